"""A job that is started in the background is there once its command has returned."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from perdure.service import jobfiles
from perdure.service.jobfiles import Parts, load_parts, wait_for_start, write_document
from perdure.service.jobfolders import paths_of


def test_it_is_waited_for_until_it_serves_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`perdure attach` right after `perdure launch` said that the job had ended.

    `perdure inject` right after `perdure run --detach` found no endpoint, or no job.
    """
    paths = paths_of(str(tmp_path), "job")
    Path(paths.root).mkdir(parents=True)
    write_document(paths.parts, Parts(started_s=0.0, run=1))  # The run before.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:

        def let_begin(seconds: float) -> None:
            write_document(paths.parts, Parts(started_s=0.0, run=child.pid))

        monkeypatch.setattr(jobfiles, "_START_S", 3600.0)
        with monkeypatch.context() as patch:
            patch.setattr(
                jobfiles, "time", SimpleNamespace(monotonic=time.monotonic, sleep=let_begin)
            )
            wait_for_start(paths, child.pid)
        parts = load_parts(paths)
        assert parts is not None
        assert parts.run == child.pid
        child.kill()


def test_one_that_has_ended_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobfiles, "_START_S", 3600.0)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    wait_for_start(paths_of(str(tmp_path), "job"), ended.pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(ended.pid, 0)
    ended.returncode = 0  # It was waited for.
