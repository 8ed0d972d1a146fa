"""A rank has started a process as another user, with `sudo`. perdure cannot end that process."""

import os
import subprocess
import sys

import pytest
from tests.waiting import PATIENCE_S

from perdure.adapters.host import send_signal

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another user's process needs root")

_BELOW = """
import os, subprocess, sys, time
from types import SimpleNamespace
from perdure.keeper.ranks import Ranks
from perdure.model.paths import job_paths
from perdure.service.processes import end_family
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
foreign = subprocess.Popen(["sleep", "3600"], start_new_session=True, **quiet)
os.setgroups([])
os.setresuid(65534, 65534, 65534)
own = subprocess.Popen(["sleep", "3600"], **quiet)
"""
_KEEPER = """
told = []
paths = job_paths("/nowhere", "j", "/nowhere", "/nowhere")
ranks = Ranks("j", paths, "", SimpleNamespace(pids=set()), send=told.append, log=print)
ranks.kill(0, 0.0)
while not told:
    ranks.advance(time.monotonic())
    own.poll()
    time.sleep(0.01)
own.wait()
print(foreign.pid, foreign.poll())
"""
_SUPERVISOR = """
print(end_family("j", "/nowhere", spare=frozenset(), timeout_s=3600.0) == [foreign.pid])
own.wait()
print(foreign.pid, foreign.poll())
"""


def run_below_root(program: str) -> str:
    """Run `program` as an ordinary user who has a child of root; return what it prints."""
    words = [sys.executable, "-c", _BELOW + program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, cwd="/")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].split()
    assert send_signal(int(last[0]), 9)
    assert last[1:] == ["None"], "it goes on"
    return done.stdout


def test_the_next_ranks_do_not_wait_for_it() -> None:
    assert "are another user's and go on" in run_below_root(_KEEPER)


def test_the_end_of_the_job_does_not_wait_for_it() -> None:
    assert run_below_root(_SUPERVISOR).startswith("True")
