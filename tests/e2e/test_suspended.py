"""A machine that is suspended, or a pod that is frozen: all stands still at once, and goes on.

Nobody was silent and nobody waited in vain, in any depth and whoever wakes first.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import SCRIPTS, Job

PAUSE_S = 60.0
ELASTIC = (str(SCRIPTS / "elastic.py"), "--trail", "trail", "--steps", "100000")
GROUPS = (str(SCRIPTS / "torchft_groups.py"), "10000000", "trail")
PLAIN = (str(SCRIPTS / "train_paced.py"), "--trail", "trail", "--steps", "100000")


def list_processes(job: Job) -> list[psutil.Process]:
    """Return all processes of the job, by the mark that they carry."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PERDURE_HOME") == job.env["PERDURE_HOME"]:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("reverse", [False, True], ids=["in-order", "reverse"])
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("-n", "1", "--nodes", "2", *PLAIN), id="resumable"),
        pytest.param(("-n", "3", *ELASTIC), id="elastic"),
        pytest.param(("-n", "1", "--torchft", "--replicas", "2", *GROUPS), id="torchft"),
    ],
)
def test_a_suspended_job_goes_on_where_it_was(
    start: Callable[..., Job], tmp_path: Path, words: tuple[str, ...], reverse: bool
) -> None:
    (tmp_path / "trail").mkdir()
    job = start("sleeper", *words)
    job.wait_step(20)
    before = job.state()
    processes = list_processes(job)
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    for process in reversed(processes) if reverse else processes:
        os.kill(process.pid, signal.SIGCONT)
    job.wait_step(before["step"] + 40)
    after = job.state()
    assert after["restarts"] == before["restarts"], job.text()
    assert after["generation"] == before["generation"], job.text()
    assert job.report()["recoveries"] == []
    job.cli("stop", "sleeper")
    assert job.wait() == 0, job.text()
