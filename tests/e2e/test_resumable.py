"""Depth resumable: exact resume, and what survives the death of each part."""

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job, read_trail

Start = Callable[..., Job]
SCRIPT = str(SCRIPTS / "train_exact.py")


def launch(start: Start, home: Path, name: str, ranks: int, *args: str, every: int = 10) -> Job:
    """Start the exact script with checkpoints at every n-th step."""
    (home / name).mkdir()
    spec = home / f"{name}.toml"
    words = ["--trail", str(home / name), *args]
    spec.write_text(
        f'script = "{SCRIPT}"\nargs = {json.dumps(words)}\n[checkpoint]\nevery_steps = {every}\n'
        "[restart]\nmax_restarts = 20\n"
    )
    return start(name, "-n", str(ranks), "-c", str(spec))


def check_equal(home: Path, steps: int, ranks: int, name: str = "killed") -> None:
    """Every (rank, step) of the killed run, as often as it ran, equals the reference."""
    want, got = read_trail(home / "reference"), read_trail(home / name)
    assert sorted(want) == [(rank, step) for rank in range(ranks) for step in range(steps)]
    assert sorted(got) == sorted(want)
    for key, runs in got.items():
        assert all(run == want[key][0] for run in runs), (key, want[key], runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ["--accumulate", "2", "--workers", "1"]),
        (3, []),
        (2, ["--fsdp"]),
    ],
)
def test_killed_run_is_bitwise_equal(
    start: Start, tmp_path: Path, ranks: int, options: list[str]
) -> None:
    steps = 60
    reference = launch(start, tmp_path, "reference", ranks, "--steps", str(steps), *options)
    assert reference.wait() == 0, reference.text()
    words = ["--steps", str(steps), "--pace-s", "0.05", *options]
    job = launch(start, tmp_path, "killed", ranks, *words)
    chance = random.Random(ranks)
    for at_step in (12, 30, 47):
        job.wait_step(at_step)
        time.sleep(chance.random() * 0.3)
        victim = chance.choice(job.find("perdure rank killed"))
        victim.kill()
        job.wait_until(lambda victim=victim: not victim.is_running(), "death")
    assert job.wait() == 0, job.text()
    check_equal(tmp_path, steps, ranks)
    report = job.report()
    assert report["steps_committed"] == steps
    assert abs(report["ledger"]["unattributed"]["fraction"]) <= 0.005, report


@pytest.mark.slow
def test_each_part_may_die(start: Start, tmp_path: Path) -> None:
    """Controller, agent and nats-server die without a step lost; the keeper's death restarts."""
    steps = 160
    reference = launch(start, tmp_path, "reference", 2, "--steps", str(steps))
    assert reference.wait() == 0, reference.text()
    job = launch(start, tmp_path, "killed", 2, "--steps", str(steps), "--pace-s", "0.05")
    for at_step, part in (
        (15, "perdure controller"),
        (35, "perdure agent"),
        (55, "nats-server"),
        (75, "perdure keeper"),
    ):
        job.wait_step(at_step)
        job.kill(part)
        job.wait_until(lambda part=part: job.find(part), f"a new {part}")
    assert job.wait() == 0, job.text()
    check_equal(tmp_path, steps, 2)
    rungs = [row["rung"] for row in job.report()["recoveries"]]
    assert rungs.count("restart") == 1, job.report()["recoveries"]


def test_checkpoint_and_stop_by_command_then_resume(start: Start, tmp_path: Path) -> None:
    steps = 80
    reference = launch(start, tmp_path, "reference", 2, "--steps", str(steps))
    assert reference.wait() == 0, reference.text()
    job = launch(start, tmp_path, "killed", 2, "--steps", str(steps), "--pace-s", "0.05", every=0)
    job.wait_step(10)
    saved = json.loads(job.cli("checkpoint", "killed", "--json").stdout)
    assert saved["step"] >= 10
    job.cli("stop", "killed")
    assert job.wait() == 0, job.text()
    reached = json.loads(job.cli("status", "killed", "--json").stdout)
    assert reached["state"] == "stopped"
    assert 10 <= reached["step"] < steps
    again = start("killed", "-n", "2", "-c", str(tmp_path / "killed.toml"))
    assert again.wait() == 0, again.text()
    check_equal(tmp_path, steps, 2)


def test_sigusr1_to_perdure_run_is_a_checkpoint_now(start: Start, tmp_path: Path) -> None:
    job = launch(start, tmp_path, "asked", 2, "--steps", "120", "--pace-s", "0.05", every=0)
    job.wait_step(10)
    job.process.send_signal(signal.SIGUSR1)
    job.wait_until(lambda: job.state().get("checkpoints"), "checkpoint")
    assert job.state()["checkpoints"][-1]["step"] >= 10
    assert job.wait() == 0, job.text()
    assert "asked for by SIGUSR1" in job.cli("events", "asked").stdout
    assert read_trail(tmp_path / "asked").keys() == {(r, s) for r in (0, 1) for s in range(120)}
    assert job.report()["recoveries"] == []


def test_alone_the_same_script_runs(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    (tmp_path / "trail").mkdir()
    env = dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    env |= {"MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--trail", str(tmp_path / "trail"), "--steps", "5"],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(read_trail(tmp_path / "trail")) == [(0, step) for step in range(5)]
