"""T15: what a command starts for a moment or for a while ends with it, also by SIGKILL."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from tests.waiting import PATIENCE_S

BOUND = """
import sys, time
from perdure.service.processes import start_bound
print(start_bound(["sleep", "1000"], open("/dev/null", "wb")).pid, flush=True)
time.sleep(1000)
"""
GUARDED = """
import subprocess, time
from perdure.service.processes import guarded
with guarded("SOME_MARK"):
    # Like torchrun: whoever is killed leaves a worker in a session of its own.
    shell = subprocess.Popen(["sh", "-c", "setsid sleep 1000 & echo $!; wait"])
    time.sleep(1000)
"""


@pytest.mark.parametrize("program", [BOUND, GUARDED], ids=["bound", "guarded"])
def test_nothing_outlives_who_has_started_it(program: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        worker = psutil.Process(int(parent.stdout.readline()))
        family = [worker, *psutil.Process(parent.pid).children(recursive=True)]
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == []


def test_what_an_interrupted_way_out_leaves_is_ended() -> None:
    """A second Ctrl-C comes while a job is being stopped after the first."""
    program = GUARDED.replace("time.sleep(1000)", "input(); raise KeyboardInterrupt")
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    ) as parent:  # fmt: skip
        assert parent.stdin is not None
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.stdin.write("\n")
        parent.stdin.flush()
        parent.wait(PATIENCE_S)
        _, alive = psutil.wait_procs([worker], timeout=PATIENCE_S)
    assert alive == []
