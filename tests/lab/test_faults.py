"""Every class of fault, made by `perdure inject` in a job across namespaces, is named rightly."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import network
from tests.lab.episode import ENDS_ITSELF, Fault, Outcome, run_episode, wait_quiet
from tests.lab.job import LabJob
from tests.waiting import PATIENCE_S

# Serial: a laboratory runs before all else on the machine, so that it measures no neighbour.
pytestmark = [pytest.mark.serial, pytest.mark.torch, pytest.mark.slow]

WHY_NOT = network.why_not()
HANG_S = 15.0
"""How long a fault lasts that no order can end, so that its verdict has to come within it."""


def mark_long(*names: str) -> list[Any]:
    """Return parameters that `make lab` tries, and `make test` leaves out."""
    return [pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabJob]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    home = tmp_path_factory.mktemp("lab")
    with network.Lab(3) as lab:
        job = LabJob(lab, home, "lab")
        try:
            job.wait_training()
            assert job.wait(lambda: len(job.find_busy_links()) >= 3, PATIENCE_S)
            wait_quiet(job)
            yield job
        finally:
            job.end()


def harm(
    job: LabJob,
    kind: str,
    rank: int,
    *,
    link: tuple[int, int] | None = None,
    patience_s: float = PATIENCE_S,
    mended: bool = False,
    **args: float,
) -> Outcome:
    """Harm a rank, and return what the journal says once it is healed and there is quiet again."""
    if job.journal.open:  # A test before this one has failed.
        wait_quiet(job)
    return run_episode(job, Fault(kind, rank, args, link, patience_s, mended))


@pytest.mark.parametrize("kind", [*mark_long("stop", "gil", "sleep"), "spin"])
def test_a_rank_that_hangs_is_named(job: LabJob, kind: str) -> None:
    for_s = HANG_S if kind in ENDS_ITSELF else PATIENCE_S
    outcome = harm(job, kind, 1, patience_s=for_s, for_s=for_s)
    assert (outcome.kind, outcome.culprit) == ("ComputeHang", "rank 1"), outcome
    assert outcome.took_s >= 0.9, "sooner than the floor"


@pytest.mark.parametrize("stage", mark_long("forward", "backward", "data"))
def test_a_slow_rank_is_named_with_its_stage(job: LabJob, stage: str) -> None:
    """The shorter twin: tests/e2e/test_slow_nodes.py."""
    outcome = harm(job, f"slow-{stage}", 2, ms=60.0, for_s=PATIENCE_S)
    assert (outcome.kind, outcome.culprit) == ("Straggler", "rank 2"), outcome
    assert outcome.stage == stage


@pytest.mark.parametrize(
    ("kind", "verdict"), [("slow-link", "CommSlow"), ("drop-link", "CommHang")]
)
def test_a_link_is_named_with_its_direction(job: LabJob, kind: str, verdict: str) -> None:
    src, dst = job.find_busy_links()[0]
    args = {"to": float(dst), "mbit": 20.0, "for_s": 20.0}
    outcome = harm(job, kind, src, link=(src, dst), **args)
    assert (outcome.kind, outcome.culprit) == (verdict, f"link {src}->{dst}"), outcome


def test_a_node_without_its_network_is_named(job: LabJob) -> None:
    outcome = harm(job, "link-down", 2, mended=True, for_s=PATIENCE_S)
    assert outcome.kind_right, outcome
    assert outcome.culprit_right, outcome


@pytest.mark.long
def test_taking_memory_accuses_nobody_else(job: LabJob) -> None:
    outcome = harm(job, "memory", 0, patience_s=3.0, mb=64.0, for_s=3.0)
    assert outcome.kind in ("none", "Straggler"), outcome
    assert outcome.culprit in ("none", "rank 0"), outcome


@pytest.mark.long
def test_a_rank_that_calls_another_size_is_named(job: LabJob) -> None:
    outcome = harm(job, "wrong-size", 1)
    assert outcome.culprit == "rank 1", outcome
    assert outcome.kind_right, outcome


def test_a_rank_that_dies_is_named_and_the_world_comes_back(job: LabJob) -> None:
    outcome = harm(job, "crash", 0)
    assert (outcome.kind, outcome.culprit) == ("Crash", "rank 0"), outcome


def test_diagnose_says_what_the_journal_says(job: LabJob) -> None:
    said = json.loads(job.cli("diagnose", job.name, "--json"))["verdicts"]
    kinds = {v["kind"] for v in said}
    assert {"ComputeHang", "CommSlow", "CommHang", "Crash"} <= kinds
    hang = next(v for v in said if v["kind"] == "ComputeHang")
    assert hang["culprit"] == {"rank": 1}
    assert hang["confirmed_s"] > hang["first_seen_s"]


def test_network_faults_are_refused_where_the_network_is_the_machines_own(tmp_path: Path) -> None:
    from perdure.worker.steering.harm import NetworkFaults

    assert "docs/lab.md" in NetworkFaults({}).find_objection({"to": 0})


def test_a_rank_that_calls_another_operation_is_named(job: LabJob) -> None:
    outcome = harm(job, "wrong-op", 1)
    assert (outcome.kind, outcome.culprit) == ("Desync", "rank 1"), outcome
