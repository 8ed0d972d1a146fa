"""Depth resumable: what survives the death of each part, commands, and the script alone."""

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.exact import SCRIPT, Start, check_equal, hold_at, jobs_in, launch
from tests.e2e.harness import read_trail
from tests.waiting import PATIENCE_S

STEPS = 100


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the trail of the run that nothing happens to."""
    home = tmp_path_factory.mktemp("reference")
    with jobs_in(home) as start:
        job = launch(start, home, "reference", 2, "--steps", str(STEPS))
        assert job.wait() == 0, job.text()
    return home / "reference"


@pytest.mark.slow
def test_each_part_may_die(start: Start, tmp_path: Path, reference: Path) -> None:
    """Controller, agent and nats-server die without a step lost; the keeper's death restarts."""
    (tmp_path / "reference").symlink_to(reference)
    trail = tmp_path / "killed"
    job = launch(start, tmp_path, "killed", 2, "--steps", str(STEPS), "--pace-s", "0.1", until=30)
    job.wait_step(10)
    for until, part in ((50, "perdure controller"), (70, "perdure agent"), (90, "nats-server")):
        old = job.kill(part)
        job.wait_until(
            lambda part=part, old=old: [p for p in job.find(part) if p.pid != old], f"a new {part}"
        )
        hold_at(trail, until)
        job.wait_step(job.state()["step"] + 5)  # Seen by all three.
    job.kill("perdure keeper")
    job.wait_until(lambda: job.state()["restarts"] == 1, "another generation")
    (trail / "hurry").touch()
    hold_at(trail, -1)
    assert job.wait() == 0, job.text()
    check_equal(tmp_path, STEPS, 2)
    rungs = [row["rung"] for row in job.report()["recoveries"]]
    assert rungs.count("restart") == 1, job.report()["recoveries"]


@pytest.mark.slow
def test_a_job_that_is_done_says_so_when_it_is_started_again(start: Start, tmp_path: Path) -> None:
    first = launch(start, tmp_path, "once", 1, "--steps", "20")
    assert first.wait() == 0, first.text()
    assert "had finished" not in first.text()
    words = ["-n", "1", "-c", str(tmp_path / "once.toml"), SCRIPT, "--trail"]
    again = start("once", *words, str(tmp_path / "once"), "--steps", "30")
    assert again.wait() == 0, again.text()
    (said,) = [line for line in again.text().splitlines() if "had finished" in line]
    assert "had finished at step 20, and goes on from there if its script asks" in said
    assert "`perdure rm once`, or another --name, begins anew" in said
    assert sorted(step for _, step in read_trail(tmp_path / "once")) == list(range(30))


@pytest.mark.slow
def test_checkpoint_by_signal_and_by_command_and_stop_then_resume(
    start: Start, tmp_path: Path, reference: Path
) -> None:
    (tmp_path / "reference").symlink_to(reference)
    trail = tmp_path / "killed"
    words = ("--steps", str(STEPS), "--pace-s", "0.2")
    job = launch(start, tmp_path, "killed", 2, *words, every=0, until=20)
    job.wait_step(2)
    job.process.send_signal(signal.SIGUSR1)
    hold_at(trail, 40)
    job.wait_until(lambda: job.state().get("checkpoints"), "checkpoint")
    assert job.state()["checkpoints"][-1]["step"] >= 2
    assert "asked for by SIGUSR1" in job.cli("events", "killed").stdout
    hold_at(trail, 60)
    saved = json.loads(job.cli("checkpoint", "killed", "--json").stdout)
    assert saved["step"] > job.state()["checkpoints"][0]["step"], saved
    hold_at(trail, 80)
    job.cli("stop", "killed")
    assert job.wait() == 0, job.text()
    reached = json.loads(job.cli("status", "killed", "--json").stdout)
    assert reached["state"] == "stopped", reached
    assert saved["step"] <= reached["step"] < STEPS
    assert job.report()["recoveries"] == []
    damaged = flip_a_bit_of_the_newest(job.folder / "checkpoints")
    (trail / "hurry").touch()
    hold_at(trail, -1)
    job.cli("resume", "killed")  # By the same job file.
    check_equal(tmp_path, STEPS, 2)
    for command in ("status", "diagnose", "report"):
        told = job.cli(command, "killed").stdout
        assert "A checkpoint was not used, and training went on from step" in told, command
        assert str(damaged) in told, command
    [row] = job.report()["skipped"]
    assert row["resumed"] == saved["step"]


def flip_a_bit_of_the_newest(folder: Path) -> Path:
    """Damage the largest file of the newest checkpoint; return the checkpoint."""
    newest = max(folder.glob("step-*"))
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    return newest


def test_alone_the_same_script_runs(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    (tmp_path / "trail").mkdir()
    env = dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    env |= {"MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--trail", str(tmp_path / "trail"), "--steps", "5"],
        env=env, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(read_trail(tmp_path / "trail")) == [(0, step) for step in range(5)]
