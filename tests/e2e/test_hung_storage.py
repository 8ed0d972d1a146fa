"""The disk of a job's checkpoints hangs: training goes on, and no rank is accused."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.exact import find_step
from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import wait_until

pytestmark = pytest.mark.torch
_SCRIPT = """
import runpy
import sys

from perdure.worker import busy
from perdure.worker.checkpoint import checkpointer

checkpointer.WAIT_S = {wait_s}
busy.FIRST_S = busy.LEAST_S = {last_s}
runpy.run_path({script!r}, run_name="__main__")
"""


def launch(
    start: Callable[..., Job], home: Path, *words: str, wait_s: float = 3.0, last_s: float = 3600.0
) -> Job:
    """Start two ranks that save every 20 steps to a disk that hangs once `stuck` is there."""
    (home / "hung").mkdir()
    script = _SCRIPT.format(wait_s=wait_s, last_s=last_s, script=str(SCRIPTS / "train_exact.py"))
    (home / "train.py").write_text(script)
    spec = home / "hung.toml"
    words = ("--trail", str(home / "hung"), "--pace-s", "0.02", *words)
    spec.write_text(
        f'script = "train.py"\nargs = {json.dumps(words)}\n[checkpoint]\nevery_steps = 20\n'
    )
    return start("hung", "-n", "2", "-c", str(spec))


def events(job: Job, kind: str) -> list[dict[str, Any]]:
    """Return the bodies of the journal's entries of one kind."""
    lines = job.cli("events", "hung", "--json", "--kind", kind).stdout.splitlines()
    return [json.loads(line) for line in lines]


def accused(job: Job) -> list[dict[str, Any]]:
    """Return the verdicts that are not about the test machine's other work."""
    found = json.loads(job.cli("diagnose", "hung", "--json").stdout)["verdicts"]
    return [verdict for verdict in found if verdict["kind"] in ("ComputeHang", "CommHang")]


def hung_saves(job: Job) -> list[dict[str, Any]]:
    """Return what the newest snapshot says of hung disks."""
    rows: list[dict[str, Any]] = job.state().get("hung_saves", [])
    return rows


@pytest.mark.slow
def test_training_goes_on_beside_a_checkpoint_disk_that_hangs(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = launch(start, tmp_path, "--steps", "1000000")
    stuck = tmp_path / "hung" / "stuck"
    job.wait_until(lambda: job.state().get("checkpoints"), "a checkpoint")
    stuck.touch()
    job.wait_until(lambda: hung_saves(job), "a word on storage")
    (row,) = hung_saves(job)
    assert "is still being written" in row["why"]
    step = find_step(job)
    job.wait_until(lambda: find_step(job) >= step + 200, "200 steps, of which ten want a save")
    assert job.state()["hung_saves"] == [row]
    assert len(events(job, "CheckpointFailed")) == 1, "told once"
    assert "no checkpoint was saved since" in job.cli("status", "hung").stdout

    refused = job.cli("checkpoint", "hung", check=False)
    assert refused.returncode != 0
    assert "is still being written" in refused.stdout + refused.stderr

    stuck.unlink()
    job.wait_until(lambda: hung_saves(job)[0].get("over_s"), "the end of it")
    assert hung_saves(job)[0]["skipped"] >= 10
    step = find_step(job)
    job.wait_until(
        lambda: job.state()["checkpoints"][-1]["step"] > step, "a checkpoint of a later step"
    )
    assert "over after" in job.cli("report", "hung").stdout
    job.cli("stop", "hung")
    assert job.wait() == 0, job.text()
    assert "checkpoints are written again" in job.text()
    assert job.report()["recoveries"] == []
    assert not accused(job)


@pytest.mark.slow
@pytest.mark.long
def test_end_of_training_says_what_was_not_saved(start: Callable[..., Job], tmp_path: Path) -> None:
    """The ranks wait for their disk, much longer than a silent rank may; then they end."""
    job = launch(start, tmp_path, "--steps", "50", last_s=75.0)
    (tmp_path / "hung" / "stuck").touch()
    assert job.wait() == 3, job.text()
    assert "training has ended, and there is none" in job.text()
    ends = [event for event in events(job, "CheckpointFailed") if "has ended" in event["error"]]
    assert [event["step"] for event in ends] == [20]
    assert "training has ended" in job.cli("report", "hung").stdout
    assert not accused(job)


@pytest.mark.slow
@pytest.mark.long
def test_the_last_step_is_saved_once_the_disk_answers(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """The save of the last step was due at an interval, and was skipped for an older one."""
    job = launch(start, tmp_path, "--steps", "60")
    stuck = tmp_path / "hung" / "stuck"
    stuck.touch()
    job.wait_until(lambda: "perdure waits" in job.text(), "the end of training")
    stuck.unlink()
    assert job.wait() == 0, job.text()
    assert events(job, "CheckpointSaved")[-1]["step"] == 60


@pytest.mark.long
def test_a_state_directory_whose_disk_hangs_stops_no_step(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """As a home on an NFS whose server is away: the ranks themselves touch nothing there."""
    state, image, trail = tmp_path / "state", tmp_path / "image", tmp_path / "trail"
    state.mkdir()
    trail.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 256 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(state)], capture_output=True)
    if made.returncode or mounted.returncode:
        pytest.skip("no file system of its own can be mounted here")
    try:
        words = ("--trail", str(trail), "--steps", "1000000", "--step-s", "0.02")
        job = start("hung", "-n", "2", str(SCRIPTS / "train_paced.py"), *words)
        job.wait_step(5)
        subprocess.run(["fsfreeze", "-f", str(state)], check=True)
        try:
            for rank in range(2):
                path = trail / f"rank-{rank}.txt"
                size = path.stat().st_size
                wait_until(lambda path=path, size=size: path.stat().st_size > size + 2000, "steps")
        finally:
            subprocess.run(["fsfreeze", "-u", str(state)], check=True)
        step = job.state()["step"]
        job.wait_step(step + 50)
        assert not accused(job)
        job.cli("stop", "hung", "--now")
        job.wait()
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)
