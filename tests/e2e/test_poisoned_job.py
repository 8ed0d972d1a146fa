"""T1, T2: a script that logs and raises whatever it likes costs nobody the job's control."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Job

Start = Callable[..., Job]


def read(job: Job, *args: str) -> str:
    return job.cli(*args).stdout


def load(text: str) -> Any:
    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_a_script_logs_and_raises_stops_nothing(start: Start, tmp_path: Path) -> None:
    """Its environment is larger than what the warm image's socket takes at once."""
    gate = tmp_path / "gate"
    large = [word for n in range(3) for word in ("--env", f"LARGE_{n}={'x' * 100_000}")]
    job = start("poisoned", "-n", "2", *large, str(SCRIPTS / "train_poisoned.py"), str(gate))
    job.wait_step(12)
    job.cli("checkpoint", job.name)
    job.cli("set", job.name, "checkpoint.every_steps=50")
    gate.touch()
    job.wait_until(lambda: job.state().get("generation") == 1, "the next generation")
    job.wait_until(lambda: job.state().get("state") == "running", "training again")
    gate.unlink()
    before = job.state()["step"]
    job.wait_step(before + 5)
    job.cli("stop", job.name)
    job.wait()

    for command in ("status", "report", "diagnose"):
        load(read(job, command, job.name, "--json"))
    events = [load(line) for line in read(job, "events", job.name, "--json").splitlines()]
    kinds = [event["kind"] for event in events]
    assert "CheckpointSaved" in kinds
    assert "KeeperLost" not in kinds
    assert all(event["warm"] for event in events if event["kind"] == "RanksStarted")
    ends = [event["record"] for event in events if event["kind"] == "RankExited"]
    first = next(end for end in ends if end["rank"] == 1)
    assert first["code"] == 1
    assert first["error"].startswith("ValueError: cannot open \\udcff\\ud800")
    lines = read(job, "metrics", job.name, "--curves", "--json").splitlines()
    logged = [load(line) for line in lines]
    losses = [row["last"] for row in logged if row["name"] == "loss"]
    assert {"$numberDouble": "NaN"} in losses
    assert any(isinstance(loss, float) for loss in losses)
    assert "lo\\udcffss" in {row["name"] for row in logged}

    text = read(job, "diagnose", job.name)
    assert "Crash of rank 1: rank 1 ended with exit code 1" in text
    assert "values of run.log" in text
    agent_log = (job.folder / "logs" / "agent-0.log").read_text(encoding="utf-8")
    assert "dropped: of a stranger: malformed message" in agent_log
    assert "\x1b" not in text + read(job, "report", job.name) + read(job, "status", job.name)
