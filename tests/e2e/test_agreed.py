"""Members of an elastic world have one state and the gradients of a plain loop, or say why not."""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.torch, pytest.mark.slow]
SCRIPT = str(SCRIPTS / "agreed.py")
LONG = pytest.mark.long
KEPT = [
    pytest.param("unfreeze", (), id="unfreeze"),
    pytest.param("unfreeze", ("--exact",), id="unfreeze exact", marks=LONG),
    pytest.param("clip", ("--width", "1200"), id="clip while it follows", marks=LONG),
    pytest.param("heat", (), id="heat", marks=LONG),
    pytest.param("heat", ("--exact",), id="heat exact", marks=LONG),
    pytest.param("heat", ("--width", "1200"), id="heat while it follows", marks=LONG),
    pytest.param("heat", ("--pipeline", "2"), id="heat stages"),
    pytest.param("heat", ("--shard", "2"), id="heat shard", marks=LONG),
    pytest.param("counts", (), id="counts", marks=LONG),
    pytest.param("counts", ("--pipeline", "2"), id="counts stages", marks=LONG),
    pytest.param("counts", ("--shard", "2"), id="counts shard"),
    pytest.param("edited", (), id="edited", marks=LONG),
    pytest.param("edited", ("--pipeline", "2"), id="edited stages", marks=LONG),
    pytest.param("edited", ("--shard", "2"), id="edited shard", marks=LONG),
    *(
        pytest.param(situation, more, id=" ".join((situation, *more)), marks=LONG)
        for situation in ("clip", "twice", "unused", "flags", "moments", "scratch")
        for more in ((), ("--exact",), ("--shard", "2"), ("--pipeline", "2"))
        if not (more and more[0] != "--exact" and situation in ("moments", "scratch"))
    ),
]
REFUSED = [
    pytest.param("data", (), "alters the buffer", id="data", marks=LONG),
    pytest.param("assign", (), "alters the buffer", id="assign", marks=LONG),
    pytest.param("data", ("--shard", "2"), "alters the buffer", id="data shard", marks=LONG),
    pytest.param("data", ("--pipeline", "2"), "alters the buffer", id="data stages", marks=LONG),
    pytest.param("cools", ("--shard", "2"), "alters the attribute", id="cools shard"),
    pytest.param("cools", ("--pipeline", "2"), "alters the attribute", id="cools", marks=LONG),
    pytest.param("unfreeze", ("--shard", "2"), "requires_grad", id="freeze shard", marks=LONG),
    pytest.param("unfreeze", ("--pipeline", "2"), "requires_grad", id="freeze stages", marks=LONG),
]  # fmt: skip


def read(trail: Path) -> list[list[dict[str, Any]]]:
    """Return the rows of each process."""
    texts = [path.read_text() for path in sorted(trail.glob("rank-*"))]
    return [[json.loads(line) for line in t.splitlines() if line.endswith("}")] for t in texts]


def find_last(trail: Path) -> dict[str, Any]:
    """Return the newest row of the process that is furthest."""
    texts = [path.read_text().splitlines()[-2:] for path in trail.glob("rank-*")]
    rows = [json.loads(line) for text in texts for line in text if line.endswith("}")]
    return max(rows, key=lambda row: row["step"], default={})


def compare(trail: Path, *words: str) -> None:
    """Compare members with each other, and losses with those of a plain loop."""
    rows = [row for rows in read(trail) for row in rows]
    compare_losses(trail, rows, *words)
    found: dict[int, set[str]] = defaultdict(set)
    for row in rows:
        found[row["step"]].add(row["hash"])
    assert all(len(hashes) == 1 for hashes in found.values()), found


def compare_losses(trail: Path, rows: list[dict[str, Any]], *words: str) -> None:
    steps = max(row["step"] for row in rows) + 1
    plain = [sys.executable, SCRIPT, "--trail", str(trail), *words, "--plain"]
    # Threads of one process that wait for each other take minutes on a busy machine.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*plain, "--steps", str(steps)], check=True, timeout=PATIENCE_S, env=env)
    true = [json.loads(line)["loss"] for line in (trail / "plain").read_text().splitlines()]
    off = 0.05 if "moments" in words else 2e-3  # bfloat16 rounds each sum.
    for row in rows:
        assert row["loss"] == pytest.approx(true[row["step"]], rel=off), row


@pytest.mark.parametrize(("situation", "more"), KEPT)
def test_members_agree_across_a_kill_and_a_join(
    start: Callable[..., Job], tmp_path: Path, situation: str, more: tuple[str, ...]
) -> None:
    words = ("--situation", situation, *more)
    job = start("ag", "-n", "2", SCRIPT, "--trail", str(tmp_path), *words)
    job.wait_until(lambda: find_last(tmp_path).get("step", 0) > 20, "the steps before the kill")
    os.kill(job.find("perdure rank ag g0 r1")[0].pid, signal.SIGKILL)
    job.wait_until(lambda: 1 not in find_last(tmp_path)["world"], "a world without it")
    job.wait_until(lambda: len(find_last(tmp_path)["world"]) == 2, "a world of two again")
    last = find_last(tmp_path)["step"]
    job.wait_until(lambda: find_last(tmp_path)["step"] > last + 5, "steps after the join")
    job.cli("stop", "ag")
    assert job.wait() == 0, job.text()[-3000:]
    compare(tmp_path, *words)


@pytest.mark.parametrize(("situation", "more", "said"), REFUSED)
def test_what_cannot_be_kept_ends_the_job_by_name(
    start: Callable[..., Job], tmp_path: Path, situation: str, more: tuple[str, ...], said: str
) -> None:
    words = ("--trail", str(tmp_path), "--situation", situation, *more)
    job = start("ag", "-n", "2", SCRIPT, *words)
    assert job.wait() == 1, job.text()[-3000:]
    assert said in job.text()


def test_a_state_that_changed_on_one_member_is_in_no_checkpoint(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """Memory of rank 1 changes after step 22: all go back to step 20, and train on as it was."""
    (tmp_path / "job.toml").write_text("[checkpoint]\nevery_steps = 10\n")
    words = ("--trail", str(tmp_path), "--situation", "flip", "--steps", "60")
    job = start("ag", "-n", "2", "-c", str(tmp_path / "job.toml"), SCRIPT, *words)
    assert job.wait() == 0, job.text()[-3000:]
    said = "before step 30: rank 0 and rank 1 do not have the same model.1.linear.weight"
    assert said in job.text()
    (incident,) = job.report()["recoveries"]
    assert (incident["culprit"], incident["cause"]) == ("the world", f"members differ {said}")
    verdicts = json.loads(job.cli("diagnose", "ag", "--json").stdout)["verdicts"]
    (crash,) = [v for v in verdicts if v["kind"] == "Crash"]
    assert crash["culprit"] == {}, "of two members, none is known to be wrong"
    rows = [row for rows in read(tmp_path) if rows and rows[-1]["step"] == 59 for row in rows]
    assert min(row["step"] for row in rows) == 20
    compare_losses(tmp_path, rows, "--situation", "flip")


@pytest.mark.long
def test_on_step_that_writes_is_found_when_a_follower_comes(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """All go back to where they agreed, and members never commit a step unlike."""
    words = ("--trail", str(tmp_path), "--situation", "writes", "--width", "1200")
    job = start("ag", "-n", "2", SCRIPT, *words)
    job.wait_until(lambda: find_last(tmp_path).get("step", 0) > 10, "the steps before the kill")
    os.kill(job.find("perdure rank ag g0 r1")[0].pid, signal.SIGKILL)
    job.wait_until(lambda: "elastic: members differ before step" in job.text(), "the difference")
    assert "after_update=" in job.text()
    job.wait_until(lambda: job.find("perdure rank ag g1 r1"), "the next generation")
    job.cli("stop", "ag", "--now")
    job.wait()
    found: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for row in (row for rows in read(tmp_path) for row in rows):
        found[row["step"], *row["world"]].add(row["hash"])
    assert all(len(hashes) == 1 for hashes in found.values()), found
