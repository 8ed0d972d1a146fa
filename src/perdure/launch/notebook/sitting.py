"""The program of a session: runs the job, and has it leave before the session's ceiling.

    python -m perdure.launch.notebook.sitting SESSION.json

No signal comes before the end of a session, so that this program warns itself, and from there on it
is as before Slurm's walltime: a stop at an agreed step, a checkpoint, a line in runs.jsonl, and a
decision about what follows.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from perdure.launch.slurm.batch import RUNS, follow, look_at_job, read_runs, say
from perdure.launch.slurm.chain import STUCK_RUNS, Run, decide
from perdure.model.checkpoints import MANIFEST, parse_checkpoint_name
from perdure.model.paths import job_paths

_PR_SET_PDEATHSIG = 1
_WORDS = {
    int(signal.SIGUSR1): "the session's ceiling is near",
    int(signal.SIGTERM): "the cell was stopped",
}
_KEPT = ("state.json", "journal.jsonl", "job.json", "logs")
"""What of a job's own directory goes to the durable place beside its checkpoints."""


def main(path: str) -> int:
    """Be one session of the chain; return the exit code of `perdure run`."""
    settings: dict[str, Any] = msgspec.json.decode(Path(path).read_bytes())
    name, durable, data = settings["job"], Path(settings["durable"]), Path(settings["data"])
    told: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda got, frame: told.append(got))
    signal.signal(signal.SIGALRM, lambda got, frame: told.append(signal.SIGUSR1))
    # A notebook whose kernel was restarted would run the job a second time beside this one.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    left_s = find_time_left(settings, time.time())
    before = read_runs(durable / RUNS)
    say(f"session {len(before) + 1} of job {name}; it leaves in {left_s / 60:.0f} min")
    signal.setitimer(signal.ITIMER_REAL, max(left_s, 1.0))
    command = [sys.executable, "-P", "-m", "perdure", "run", "-c", str(data / "job.json")]
    began_s = time.time()
    code = follow(subprocess.Popen(command, cwd=data / "project"), told, _WORDS)
    signal.setitimer(signal.ITIMER_REAL, 0)
    state, saved = look_at_job(name)
    checkpoint = max(saved, find_newest(durable))  # It may have gone on from one and saved none.
    run = Run(
        job=name, restart=len(before), state=state, code=code, checkpoint=checkpoint,
        # A cell that was stopped ends the session, and not the job.
        warned=bool(told), started_s=began_s, ended_s=time.time(),
    )  # fmt: skip
    keep(name, durable / f"session-{len(before) + 1}", settings["outputs"], data)
    what, why = decide_next(run, before, settings["sessions_max"])
    record(durable, run, what, why)
    say(f"{what}: {why}")
    return code


def find_time_left(settings: dict[str, Any], now: float) -> float:
    """Return the seconds until the job is told to leave.

    >>> find_time_left({"began_s": 100.0, "session_max_s": 3600, "stop_before_s": 600}, 160.0)
    2940.0
    """
    ceiling = settings["began_s"] + settings["session_max_s"]
    return float(ceiling - settings["stop_before_s"] - now)


def decide_next(run: Run, before: list[Run], sessions_max: int) -> tuple[str, str]:
    """Return what follows a session (as `chain.decide` says), and why, in a notebook's words."""
    what, why = decide(run, before, sessions_max - 1)
    step = f"step {run.checkpoint}" if run.checkpoint >= 0 else "the beginning"
    if what == "requeue":
        why = f"left before the session's end; the next one goes on from {step}"
    elif what == "give up" and run.restart >= sessions_max - 1:
        why = f"{run.restart + 1} sessions; notebook.sessions_max"
    elif what == "give up":
        why = f"{STUCK_RUNS} sessions ended without a checkpoint after {step}"
    return what, why


def find_newest(durable: Path) -> int:
    """Return the step of the newest whole checkpoint; -1 for none."""
    names = [path.parent.name for path in durable.glob(f"checkpoints/*/{MANIFEST}")]
    return max((s for n in names if (s := parse_checkpoint_name(n)) is not None), default=-1)


def keep(name: str, folder: Path, outputs: list[str], data: Path) -> None:
    """Copy the job's records and outputs to the durable place; what cannot be is told of."""
    root = Path(job_paths(os.environ["PERDURE_HOME"], name, os.getuid()).root)
    wanted = {root / part: folder / part for part in _KEPT}
    wanted |= {data / "project" / out: folder / "outputs" / out for out in outputs}
    wanted[data / "run.out"] = folder / "run.out"
    for source, target in wanted.items():
        with contextlib.suppress(FileNotFoundError):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, target, dirs_exist_ok=True)
                else:
                    shutil.copyfile(source, target)
            except shutil.Error as error:
                say(f"not all of {source} is kept: {error}")


def record(durable: Path, run: Run, what: str, why: str) -> None:
    """Write the session's line, then its status, each on disk before the next."""
    with open(durable / RUNS, "ab") as file:
        file.write(msgspec.json.encode(run) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    status = {
        "job": run.job, "state": run.state, "reason": why, "next": what, "code": run.code,
        "checkpoint": run.checkpoint, "session": run.restart + 1, "ended_s": run.ended_s,
    }  # fmt: skip
    temporary = durable / ".status.json.tmp"
    with open(temporary, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(status)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, durable / "status.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
