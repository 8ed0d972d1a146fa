"""Ends what a killed supervisor has left: run as `python -I -S guard.py PID NAME=VALUE...`.

Each part of a job sees the end of its supervisor by itself, and the controller writes the job's
end down before it goes. But any of them may have been killed as well, and nats-server watches
nobody. So the guard, which needs nothing but Python's standard library and waits for one event,
gives the others `GRACE_S` to leave and then kills what still carries the job's marks, which are
variables that each process of the job was started with. It is one of the supervisor's parts, so it
is started again when it dies.

Once the supervisor is gone, a new run of the job begins by killing all that carries the marks, the
guard included, before it starts anything: the guard never meets the parts of a later run.
"""

import contextlib
import os
import select
import signal
import sys
import time

GRACE_S = 0.8
"""Given to the parts to write the job's end down and to leave."""
_KILL_S = 10.0
_LOOK_S = 0.02


def main(supervisor: int, marks: set[bytes]) -> None:
    """Wait for the end of process `supervisor`; then end what has `marks` and does not leave."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    failpoint("guard/begun")
    wait_end(supervisor)
    failpoint("guard/woken")
    ended_s = time.monotonic()
    while time.monotonic() < ended_s + GRACE_S + _KILL_S:
        left = find_marked(marks)
        if not left:
            return
        if time.monotonic() > ended_s + GRACE_S:
            failpoint("guard/kill")
            for pid in left:
                kill_marked(pid, marks)
        time.sleep(_LOOK_S)


def wait_end(pid: int) -> None:
    """Return once `pid`, our parent, is gone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    if os.getppid() == pid:  # Else it was gone before, and the number may be somebody else's.
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll()
    os.close(fd)


def find_marked(marks: set[bytes]) -> list[int]:
    """Return the living processes of the job, but for ourselves."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and is_marked(pid, marks)]


def is_marked(pid: int, marks: set[bytes]) -> bool:
    """Return whether `pid` lives and was started with `marks` in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in (b"Z", b"X") and marks <= set(environ.split(b"\0"))


def kill_marked(pid: int, marks: set[bytes]) -> None:
    """Kill `pid` if it is still a process of the job, which its pidfd makes sure of."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            if is_marked(pid, marks):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def failpoint(name: str) -> None:
    """Have the fault of a test happen here; without its variable nothing is imported."""
    if os.environ.get("PERDURE_FAILPOINTS"):
        sys.path.append(__file__.rpartition("/perdure/")[0])
        from perdure import failpoints

        failpoints.failpoint(name)


if __name__ == "__main__":
    main(int(sys.argv[1]), {os.fsencode(mark) for mark in sys.argv[2:]})
