"""What `run.log` told is there, each step of it, whatever became of controllers and files."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Job


def read_curves(job: Job) -> list[dict[str, Any]]:
    lines = job.cli("metrics", job.name, "--curves", "--json").stdout.splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.long
def test_controllers_that_die_and_damage_cost_no_step_that_is_not_said(
    start: Callable[..., Job],
) -> None:
    job = start("logging", str(SCRIPTS / "train_logging.py"), "0.005")
    job.wait_step(100)
    job.kill("perdure controller")
    job.wait_step(job.state()["step"] + 100)  # Which another one shows.
    assert job.state()["metrics"]["loss"] < 1 / 100
    job.kill("perdure controller")  # Its successor folds what the first two have left.
    kept = job.folder / "curves" / "kept"
    job.wait_until(kept.exists, "the older values folded")
    data = bytearray(kept.read_bytes())
    job.wait_step(job.state()["step"] + 50)
    job.cli("stop", job.name)
    job.wait()

    rows = [row for row in read_curves(job) if row["name"] == "loss"]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert len(steps) >= steps[-1] + 1 - 2 * 100  # A batch that was under way, twice at most.
    assert all(row["last"] == 1.0 / (row["step"] + 1) for row in rows)
    kinds = [
        json.loads(line)["kind"]
        for line in job.cli("events", job.name, "--json").stdout.splitlines()
    ]
    assert "MetricsLogged" not in kinds
    assert kinds.count("ControllerStarted") == 3

    data[-9] ^= 1
    kept.write_bytes(data)
    assert "lines or files of curves" in job.cli("diagnose", job.name).stdout
    assert job.report()["goodput"] > 0
    assert 0 < len([row for row in read_curves(job) if row["name"] == "loss"]) < len(rows)
