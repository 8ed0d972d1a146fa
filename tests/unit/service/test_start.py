"""A job that is started in the background is there once its command has returned."""

import subprocess
import sys
import time
from pathlib import Path

from perdure.service.jobfiles import wait_for_start
from perdure.service.jobfolders import is_alive, paths_of

HOLDER = """
import fcntl, sys, time
time.sleep(0.5)
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
sys.stdin.read()
"""


def test_it_is_waited_for_until_it_holds_the_job_or_has_ended(tmp_path: Path) -> None:
    """`perdure attach` right after `perdure launch` said that the job had ended."""
    paths = paths_of(str(tmp_path), "job")
    Path(paths.root).mkdir(parents=True)
    command = [sys.executable, "-c", HOLDER, paths.lock]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as holder:
        assert not is_alive(paths)
        wait_for_start(paths, holder.pid)
        assert is_alive(paths)
        assert holder.stdin is not None
        holder.stdin.close()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    began = time.monotonic()
    wait_for_start(paths, ended.pid)
    assert time.monotonic() - began < 15.0
    ended.returncode = 0  # It was waited for.
