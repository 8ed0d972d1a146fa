"""T15: what a test run or a bench has started ends with it, however it ends."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from bench.sweep import MARK
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
PARENT = """
import subprocess, sys, time
# Workers with sessions of their own, one of which has emptied its environment.
subprocess.Popen([sys.executable, "-S", "-c",
    "import subprocess, time; subprocess.Popen(['sleep', '1000'], start_new_session=True);"
    "time.sleep(1000)"])
subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
time.sleep(0.1)
"""
BENCH = f"from sweep import sweep_after_me\nsweep_after_me()\n{PARENT}\ntime.sleep(1000)"
TEST = f"def test_it():\n    exec({PARENT!r} + 'time.sleep(1000)')\n"


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a bench or a run of pytest, each as people do."""
    env = {name: value for name, value in os.environ.items() if name != MARK}
    if request.param == "bench":
        command = [sys.executable, "-c", BENCH]
        env["PYTHONPATH"] = str(ROOT / "bench")
    else:
        # With the conftest of all tests: a folder below it, for so long.
        (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure\n")
        (tmp_path / "test_it.py").write_text(TEST)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
        env["PYTHONPATH"] = str(ROOT)
    process = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
    yield process
    process.kill()
    process.wait()


def find_family(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # It may have been asked for a moment only.
            if "sleep" in process.name():
                found.append(process)
    return found


def find_sweepers(pid: int) -> list[psutil.Process]:
    """Return the process that waits for the end of `pid`, and sleeps after each look at it."""
    found = psutil.process_iter(["cmdline"])
    return [
        one
        for one in found
        if any(word.endswith("sweep.py") for word in one.info["cmdline"] or ())
        and str(pid) in one.info["cmdline"]
    ]


@pytest.mark.parametrize(
    ("run", "number"),
    [
        ("bench", signal.SIGKILL),
        pytest.param("bench", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("tests", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("tests", signal.SIGKILL, marks=pytest.mark.long),
    ],
    indirect=["run"],
)
def test_nothing_outlives_a_run_that_is_ended_early(
    run: "subprocess.Popen[bytes]", number: signal.Signals
) -> None:
    wait_until(lambda: run.poll() is not None or len(find_family(run.pid)) > 1, "family")
    assert run.poll() is None
    family = psutil.Process(run.pid).children(recursive=True)
    # Who has emptied his environment must have been seen before.
    (sweeper,) = find_sweepers(run.pid)
    looks = sweeper.num_ctx_switches().voluntary
    wait_until(lambda: sweeper.num_ctx_switches().voluntary >= looks + 2, "look by the sweeper")
    run.send_signal(number)
    run.wait(PATIENCE_S)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == []
