"""Depth resumable: what survives the death of each part, commands, and the script alone."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.box import find_port
from tests.e2e.exact import SCRIPT, Start, check_equal, hold_at, launch
from tests.e2e.harness import Job, read_trail
from tests.waiting import PATIENCE_S

STEPS = 100


def run_alone(folder: Path) -> None:
    """Run two ranks of the script without perdure; they leave their trail."""
    folder.mkdir()
    env = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    env["MASTER_PORT"] = str(find_port())
    words = [sys.executable, SCRIPT, "--trail", str(folder), "--steps", str(STEPS)]
    ranks = [subprocess.Popen(words, env=env | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    try:
        assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.slow
def test_each_part_may_die_and_each_loss_is_that_of_the_script_alone(
    start: Start, tmp_path: Path
) -> None:
    """Controller, agent and nats-server die without a step lost; the keeper's death restarts.

    Its only checkpoints are those that a signal, commands, and its stop ask for.
    """
    run_alone(tmp_path / "reference")
    trail = tmp_path / "killed"
    words = ("--steps", str(STEPS), "--pace-s", "0.2")
    job = launch(start, tmp_path, "killed", 2, *words, every=10 * STEPS, until=20)
    job.wait_step(2)
    saved = save_by_signal_and_by_command(job, trail)
    for until, part in ((70, "perdure controller"), (80, "perdure agent"), (90, "nats-server")):
        old = job.kill(part)
        job.wait_until(
            lambda part=part, old=old: [p for p in job.find(part) if p.pid != old], f"a new {part}"
        )
        hold_at(trail, until)
        job.wait_step(job.state()["step"] + 5)  # Seen by all three.
    assert [row["rung"] for row in job.report()["recoveries"]] == ["none"] * 3
    job.kill("perdure keeper")
    job.wait_until(lambda: job.state()["restarts"] == 1, "another generation")
    job.wait_state("running")
    job.cli("stop", "killed")
    assert job.wait() == 0, job.text()
    reached = json.loads(job.cli("status", "killed", "--json").stdout)
    assert reached["state"] == "stopped", reached
    assert saved <= reached["step"] < STEPS
    rungs = [row["rung"] for row in job.report()["recoveries"]]
    assert rungs.count("restart") == 1, rungs
    damaged = flip_a_bit_of_the_newest(job.folder / "checkpoints")
    (trail / "hurry").touch()
    hold_at(trail, -1)
    resumed = job.cli("resume", "killed")  # By the same job file.
    check_equal(tmp_path, STEPS, 2)
    assert "had finished" not in resumed.stdout + resumed.stderr
    for command in ("status", "diagnose", "report"):
        told = job.cli(command, "killed").stdout
        assert "A checkpoint was not used, and training went on from step" in told, command
        assert str(damaged) in told, command
    [row] = job.report()["skipped"]
    assert row["resumed"] == saved
    go_on(start, trail)


def save_by_signal_and_by_command(job: Job, trail: Path) -> int:
    """Return the step of the second checkpoint."""
    job.process.send_signal(signal.SIGUSR1)
    hold_at(trail, 40)
    job.wait_until(lambda: job.state().get("checkpoints"), "checkpoint")
    first = job.state()["checkpoints"][-1]["step"]
    assert first >= 2
    assert "asked for by SIGUSR1" in job.cli("events", "killed").stdout
    hold_at(trail, 60)
    saved = json.loads(job.cli("checkpoint", "killed", "--json").stdout)
    assert saved["step"] > first, saved
    return int(saved["step"])


def go_on(start: Start, trail: Path) -> None:
    """Start the job again that is done, for ten steps more."""
    words = ["-n", "2", "-c", f"{trail}.toml", SCRIPT, "--trail", str(trail)]
    again = start("killed", *words, "--steps", str(STEPS + 10))
    assert again.wait() == 0, again.text()
    (said,) = [line for line in again.text().splitlines() if "had finished" in line]
    assert f"had finished at step {STEPS}, and goes on from there if its script asks" in said
    assert "`perdure rm killed`, or another --name, begins anew" in said
    want = [(rank, step) for rank in range(2) for step in range(STEPS + 10)]
    assert sorted(read_trail(trail)) == want


def flip_a_bit_of_the_newest(folder: Path) -> Path:
    """Damage the largest file of the newest checkpoint; return the checkpoint."""
    newest = max(folder.glob("step-*"))
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    return newest
