"""A job that is started in the background is there once its command has returned."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from perdure.service import jobfiles
from perdure.service.jobfiles import wait_for_start
from perdure.service.jobfolders import is_alive, paths_of

HOLDER = """
import fcntl, sys
sys.stdin.readline()
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
sys.stdin.read()
"""


def test_it_is_waited_for_until_it_holds_the_job_or_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`perdure attach` right after `perdure launch` said that the job had ended."""
    paths = paths_of(str(tmp_path), "job")
    Path(paths.root).mkdir(parents=True)
    command = [sys.executable, "-c", HOLDER, paths.lock]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as holder:
        line = holder.stdin
        assert line is not None

        def let_begin(seconds: float) -> None:
            line.write(b"\n" * 2)  # The second one is never read.
            line.flush()
            time.sleep(seconds)

        monkeypatch.setattr(jobfiles, "_START_S", 3600.0)
        with monkeypatch.context() as patch:
            patch.setattr(
                jobfiles, "time", SimpleNamespace(monotonic=time.monotonic, sleep=let_begin)
            )
            wait_for_start(paths, holder.pid)
        assert is_alive(paths)
        line.close()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    wait_for_start(paths, ended.pid)
    ended.returncode = 0  # It was waited for.
