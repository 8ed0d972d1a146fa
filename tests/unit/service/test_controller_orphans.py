"""T15: the controller that ends an orphaned job ends its server, with the guard gone."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S, wait_until

from perdure.adapters.nats import server_config
from perdure.service.controller import process as controller
from perdure.service.jobfolders import paths_of
from perdure.service.processes import find_by_argument


@pytest.mark.parametrize("orphaned", [True, False])
def test_the_server_ends_with_an_orphaned_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orphaned: bool
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    paths = paths_of(str(tmp_path), "left")
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.setenv("PERDURE_RUN_PID", str(gone.pid if orphaned else os.getpid()))

    def begin(argument: str) -> subprocess.Popen[bytes]:
        command = ["sh", "-c", "sleep 1000; true", "sh", argument]
        process = subprocess.Popen(command, start_new_session=True)
        # For a moment, the kernel shows no arguments of a program that has just been started.
        wait_until(lambda: find_by_argument(argument) == [process.pid])
        return process

    ours, other = begin(server_config(paths.nats)), begin(server_config(str(tmp_path)))
    try:
        controller._end_orphans(paths)
        if orphaned:
            assert ours.wait(PATIENCE_S) < 0
        assert other.poll() is None
        assert orphaned or ours.poll() is None
    finally:
        for process in (ours, other):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)
