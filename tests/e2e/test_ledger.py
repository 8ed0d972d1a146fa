"""The ledger of a run with failures, beside what the script itself measured.

What each step took is in the trail that the script leaves, however busy the machine was.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.e2e.killed_twice import RANKS, STEPS, train_killed_twice
from tests.waiting import wait_until

Start = Callable[..., Job]


@pytest.mark.slow
def test_useful_is_what_the_committed_steps_took(start: Start, tmp_path: Path) -> None:
    report, committed_s, again_s = train_killed_twice(start, tmp_path)
    ledger = {name: row["s"] for name, row in report["ledger"].items()}
    slot_s = report["slot_s"]
    assert report["steps_committed"] == STEPS
    # How exact the accounts are on a quiet machine is measured by bench/gates/job.py.
    assert ledger["unattributed"] <= 0.02 * slot_s, ledger
    assert sum(ledger.values()) == pytest.approx(slot_s, rel=1e-6)
    assert again_s > 0
    assert ledger["useful"] == pytest.approx(committed_s, abs=again_s / 2), ledger
    assert ledger["lost_work"] == pytest.approx(again_s, rel=0.7), ledger


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "declared"),
    [
        pytest.param("stop", (), id="stop-supervised", marks=pytest.mark.long),
        pytest.param("kill", (), id="kill-supervised", marks=pytest.mark.long),
        pytest.param("stop", ("--declare",), id="stop-resumable", marks=pytest.mark.long),
        pytest.param("kill", ("--declare",), id="kill-resumable", marks=pytest.mark.long),
    ],
)
def test_a_hang_in_which_the_job_is_ended_is_loss(
    start: Start, how: str, declared: tuple[str, ...]
) -> None:
    job = start("hangs", "-n", str(RANKS), str(SCRIPTS / "stall.py"), "read", "--for-s", "86400",
                *declared)  # fmt: skip

    def hung_s() -> float:
        found = [v for v in job.state().get("verdicts", ()) if v["culprit"].get("rank") == 1]
        return max((job.state()["at_s"] - v["first_seen_s"] for v in found), default=0.0)

    job.wait_until(lambda: hung_s() > 5, "a hang of 5 s")
    if how == "stop":
        job.cli("stop", "hangs", "--now")
        job.wait()
    else:
        job.process.kill()
        job.process.wait()
        wait_until(lambda: not job.leftovers(), "end of its ranks, by its guard")
    report = job.report()
    ledger = {name: row["s"] for name, row in report["ledger"].items()}
    (recovery,) = report["recoveries"]
    assert (recovery["culprit"], recovery["rung"]) == ("rank 1", "stop")
    assert recovery["total_s"] > 5
    lost_s = sum(ledger[f"reconfiguration.{phase}"] for phase in ("detect", "decide", "abort"))
    assert lost_s == pytest.approx(RANKS * recovery["total_s"], rel=0.4), ledger
    assert ledger["useful"] < report["slot_s"] - lost_s
