"""The traps of the profiles: GEN of a bare box, SLURM, K8S, NB of notebooks."""

from perdure.detect.traps import checks as c
from perdure.detect.traps.universal import _SYMPTOMS, _VANISHED, Row, row

_LAUNCH = "perdure.launch.kubernetes"
_NB = "there is no launcher for notebooks yet"

GENERIC: tuple[Row, ...] = (
    row("GEN1", "a forgotten box bills day and night",
        "perdure pull, verify, teardown; the meter is shown before a launch", scope="ssh",
        prevented="perdure.launch.gate:find_obstacles"),
    row("GEN2", "the connection drops and takes the run along",
        "perdure launch, perdure run --detach, or tmux", c.check_hangup, scope="ssh",
        prevented="perdure.launch.local:submit", diagnosed=_VANISHED),
    row("GEN2b", "systemd ends what a user leaves behind",
        "loginctl enable-linger, or systemd-run --user --scope", c.check_linger, scope="ssh"),
    row("GEN2c", "nothing to detach with", "apt-get install tmux", c.check_detach_tool,
        scope="ssh"),
    row("GEN3", "a transfer starts from zero, or leaves half a file under its last name",
        "rsync --partial-dir; apt-get install rsync", c.check_transfer_tool, scope="ssh",
        prevented="perdure.launch.transfer:pull"),
    row("GEN4", "CRLF breaks a script on Linux", "perdure doctor --fix, and .gitattributes",
        c.check_line_ends, scope="ssh", fix=True,
        prevented="perdure.launch.ssh.results:repair", diagnosed=_SYMPTOMS),
    row("GEN5", "the heavy part is checked on the wrong machine",
        "a short run there first; perdure doctor on the box", scope="ssh",
        prevented="perdure.cli.checks:check_script"),
    row("GEN6", "a reboot takes every session along",
        "interruption.relaunch; else the same --name resumes the job",
        scope="ssh", prevented="perdure.launch.ssh.render:render", diagnosed=_VANISHED),
    row("GEN7", "two runs on one GPU halve each other",
        "perdure queue run: one item a GPU, with locks", c.check_shared_gpu, scope="ssh",
        prevented="perdure.launch.ssh.box:take_devices"),
    row("GEN8", "a dropped poll is taken for a death",
        "ask again: only the place itself knows", scope="ssh",
        prevented="perdure.launch.ssh.ask:ask_state"),
    row("GEN9", "a clock that was never set", "ntpd, chrony or systemd-timesyncd", c.check_clock),
    row("GEN10", "too few descriptors for a mesh of connections", "ulimit -n 65536",
        c.check_files, diagnosed=_SYMPTOMS),
)  # fmt: skip

SLURM: tuple[Row, ...] = (
    row("SLURM1", "a checkpoint inside the signal handler is corrupt",
        "the handler sets a flag; the checkpoint is at an agreed step", scope="slurm",
        prevented="perdure.control.steering.boundary:open_boundary"),
    row("SLURM2", "the warning comes too late, or before its handler stands",
        "time limit > warning + 60 s + start-up + checkpoint; USR1 to the batch shell",
        c.check_slurm_signal, scope="slurm",
        prevented="perdure.launch.slurm.checks:check_walltime", diagnosed=_SYMPTOMS),
    row("SLURM2b", "the cluster allows no requeue", "ask the site for JobRequeue=1",
        c.check_slurm_requeue, scope="slurm"),
    row("SLURM3", "srun inside sbatch does not inherit --cpus-per-task",
        "srun --cpus-per-task, always", scope="slurm",
        prevented="perdure.launch.slurm.batch:place_nodes"),
    row("SLURM4", "an OOM kill is a state of the job and no traceback",
        "every step's state and DerivedExitCode", c.check_slurm_accounting, scope="slurm",
        diagnosed="perdure.model.slurm:explain_rows"),
    row("SLURM5", "checkpoints in $TMPDIR are gone with the job",
        "a shared file system for DURABLE_DIR and checkpoint.url", c.check_durable,
        prevented="perdure.launch.lint:check_plan"),
)  # fmt: skip

KUBERNETES: tuple[Row, ...] = (
    row("K8S1", "Pending: Insufficient nvidia.com/gpu", "is the device plugin up? any taint?",
        scope="kubernetes", detected=f"{_LAUNCH}:check_nodes", watched=f"{_LAUNCH}:judge"),
    row("K8S2", "restartPolicy Always is refused on a Job", "Never or OnFailure",
        scope="kubernetes", prevented=f"{_LAUNCH}.linter:lint_manifests"),
    row("K8S3", "ImagePullBackOff: the Job waits for ever", "imagePullSecrets, a real digest",
        scope="kubernetes", watched=f"{_LAUNCH}:judge"),
    row("K8S4", "Multi-Attach: a ReadWriteOnce volume on two nodes",
        "ReadWriteMany, or one node", scope="kubernetes",
        prevented=f"{_LAUNCH}.checks:check_profile", detected=f"{_LAUNCH}:check_claim",
        watched="perdure.model.kubernetes:explain_pod"),
    row("K8S5", "evicted for ephemeral storage",
        "write to the PVC; limits.ephemeral-storage", scope="kubernetes", diagnosed=_SYMPTOMS,
        prevented=f"{_LAUNCH}.linter:lint_manifests"),
    row("K8S6", "the container runs on the CPU", "limits of nvidia.com/gpu; a probe at start",
        c.check_gpu_visible, scope="kubernetes", prevented=f"{_LAUNCH}.pod:check_gpus"),
)  # fmt: skip

NOTEBOOK: tuple[Row, ...] = (
    row("NB1", "Drive syncs late and loses the saved checkpoint",
        "trust a checkpoint once a second look lists it", scope="notebook", lack=_NB),
    row("NB2", "one failing cell loses a Kaggle commit's output",
        "results and status are written as they come", scope="notebook", lack=_NB),
    row("NB3", "a commit runs on the wrong accelerator, or without internet",
        "a real matmul in the first cell", c.check_gpu_visible, scope="notebook", lack=_NB),
    row("NB4", "/content and /kaggle/temp are scratch",
        "DURABLE_DIR on Drive or in /kaggle/working", c.check_durable, scope="notebook"),
    row("NB5", "Colab disconnects without a signal", "a checkpoint every N steps, and resume",
        scope="notebook",
        prevented="perdure.worker.checkpoint.checkpointer:Checkpointer"),
)  # fmt: skip
