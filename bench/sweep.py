"""What a test run or a bench has started ends with it, however it ends: Ctrl-C, SIGTERM, SIGKILL.

`sweep_after_me()` marks the environment, which whatever is started inherits, and leaves a process
beside that waits for our end. It then kills everything that carries the mark, such as the workers
of a torchrun that was killed, and descendants that it had seen before they emptied their
environment (a session of sshd), each by its pidfd and start time. It needs only the standard
library, and carries no mark itself.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from secrets import token_hex

MARK = "SWEPT_WITH"
_LOOK_S = 2.0
_KILL_S = 10.0


def sweep_after_me() -> None:
    """Have all that this process starts from now on ended with it, unless who started it does."""
    if MARK not in os.environ:
        mark = token_hex(8)
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark]
        subprocess.run(command, env={}, check=True, timeout=60)
        os.environ[MARK] = mark


def main(pid: int, mark: str) -> None:
    """Wait for the end of `pid`, then sweep: a process of its own, which is nobody's child."""
    fd = os.pidfd_open(pid)
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # Whoever reads our starter's output shall see its end.
        os.dup2(null, stream)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    seen: dict[int, bytes] = {}
    while not poller.poll(_LOOK_S * 1000):
        seen |= find_descendants(pid)
    sweep(f"{MARK}={mark}".encode(), seen)


def sweep(mark: bytes, seen: dict[int, bytes]) -> None:
    """Kill what carries `mark`, and what was `seen` (pid -> start time), until nothing is left."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        left = {pid: read_stat(pid)[1] for pid in pids if is_marked(pid, mark)}
        left |= {pid: start for pid, start in seen.items() if read_stat(pid)[1] == start}
        left.pop(os.getpid(), None)
        if not left:
            return
        for pid, start in left.items():
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(pid)
                if read_stat(pid)[1] == start:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                os.close(fd)
        time.sleep(0.02)


def is_marked(pid: int, mark: bytes) -> bool:
    """Return whether `pid` lives and was started with `mark` in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0") and read_stat(pid)[1] != b""
    except OSError:
        return False


def find_descendants(pid: int) -> dict[int, bytes]:
    """Return the living descendants of `pid`: pid -> start time."""
    stats = {int(name): read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found: dict[int, bytes] = {}
    queue = [pid]
    while queue:
        parent = queue.pop()
        for child, (above, start) in stats.items():
            if above == parent and start and child not in found:
                found[child] = start
                queue.append(child)
    return found


def read_stat(pid: int) -> tuple[int, bytes]:
    """Return the parent and start time of `pid`; no start time for who is gone, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0, b""
    return int(words[1]), b"" if words[0] in (b"Z", b"X") else words[19]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
