"""Who waits for whom through sends and receives: a stage that stands still is named, not another.

Each stage of a pipeline has a communicator of its own, so that ranks of two stages are missing in
theirs: the one that computes for ever, and the one that is blocked in a receive from it.
"""

import re
import signal
from collections.abc import Callable

import pytest

from perdure.model.verdicts import Verdict
from perdure.service.jobfiles import read_mirror
from perdure.service.jobfolders import paths_of
from perdure.telemetry.verdicts import list_verdicts
from tests.e2e.harness import SCRIPTS, Job

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize(
    ("rank", "when"),
    [(3, "before-send"), pytest.param(1, "after-send", marks=pytest.mark.long)],
)
def test_the_rank_that_stands_still_is_named_and_not_who_waits_for_it(
    start: Callable[..., Job], rank: int, when: str
) -> None:
    """The first verdict of a hang that stands is about that rank."""
    script = str(SCRIPTS / "pipeline_stall.py")
    job = start("pipe", "-n", "4", "--observe", script, str(rank), when)

    def find_hangs(since_s: float) -> list[Verdict]:
        """Return what `perdure diagnose` would show."""
        verdicts = list_verdicts(list(read_mirror(paths_of(str(job.home / "state"), "pipe")) or ()))
        standing = [v for v in verdicts if "withdrawn" not in v.evidence]
        hangs = [v for v in standing if v.kind in ("ComputeHang", "CommHang")]
        return [v for v in hangs if v.confirmed_s > since_s]

    job.wait_until(lambda: "stalls at" in job.text(), "the stall")
    since_s = float(re.findall(r"stalls at ([\d.]+)", job.text())[0])
    job.wait_until(lambda: find_hangs(since_s), "a hang is told")
    hang = find_hangs(since_s)[0]
    assert (hang.kind, hang.culprit.rank) == ("ComputeHang", rank), hang
    job.process.send_signal(signal.SIGTERM)
    job.wait()
