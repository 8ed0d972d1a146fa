"""What the ranks of a job start from: the program, the script's files, and the environment.

A restart within the job has the same environment and folder. If a file has changed, perdure names
it. A later command by a person wins, and perdure says what differs from the last run.
"""

import contextlib
import glob
import hashlib
import hmac
import os
import platform
import secrets
import sys
import time
from collections.abc import Mapping

import msgspec

from perdure.launch.environment import HASH_SEED
from perdure.model.input.raw import carry_text, restore_job, restore_text
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.service.jobfiles import read_document, write_document

_FILES_MAX = 128
_FILE_BYTES_MAX = 1 << 20
_NAMES_MAX = 6
"""Files, or variables, that one line names."""
_CLEAR = frozenset({
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "HF_HOME", "LANG", "LD_LIBRARY_PATH",
    "LD_PRELOAD", "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_PROTO", "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH", "TORCH_HOME", "TZ",
})  # fmt: skip
"""Variables whose values are written down. perdure writes down a keyed hash of all others."""
_SESSION = frozenset({"_", "COLUMNS", "DISPLAY", "INVOCATION_ID", "JOURNAL_STREAM", "LINES"})
_SESSION |= {"OLDPWD", "PWD", "SHLVL", "STY", "TORCHELASTIC_RUN_ID", "WINDOWID"}
_OF_SESSION = "DBUS_", "PERDURE_", "PET_", "SLURM_", "SSH_", "TERM", "TMUX", "VSCODE_", "XDG_"
"""Names of variables that differ from one login, or one attempt, to the next."""


class Start(msgspec.Struct, frozen=True):
    """`start.json`: what a run starts from."""

    key: str
    """Key of the hashes, in hexadecimal digits; all runs of a job have the same."""
    program: str
    files: dict[str, str]
    """Path -> hash of the script, and of the modules beside it."""
    environ: dict[str, str]
    """Variable -> its value, or a keyed hash."""


def make_start(spec: JobSpec, environ: Mapping[str, str], before: Start | None = None) -> Start:
    """Return what the ranks of `spec` start from, comparable with `before`."""
    spec = restore_job(spec)
    key = before.key if before is not None else secrets.token_hex(32)

    def cover(name: str, value: str) -> str:
        if name in _CLEAR:
            return carry_text(value)
        return hmac.digest(bytes.fromhex(key), os.fsencode(value), "sha256").hex()

    variables = {
        carry_text(name): cover(name, value)
        for name, value in sorted({**environ, **spec.env}.items())
        if name not in _SESSION and not name.startswith(_OF_SESSION)
    }
    program = f"{os.path.realpath(sys.executable)} ({platform.python_version()})"
    return Start(key, carry_text(program), hash_files(spec), variables)


def hash_files(spec: JobSpec) -> dict[str, str]:
    """Return path -> hash of the script and the modules beside it, as far as they can be read."""
    spec = restore_job(spec)
    if spec.module:
        script = os.path.join(spec.cwd, *spec.script.split("."))
        script = os.path.join(script, "__main__.py") if os.path.isdir(script) else f"{script}.py"
    else:
        script = os.path.join(spec.cwd, spec.script)
    folder = script if os.path.isdir(script) else os.path.dirname(script)
    beside = [] if spec.no_python else sorted(glob.glob(f"{glob.escape(folder)}/*.py"))
    found: dict[str, str] = {}
    for path in dict.fromkeys([script, *beside[:_FILES_MAX]]):
        with contextlib.suppress(OSError):
            if os.path.isfile(path) and os.path.getsize(path) <= _FILE_BYTES_MAX:
                with open(path, "rb") as file:
                    found[carry_text(path)] = hashlib.sha256(file.read()).hexdigest()
    return found


def record_start(spec: JobSpec, paths: JobPaths, previous: str, environ: Mapping[str, str]) -> None:
    """Write down what a run starts from; `previous` is the folder of the run before, or empty."""
    before = read_document(f"{previous}/start.json", Start) if previous else None
    write_document(paths.start, make_start(spec, environ, before), mode=0o600)


def compare_start(spec: JobSpec, paths: JobPaths, environ: Mapping[str, str]) -> list[str]:
    """Return one line that says how this start differs from the last run of the job, if it does."""
    before, last = read_document(paths.start, Start), read_document(paths.spec, JobSpec)
    if before is None or last is None:
        return []
    now, last, spec = make_start(spec, environ, before), restore_job(last), restore_job(spec)
    parts = []
    if before.program != now.program:
        parts.append(f"Python is {now.program}, and was {before.program}")
    for name, old, new in (
        ("script", last.script, spec.script),
        ("arguments", " ".join(last.args), " ".join(spec.args)),
        ("folder", last.cwd, spec.cwd),
    ):
        if old != new:
            parts.append(f"the {name} changed from `{old}` to `{new}`")
    if (last.script, last.cwd) == (spec.script, spec.cwd):
        parts += describe_files(before.files, now.files)
    # The seed of the last run is given to this one as well.
    drawn = {HASH_SEED} & last.env.keys() - environ.keys() - spec.env.keys()
    names = sorted({*before.environ, *now.environ} - drawn)
    changed = [name for name in names if before.environ.get(name) != now.environ.get(name)]
    for name in changed[:_NAMES_MAX]:
        parts.append(_describe_variable(name, before.environ.get(name), now.environ.get(name)))
    if len(changed) > _NAMES_MAX:
        parts.append(f"{len(changed) - _NAMES_MAX} more variables changed")
    if not parts:
        return []
    return [f"this run of `{spec.name}` differs from its last one: {'; '.join(parts)}"]


def _describe_variable(name: str, old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return f"{name} is {'new' if old is None else 'not set any more'}"
    return f"{name} changed" + (f" from `{old}` to `{new}`" if name in _CLEAR else "")


def describe_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return which files are not what they were, each with the time of its change."""
    paths = [path for path in sorted({*before, *now}) if before.get(path) != now.get(path)]
    parts = []
    for path in paths[:_NAMES_MAX]:
        if path not in now:
            parts.append(f"{path} is gone")
            continue
        what = "was edited" if path in before else "is new"
        with contextlib.suppress(OSError):
            at_s = os.stat(restore_text(path)).st_mtime
            what += time.strftime(" at %Y-%m-%d %H:%M:%S", time.localtime(at_s))
        parts.append(f"{path} {what}")
    if len(paths) > _NAMES_MAX:
        parts.append(f"{len(paths) - _NAMES_MAX} more files changed")
    return parts


class FileWatch:
    """Says after a restart which files of the script were edited while the job ran."""

    def __init__(self, spec: JobSpec) -> None:
        """Begin with the files as they are."""
        self._spec, self._files = spec, hash_files(spec)
        self._told = 0

    def tell(self, generation: int) -> str:
        """Return a line once for each generation whose files differ from the one before."""
        if generation <= self._told:
            return ""
        self._told = generation
        before, self._files = self._files, hash_files(self._spec)
        changed = describe_files(before, self._files)
        if not changed:
            return ""
        return f"warning: the ranks of restart {generation} run other code: {'; '.join(changed)}"
