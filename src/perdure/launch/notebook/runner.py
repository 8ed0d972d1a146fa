"""The program of a session: runs the job, and has it leave before the session's ceiling.

    python -m perdure.launch.notebook.runner SESSION.json

No signal comes before the end of a session, so that this program warns itself, and from there on it
is as before Slurm's walltime: a stop at an agreed step, a checkpoint, a line in runs.jsonl, and a
decision about what follows.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from perdure.launch.notebook.session import write_durably
from perdure.launch.results.pulling import EXCLUDED
from perdure.launch.runs import (
    RUNS,
    SESSION_WORDS,
    Run,
    append_run,
    decide,
    follow,
    hear,
    locate_own_job,
    look_at_job,
    read_runs,
    say,
)
from perdure.launch.ssh.results import walk_area
from perdure.model.checkpoints import MANIFEST, parse_checkpoint_name
from perdure.model.job import JobSpec

KEEP_S = 30.0
"""Journal, logs and outputs are as old as this at most where a session ends without a word."""
_PR_SET_PDEATHSIG = 1
_WORDS = {
    int(signal.SIGUSR1): "the session's ceiling is near",
    int(signal.SIGTERM): "the cell was stopped",
}
_KEPT = ("state.json", "journal.jsonl", "job.json", "logs", "curves")
"""What of a job's own directory goes to the durable place beside its checkpoints."""


def main(path: str) -> int:
    """Be one session of the chain; return the exit code of `perdure run`."""
    settings: dict[str, Any] = msgspec.json.decode(Path(path).read_bytes())
    name, durable, data = settings["job"], Path(settings["durable"]), Path(settings["data"])
    spec = msgspec.json.decode((data / "job.json").read_bytes(), type=JobSpec)
    told = hear(signal.SIGUSR1, signal.SIGTERM)
    signal.signal(signal.SIGALRM, lambda got, frame: told.append(signal.SIGUSR1))
    # A notebook whose kernel was restarted would run the job a second time beside this one.
    end_with_parent()
    lock = os.open(f"{data}.lock", os.O_CREAT | os.O_WRONLY, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    left_s = compute_time_left(settings, time.time())
    before, session = read_runs(durable / RUNS), next_session_number(durable)
    say(f"session {session} of job {name}; it leaves in {left_s / 60:.0f} min")
    signal.setitimer(signal.ITIMER_REAL, max(left_s, 1.0))
    command = [sys.executable, "-P", "-m", "perdure", "run", "-c", str(data / "job.json")]
    began_s = time.time()
    sent = read_stamps(data / "project")
    # The lock goes along: it is held for as long as either of the two lives.
    process = subprocess.Popen(
        command, cwd=data / "project", pass_fds=(lock,), preexec_fn=end_with_parent
    )

    def keep_all() -> None:
        keep(name, durable / f"session-{session}", settings["outputs"], data, sent)

    with repeat(keep_all, KEEP_S):
        code = follow(process, told, _WORDS, leaves=spec.unordered.leaves)
    signal.setitimer(signal.ITIMER_REAL, 0)
    keep_all()
    state, saved = look_at_job(locate_own_job(name))
    run = Run(
        job=name, restart=len(before), state=state, code=code,
        # It may have gone on from one and saved none.
        checkpoint=max(saved, read_newest_step(durable)),
        # A cell that was stopped ends the session, and not the job.
        warned=bool(told), started_s=began_s, ended_s=time.time(),
    )  # fmt: skip
    what, why = decide(run, before, settings["sessions_max"] - 1, SESSION_WORDS)
    record(durable, run, session, what, why)
    say(f"{what}: {why}")
    return code


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def next_session_number(durable: Path) -> int:
    """Return the number of this session: one that ended without a word has left its folder."""
    names = [path.name.removeprefix("session-") for path in durable.glob("session-*")]
    return 1 + max((int(name) for name in names if name.isdigit()), default=0)


@contextlib.contextmanager
def repeat(act: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `act` every so often, in a thread of its own."""
    over = threading.Event()

    def go() -> None:
        while not over.wait(every_s):
            act()

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def compute_time_left(settings: dict[str, Any], now: float) -> float:
    """Return the seconds until the job is told to leave.

    >>> compute_time_left({"began_s": 100.0, "session_max_s": 3600, "stop_before_s": 600}, 160.0)
    2940.0
    """
    ceiling = settings["began_s"] + settings["session_max_s"]
    return float(ceiling - settings["stop_before_s"] - now)


def read_newest_step(durable: Path) -> int:
    """Return the step of the newest whole checkpoint; -1 for none."""
    names = [path.parent.name for path in durable.glob(f"checkpoints/*/{MANIFEST}")]
    return max((s for n in names if (s := parse_checkpoint_name(n)) is not None), default=-1)


def read_stamps(project: Path) -> dict[str, tuple[int, int]]:
    """Return name -> size and time of change of each file of a project, caches left out."""
    told: dict[str, list[str]] = {"excluded": [], "unread": [], "others": []}
    paths = walk_area(str(project), set(), EXCLUDED, told | {"roots": {}})
    stamps = {}
    for path in paths:
        with contextlib.suppress(OSError):  # A link that leads nowhere, or a file that went.
            stat = os.stat(path)
            stamps[os.path.relpath(path, project)] = (stat.st_size, stat.st_mtime_ns)
    return stamps


def keep(
    name: str, folder: Path, outputs: list[str], data: Path, sent: dict[str, tuple[int, int]]
) -> None:
    """Copy what is newer of the job's records and outputs to the durable place.

    So is what the script has written into its project and nobody named: whatever is there now and
    was not, or not so, when it was `sent`. The session takes the rest with it.
    """
    root = Path(locate_own_job(name).root)
    wanted = {
        **{root / part: folder / part for part in _KEPT},
        **{data / "project" / out: folder / "outputs" / out for out in outputs},
        data / "run.out": folder / "run.out",
    }
    named = tuple(f"{os.path.normpath(out)}/" for out in outputs)
    for path, stamp in read_stamps(data / "project").items():
        if sent.get(path) != stamp and not path.startswith(named):
            wanted[data / "project" / path] = folder / "project" / path
    for source, target in wanted.items():
        try:
            copy_newer(source, target)
        except OSError as error:
            say(f"not all of {source} is kept: {error}")


def copy_newer(source: Path, target: Path) -> None:
    """Copy a file, or a folder's files, that `target` has not, or has otherwise.

    Raises:
        OSError: the target cannot be written.
    """
    if source.is_dir():
        for path in sorted(source.iterdir()):
            copy_newer(path, target / path.name)
        return
    with contextlib.suppress(FileNotFoundError):  # Gone meanwhile, or not there yet.
        now, before = source.stat(), target.stat() if target.exists() else None
        if before and before.st_size == now.st_size and before.st_mtime == now.st_mtime:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def record(durable: Path, run: Run, number: int, what: str, why: str) -> None:
    """Write the session's line, then its status, each on disk before the next."""
    append_run(durable / RUNS, run)
    status = {
        "job": run.job, "state": run.state, "reason": why, "next": what, "code": run.code,
        "checkpoint": run.checkpoint, "session": number, "ended_s": run.ended_s,
    }  # fmt: skip
    text = msgspec.json.format(msgspec.json.encode(status)).decode()
    write_durably(str(durable / "status.json"), f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
