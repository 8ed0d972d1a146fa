"""Delay, jitter and loss where the kernel has no `sch_netem`: relays frames between two TAPs.

    relay.py NAMESPACE PORT CONTROL

One TAP is `eth0` of the namespace, the other is `PORT` beside the bridge. The file CONTROL holds
`delay jitter loss` (seconds, seconds, share), each way, and is read five times a second. Frames
keep their order. Ends with its parent.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TAP_NO_PI = 0x1002
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_READ_S = 0.2
_BATCH = 64
_FRAME_MAX = 10_000


def open_tap(name: str) -> int:
    """Return a new TAP in the current network namespace."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_NO_PI))
    return fd


def open_pair(space: str, port: str) -> tuple[int, int]:
    """Return the TAP beside the bridge and the one in the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    outer = open_tap(port)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{space}", os.O_RDONLY)
    if libc.setns(there, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    inner = open_tap("eth0")
    libc.setns(home, _CLONE_NEWNET)
    return outer, inner


class Relay:
    """The frames under way."""

    def __init__(self, outer: int, inner: int, control: str) -> None:
        """Relay between two TAPs as the file `control` says."""
        self._other = {outer: inner, inner: outer}
        self._control = control
        self._delay_s = self._jitter_s = self._loss = 0.0
        self._queues: dict[int, deque[tuple[float, bytes]]] = {outer: deque(), inner: deque()}
        self._read_at = 0.0

    def run(self) -> None:
        """Relay for ever."""
        while True:
            now = time.monotonic()
            if now - self._read_at > _READ_S:
                self._read_at = now
                self._read_control()
            heads = [queue[0][0] for queue in self._queues.values() if queue]
            timeout_s = max(0.0, min([_READ_S, *(due - now for due in heads)]))
            ready, _, _ = select.select(list(self._other), [], [], timeout_s)
            for fd in ready:
                self._take(fd)
            self._deliver()

    def _read_control(self) -> None:
        with open(self._control, encoding="ascii") as file:
            words = file.read().split()
        if len(words) == 3:
            self._delay_s, self._jitter_s, self._loss = map(float, words)

    def _take(self, fd: int) -> None:
        target = self._other[fd]
        queue = self._queues[target]
        for _ in range(_BATCH):
            try:
                frame = os.read(fd, _FRAME_MAX)
            except BlockingIOError:
                return
            if self._loss and random.random() < self._loss:
                continue
            delay_s = self._delay_s + self._jitter_s * random.random()
            if delay_s or queue:
                due = max(time.monotonic() + delay_s, queue[-1][0] if queue else 0.0)
                queue.append((due, frame))
            else:
                self._write(target, frame)

    def _deliver(self) -> None:
        now = time.monotonic()
        for target, queue in self._queues.items():
            while queue and queue[0][0] <= now:
                self._write(target, queue.popleft()[1])

    def _write(self, fd: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # A full queue, an interface that is down: lost.
            os.write(fd, frame)


if __name__ == "__main__":
    pair = open_pair(sys.argv[1], sys.argv[2])
    print("up", flush=True)
    Relay(*pair, sys.argv[3]).run()
