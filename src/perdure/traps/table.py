"""The traps of any machine, several nodes, a bare box, and each platform, in one table.

`judge` makes of facts the rows that `perdure doctor` shows; `docs/doctor.md` has the whole table.
"""

from collections.abc import Callable

from perdure.model.platforms.box import BoxFacts
from perdure.model.platforms.traps import Check, Scope, Trap, When
from perdure.traps import checks as c

Row = tuple[Trap, Callable[[BoxFacts], c.Verdict] | None]

_WHENS: tuple[When, ...] = ("prevented", "detected", "watched", "diagnosed")
_CHECKS = "perdure.traps.checks"
_SYMPTOMS = "perdure.traps.symptoms:name_symptoms"
_VANISHED = "perdure.telemetry.outcome:explain_vanishing"
_KUBERNETES = "perdure.launch.kubernetes"


def _row(
    id: str,
    title: str,
    mend: str,
    check: Callable[[BoxFacts], c.Verdict] | None = None,
    *,
    scope: Scope = "any",
    **how: str,
) -> Row:
    """Return one row; a check stands for `detected`."""
    times: dict[When, str] = {}
    for when in _WHENS:
        if when == "detected" and check is not None:
            times[when] = f"{_CHECKS}:{check.__name__}"
        elif when in how:
            times[when] = how[when]
    return Trap(id, title, scope, times, mend), check


UNIVERSAL: tuple[Row, ...] = (
    _row("U3", "a process vanished: reboot, out of memory, hang-up or kill",
        "perdure diagnose JOB says which", diagnosed=_VANISHED),
    _row("U6", "a full disk breaks torch.save",
        "make room, a smaller checkpoint.keep_last, or a roomier checkpoint.url",
        c.check_bytes, watched="perdure.service.storage_watch:StorageWatch", diagnosed=_SYMPTOMS),
    _row("U7", "inodes run out before bytes", "pack small files, clear caches; df -i says where",
        c.check_inodes, watched="perdure.service.storage_watch:StorageWatch", diagnosed=_SYMPTOMS),
    _row("U9", "loader workers times big tensors: the cgroup's OOM kill, a bare `Killed`",
        "fewer workers, smaller prefetch, or more memory", c.check_memory,
        diagnosed="perdure.model.failures:ExitRecord"),
    _row("U10", "out of memory on the GPU, by fragments",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; a smaller micro-batch",
        c.check_allocator, diagnosed=_SYMPTOMS),
    _row("U26", "line ends of Windows in a script", "sed -i 's/\\r$//' FILE, and .gitattributes",
        c.check_line_ends, diagnosed=_SYMPTOMS),
    _row("U28", "driver, toolkit and torch do not fit together",
        "a torch built for the driver's CUDA", c.check_cuda, diagnosed=_SYMPTOMS),
    _row("U30", "an image by tag instead of digest", "image@sha256:...", scope="kubernetes",
        detected="perdure.launch.kubernetes.fields:check_fields"),
    _row("U31", "a container without a GPU trains on the CPU, a hundred times slower",
        "the runtime's --gpus all, or torch with CUDA", c.check_gpu_visible, diagnosed=_SYMPTOMS),
    _row("U34", "secrets in files, arguments or logs",
        "launch.secrets; chmod 600 what others may read",
        prevented="perdure.launch.lint:check_plan"),
    _row("U41", "`free` and `top` tell of the machine, not of the container",
        "read memory.events of the cgroup: perdure does", c.check_oom_counter,
        diagnosed="perdure.model.failures:ExitRecord"),
    _row("U44", "no `__main__` guard where processes are spawned", "if __name__ == '__main__':",
        c.check_system, diagnosed=_SYMPTOMS),
    _row("U46", "more ranks than GPUs on a node: NCCL refuses two ranks on one GPU",
        "as many ranks as GPUs, or gloo",
        detected="perdure.cli.running.jobspec:check_devices",
        watched="perdure.model.nccl:explain_shared_gpus", diagnosed=_SYMPTOMS),
)  # fmt: skip

NODES: tuple[Row, ...] = (
    _row("MN1", "no fabric manager: every collective over NVSwitch hangs",
        "systemctl start nvidia-fabricmanager", c.check_fabric, scope="nodes",
        diagnosed=_SYMPTOMS),
    _row("MN3", "the time-out of 1,800 s hides a dead rank", "perdure names it within seconds",
        scope="nodes", watched="perdure.detect.arrival:list_stuck_comms", diagnosed=_SYMPTOMS),
)  # fmt: skip


GENERIC: tuple[Row, ...] = (
    _row("GEN1", "a forgotten box bills day and night",
        "perdure pull, verify, teardown; the meter is shown before a launch", scope="ssh",
        prevented="perdure.launch.results.gate:find_obstacles"),
    _row("GEN2", "the connection drops and takes the run along",
        "perdure launch, perdure run --detach, or tmux", c.check_hangup, scope="ssh",
        prevented="perdure.launch.local:submit", diagnosed=_VANISHED),
    _row("GEN3", "a transfer starts from zero, or leaves half a file under its last name",
        "rsync --partial-dir; apt-get install rsync", c.check_transfer_tool, scope="ssh",
        prevented="perdure.launch.transfer:pull"),
    _row("GEN4", "CRLF breaks a script on Linux", "sed -i 's/\\r$//' FILE, and .gitattributes",
        c.check_line_ends, scope="ssh",
        prevented="perdure.launch.ssh.results:repair", diagnosed=_SYMPTOMS),
    _row("GEN5", "the heavy part is checked on the wrong machine",
        "a short run there first; perdure doctor on the box", scope="ssh",
        detected="perdure.launch.ssh.check:check"),
    _row("GEN6", "a reboot takes every session along",
        "interruption.relaunch; else the same --name resumes the job",
        scope="ssh", prevented="perdure.launch.ssh.render:render", diagnosed=_VANISHED),
    _row("GEN7", "two runs on one GPU halve each other",
        "perdure queue run: one item a GPU, with locks", c.check_shared_gpu, scope="ssh",
        prevented="perdure.launch.ssh.box:take_devices"),
    _row("GEN8", "a dropped poll is taken for a death",
        "ask again: only the place itself knows", scope="ssh",
        prevented="perdure.launch.ssh.ask:ask_state"),
    _row("GEN10", "too few descriptors for a mesh of connections", "ulimit -n 65536",
        c.check_files, diagnosed=_SYMPTOMS),
)  # fmt: skip

SLURM: tuple[Row, ...] = (
    _row("SLURM1", "a checkpoint inside the signal handler is corrupt",
        "the handler sets a flag; the checkpoint is at an agreed step", scope="slurm",
        prevented="perdure.control.agreement.boundary:open_boundary"),
    _row("SLURM2", "the warning comes too late, or before its handler stands",
        "time limit > warning + 60 s + start-up + checkpoint; USR1 to the batch shell",
        c.check_slurm_signal, scope="slurm",
        prevented="perdure.launch.slurm.render:check_job", diagnosed=_SYMPTOMS),
    _row("SLURM2b", "the cluster allows no requeue", "ask the site for JobRequeue=1",
        c.check_slurm_requeue, scope="slurm"),
    _row("SLURM3", "srun inside sbatch does not inherit --cpus-per-task",
        "srun --cpus-per-task, always", scope="slurm",
        prevented="perdure.launch.slurm.batch:place_nodes"),
    _row("SLURM4", "an OOM kill is a state of the job and no traceback",
        "every step's state and DerivedExitCode", c.check_slurm_accounting, scope="slurm",
        diagnosed="perdure.model.platforms.slurm:explain_rows"),
    _row("SLURM5", "checkpoints in $TMPDIR are gone with the job",
        "a shared file system for DURABLE_DIR and checkpoint.url", c.check_job_scratch,
        prevented="perdure.launch.lint:check_plan"),
)  # fmt: skip

KUBERNETES: tuple[Row, ...] = (
    _row("K8S1", "Pending: Insufficient nvidia.com/gpu", "is the device plugin up? any taint?",
        scope="kubernetes", detected=f"{_KUBERNETES}:check_nodes", watched=f"{_KUBERNETES}:judge"),
    _row("K8S2", "restartPolicy Always is refused on a Job", "Never or OnFailure",
        scope="kubernetes", prevented=f"{_KUBERNETES}.manifest:make_job_spec"),
    _row("K8S3", "ImagePullBackOff: the Job waits for ever", "imagePullSecrets, a real digest",
        scope="kubernetes", watched=f"{_KUBERNETES}:judge"),
    _row("K8S4", "Multi-Attach: a ReadWriteOnce volume on two nodes",
        "ReadWriteMany, or one node", scope="kubernetes",
        prevented=f"{_KUBERNETES}.fields:check_profile", detected=f"{_KUBERNETES}:check_claim",
        watched="perdure.model.platforms.kubernetes:explain_pod"),
    _row("K8S5", "evicted for ephemeral storage",
        "write to the PVC; limits.ephemeral-storage", scope="kubernetes", diagnosed=_SYMPTOMS,
        prevented=f"{_KUBERNETES}.fields:check_profile"),
    _row("K8S6", "the container runs on the CPU", "limits of nvidia.com/gpu; a probe at start",
        c.check_gpu_visible, scope="kubernetes", prevented=f"{_KUBERNETES}.pod:check_gpus"),
)  # fmt: skip

NOTEBOOK: tuple[Row, ...] = (
    _row("NB1", "Drive syncs late and loses the saved checkpoint",
        "an object store as checkpoint.url; else stay until Drive, mounted anew, has it",
        scope="notebook", prevented="perdure.launch.notebook.session:Session"),
    _row("NB2", "one failing cell loses a Kaggle commit's output",
        "no cell fails there: status.json says how it is", scope="notebook",
        prevented="perdure.launch.notebook.session:Session",
        diagnosed="perdure.launch.notebook:query_state"),
    _row("NB3", "a commit runs on the wrong accelerator, or without internet",
        "a product of matrices before anything else", c.check_gpu_visible, scope="notebook",
        prevented="perdure.launch.notebook:render_metadata"),
    _row("NB4", "/content and /kaggle/temp are scratch",
        "DURABLE_DIR on Drive or in /kaggle/working", c.check_durable, scope="notebook",
        prevented="perdure.launch.notebook.cells:check_notebook"),
    _row("NB5", "Colab disconnects without a signal", "a checkpoint every N steps, and resume",
        scope="notebook", prevented="perdure.launch.notebook.runner:compute_time_left"),
)  # fmt: skip

TRAPS: tuple[Row, ...] = (*GENERIC, *SLURM, *KUBERNETES, *NOTEBOOK, *UNIVERSAL, *NODES)
_BY_ID = {trap.id: trap for trap, _ in TRAPS}


def find_trap(id: str) -> Trap:
    """Return the trap of that id.

    Raises:
        KeyError: there is none.
    """
    return _BY_ID[id]


def render_table() -> str:
    """Return the table of `docs/doctor.md`."""
    lines = [
        "| id | trap | prevented | detected | watched | diagnosed | mend |",
        "|---|---|---|---|---|---|---|",
    ]
    for trap, _ in TRAPS:
        times = [_show(trap.how.get(when, "")) for when in _WHENS]
        cells = [trap.id, trap.title, *times, trap.mend]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _show(how: str) -> str:
    module, _, name = how.partition(":")
    return f"`{module.removeprefix('perdure.')}.{name}`" if how else ""


def judge(facts: BoxFacts, scopes: frozenset[Scope]) -> tuple[tuple[Trap, Check], ...]:
    """Return what the checks of all traps in `scopes` say, in the table's order."""
    found = [(t, check(facts)) for t, check in TRAPS if check is not None and t.scope in scopes]
    return tuple(
        (trap, Check(name=trap.title, state=said[0], evidence=said[1], mend=trap.mend))
        for trap, said in found
        if said is not None
    )
