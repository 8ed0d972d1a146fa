"""Parts in state T are found after so many looks, however long those take."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from perdure.service.processes import Child, StopWatch


@pytest.fixture
def child() -> Iterator[Child]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    child = Child("agent 0", process.pid, os.pidfd_open(process.pid), process)
    yield child
    process.kill()
    process.wait()
    child.close()


def send(child: Child, number: signal.Signals, state: str) -> None:
    os.kill(child.pid, number)
    stat = Path(f"/proc/{child.pid}/stat")
    wait_until(lambda: state in stat.read_text().rpartition(")")[2].split()[0], state)


def test_it_is_reported_once(child: Child) -> None:
    watch = StopWatch(3)
    assert [watch.list_stopped([child]) for _ in range(5)] == [[]] * 5
    send(child, signal.SIGSTOP, "T")
    assert [watch.list_stopped([child]) for _ in range(5)] == [[], [], [child], [], []]


def test_one_that_went_on_begins_anew(child: Child) -> None:
    watch = StopWatch(2)
    send(child, signal.SIGSTOP, "T")
    assert watch.list_stopped([child]) == []
    send(child, signal.SIGCONT, "S")
    assert watch.list_stopped([child]) == []
    send(child, signal.SIGSTOP, "T")
    assert watch.list_stopped([child]) == []
    assert watch.list_stopped([child]) == [child]
