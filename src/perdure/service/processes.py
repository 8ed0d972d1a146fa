"""The processes of a job: started, named, counted, and in the end all gone.

A job's processes are found in two ways, neither of which needs a right that an ordinary user
lacks: as descendants (the supervisor is a subreaper, so an orphan of any depth comes back to it),
and by `PERDURE_JOB` and `PERDURE_HOME` in their environment, for those that an earlier, killed
supervisor has left behind.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from perdure.adapters import host
from perdure.adapters.host import (
    list_ancestors,
    list_children,
    list_descendants,
    read_all,
    read_environ,
    read_start_time,
    read_state,
    scan_processes,
    send_signal,
)
from perdure.service.shield import refuse_site_handlers
from perdure.worker.system.process import die_with, ignore_site_signals


@dataclass(slots=True)
class Child:
    """One part of the job that the supervisor has started."""

    part: str
    """`controller`, `agent 0`, `nats-server`."""
    pid: int
    pidfd: int
    process: "subprocess.Popen[bytes]"

    def kill(self) -> None:
        """Kill it; its end is then seen like any other."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Give its descriptor back."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class StopWatch:
    """Finds parts that are stopped (state T) and do not come back by themselves.

    A stopped part is seen by nobody else: it is no death, and what it should say is merely late.
    Sightings are counted, not seconds, so that a supervisor that was itself stopped takes nobody's
    pause for longer than it was. To continue a part (SIGCONT) is not ours; each can be replaced.
    """

    def __init__(self, sightings: int) -> None:
        """Report what was stopped at so many looks in a row."""
        self._sightings = sightings
        self._seen: dict[int, int] = {}

    def list_stopped(self, children: Iterable[Child]) -> list[Child]:
        """Look once; return those that have been stopped for long enough, each once."""
        stopped = [c for c in children if c.pidfd >= 0 and read_state(c.pid) == "T"]
        self._seen = {c.pid: self._seen.get(c.pid, 0) + 1 for c in stopped}
        return [c for c in stopped if self._seen[c.pid] == self._sightings]


def part_command(*words: str) -> list[str]:
    """Return the command line of a part, such as `controller JOB`."""
    return [sys.executable, "-P", "-m", "perdure", *words]


def guard_command(**marks: str) -> list[str]:
    """Return the command line of this process's guard, which imports nothing of perdure.

    When this process is gone, it ends what has all of `marks` in its environment.
    """
    program = str(Path(__file__).with_name("guard.py"))
    marked = [f"{name}={value}" for name, value in marks.items()]
    return [sys.executable, "-I", "-S", program, str(os.getpid()), *marked]


@contextlib.contextmanager
def guarded(name: str) -> Iterator[None]:
    """Have what is started meanwhile end with this process, by a mark called `name`.

    Where it is left by an exception, too: a second Ctrl-C may have come amid the way out.
    """
    mark = f"{os.getpid()}-{os.urandom(6).hex()}"
    guard = subprocess.Popen(guard_command(**{name: mark}), start_new_session=True)
    os.environ[name] = mark
    try:
        yield
        guard.kill()
        guard.wait()
    finally:
        del os.environ[name]


def start_bound(command: list[str], output: BinaryIO) -> "subprocess.Popen[bytes]":
    """Start a program that the kernel kills when the thread that calls this has ended."""
    bind = partial(die_with, os.getpid())
    return subprocess.Popen(
        command, stdout=output, stderr=output, start_new_session=True, preexec_fn=bind
    )


def start_child(part: str, command: list[str], env: dict[str, str], log: str) -> Child:
    """Start `command` in a session of its own, so that the terminal's Ctrl-C is ours alone."""
    is_server = part.startswith("nats-server")
    prepare = refuse_site_handlers if is_server else ignore_site_signals
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
            preexec_fn=prepare,
        )
    return Child(part, process.pid, os.pidfd_open(process.pid), process)


def describe_exit(status: int) -> str:
    """Return `subprocess`'s return code in words."""
    if status >= 0:
        return f"exit code {status}"
    with contextlib.suppress(ValueError):
        return f"signal {-status} ({signal.Signals(-status).name})"
    return f"signal {-status}"


def list_living_descendants(pid: int) -> list[int]:
    """Return the living descendants of `pid`, zombies left out."""
    return sorted(child for child in list_descendants([pid])[pid] if read_state(child) not in "ZXx")


def find_marked(job: str, home: str) -> list[int]:
    """Return the processes of this user that carry the job's mark, but for our own ancestors."""
    spared = list_ancestors(os.getpid())
    marked = host.find_marked({"PERDURE_JOB": job, "PERDURE_HOME": home})
    return [pid for pid in marked if pid not in spared]


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process of a job whose supervisor is gone."""

    job: str
    pid: int
    start: int
    """Clock ticks since boot, which tell it from a later process of the same number."""
    age_s: float
    command: str
    supervisor: int
    """Pid of the `perdure run` or `perdure node join` that started it; 0 where it does not tell."""


def find_leftovers(home: str, is_run: Callable[[str], bool]) -> list[Leftover]:
    """Return the processes that carry the marks of a job below `home` which nobody watches over.

    They are that job's because PERDURE_JOB and PERDURE_HOME stand in the environment that each was
    started with. Somebody watches over a job that `is_run`, or where a supervisor that one of its
    processes names lives and is older than that process.
    """
    found: dict[str, list[Leftover]] = {}
    watched: set[str] = set()
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    for pid, command in read_all("cmdline"):
        marks, start = read_environ(pid), read_start_time(pid)
        job = marks.get("PERDURE_JOB", "")
        if marks.get("PERDURE_HOME") != home or not job or not start or pid == os.getpid():
            continue
        named = marks.get("PERDURE_RUN_PID", "")
        run = int(named) if named.isdecimal() else 0
        if run and 0 < read_start_time(run) <= start:
            watched.add(job)
        age_s = max(0.0, now_s - start / os.sysconf("SC_CLK_TCK"))
        text = command.replace(b"\0", b" ").decode(errors="replace").strip()
        words = "".join(char if char.isprintable() else "?" for char in text)
        found.setdefault(job, []).append(Leftover(job, pid, start, age_s, words, run))
    left = [job for job in found if job not in watched and not is_run(job)]
    return [one for job in sorted(left) for one in sorted(found[job], key=lambda one: one.pid)]


def find_by_argument(argument: str) -> list[int]:
    """Return the processes with exactly this argument in their command line."""
    return [pid for pid, line in read_all("cmdline") if argument.encode() in line.split(b"\0")]


def find_by_title(title: str) -> list[int]:
    """Return the processes that call themselves `title`, to the end of a word."""
    wanted = f"{title} ".encode()
    lines = read_all("cmdline")
    return [pid for pid, line in lines if (line.replace(b"\0", b" ") + b" ").startswith(wanted)]


def reap_adopted(known: set[int]) -> None:
    """Reap orphans that were handed to us and have ended; somebody waits for those in `known`."""
    try:
        pids = list_children(os.getpid())
    except OSError:
        pids = {p.pid for p in scan_processes().values() if p.parent == os.getpid()}
    for pid in pids:
        if pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_family(job: str, home: str, *, spare: frozenset[int], timeout_s: float = 10.0) -> list[int]:
    """Kill every process of the job but `spare`; return those that would not go.

    Repeats until none is found, since a process may have forked while it was being counted.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        reap_adopted(set(spare))
        pids = {*list_living_descendants(os.getpid()), *find_marked(job, home)} - spare
        ours = [pid for pid in pids if send_signal(pid, signal.SIGKILL)]
        if not ours or time.monotonic() > deadline:
            return sorted(pids)
        time.sleep(0.01)


def read_process_start_s() -> float:
    """Return when this process was started, by the monotonic clock (to 10 ms)."""
    started_s = read_start_time(os.getpid()) / os.sysconf("SC_CLK_TCK")
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    return time.monotonic() - max(0.0, age_s)
