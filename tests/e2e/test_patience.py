"""What takes very long and is no failure is said and waited for (DESIGN: verdict and action; T5).

In real time, but three jobs at once, with no threshold set: each is the first of its kind in its
job, after steps of 20 ms, and longer than any step-time threshold by two orders of magnitude. The
shorter form takes a quarter of that.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Job

Start = Callable[..., Job]
STALLS = {"evaluate": 60, "compile": 30, "read": 62}


STALL_STEP = 125
"""As in the script."""


def find_verdicts(job: Job) -> list[dict[str, Any]]:
    """Return what was told of the job; that the machine is busy is right where other tests run."""
    verdicts = json.loads(job.cli("diagnose", job.name, "--json").stdout)["verdicts"]
    return [verdict for verdict in verdicts if verdict["kind"] != "HostBusy"]


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.25, pytest.param(1.0, marks=pytest.mark.long)])
def test_evaluation_recompile_and_late_read_survive(start: Start, part: float) -> None:
    script = str(SCRIPTS / "stall.py")
    jobs = {}
    for what, for_s in STALLS.items():
        depth = [] if what == "evaluate" else ["--declare"]
        words = [script, what, "--for-s", str(part * for_s), *depth]
        options = ["-n", "2", *words]
        jobs[what] = start(what, *options)
    for what, job in jobs.items():
        assert job.wait() == 0, job.text()
        stalled = [float(s) for s in re.findall(r"stalled for ([\d.]+) s", job.text())]
        assert max(stalled) >= 0.8 * part * STALLS[what], stalled
        assert not (job.folder / "logs" / "ranks" / "g1").exists(), job.text()
        assert job.report()["recoveries"] == []
        verdicts = find_verdicts(job)
        assert all("withdrawn" in v["evidence"] for v in verdicts), verdicts
    # Said all the same: the rank that all wait for is named before the stall is over. That it, or
    # the other, stood still for a second before or after is right to be told, and is not the stall.
    (hang,) = (v for v in find_verdicts(jobs["read"]) if v["step"] == STALL_STEP)
    assert hang["culprit"]["rank"] == 1
    assert (hang["certain"], hang["ground"]) == (False, "habit")
    assert hang["acts_s"] - hang["confirmed_s"] > 590


@pytest.mark.slow
@pytest.mark.long
def test_what_torch_compiles_in_mid_training_is_said_of_nobody(start: Start) -> None:
    """Nor is the first import of what compiles, which takes seconds."""
    words = [str(SCRIPTS / "stall.py"), "recompile", "--for-s", "16", "--declare"]
    job = start("recompile", "-n", "2", *words)
    assert job.wait() == 0, job.text()
    assert not [v for v in find_verdicts(job) if v["step"] == STALL_STEP]
