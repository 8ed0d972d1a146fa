"""`perdure run --spares`: whole nodes of an elastic job are lost, and spare ones stand in."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Job


def read(trail: Path, rank: int) -> list[dict[str, Any]]:
    path = trail / f"rank-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def read_ready(job: Job) -> set[int]:
    """Return the ranks that were ready to be members, ever."""
    lines = (job.folder / "journal.jsonl").read_text().splitlines()
    bodies = [json.loads(line)["body"] for line in lines if line.endswith("}")]
    return {body["rank"] for body in bodies if body["type"] == "RankJoined"}


def kill_node(job: Job, node: int, rank: int) -> None:
    """SIGKILL all that a node has: agent, keeper, rank."""
    pids = [
        job.find(f"perdure agent {job.name} {node}")[0].pid,
        job.find(f"perdure keeper {job.name} {node}")[0].pid,
        job.find(f"perdure rank {job.name} g0 r{rank}:")[0].pid,
    ]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.long
def test_the_world_outlives_the_node_it_began_on(start: Callable[..., Job], tmp_path: Path) -> None:
    """The first node had the store and rank 0. It comes back with the next spare."""
    trail = tmp_path / "trail"
    job = start(
        "el", "-n", "1", "--nodes", "2", "--spares", "1",
        str(SCRIPTS / "elastic.py"), "--trail", str(trail), "--steps", "100000", "--pace-s", "0.05",
    )  # fmt: skip
    job.wait_until(lambda: len(read(trail, 1)) >= 10 and 2 in read_ready(job), "a spare")
    kill_node(job, 0, rank=0)
    job.wait_until(lambda: read(trail, 1)[-1]["world"] == [1, 2], "the spare in the world")
    job.wait_until(lambda: 3 in read_ready(job), "a new process on the node that is back")
    kill_node(job, 1, rank=1)
    job.wait_until(lambda: read(trail, 2)[-1]["world"] == [2, 3], "the next spare in the world")
    job.cli("stop", "el", "--now")
    job.wait()
    rows = [row for rank in range(3) for row in read(trail, rank)]
    agreed: dict[int, set[str]] = {}
    for row in rows:
        agreed.setdefault(row["step"], set()).add(row["hash"])
    assert sorted(agreed) == list(range(max(agreed) + 1))
    assert all(len(hashes) == 1 for hashes in agreed.values())
    report = job.report()
    rungs = [r["rung"] for r in report["recoveries"]]
    assert [rung for rung in rungs if rung not in ("none", "join")] == ["replace", "replace"]
    assert report["ledger"]["unattributed"]["s"] <= 0.005 * report["slot_s"]
    assert report["ledger"]["idle"]["s"] > 0


@pytest.mark.long
def test_a_job_whose_only_keeper_is_killed_goes_on_from_its_checkpoint(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """It stood still for ever: its members counted as having finished."""
    trail = tmp_path / "trail"
    job = start(
        "el", "-n", "2", str(SCRIPTS / "elastic.py"), "--trail", str(trail), "--steps", "60",
        "--pace-s", "0.05", "--hold-at", "50",
    )  # fmt: skip
    job.wait_until(lambda: len(read(trail, 1)) >= 15, "steps")
    os.kill(job.find("perdure keeper el 0")[0].pid, signal.SIGKILL)
    (trail / "hurry").touch()
    assert job.wait() == 0, job.text()
    assert {row["step"] for row in read(trail, 0)} == set(range(60))
    (lost,) = job.report()["recoveries"]
    assert (lost["rung"], lost["cause"], lost["culprit"]) == ("restart", "keeper lost", "node 0")
    lines = (job.folder / "journal.jsonl").read_text().splitlines()
    bodies = [json.loads(line)["body"] for line in lines]
    ends = [b["record"] for b in bodies if b["type"] == "RankExited" and b["record"].get("asked")]
    assert [(end["rank"], end["signal"]) for end in ends] == [(0, 9), (1, 9)]
    # It was told as of when the next keeper was up, after peers elsewhere had failed of it.
    assert {end["at_s"] for end in ends} == {lost["at_s"]}
