"""/proc as it really is, with children that really live and die."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from tests.waiting import PATIENCE_S

from perdure.adapters.host import (
    ProcSampler,
    end_leftovers,
    find_marked,
    kill_process,
    list_children,
    list_descendants,
    pick_free_ports,
    read_start_time,
    read_state,
)

_FAMILY = """\
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import sys, time; x = bytearray(30 << 20)\\n"
    "while time.process_time() < 0.15: pass\\n"
    "print('ready', flush=True); sys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    env = dict(os.environ, PERDURE_TEST_MARK=f"m{os.getpid()}")
    parent = subprocess.Popen(
        [sys.executable, "-c", _FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    yield parent, int(parent.stdout.readline())
    parent.stdin.close()
    parent.stdout.close()
    parent.wait()


def test_sample_has_descendants(family: tuple[subprocess.Popen[bytes], int]) -> None:
    parent, child = family
    assert child in list_descendants([parent.pid])[parent.pid]
    sampler = ProcSampler()
    sampler.watch([parent.pid])
    look = sampler.sample(parent.pid, 100.0)
    assert look.state in "SR"
    assert look.cpu_s >= 0.1  # The child's sum.
    assert look.rss_bytes > 35 << 20
    assert look.num_threads >= 2
    assert look.io_bytes > 0
    assert sampler.sample(parent.pid, 100.4, age_s=0.5) is look
    os.kill(parent.pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, parent.pid, os.WSTOPPED | os.WNOWAIT)
        assert sampler.sample(parent.pid, 100.4).state == "T"
        assert read_state(parent.pid) == "T"
    finally:
        os.kill(parent.pid, signal.SIGCONT)
    sampler.watch([])
    assert sampler.sample(parent.pid, 101.0).state == "X"


def test_gone_process(family: tuple[subprocess.Popen[bytes], int]) -> None:
    parent, _ = family
    sampler = ProcSampler()
    sampler.watch([parent.pid])
    parent.kill()
    parent.wait()
    assert sampler.sample(parent.pid, 1.0).state == "X"
    assert read_start_time(parent.pid) == 0
    sampler.watch([])


def test_leftovers_end_by_mark_and_by_pid(family: tuple[subprocess.Popen[bytes], int]) -> None:
    parent, child = family
    marks = {"PERDURE_TEST_MARK": f"m{os.getpid()}"}
    assert set(find_marked(marks)) == {parent.pid, child}
    start = read_start_time(parent.pid)
    assert not kill_process(parent.pid, start + 1)  # Another process under the same pid.
    killed = end_leftovers({parent.pid: start, 999_999_999: 5}, marks, timeout_s=PATIENCE_S)
    assert set(killed) >= {parent.pid}
    assert find_marked(marks) == {}
    assert parent.wait() == -signal.SIGKILL


def test_children_of_another_thread_are_not_listed() -> None:
    """It waits for them itself: whoever reaped one of them would take its exit status away."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(subprocess.Popen, command, stdin=subprocess.PIPE).result()
        with theirs, subprocess.Popen(command, stdin=subprocess.PIPE) as mine:
            found = list_children(os.getpid())
            assert mine.pid in found
            assert theirs.pid not in found
            for child in (mine, theirs):
                assert child.stdin is not None
                child.stdin.close()


class LowestPort(socket.socket):
    """A listener that always gets the lowest free port, as a kernel may choose it."""

    taken: ClassVar[set[int]] = set()

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__()
        self.port = min(set(range(1, 10)) - self.taken)
        self.taken.add(self.port)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def close(self) -> None:
        self.taken.discard(self.port)
        super().close()


def test_no_port_is_picked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_server", LowestPort)
    assert pick_free_ports("127.0.0.1", 6) == [1, 2, 3, 4, 5, 6]
    assert not LowestPort.taken
