"""`run.work`: packed sequences are no slowness, and a rank that is slow beneath them is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.worker.native.build import BuildError, build
from tests.e2e.exact import Start
from tests.e2e.harness import SCRIPTS, Job

# Serial: other work on the cores is slowness of a rank, too.
pytestmark = [pytest.mark.serial, pytest.mark.long]


def launch(start: Start, home: Path, name: str, *words: str, ranks: int = 2) -> Job:
    """Start the packed script, and wait until it trains."""
    try:
        build()
    except BuildError as error:
        pytest.skip(f"the compiled recorder cannot be built here: {error}")
    (home / name).mkdir(exist_ok=True)
    script = [str(SCRIPTS / "train_packed.py"), str(home / name), *words]
    job = start(name, "-n", str(ranks), *script)
    job.wait_until(lambda: '"ProgressNoted"' in read_journal(job), "progress")
    return job


def read_journal(job: Job) -> str:
    try:
        return (job.folder / "journal.jsonl").read_text()
    except OSError:
        return ""


def list_stragglers(job: Job) -> list[dict[str, Any]]:
    """Return what was said of slow ranks so far."""
    lines = [line for line in read_journal(job).splitlines() if '"VerdictReached"' in line]
    verdicts = [json.loads(line)["body"]["verdict"] for line in lines if line.endswith("}")]
    return [verdict for verdict in verdicts if verdict["kind"] == "Straggler"]


def find_slow(job: Job, quiet_steps: int) -> dict[str, Any]:
    """Return what is said of rank 1 once it is slow, after so many steps of silence."""
    folder = job.home / job.name
    steps = folder / "steps"
    job.wait_until(lambda: steps.exists() and steps.stat().st_size >= quiet_steps, "steps")
    assert list_stragglers(job) == []
    (folder / "slow").touch()
    job.wait_until(lambda: list_stragglers(job), "a straggler")
    (verdict, *_) = list_stragglers(job)
    (folder / "hurry").touch()
    assert verdict["culprit"]["rank"] == 1
    return verdict


def test_a_rank_that_is_slow_for_each_token_is_named(start: Start, tmp_path: Path) -> None:
    """From its first step on."""
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "slow").touch()
    job = launch(start, tmp_path, "packed", "--declare", "--factor=4")
    job.wait_until(lambda: list_stragglers(job), "a straggler")
    (tmp_path / "packed" / "hurry").touch()
    assert job.wait() == 0
    (verdict, *_) = list_stragglers(job)
    assert verdict["culprit"]["rank"] == 1
    assert verdict["evidence"]["stage"] == "forward"
    assert verdict["evidence"]["declared_work"] == pytest.approx(1.0, abs=0.6)
    assert verdict["evidence"]["work_believed"]
    assert "times the others' work" in job.cli("diagnose", "packed").stdout


@pytest.mark.parametrize("loop", ["steps", "bare"])
def test_minutes_of_uneven_steps_are_silent_and_a_slow_rank_is_found(
    start: Start, tmp_path: Path, loop: str
) -> None:
    job = launch(start, tmp_path, loop, "--declare", "--loop", loop, ranks=3)
    find_slow(job, 600)
    assert job.wait() == 0


def test_members_with_uneven_micro_batches_are_compared_for_each(
    start: Start, tmp_path: Path
) -> None:
    """Rank 1 has three of five, rank 0 two: nobody declares anything."""
    words = ("--loop", "elastic", "--factor", "3")
    job = launch(start, tmp_path, "elastic", *words)
    verdict = find_slow(job, 150)
    assert verdict["evidence"]["declared_work"] == pytest.approx(1.5, abs=0.01)
    job.cli("stop", "elastic", "--now")
    job.wait()


def test_who_declares_ten_times_as_much_is_named_all_the_same(start: Start, tmp_path: Path) -> None:
    """It is slow from its first step on."""
    (tmp_path / "liar").mkdir()
    (tmp_path / "liar" / "slow").touch()
    job = launch(start, tmp_path, "liar", "--declare", "--times=10", "--factor=3", ranks=3)
    job.wait_until(lambda: list_stragglers(job), "a straggler")
    (verdict, *_) = list_stragglers(job)
    assert verdict["culprit"]["rank"] == 1
    assert not verdict["evidence"]["work_believed"]
    assert "which its times do not bear out" in verdict["reason"]
    (tmp_path / "liar" / "hurry").touch()
    assert job.wait() == 0
