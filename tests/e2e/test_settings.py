"""Live configuration, pause and their pictures on a real run, through a kill."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.exact import Start
from tests.e2e.harness import SCRIPTS, Job


class Trail:
    """What each rank has written down of its steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    continue  # Cut short by a kill.
        return rows

    def values(self) -> dict[int, set[tuple[float, float]]]:
        """Return, for each step, every (lr declared, lr in the optimizer) that it was made with."""
        found: dict[int, set[tuple[float, float]]] = {}
        for row in self.rows():
            found.setdefault(row["step"], set()).add((row["lr"], row["applied"]))
        return found

    def last(self) -> int:
        return max((row["step"] for row in self.rows()), default=-1)


def say(job: Job, *words: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(job.cli(*words, "--json").stdout)
    return answer


@pytest.mark.slow
def test_a_change_is_the_same_on_every_rank_from_its_step_on(start: Start, tmp_path: Path) -> None:
    trail = Trail(tmp_path / "trail")
    trail.folder.mkdir()
    script = [str(SCRIPTS / "train_settings.py"), "--steps", "100000", "--pace-s", "0.15",
              "--trail", str(trail.folder), "--refuse-rank", "1"]  # fmt: skip
    (tmp_path / "s.toml").write_text("[checkpoint]\nevery_steps = 20\n")
    job = start("s", "-n", "2", "-c", str(tmp_path / "s.toml"), *script)
    job.wait_step(3)
    said = say(job, "set", "s", "lr=0.5", "--why", "test")
    first = said["applied_at_step"]
    assert (said["ok"], said["ranks"], said["before"]) == (True, [0, 1], {"lr": 0.1})
    job.wait_step(first + 3)

    refused = job.cli("set", "s", "lr=5", check=False)  # Rank 1's own check takes no lr above 1.
    assert (refused.returncode, "rank 1: lr: too high for this rank" in refused.stderr) == (4, True)

    later = say(job, "set", "s", "lr=0.25", "--at-step", str(trail.last() + 50_000))[
        "applied_at_step"
    ]
    job.wait_until(lambda: job.state().get("coming"), "a change to come")
    assert job.state()["coming"][0]["step"] == later
    assert (job.state()["settings"]["lr"], job.state()["schema"]) == (0.5, 1)

    paused = say(job, "pause", "s", "--why", "lunch")["step"]
    job.wait_state("paused")
    assert trail.last() == paused - 1
    held = say(job, "set", "s", "lr=0.75")
    assert held["applied_at_step"] == paused
    scraped = job.cli("metrics", "s").stdout
    figures = {s.name: s.value for f in text_string_to_metric_families(scraped) for s in f.samples}
    assert (figures["perdure_paused"], figures["perdure_step"]) == (1.0, paused)
    assert trail.last() == paused - 1
    say(job, "resume", "s")
    job.wait_step(paused + 3)
    job.wait_until(lambda: job.state()["ranks"][0]["steps_per_s"] > 0, "a pace")

    os.kill(job.state()["ranks"][1]["pid"], signal.SIGKILL)
    job.wait_until(lambda: job.state().get("generation") == 1, "generation 1")
    job.wait_step(paused + 6)
    undone = say(job, "set", "s", "--undo")
    assert undone["changes"] == {"lr": 0.5}
    job.wait_step(undone["applied_at_step"] + 2)
    assert say(job, "stop", "s")["ok"]
    job.wait()

    want = {step: 0.5 for step in range(first, paused)} | {
        step: 0.75 for step in range(paused, undone["applied_at_step"])
    }
    for step, values in trail.values().items():
        lr = want.get(step, 0.1 if step < first else 0.5)
        # The step that the kill found begun and not committed may be given another value.
        lost = {(0.75, 0.75)} if step == undone["applied_at_step"] else set()
        assert {(lr, lr)} <= values <= {(lr, lr)} | lost, step
    assert {row["rank"] for row in trail.rows() if row["step"] == undone["applied_at_step"]} == {
        0,
        1,
    }
