"""SIGUSR1 and SIGUSR2, as a scheduler sends them: ranks that handle them get them once each."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Job

pytestmark = pytest.mark.slow

COUNTS = """
import os, signal, time
rank = os.environ["RANK"]
print("before", rank, signal.getsignal(signal.SIGUSR1).name, flush=True)
if rank != "2":
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda n, _: print(f"got {n} in {rank}.", flush=True))
print("ready", rank, flush=True)
for number in range(10**9):
    if rank == "2" and number % 10 == 0:
        print("alive", flush=True)
    time.sleep(0.05)
"""
BELOW_A_SHELL = '#!/bin/sh\npython3 count.py\necho "the shell goes on"\nsleep 1000\n'


def begin(start: Callable[..., Job], ranks: int, *options: str) -> Job:
    job = start("site", "-n", str(ranks), *options)
    ready = [f"ready {rank}" for rank in range(ranks)]
    job.wait_until(lambda: all(one in job.text() for one in ready), "the ranks")
    job.wait_state("running")
    return job


def send(job: Job, number: int, everywhere: bool) -> None:
    pids = [process.pid for process in job.find("")] if everywhere else []
    for pid in [*pids, job.process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def count(job: Job, number: int) -> list[int]:
    return [job.text().count(f"got {int(number)} in {rank}.") for rank in range(2)]


@pytest.mark.parametrize(
    ("everywhere", "cold"),
    [
        (True, ()),
        (False, ("--cold",)),
        pytest.param(False, (), marks=pytest.mark.long),
        pytest.param(True, ("--cold",), marks=pytest.mark.long),
    ],
)
def test_ranks_that_handle_a_signal_get_it_once_and_one_that_does_not_lives_on(
    start: Callable[..., Job], tmp_path: Path, everywhere: bool, cold: tuple[str, ...]
) -> None:
    (tmp_path / "count.py").write_text(COUNTS)
    job = begin(start, 3, *cold, "count.py")
    assert "before 0 SIG_DFL" in job.text(), "libraries install a handler only then"
    names = ("nats-server", "controller", "agent", "keeper", "g0 r0", "g0 r1", "g0 r2")
    parts = {name: job.pid_of(name) for name in names}
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        send(job, number, everywhere)
        job.wait_until(lambda number=number: min(count(job, number)) > 0, "the signal")
    send(job, signal.SIGUSR2, everywhere)  # It is handled after any echo of the first ones.
    job.wait_until(lambda: min(count(job, signal.SIGUSR2)) > 1, "the next signal")
    assert count(job, signal.SIGUSR1) == [1, 1]
    seen = job.text().count("alive")
    job.wait_until(lambda: job.text().count("alive") > seen + 4, "training")
    assert {name: job.pid_of(name) for name in parts} == parts
    job.cli("stop", "site", "--now")
    job.wait()


def test_a_handler_below_a_shell_gets_it(start: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(COUNTS)
    (tmp_path / "go.sh").write_text(BELOW_A_SHELL)
    (tmp_path / "go.sh").chmod(0o755)
    job = begin(start, 2, "--cold", "--no-python", "./go.sh")
    send(job, signal.SIGUSR1, False)
    job.wait_until(lambda: min(count(job, signal.SIGUSR1)) > 0, "the signal")
    job.cli("stop", "site", "--now")
    job.wait()
