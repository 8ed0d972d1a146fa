"""A job as a chain of runs: one run looked after on its place, what it leaves, and what follows it.

The programs of a Slurm job, of a session of a notebook and of a pod have this in common: they start
`perdure run`, have it leave at an agreed step once the place is about to end it, and read by the
job's own files how it ended.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from perdure.files.private import locate_job
from perdure.files.regular import read_file
from perdure.model.errors import ProtocolError
from perdure.model.paths import JobPaths
from perdure.model.records import decode_record
from perdure.model.report import Snapshot

RUNS = "runs.jsonl"
"""In a job's folder: a line for each run that ended."""
STUCK_RUNS = 3
"""So many runs in a row that ended at the walltime without a later checkpoint end the chain."""
JOB_WORDS = {
    "requeue": "the walltime is near; goes on from {step}",
    "often": "put back {run.restart} times; slurm.requeue_max",
    "stuck": f"{STUCK_RUNS} runs ended at their walltime without a checkpoint after step "
    "{run.checkpoint}: a longer slurm.time_limit",
}
SESSION_WORDS = {
    "requeue": "left before the session's end; the next one goes on from {step}",
    "often": "{runs} sessions; notebook.sessions_max",
    "stuck": f"{STUCK_RUNS} sessions ended without a checkpoint after {{step}}",
}
"""Why another run follows, or none does: said of a job of Slurm's, and of a notebook's session."""
_POLL_S = 0.2


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the chain, as it ended."""

    job: str
    restart: int
    state: str
    """perdure's own word: done, stopped, failed, or lost where nobody wrote it."""
    code: int
    checkpoint: int
    """Step of the newest checkpoint; -1 for none."""
    warned: bool
    ended_by: str = ""
    """`TERM` where Slurm ended it."""
    started_s: float = 0.0
    ended_s: float = 0.0
    nodes: int = 0
    """Those that Slurm had given; 0 elsewhere."""
    fixed: bool = False
    """Whether its world was seen to be of a fixed size, so that it goes on with as many only."""


def decide(
    run: Run, before: list[Run], requeue_max: int, words: Mapping[str, str] = JOB_WORDS
) -> tuple[Literal["leave", "requeue", "give up"], str]:
    """Return what follows a run, and why.

    >>> decide(Run(job="1", restart=0, state="stopped", code=0, checkpoint=40, warned=True), [], 9)
    ('requeue', 'the walltime is near; goes on from step 40')
    """
    if run.state == "done":
        return "leave", "done"
    if run.state == "failed" or (run.code and run.state != "stopped"):
        return "leave", f"failed with exit code {run.code}"
    if run.ended_by == "TERM":
        return "leave", "ended by Slurm, which puts it back itself where it is to go on"
    if not run.warned:
        return "leave", f"{run.state} without a warning"
    step = f"step {run.checkpoint}" if run.checkpoint >= 0 else "the beginning"
    said = {"run": run, "runs": run.restart + 1, "step": step}
    told = {key: text.format_map(said) for key, text in words.items()}
    if run.restart >= requeue_max:
        return "give up", told["often"]
    newest = [*before, run][-STUCK_RUNS:]
    stuck = all(r.warned and r.checkpoint <= newest[0].checkpoint for r in newest)
    if len(newest) == STUCK_RUNS and stuck:
        return "give up", told["stuck"]
    return "requeue", told["requeue"]


def hear(*numbers: int) -> list[int]:
    """Return a list to which each of these signals is added as it comes."""
    told: list[int] = []
    for number in numbers:
        signal.signal(number, lambda got, frame: told.append(got))
    return told


def follow(
    process: "subprocess.Popen[bytes]",
    told: list[int],
    words: Mapping[int, str],
    meanwhile: Callable[[], None] = lambda: None,
    *,
    leaves: bool = True,
) -> int:
    """Wait for a command of perdure's, stopping it once we were told to; return its exit code.

    It is told once: a second signal would end it at once, without a checkpoint. `words` say why, by
    the signal; what has none is passed on in silence. One that does not leave (`Unordered.leaves`)
    is not stopped for a warning (USR1), and saves nothing: it goes on until it is really ended.
    """
    passed = False
    while process.poll() is None:
        if not leaves and signal.SIGUSR1 in told:
            told.remove(signal.SIGUSR1)
            say(f"{words[signal.SIGUSR1]}: observed only: would have stopped at an agreed step")
        if told and not passed:
            passed = True
            if why := words.get(told[0]):
                say(f"{why}: stops at an agreed step")
            process.send_signal(signal.SIGTERM)
        meanwhile()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
    return exit_code(process.returncode)


def exit_code(returncode: int) -> int:
    """Return a process's end as a shell tells it: 128 + N for signal N.

    >>> exit_code(3), exit_code(-15)
    (3, 143)
    """
    return returncode if returncode >= 0 else 128 - returncode


def locate_own_job(name: str, home: str = "") -> JobPaths:
    """Return where a job of this user has its files."""
    return locate_job(home or os.environ["PERDURE_HOME"], name)


def read_runs(path: Path) -> list[Run]:
    """Return the runs so far; a torn last line counts for none."""
    runs = []
    with contextlib.suppress(FileNotFoundError):
        for line in read_file(path).splitlines():
            with contextlib.suppress(msgspec.MsgspecError):
                runs.append(msgspec.json.decode(line, type=Run))
    return runs


def append_run(path: Path, run: Run) -> None:
    """Write down how a run ended; it is on the disk before anything follows from it."""
    with open(path, "ab") as file:
        file.write(msgspec.json.encode(run) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def say(text: str) -> None:
    """Tell the place's own log."""
    print(f"perdure: {text}", flush=True)


def look_at_job(paths: JobPaths) -> tuple[str, int]:
    """Return a job's state, `lost` where nobody wrote it, and the step of its newest checkpoint."""
    snapshot = read_status(paths)
    if snapshot is None:
        return "lost", -1
    steps = [int(str(row.get("step", -1))) for row in snapshot.checkpoints]
    return snapshot.state, max(steps, default=-1)


def read_status(paths: JobPaths) -> Snapshot | None:
    """Return what a job's own process wrote down last; None where nobody wrote it."""
    try:
        snapshot: Snapshot = decode_record(read_file(paths.snapshot), Snapshot)
    except (OSError, ProtocolError):
        return None
    return snapshot
