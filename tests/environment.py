"""The environment that tests start with: without what belongs to another job, shell, or proxy."""

import os
import re
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path

KEPT = frozenset(
    {"PERDURE_EXPLORE", "PERDURE_SEEDS", "PERDURE_FAILURES", "PERDURE_EXAMPLES"}
    | {"PERDURE_EXACT_EXAMPLES", "PERDURE_TORCHFT", "PERDURE_NANOGPT"}
)
"""Settings of the tests themselves."""
DROPPED = frozenset({
    # A job, as launchers and schedulers describe it.
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
    "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "JOB_COMPLETION_INDEX", "KUBECONFIG",
    # A proxy, which would be asked for servers on the loopback interface.
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "http_proxy", "https_proxy",
    "all_proxy", "ftp_proxy",
    # A terminal and its colors.
    "FORCE_COLOR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PYTHON_COLORS", "TTY_COMPATIBLE",
    "TTY_INTERACTIVE", "COLUMNS", "LINES", "TMUX", "TMUX_PANE", "SSH_CONNECTION", "SSH_CLIENT",
    "SSH_TTY",
    # A git hook, and options of tools.
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "CDPATH", "POSIXLY_CORRECT",
    "RSYNC_RSH", "RSYNC_PROXY", "TAR_OPTIONS", "RUST_LOG", "NCCL_DEBUG", "TORCH_LOGS",
    "TORCH_CPP_LOG_LEVEL", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS",
})  # fmt: skip
PREFIXES = (
    *("PERDURE_", "SLURM", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "KUBERNETES_"),
    *("TORCHELASTIC_", "TORCHFT_", "WANDB_", "MLFLOW_", "RUNPOD_", "VAST_", "LAMBDA_", "KAGGLE_"),
)


def drop_foreign(environ: MutableMapping[str, str]) -> None:
    """Remove each variable that would tell perdure of a job, a terminal, or a proxy."""
    for name in list(environ):
        if name not in KEPT and (name in DROPPED or name.startswith(PREFIXES)):
            del environ[name]


def choose_plain_tmp(environ: MutableMapping[str, str]) -> None:
    """Leave a TMPDIR that a shell would split: programs that tests write do not quote theirs."""
    if not re.fullmatch(r"[\w/.,:+@-]*", environ.get("TMPDIR", ""), re.ASCII):
        environ["TMPDIR"] = "/tmp"


def skip_shim(environ: MutableMapping[str, str]) -> None:
    """Let `python3` be this Python itself if it is a script that looks for it, such as pyenv's.

    Each start of such a script runs a dozen of bash, and boxes and fakes start many.
    """
    found = shutil.which("python3", path=environ.get("PATH"))
    folder = Path(sys.base_prefix, "bin")
    if found and Path(found).read_bytes()[:2] == b"#!" and (folder / "python3").exists():
        environ["PATH"] = f"{folder}{os.pathsep}{environ['PATH']}"
