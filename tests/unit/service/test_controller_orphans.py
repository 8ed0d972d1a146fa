"""T15: the controller that ends an orphaned job ends each of its servers, with the guard gone."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from perdure.adapters.nats import server_config
from perdure.model.job import BusConfig, JobSpec
from perdure.service.controller import process as controller
from perdure.service.jobfolders import paths_of


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("orphaned", [True, False])
def test_servers_and_standbys_end_with_an_orphaned_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, orphaned: bool
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    spec = JobSpec(name="left", script="train.py", bus=BusConfig(replicas=replicas))
    paths = paths_of(str(tmp_path), spec.name)
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.setenv("PERDURE_RUN_PID", str(gone.pid if orphaned else os.getpid()))
    folders = [os.path.join(paths.nats, str(n)) for n in range(replicas)]
    arguments = [server_config(f) for f in (folders if replicas > 1 else [paths.nats])]

    def begin(argument: str, **marks: str) -> subprocess.Popen[bytes]:
        command = ["sh", "-c", "sleep 1000; true", "sh", argument]
        return subprocess.Popen(command, env=os.environ | marks, start_new_session=True)

    ours = [begin(one, PERDURE_JOB="left") for one in (*arguments, "controller")]
    others = [begin("controller", PERDURE_JOB="other"), begin(server_config(str(tmp_path)))]
    try:
        controller._end_orphans(spec, paths)
        for process in ours:
            if orphaned:
                assert process.wait(PATIENCE_S) < 0
        assert all(process.poll() is None for process in others + ([] if orphaned else ours))
    finally:
        for process in (*ours, *others):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)
