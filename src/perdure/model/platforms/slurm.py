"""Slurm's words: what a profile asks for, and what its states mean for a job."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec
from perdure.model.platforms.outcome import Outcome, State
from perdure.model.platforms.slurm_reasons import explain_reason

Count = Annotated[int, Meta(ge=0)]
Word = Annotated[str, Meta(pattern=r"^[^\s'\"\\$`;&|<>]*$")]
"""Goes into an `#SBATCH` line as it is."""

Mount = Annotated[str, Meta(pattern=r"^[^\s'\"\\`;&|<>,]+$")]
"""Goes into a list of mounts; `$NAME` is expanded on the first node."""

JITTER_S = 60
"""Slurm checks time limits once a minute: a warning may come that much early or late."""


class SlurmSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a job asks of Slurm, and what it is told before its walltime."""

    partition: Word = ""
    """Empty: the cluster's default."""
    account: Word = ""
    """Whom the time is charged to."""
    qos: Word = ""
    """Quality of service."""
    constraint: Word = ""
    """Features that a node must have."""
    time_limit: Word = "01:00:00"
    """Walltime of one run of the chain: minutes, `HH:MM:SS` or `D-HH:MM:SS`."""
    warn_s: Annotated[int, Meta(ge=1)] = 120
    """How long before the walltime the job is told to save and to leave."""
    startup_s: Annotated[int, Meta(ge=0)] = 60
    """From the start of a run to its first step, as the linter counts."""
    checkpoint_s: Annotated[int, Meta(ge=0)] = 30
    """One checkpoint, as the linter counts; less than `warn_s`."""
    cpus_per_task: Count = 0
    """Cores of a node's agent with all its ranks; 0: as many as ranks."""
    mem: Word = ""
    """Memory of a node, such as `64G`."""
    gres: Word = ""
    """Devices of a node, such as `gpu:a100:4`; empty: `gpu:N` where launch.gpus says N."""
    array: Word = ""
    """Tasks such as `0-7%2`: each is a job of its own, NAME-TASK, and sees SLURM_ARRAY_TASK_ID."""
    dependency: Word = ""
    """Such as `afterok:123`; the job is cancelled where that can never come true."""
    requeue_max: Count = 1000
    """So many times the job is put back into the queue at its walltime; then it fails."""
    modules: tuple[str, ...] = ()
    """Loaded before anything else (`module load`)."""
    container: str = ""
    """A command that carries each node's agent with its ranks into a container, such as
    `apptainer exec --nv image.sif`; what asks Slurm stays outside."""
    container_image: str = ""
    """The same by Pyxis: an image for `srun --container-image`."""
    container_mounts: tuple[Mount, ...] = ()
    """Seen in the container as well (`SRC` or `SRC:DST[:FLAGS]`), beside the project and
    DURABLE_DIR, which are always."""
    container_python: str = "python3"
    """The Python in the container; it has perdure and torch."""
    extra: tuple[str, ...] = ()
    """More lines for the head of the script, such as `--exclude=n7`."""


def count_nodes(spec: JobSpec) -> tuple[int, int]:
    """Return the fewest and the most nodes that a job asks Slurm for.

    They differ by what an elastic job may grow (`nodes_max`), less what `remote` says comes from
    other allocations.

    >>> count_nodes(JobSpec(script="t.py", nodes=1, nodes_max=3))
    (1, 3)
    >>> count_nodes(JobSpec(script="t.py", nodes=1, nodes_max=3, remote=1))
    (1, 2)
    """
    if spec.groups:
        return 1, 1
    return spec.local_nodes - max(0, spec.growth - spec.remote), spec.local_nodes


def fit_nodes(spec: JobSpec, nodes: int) -> JobSpec:
    """Return the job that a run on `nodes` nodes is, of those that `count_nodes` has asked for.

    Its world begins with all of them; those that are missing are places for machines that join.

    >>> run = fit_nodes(JobSpec(script="t.py", nodes=1, nodes_max=3), 2)
    >>> run.nodes, run.growth, run.remote, run.local_nodes
    (2, 1, 1, 2)
    """
    fewest, most = count_nodes(spec)
    if fewest == most:
        return spec
    return replace(spec, nodes=spec.nodes + nodes - fewest, remote=spec.remote + most - nodes)


def parse_time_limit(text: str) -> int:
    """Return a time limit in seconds.

    Raises:
        ConfigError: it is none that Slurm reads.

    >>> parse_time_limit("1-02:00:00"), parse_time_limit("90"), parse_time_limit("02:30")
    (93600, 5400, 150)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ConfigError(
            f"slurm.time_limit = {text!r} is no time limit", hint="minutes, HH:MM:SS or D-HH:MM:SS"
        )
    days, *parts = match.groups()
    has_hours = days is not None or parts[-1] is not None  # D-HH[:MM[:SS]], HH:MM:SS; MM[:SS]
    units_s = (3600, 60, 1) if has_hours else (60, 1, 0)
    seconds = sum(int(part or 0) * unit for part, unit in zip(parts, units_s, strict=True))
    return int(days or 0) * 86400 + seconds


_STATES: dict[str, State] = {
    "PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting", "REQUEUE_FED": "waiting", "SPECIAL_EXIT": "waiting",
    "RESV_DEL_HOLD": "waiting", "RUNNING": "running", "COMPLETING": "running",
    "SIGNALING": "running", "STAGE_OUT": "running", "SUSPENDED": "running", "STOPPED": "running",
    "RESIZING": "running", "COMPLETED": "done", "FAILED": "failed",
    "OUT_OF_MEMORY": "out of memory", "TIMEOUT": "time limit", "DEADLINE": "time limit",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node failed", "BOOT_FAIL": "node failed", "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
}  # fmt: skip
_WORST: Sequence[State] = ("out of memory", "node failed", "preempted", "time limit")
"""What is told first of an attempt whose steps ended differently: causes before consequences."""
_OOM = 125
"""slurmstepd's word for a step that ran out of memory, in the place of a code or of a signal."""


class SlurmRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `sacct -D`, or what `squeue` and `scontrol show job` tell of a job."""

    id: str
    """Such as `12`, `12.batch`, `12.0`."""
    state: str
    """Slurm's own word, without what follows it (`CANCELLED by 0`)."""
    code: int = 0
    signal: int = 0
    derived_code: int = 0
    """Highest exit code of the job's steps."""
    derived_signal: int = 0
    reason: str = ""
    start: str = ""
    end: str = ""
    restarts: int = 0
    nodes: str = ""


def map_state(word: str) -> State:
    """Return perdure's word for a state of Slurm's, long form."""
    return _STATES.get(word.split()[0].rstrip("+") if word else "", "unknown")


def split_exit(text: str) -> tuple[int, int]:
    """Return (exit code, signal) of Slurm's `0:9`."""
    code, _, number = text.partition(":")
    return (int(code) if code.isdigit() else 0, int(number) if number.isdigit() else 0)


def explain_rows(rows: Sequence[SlurmRow], job: str) -> Outcome:
    """Return how the newest attempt of `job` is; of an array, how its tasks are together."""
    attempts = split_attempts(rows, job)
    if attempts:
        return explain_attempt(attempts[-1])
    tasks = dict.fromkeys(row.id for row in rows if row.id.startswith(f"{job}_"))
    ends = [explain_rows(rows, task) for task in tasks if "." not in task]
    return join_ends(ends) if ends else Outcome(state="unknown", reason="Slurm says nothing of it")


def split_attempts(rows: Sequence[SlurmRow], job: str) -> list[list[SlurmRow]]:
    """Return the attempts of `job`, oldest first: its own row, then those of its steps.

    `sacct -D` shows an attempt's steps below it.
    """
    attempts: list[list[SlurmRow]] = []
    for row in rows:
        if row.id == job:
            attempts.append([row])
        elif row.id.startswith(f"{job}.") and attempts:
            attempts[-1].append(row)
    return attempts


def explain_attempts(rows: Sequence[SlurmRow], job: str) -> list[Outcome]:
    """Return how each attempt of `job` is, or ended, oldest first.

    Another one follows only what is over: what Slurm calls REQUEUED there was put back, at its
    walltime or by a person.
    """
    ends = [explain_attempt(attempt) for attempt in split_attempts(rows, job)]
    return [
        end if end.over or end is ends[-1] else replace(end, state="put back", reason="requeued")
        for end in ends
    ]


def explain_attempt(rows: Sequence[SlurmRow]) -> Outcome:
    """Return how an attempt is, or ended: `rows` are its own and those of its steps.

    A step that was killed for memory leaves a COMPLETED job behind when the script ends in another
    command, and a job that ran out of time shows exit code 0: so every step is looked at.
    """
    own, *_ = rows
    state = map_state(own.state)
    end = Outcome(
        state=state,
        code=own.code or own.derived_code,
        signal=own.signal or own.derived_signal,
        reason=f"{own.state} {own.code}:{own.signal}",
        start=own.start,
        end=own.end,
        nodes=own.nodes,
    )
    if state in ("waiting", "running"):
        return replace(end, reason=explain_reason(own.reason))
    found = [(map_state(row.state), row) for row in rows]
    for worst in _WORST:
        for kind, row in found:
            if kind == worst:
                return replace(
                    end,
                    state=worst,
                    signal=end.signal or row.signal,
                    reason=f"{row.state} in {row.id}",
                )
    if _OOM in (own.derived_code, own.derived_signal):
        return replace(end, state="out of memory", reason=f"a step left with {_OOM}")
    return replace(end, state="failed") if state == "done" and (end.code or end.signal) else end


def join_ends(ends: Sequence[Outcome]) -> Outcome:
    """Return how an array is by its tasks: running or waiting as long as one is, else the worst."""
    for state in ("running", "waiting", *_WORST, "failed", "cancelled", "unknown"):
        found = [end for end in ends if end.state == state]
        if found:
            reason = f"{len(found)} of {len(ends)} tasks are {state}: {found[0].reason}"
            return replace(found[0], reason=reason)
    return Outcome(state="done", reason=f"all {len(ends)} tasks are done")


SACCT_FIELDS = "JobID,State,ExitCode,DerivedExitCode,Start,End,NodeList"


def parse_sacct(text: str) -> list[SlurmRow]:
    """Return the rows of `sacct -D -n -P -o SACCT_FIELDS`."""
    rows = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) < 7:
            continue
        (code, number), (derived, derived_signal) = split_exit(parts[2]), split_exit(parts[3])
        rows.append(
            SlurmRow(
                id=parts[0], state=parts[1].split(" ")[0], code=code, signal=number,
                derived_code=derived, derived_signal=derived_signal, start=parts[4], end=parts[5],
                nodes="" if parts[6].startswith("None") else parts[6],
            )
        )  # fmt: skip
    return rows


def parse_scontrol(text: str) -> Mapping[str, str]:
    """Return the fields of `scontrol -o show job`, of the first job in it."""
    line = next(iter(text.strip().splitlines()), "")
    return dict(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", line))


def read_scontrol(fields: Mapping[str, str]) -> SlurmRow | None:
    """Return the row that `scontrol show job` tells; None where there is none."""
    if "JobState" not in fields:
        return None
    code, number = split_exit(fields.get("ExitCode", "0:0"))
    derived, derived_signal = split_exit(fields.get("DerivedExitCode", "0:0"))
    return SlurmRow(
        id=fields.get("JobId", ""), state=fields["JobState"], code=code, signal=number,
        derived_code=derived, derived_signal=derived_signal,
        reason="" if fields.get("Reason") in (None, "None") else fields["Reason"],
        start=fields.get("StartTime", ""), end=fields.get("EndTime", ""),
        restarts=int(fields.get("Restarts", "0") or 0), nodes=fields.get("BatchHost", ""),
    )  # fmt: skip


class Allocation(msgspec.Struct, frozen=True):
    """The attempt of a Slurm job that something runs in."""

    job: str
    """Such as `12`; `12_3` for a task of an array."""
    restart: int = 0
    """How often it had been put back before."""


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the attempt that this environment is of; None outside Slurm."""
    job = environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    count = environ.get("SLURM_RESTART_COUNT", "")
    return Allocation(job, int(count) if count.isdigit() else 0) if job else None


def list_tasks(array: str) -> list[str]:
    """Return the tasks of an array.

    >>> list_tasks("0-2,7,10-20:5%2")
    ['0', '1', '2', '7', '10', '15', '20']
    """
    tasks: list[str] = []
    for part in array.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match:
            first, last, step = match[1], match[2] or match[1], match[3] or "1"
            tasks += map(str, range(int(first), int(last) + 1, int(step) or 1))
    return tasks


def parse_job_id(lines: Iterable[str]) -> str:
    """Return the job id in what `sbatch --parsable` printed, below whatever a login prints."""
    found = [m[1] for line in lines if (m := re.fullmatch(r"(\d+)(;\S+)?", line.strip()))]
    return found[-1] if found else ""
