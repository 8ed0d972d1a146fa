"""The ledger of a run with failures, beside what the script itself measured.

What each step took is in the trail that the script leaves, however busy the machine was.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job

Start = Callable[..., Job]
SCRIPT = str(SCRIPTS / "train_paced.py")
RANKS = 2
STEPS = 60


def read_trails(folder: Path) -> list[list[tuple[int, float]]]:
    """Return (step, seconds) of every step that each rank has run."""
    trails = []
    for path in folder.glob("*.txt"):
        rows = [row.split() for row in path.read_text().splitlines()]
        trails.append([(int(row[0]), float(row[1])) for row in rows if len(row) == 2])
    return trails


@pytest.mark.slow
def test_useful_is_what_the_committed_steps_took(start: Start, tmp_path: Path) -> None:
    trail = tmp_path / "trail"
    trail.mkdir()
    spec = tmp_path / "job.toml"
    args = f'["--trail", "{trail}", "--steps", "{STEPS}"]'
    spec.write_text(f'script = "{SCRIPT}"\nargs = {args}\n[checkpoint]\nevery_steps = 10\n')
    job = start("killed", "-n", str(RANKS), "-c", str(spec))
    for generation, (at_step, rank) in enumerate(((24, 1), (47, 0))):
        # By the script's own trail: pictures of a busy machine come late.
        job.wait_until(
            lambda s=at_step: any(row[0] >= s for rows in read_trails(trail) for row in rows),
            f"step {at_step}",
        )
        job.kill(f"perdure rank killed g{generation} r{rank}")
        job.wait_until(lambda g=generation: job.find(f"rank killed g{g + 1}"), "restart")
    assert job.wait() == 0, job.text()
    trails = read_trails(trail)
    committed_s = sum(sum(dict(rows).values()) for rows in trails)  # The last time counts.
    again_s = sum(seconds for rows in trails for _, seconds in rows) - committed_s

    report = job.report()
    ledger = {name: row["s"] for name, row in report["ledger"].items()}
    slot_s = report["slot_s"]
    assert report["steps_committed"] == STEPS
    assert ledger["unattributed"] <= 0.005 * slot_s, ledger
    assert sum(ledger.values()) == pytest.approx(slot_s, rel=1e-6)
    assert ledger["useful"] == pytest.approx(committed_s, rel=0.02), ledger
    assert again_s > 0
    step_s = committed_s / STEPS / RANKS
    assert ledger["lost_work"] == pytest.approx(again_s, abs=RANKS * 3 * step_s), ledger


@pytest.mark.slow
@pytest.mark.parametrize("declared", [(), ("--declare",)], ids=["supervised", "resumable"])
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_hang_in_which_the_job_is_ended_is_loss(
    start: Start, how: str, declared: tuple[str, ...]
) -> None:
    job = start("hangs", "-n", str(RANKS), str(SCRIPTS / "stall.py"), "read", "--for-s", "600",
                *declared)  # fmt: skip

    def hung_s() -> float:
        found = [v for v in job.state().get("verdicts", ()) if v["culprit"].get("rank") == 1]
        return max((job.state()["at_s"] - v["first_seen_s"] for v in found), default=0.0)

    job.wait_until(lambda: hung_s() > 8, "a hang of 8 s")
    if how == "stop":
        job.cli("stop", "hangs", "--now")
        job.wait()
    else:
        job.process.kill()
        job.process.wait()
        while job.leftovers() and time.monotonic() < job.deadline:
            time.sleep(0.1)  # Its guard ends them.
        assert not job.leftovers()
    report = job.report()
    ledger = {name: row["s"] for name, row in report["ledger"].items()}
    (recovery,) = report["recoveries"]
    assert (recovery["culprit"], recovery["rung"]) == ("rank 1", "stop")
    assert recovery["total_s"] > 8
    lost_s = sum(ledger[f"reconfiguration.{phase}"] for phase in ("detect", "decide", "abort"))
    assert lost_s == pytest.approx(RANKS * recovery["total_s"], abs=RANKS * 1.0), ledger
    assert ledger["useful"] < report["slot_s"] - lost_s
