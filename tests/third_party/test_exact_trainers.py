"""Trainers with perdure's one line: two ranks, one really killed, and no bit of any loss differs.

The libraries in one process, with their other paths: test_huggingface.py, test_lightning.py.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.exact import check_equal, find_step
from tests.e2e.harness import Job, read_trail

SCRIPTS = Path(__file__).resolve().parent / "scripts"
STEPS, SAMPLES, RANKS = 30, 96, 2
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.torch]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that starts a job; afterwards nothing of it may be left."""
    jobs: list[Job] = []

    def start_job(script: str, name: str, every: int, pace_s: float, *more: str) -> Job:
        trail = tmp_path / name
        trail.mkdir()
        words = ["--trail", str(trail), "--steps", str(STEPS), "--pace-s", str(pace_s), *more]
        spec = tmp_path / f"{name}.toml"
        spec.write_text(
            f'script = "{SCRIPTS / script}"\nargs = {json.dumps(words)}\n'
            f"[checkpoint]\nevery_steps = {every}\n"
        )
        jobs.append(Job(tmp_path, name, "-n", str(RANKS), "-c", str(spec)))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()
    assert [line for job in jobs for line in job.leftovers()] == []


@pytest.mark.parametrize(
    ("library", "script"),
    [
        ("transformers", "resumable_hf.py"),
        pytest.param("lightning", "resumable_lightning.py", marks=pytest.mark.long),
    ],
)
def test_a_kill_changes_no_bit_of_a_trainers_losses(
    start: Callable[..., Job], tmp_path: Path, library: str, script: str
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -e .[thirdparty]")
    reference = start(script, "reference", STEPS, 0.0)
    job = start(script, "killed", 10, 0.05, "--hold-at", "18")
    job.wait_until(lambda: find_step(job) >= 16, "step 16")
    job.kill("perdure rank killed g0 r1")
    (tmp_path / "killed" / "go").touch()
    assert job.wait() == 0, job.text()[-4000:]
    assert reference.wait() == 0, reference.text()[-4000:]
    assert f"finished at step {STEPS}" in job.text()
    check_equal(tmp_path, STEPS, RANKS)
    check_samples(tmp_path)
    report = job.report()
    (recovery,) = report["recoveries"]
    assert recovery["culprit"] == "rank 1"
    assert report["steps_committed"] == STEPS
    assert 0 < recovery["lost_steps"] < STEPS, "the ledger does not know what was lost"
    assert abs(report["ledger"]["unattributed"]["fraction"]) <= 0.02, report["ledger"]


@pytest.mark.parametrize(
    ("library", "script"),
    [
        ("transformers", "resumable_hf.py"),
        pytest.param("lightning", "resumable_lightning.py", marks=pytest.mark.long),
    ],
)
def test_a_silent_evaluation_on_rank_0_is_no_verdict(
    start: Callable[..., Job], tmp_path: Path, library: str, script: str
) -> None:
    """Row T5: the adapter declares it. It is several times as long as the detector's floor."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -e .[thirdparty]")
    job = start(script, "evaluates", 0, 0.05, "--steps", "12", "--evaluate-s", "6")
    job.wait_until(lambda: find_busy(job) == {0: "evaluate"}, "a picture with the evaluation")
    (tmp_path / "evaluates" / "go").touch()
    assert job.wait() == 0, job.text()[-4000:]
    assert "finished at step 12" in job.text()
    said = re.findall(r"evaluates from ([\d.]+)|evaluated until ([\d.]+)", job.text())
    begun_s, over_s = ([float(s) for s in side if s] for side in zip(*said, strict=True))
    assert len(begun_s) == len(over_s) > 0
    verdicts = json.loads(job.cli("diagnose", "evaluates", "--json").stdout)["verdicts"]
    spans = list(zip(begun_s, over_s, strict=True))
    meanwhile = [v for v in verdicts if any(a <= v["confirmed_s"] <= b for a, b in spans)]
    assert [v for v in meanwhile if v["kind"] != "HostBusy"] == []
    assert job.report()["recoveries"] == []


def find_busy(job: Job) -> dict[int, str]:
    """Return what `status` shows ranks to be busy with."""
    rows = job.state().get("ranks", ())
    return {row["rank"]: row["busy_phase"]["name"] for row in rows if row.get("busy_phase")}


def check_samples(home: Path) -> None:
    """Each pass over the data has used every sample once, also the one that was interrupted."""
    trail = read_trail(home / "killed")
    stream = [i for s in range(STEPS) for r in range(RANKS) for i in trail[r, s][-1][1]]
    assert len(stream) > 2 * SAMPLES
    for begin in range(0, len(stream) - SAMPLES + 1, SAMPLES):
        assert sorted(stream[begin : begin + SAMPLES]) == list(range(SAMPLES))
