"""A job that is started in the background is there once its command has returned."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from perdure.model.bus.endpoint import Endpoint
from perdure.model.errors import ConfigError
from perdure.service import jobfiles
from perdure.service.jobfiles import load_endpoint, wait_for_start, write_document
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


def test_a_command_waits_for_the_endpoint_of_a_job_that_has_just_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`perdure inject` right after `perdure run --detach` found no endpoint."""
    paths = paths_of(str(tmp_path), "job")
    Path(paths.root).mkdir(parents=True)
    begun = Endpoint(url="nats://127.0.0.1:1", token="", clock_offset_s=0.0)
    with pytest.raises(ConfigError, match="no endpoint of the job"):
        load_endpoint(paths)
    monkeypatch.setattr(jobfiles, "is_alive", lambda _: True)
    monkeypatch.setattr(jobfiles, "_START_S", 3600.0)

    def let_begin(seconds: float) -> None:
        write_document(paths.endpoint, begun)

    monkeypatch.setattr(
        jobfiles, "time", SimpleNamespace(monotonic=time.monotonic, sleep=let_begin)
    )
    assert load_endpoint(paths) == begun
