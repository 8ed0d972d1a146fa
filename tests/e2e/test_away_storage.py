"""The disk of a job's checkpoints answers with errors while ranks start: no step is given up."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import SCRIPTS, Job

pytestmark = pytest.mark.torch
SCRIPT = {"resumable": "train_paced.py", "elastic": "elastic.py"}


@pytest.mark.parametrize("kind", ["resumable", pytest.param("elastic", marks=pytest.mark.long)])
@pytest.mark.parametrize("fault", ["error", pytest.param("empty", marks=pytest.mark.long)])
def test_ranks_wait_for_their_checkpoints(
    start: Callable[..., Job], tmp_path: Path, kind: str, fault: str
) -> None:
    """A FUSE whose server has died answers with an error; a lost mount leaves an empty folder."""
    trail, place, disk = tmp_path / "trail", tmp_path / "place", tmp_path / "disk"
    for folder in (trail, disk, tmp_path / "bare"):
        folder.mkdir()
    place.symlink_to(disk)
    words = ["--trail", str(trail), "--steps", "100000000"]
    spec = tmp_path / "away.toml"
    spec.write_text(
        f'script = "{SCRIPTS / SCRIPT[kind]}"\nargs = {json.dumps(words)}\n'
        f'[checkpoint]\nevery_steps = 5\nurl = "{place}"\n'
    )
    job = start("away", "-n", "2", "-c", str(spec))
    job.wait_until(lambda: job.state().get("checkpoints"), "a checkpoint")
    place.unlink()
    place.symlink_to(place if fault == "error" else tmp_path / "bare")
    saved = max(int(path.name.rpartition("-")[2]) for path in disk.glob("step-????????"))
    for rank in job.find("perdure rank"):
        with contextlib.suppress(psutil.NoSuchProcess):  # Its world has ended it.
            rank.kill()
    job.wait_until(lambda: "checkpoints cannot be read" in job.text(), "a word on the disk")
    job.wait_until(lambda: len(job.find("perdure rank away g1")) == 2, "ranks that wait")
    place.unlink()
    place.symlink_to(disk)
    job.wait_step(saved + 5)
    lines = job.cli("events", "away", "--json", "--kind", "CheckpointRestored").stdout.splitlines()
    steps = [json.loads(line)["step"] for line in lines if json.loads(line)["generation"] == 1]
    assert steps
    assert min(steps) >= saved
    assert job.state()["restarts"] == 1
