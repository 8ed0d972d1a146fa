# ruff: noqa: ASYNC110, ASYNC220, ASYNC240
"""Processes that tell trackers: whatever becomes of them, the job goes on and ends in time."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.waiting import PATIENCE_S

from perdure.files.private import locate_job
from perdure.model.job import JobSpec, TrackingConfig
from perdure.service.controller import tracking
from perdure.service.controller.tracking import Trackers

MARK = f"a-tracker-of-test-process-{os.getpid()}"


def make(tmp_path: Path, code: str, **more: float) -> tuple[Trackers, Path]:
    """Return trackers whose one process runs `code`, and the job's folder."""
    config = TrackingConfig(mlflow="http://x", **({"timeout_s": 4 * PATIENCE_S} | more))
    spec = JobSpec(name="j", script="x.py", cwd=str(tmp_path), env={"MLFLOW_RUN_ID": "r"},
                   tracking=config)  # fmt: skip
    paths = locate_job(str(tmp_path), "j")
    Path(paths.logs).mkdir(parents=True)
    command = lambda *words: [sys.executable, "-c", code, MARK, *words]  # noqa: E731
    return Trackers(spec, paths, command, pause_s=0.05), Path(paths.root)


def list_left() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if MARK in (p.info["cmdline"] or ())]


async def test_one_that_refuses_is_tried_again_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import sys; open('tries', 'a').write('x'); "
        "print('noise'); sys.exit('perdure: error: mlflow: status 403\\nhint: h')"
    )
    trackers, _ = make(tmp_path, code)
    trackers.start()
    tries = tmp_path / "tries"
    async with asyncio.timeout(PATIENCE_S):
        while not tries.exists() or len(tries.read_text()) < 3:
            await asyncio.sleep(0.01)
        await trackers.finish()
    await trackers.end()
    said = [r.getMessage() for r in caplog.records if r.name == "perdure.tracking"]
    assert said == [
        "mlflow: mlflow: status 403; the job goes on, and it is tried again",
        "mlflow does not know of the end: mlflow: status 403",
    ]


async def test_how_one_dies_is_not_said_in_the_words_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import os, sys; tries = open('tries', 'a+'); tries.write('x'); tries.flush(); "
        "os.fstat(tries.fileno()).st_size > 1 and os.kill(os.getpid(), 9); "
        "sys.exit('perdure: error: mlflow: status 403')"
    )
    trackers, _ = make(tmp_path, code)
    trackers.start()
    async with asyncio.timeout(PATIENCE_S):
        while "SIGKILL" not in caplog.text:
            await asyncio.sleep(0.01)
        await trackers.finish()
    await trackers.end()
    assert "mlflow: mlflow: status 403; the job goes on" in caplog.text
    assert "mlflow: signal 9 (SIGKILL); the job goes on" in caplog.text


async def test_one_that_cannot_die_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel keeps a process whose disk does not answer, whoever kills it."""
    monkeypatch.setattr(tracking, "_LEAVE_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                          start_new_session=True) as real:  # fmt: skip

        class Held:
            pid, returncode = real.pid, None

            def terminate(self) -> None:
                """It does not heed it."""

            async def wait(self) -> None:
                await asyncio.Event().wait()

        async with asyncio.timeout(PATIENCE_S):
            await tracking._end(Held())  # type: ignore[arg-type]
        assert real.wait(PATIENCE_S) == -signal.SIGKILL


async def test_one_that_hangs_and_heeds_nothing_costs_the_end_what_was_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)', *sys.argv[1:]]); "
        "open('begun', 'w').close(); time.sleep(3600)"
    )
    trackers, _ = make(tmp_path, code, timeout_s=1.2)
    trackers.start()
    async with asyncio.timeout(PATIENCE_S):
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
    await trackers.finish()
    await trackers.end()
    assert "1 tracker(s) were not told of the end in time" in caplog.text
    async with asyncio.timeout(PATIENCE_S):
        while list_left():  # The one that it had started itself is killed with it.
            await asyncio.sleep(0.01)


async def test_one_that_ends_well_is_waited_for_and_has_its_environment(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; time.sleep(0.3); e = os.environ; "
        "print(e['MLFLOW_RUN_ID'], repr(e['CUDA_VISIBLE_DEVICES']), "
        "e['PERDURE_CONTROLLER_PID'] == str(os.getppid()), *sys.argv)"
    )
    trackers, root = make(tmp_path, code)
    trackers.start()
    await trackers.finish()
    await trackers.end()
    said = (root / "logs" / "tracking-mlflow.log").read_text().split()
    assert said[:3] == ["r", "''", "True"]
    assert said[-4:] == ["j", "--mlflow=http://x", "--follow", "--no-run-log"]


async def test_a_job_without_trackers_starts_none(tmp_path: Path) -> None:
    spec = JobSpec(name="j", script="x.py")
    trackers = Trackers(spec, locate_job(str(tmp_path), "j"))
    trackers.start()
    await trackers.finish()
    await trackers.end()
    assert not list(tmp_path.iterdir())
