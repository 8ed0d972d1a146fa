"""The universal traps, U1 to U44, and those of several nodes, MN1 to MN6."""

from collections.abc import Callable

from perdure.model.platforms.box import BoxFacts
from perdure.model.platforms.traps import Scope, Trap, When
from perdure.traps import checks as c

Check = Callable[[BoxFacts], c.Verdict]
Row = tuple[Trap, Check | None]

_CHECKS = "perdure.traps.checks"
_SYMPTOMS = "perdure.traps.symptoms:name_symptoms"
_VANISHED = "perdure.telemetry.fate:explain_vanishing"
_DEVICES = "perdure.detect.devices"


def row(
    id: str,
    title: str,
    mend: str,
    check: Check | None = None,
    *,
    scope: Scope = "any",
    lack: str = "",
    fix: bool = False,
    **how: str,
) -> Row:
    """Return one row; a check stands for `detected`."""
    times: dict[When, str] = {}
    for when in ("prevented", "detected", "watched", "diagnosed"):
        if when == "detected" and check is not None:
            times[when] = f"{_CHECKS}:{check.__name__}"
        elif when in how:
            times[when] = how[when]
    return Trap(id, title, scope, times, mend, lack, fix), check


UNIVERSAL: tuple[Row, ...] = (
    row("U1", "ssh leaves with 255 when what it ran was killed",
        "ask again: 255 is the connection's word, not the job's", scope="ssh",
        prevented="perdure.launch.channel:Channel"),
    row("U2", "a script is edited while it runs; a variable does not cross the detachment",
        "documents are copied when a job is submitted or queued; variables go in `env`",
        prevented="perdure.model.queue:Item"),
    row("U3", "a process vanished: reboot, out of memory, hang-up or kill",
        "perdure diagnose JOB says which", diagnosed=_VANISHED),
    row("U4", "a kill by name hits the wrong process, or the caller itself",
        "perdure kills by pid and start time only", prevented="perdure.adapters.host:kill_process"),
    row("U5", "another Python than the one that was meant",
        "a job is started with the absolute path of the Python that submitted it",
        prevented="perdure.launch.local:render"),
    row("U6", "a full disk breaks torch.save",
        "make room, a smaller checkpoint.keep_last, or a roomier checkpoint.url",
        c.check_bytes, watched="perdure.service.storage_watch:StorageWatch", diagnosed=_SYMPTOMS),
    row("U7", "inodes run out before bytes", "pack small files, clear caches; df -i says where",
        c.check_inodes, watched="perdure.service.storage_watch:StorageWatch", diagnosed=_SYMPTOMS),
    row("U8", "hot data on a network file system or a turning disk",
        "copy it to a local NVMe first; keep checkpoints where they last", c.check_hot_data),
    row("U9", "loader workers times big tensors: the cgroup's OOM kill, a bare `Killed`",
        "fewer workers, smaller prefetch, or more memory", c.check_memory,
        diagnosed="perdure.model.exits:ExitRecord"),
    row("U10", "out of memory on the GPU, by fragments",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; a smaller micro-batch",
        c.check_allocator, diagnosed=_SYMPTOMS),
    row("U11", "memory of a GPU held by a process that nvidia-smi does not show",
        "fuser -v /dev/nvidia* names the holder; end it by its pid", c.check_zombies),
    row("U12", "scp starts from zero after a reset", "rsync with --partial-dir, in a loop",
        scope="ssh", prevented="perdure.launch.transfer:pull"),
    row("U13", "a copy into a directory that is not there yet", "it is made first", scope="ssh",
        prevented="perdure.launch.ssh.submit:submit"),
    row("U14", "bytes out of the platform cost extra",
        "pull from the same zone; `free_egress` of the profile is shown before a launch",
        prevented="perdure.cli.platforms.profiles:render_danger"),
    row("U15", "bulk data is sent uncompressed", "pack and compress what compresses", scope="ssh",
        lack="transfers are not compressed"),
    row("U16", "stale waiters of an earlier run", "one run a name, one runner a queue",
        prevented="perdure.service.jobfiles:JobLock"),
    row("U17", "a poll hangs for ever", "every question has a time-out; ask again",
        prevented="perdure.cli.jobs:send_command"),
    row("U18", "`I shall look later` without an alarm",
        "alerts.command or alerts.webhook tells of the end, and of every failure",
        watched="perdure.service.controller.alerts:Alerter"),
    row("U19", "an experiment tracker deletes late", "wait before a name is used again",
        lack="perdure talks to no tracker"),
    row("U20", "a tracker's server goes away", "the journal and metrics of perdure stay local",
        prevented="perdure.service.controller.journal:read_journal"),
    row("U21", "GPU-Util says 100 % while the clock is low",
        "read clock and power: perdure map JOB", watched=f"{_DEVICES}:DeviceJudge"),
    row("U22", "Xid 48 or 79: the GPU is dead", "leave the node out, give the box back",
        watched=f"{_DEVICES}:DeviceJudge"),
    row("U23", "a GPU is throttled by heat or power, a quarter to 40 % slower",
        "another node; tell the provider", watched=f"{_DEVICES}:DeviceJudge"),
    row("U24", "the loader keeps the GPU waiting", "workers, pinned memory, prefetch",
        watched="perdure.detect.stages:StageWatch",
        lack="a loader that is as slow on every rank is no verdict"),
    row("U25", "a data set of many small files", "pack it into shards", c.check_many_files),
    row("U26", "line ends of Windows in a script", "perdure doctor --fix, and .gitattributes",
        c.check_line_ends, fix=True, diagnosed=_SYMPTOMS),
    row("U27", "configuration by pasted command lines", "a job file, and `set` of a queue file",
        prevented="perdure.model.queue:replace_fields"),
    row("U28", "driver, toolkit and torch do not fit together",
        "a torch built for the driver's CUDA", c.check_cuda, diagnosed=_SYMPTOMS),
    row("U29", "nothing pins the packages", "pip freeze > requirements.lock, or uv lock",
        c.check_lock_file),
    row("U30", "an image by tag instead of digest", "image@sha256:...", scope="kubernetes",
        detected="perdure.launch.kubernetes.linter:lint_manifests"),
    row("U31", "a container without a GPU trains on the CPU, a hundred times slower",
        "the runtime's --gpus all, or torch with CUDA", c.check_gpu_visible, diagnosed=_SYMPTOMS),
    row("U32", "tasks that need their own number of epochs", "an item each: `set` and `grid`",
        prevented="perdure.model.queue:expand_file"),
    row("U33", "`saved` was printed, and nothing arrived",
        "sizes are compared after an upload; `latest` is written last",
        prevented="perdure.worker.checkpoint.remote:Remote"),
    row("U34", "secrets in files, arguments or logs",
        "launch.secrets; chmod 600 what others may read (perdure doctor --fix)",
        c.check_secrets, fix=True, prevented="perdure.launch.lint:check_plan"),
    row("U35", "wandb without a key records what nobody will see",
        "WANDB_API_KEY by launch.secrets, or WANDB_MODE=offline and a sync later",
        c.check_tracker),
    row("U36", "results that do not come again", "the fingerprint of the environment says why",
        watched="perdure.worker.fingerprint:take_fingerprint"),
    row("U37", "plots of more than 65,535 points a side", "thin them out first",
        prevented="perdure.dash.svg:thin"),
    row("U38", "GPU-Util at 0 %: waiting for data, a lock or a dead peer",
        "perdure diagnose JOB: stages, stacks, who waits for whom",
        watched="perdure.detect.detector:Detector"),
    row("U39", "an empty TensorBoard is taken for a dead run", "liveness is progress: watch",
        prevented="perdure.detect.detector:Detector"),
    row("U40", "more threads than the cgroup grants cores",
        "OMP_NUM_THREADS; perdure run sets it where it is not set", c.check_threads,
        prevented="perdure.launch.environment:find_default_threads"),
    row("U41", "`free` and `top` tell of the machine, not of the container",
        "read memory.events of the cgroup: perdure does", c.check_oom_counter,
        diagnosed="perdure.model.exits:ExitRecord"),
    row("U42", "other code runs there than here", "compare hashes before the start", scope="ssh",
        prevented="perdure.launch.ssh.submit:submit"),
    row("U43", "output in blocks looks frozen", "judge by steps and files, not by lines",
        prevented="perdure.detect.detector:Detector"),
    row("U44", "no `__main__` guard where processes are spawned", "if __name__ == '__main__':",
        c.check_system, diagnosed=_SYMPTOMS),
)  # fmt: skip

NODES: tuple[Row, ...] = (
    row("MN1", "no fabric manager: every collective over NVSwitch hangs",
        "systemctl start nvidia-fabricmanager", c.check_fabric, scope="nodes",
        diagnosed=_SYMPTOMS),
    row("MN2", "the wrong interface is taken for collectives",
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in `env`", c.check_interface, scope="nodes",
        watched="perdure.detect.links:LinkWatch"),
    row("MN3", "the time-out of 1,800 s hides a dead rank", "perdure names it within seconds",
        scope="nodes", watched="perdure.detect.arrival:find_stuck", diagnosed=_SYMPTOMS),
    row("MN4", "frame sizes differ along a path", "the same MTU on all of it: ip link set mtu",
        c.check_mtu, scope="nodes", watched="perdure.detect.links:LinkWatch"),
    row("MN5", "torchrun --max-restarts starts again without the state",
        "perdure.init() and run.steps(): exact resume", scope="nodes",
        prevented="perdure.worker.checkpoint.checkpointer:Checkpointer"),
    row("MN6", "an elastic world waits in silence for its least number of members",
        "restart.node_wait_s bounds it; perdure status says for whom", scope="nodes",
        prevented="perdure.model.job:RestartConfig"),
)  # fmt: skip
