"""Death between two lines: the controller's after its append, rank 0's before `latest` is written.

All other points, faults and depths are for `bench/campaign_failpoints.py`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.failpoints import FOLDER, SWITCH
from tests.e2e.exact import launch
from tests.e2e.harness import Job, read_trail

STEPS = 40
TERMS = "journal/appended=crash,nth=6; checkpoint/published=crash,nth=2"


@pytest.mark.torch
def test_a_crash_after_the_append_and_one_before_latest_lose_nothing(
    start: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = tmp_path / "points"
    points.mkdir()
    monkeypatch.setenv(SWITCH, TERMS)
    monkeypatch.setenv(FOLDER, str(points))
    job = launch(start, tmp_path, "killed", 2, "--steps", str(STEPS))
    assert job.wait() == 0, job.text()
    fired = [line.split("\t")[0] for line in (points / "fired").read_text().splitlines()]
    assert fired == ["journal/appended", "checkpoint/published"]
    runs = read_trail(tmp_path / "killed")
    assert sorted(runs) == [(rank, step) for rank in range(2) for step in range(STEPS)]
    assert all(run == rows[0] for rows in runs.values() for run in rows)
    entries = [json.loads(line) for line in (job.folder / "journal.jsonl").read_text().splitlines()]
    assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))
    bodies = [entry["body"] for entry in entries]
    assert sum(body["type"] == "ControllerStarted" for body in bodies) == 2
    # What was renamed was whole by then, and is gone on from, whatever `latest` says.
    restored = [body["step"] for body in bodies if body["type"] == "CheckpointRestored"]
    assert restored == [0, 0, 20, 20]
    rungs = [one["rung"] for one in job.report()["recoveries"]]
    assert rungs == ["none", "restart"], "the controller's death, and the rank's"
