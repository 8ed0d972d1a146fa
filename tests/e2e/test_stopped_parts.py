"""SIGSTOP to parts of perdure itself: they live, answer nothing, and nobody may wait for them."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import SCRIPTS, Job

Start = Callable[..., Job]


@pytest.fixture
def pause() -> Iterator[Callable[[int], None]]:
    """Return a function that stops a process; it goes on after the test, should it still live."""
    pids: list[int] = []

    def stop(pid: int) -> None:
        pids.append(pid)
        os.kill(pid, signal.SIGSTOP)

    yield stop
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


def launch(start: Start, home: Path, steps: int, *lines: str) -> Job:
    """Start the exact script at 20 steps a second, with checkpoints only where one is asked for."""
    (home / "trail").mkdir()
    spec = home / "job.toml"
    args = ["--trail", str(home / "trail"), "--steps", str(steps), "--pace-s", "0.05"]
    text = [f'script = "{SCRIPTS / "train_exact.py"}"', f"args = {json.dumps(args)}", *lines]
    spec.write_text("\n".join(text) + "\n[checkpoint]\nevery_steps = 100000\n")
    return start("job", "-n", "2", "-c", str(spec))


def verdicts(job: Job, kind: str) -> list[dict[str, Any]]:
    found = json.loads(job.cli("diagnose", "job", "--json").stdout)["verdicts"]
    return [verdict for verdict in found if verdict["kind"] == kind]


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return value


def test_a_stopped_keeper_is_named_then_replaced(
    start: Start, tmp_path: Path, pause: Callable[[int], None]
) -> None:
    job = launch(start, tmp_path, 500, "[detect]", "quiet_action_s = 8")
    job.wait_step(20)
    pid = job.pid_of("perdure keeper")
    pause(pid)
    (verdict,) = wait_for(lambda: verdicts(job, "Unresponsive"), 8.0, "no verdict on the keeper")
    assert verdict["culprit"] == {"node": 0}
    assert verdict["evidence"] == {"pid": pid, "proc_state": "T"}
    assert "stopped (state T)" in verdict["reason"]
    before = job.state()["step"]
    job.wait_step(before + 10)  # Its ranks train on meanwhile.
    assert job.state()["restarts"] == 0
    assert job.wait() == 0, job.text()
    report = job.report()
    (recovery,) = [row for row in report["recoveries"] if row["rung"] == "restart"]
    assert 0 < recovery["lost_steps"] < 20 * 12, recovery
    assert recovery["at_step"] - recovery["lost_steps"] >= 20, "no checkpoint was taken before"
    assert any("stopped (state T)" in v["reason"] for v in verdicts(job, "Crash"))


def test_a_keeper_that_goes_on_in_time_costs_nothing(
    start: Start, tmp_path: Path, pause: Callable[[int], None]
) -> None:
    job = launch(start, tmp_path, 300)
    job.wait_step(20)
    pid = job.pid_of("perdure keeper")
    pause(pid)
    wait_for(lambda: verdicts(job, "Unresponsive"), 8.0, "no verdict on the keeper")
    os.kill(pid, signal.SIGCONT)
    assert job.wait() == 0, job.text()
    (verdict,) = verdicts(job, "Unresponsive")
    assert "withdrawn" in verdict["evidence"]
    assert job.report()["recoveries"] == []


def test_a_rank_that_dies_under_a_stopped_keeper_is_not_waited_for(
    start: Start, tmp_path: Path, pause: Callable[[int], None]
) -> None:
    job = launch(start, tmp_path, 200)
    job.wait_step(20)
    pause(job.pid_of("perdure keeper"))
    os.kill(job.pid_of("perdure rank"), signal.SIGKILL)
    wait_for(lambda: job.state().get("restarts") == 1, 12.0, "the world was not started again")
    assert job.wait() == 0, job.text()


@pytest.mark.parametrize("part", ["agent", "controller", "nats-server"])
def test_a_stopped_part_is_replaced_and_training_goes_on(
    start: Start, tmp_path: Path, pause: Callable[[int], None], part: str
) -> None:
    job = launch(start, tmp_path, 300)
    job.wait_step(20)
    title = part if part == "nats-server" else f"perdure {part}"
    old = job.pid_of(title)
    pause(old)
    wait_for(lambda: "stopped (state T) for 3 s" in job.text(), 8.0, job.text())
    wait_for(lambda: job.find(title) and job.pid_of(title) != old, 5.0, f"no new {part}")
    assert job.wait() == 0, job.text()
    report = job.report()
    assert [row["rung"] for row in report["recoveries"]] == ["none"]
    assert "stopped (state T)" in report["recoveries"][0]["cause"]
    assert abs(report["ledger"]["unattributed"]["fraction"]) <= 0.02
