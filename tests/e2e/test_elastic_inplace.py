"""`perdure run` of an elastic script: SIGKILL and SIGSTOP, and the others go on in place."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.control.membership.elastic import REFORM_TIMEOUT_S
from tests.e2e.harness import SCRIPTS, Job

STEPS = 120
HELD = ("--pace-s", "0.05", "--hold-at", str(STEPS - 20))
"""No member ends before `hurry`, however late the test comes."""


def read(trail: Path, rank: int) -> list[dict[str, Any]]:
    path = trail / f"rank-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def begin(
    start: Callable[..., Job],
    trail: Path,
    *options: str,
    steps: int = STEPS,
    more: tuple[str, ...] = (),
    script: str = "elastic.py",
) -> Job:
    job = start(
        "el", "-n", "3", *options, str(SCRIPTS / script), "--trail", str(trail),
        "--steps", str(steps), *more,
    )  # fmt: skip
    job.wait_until(lambda: len(read(trail, 0)) >= 10, "ten steps")
    return job


def pid_of(job: Job, rank: int) -> int:
    return job.find(f"perdure rank el g0 r{rank}")[0].pid


def check(job: Job, trail: Path, survivors: tuple[int, ...]) -> None:
    """Let it end; the survivors are the same processes, and have every step once, all alike."""
    (trail / "hurry").touch()
    assert job.wait() == 0, job.text()[-3000:]
    rows = {rank: read(trail, rank) for rank in survivors}
    for mine in rows.values():
        assert [row["step"] for row in mine] == list(range(STEPS))
        assert len({row["pid"] for row in mine}) == 1
    first, *others = rows.values()
    for mine in others:
        assert [r["losses"] for r in mine] == [r["losses"] for r in first]
        assert mine[-1]["hash"] == first[-1]["hash"]
    report = job.report()
    assert report["steps_committed"] == STEPS
    recoveries = [r for r in report["recoveries"] if r["rung"] == "shrink"]
    assert recoveries
    assert all(r["lost_steps"] == 0 for r in recoveries)


@pytest.mark.slow
@pytest.mark.long
def test_survivors_of_two_deaths_train_on(start: Callable[..., Job], tmp_path: Path) -> None:
    trail, alone = tmp_path / "trail", tmp_path / "alone"
    (tmp_path / "job.toml").write_text("[restart]\nreplace = false\n")
    # One process beside the job, which loads what it needs when it needs it.
    words = [str(SCRIPTS / "elastic.py"), "--trail", str(alone), "--exact", "--steps", str(STEPS)]
    with subprocess.Popen([sys.executable, *words]) as process:
        more = (*HELD, "--exact", "--num-workers", "1")
        job = begin(start, trail, "-c", str(tmp_path / "job.toml"), more=more)
        os.kill(pid_of(job, 1), signal.SIGKILL)
        job.wait_until(lambda: read(trail, 2)[-1]["world"] == [0, 2], "the others' next step")
        os.kill(pid_of(job, 0), signal.SIGKILL)
        job.wait_until(lambda: read(trail, 2)[-1]["world"] == [2], "the last one's next step")
        check(job, trail, (2,))
    assert process.returncode == 0
    assert [r["losses"] for r in read(trail, 2)] == [r["losses"] for r in read(alone, 0)]


@pytest.mark.slow
@pytest.mark.long
def test_a_new_process_takes_the_place_of_a_dead_one(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    trail = tmp_path / "trail"
    job = begin(start, trail, steps=100_000, more=("--pace-s", "0.05"))
    for rank, world in ((1, [0, 2, 4]), (4, [0, 2, 7])):
        os.kill(pid_of(job, rank), signal.SIGKILL)
        job.wait_until(lambda w=world: read(trail, 1)[-1]["world"] == w, f"world {world}")
    # The picture is written once a second: the world that the ranks name is in the next one.
    job.wait_until(
        lambda: sorted(row["rank"] for row in job.state()["ranks"]) == [0, 2, 7],
        "the new process in the picture",
    )
    job.cli("stop", "el", "--now")
    job.wait()
    rows, others = read(trail, 1), {row["step"]: row for row in read(trail, 0)}
    pids = list(dict.fromkeys(row["pid"] for row in rows))
    assert len(pids) == 3
    for pid in pids:  # Each came at some step, left at another, and agreed meanwhile.
        mine = [row for row in rows if row["pid"] == pid]
        first = mine[0]["step"]
        assert [row["step"] for row in mine] == list(range(first, first + len(mine)))
        for row in mine:
            same = others.get(row["step"], row)
            assert (row["losses"], row["hash"]) == (same["losses"], same["hash"])
    report = job.report()
    assert [r["rung"] for r in report["recoveries"]] == ["shrink", "join"] * 2
    ledger = report["ledger"]
    assert ledger["unattributed"]["s"] <= 0.005 * report["slot_s"]


@pytest.mark.slow
def test_a_process_that_has_lost_its_device_is_replaced_and_the_user_told(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    trail = tmp_path / "trail"
    more = ("--pace-s", "0.05")
    job = begin(start, trail, steps=100_000, more=more, script="elastic_device.py")
    job.wait_until(lambda: read(trail, 0)[-1]["world"] == [0, 2, 4], "the world of three again")
    job.cli("stop", "el", "--now")
    job.wait()
    rows = read(trail, 0)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len({row["pid"] for row in rows}) == 1
    lost, _ = job.report()["recoveries"]
    assert (lost["rung"], lost["culprit"], lost["lost_steps"]) == ("shrink", "rank 1", 0)
    words = "CUDA error: an illegal memory access was encountered"
    assert lost["cause"] == f"device lost (exit code 5): {words}"
    assert "rank 1: device lost (exit code 5): CUDA error" in job.cli("report", "el").stdout
    assert "the device of rank 1 was lost" in job.cli("diagnose", "el").stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_member_that_ends_well_too_early_is_replaced(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    trail = tmp_path / "trail"
    job = begin(start, trail, steps=100_000, more=("--pace-s", "0.05", "--quit-at", "20"))
    job.wait_until(lambda: read(trail, 0)[-1]["world"] == [0, 2], "a world without rank 1")
    job.wait_until(lambda: read(trail, 0)[-1]["world"] == [0, 2, 4], "the world of three again")
    found = json.loads(job.cli("diagnose", "el", "--json").stdout)["verdicts"]
    assert [(v["kind"], v["culprit"], v["ground"]) for v in found] == [
        ("EarlyExit", {"rank": 1}, "ended")
    ]
    job.cli("stop", "el", "--now")
    job.wait()
    rows = read(trail, 0)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len({row["pid"] for row in rows}) == 1


@pytest.mark.slow
@pytest.mark.long
def test_a_world_is_formed_with_a_member_that_is_busy_for_longer_than_others_may_take(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    trail, busy_s = tmp_path / "trail", REFORM_TIMEOUT_S + 5.0
    job = begin(start, trail, more=(*HELD, "--busy-s", str(busy_s)))
    job.wait_until(
        lambda: any((r.get("busy_phase") or {}).get("name") for r in job.state().get("ranks", ())),
        "the declared phase",
    )
    os.kill(pid_of(job, 1), signal.SIGKILL)
    job.wait_until(lambda: read(trail, 0)[-1]["epoch"] > 0, "the others' next step")
    check(job, trail, (0, 2))


@pytest.mark.slow
@pytest.mark.long
def test_the_controller_may_die_with_a_rank(start: Callable[..., Job], tmp_path: Path) -> None:
    trail = tmp_path / "trail"
    job = begin(start, trail, more=HELD)
    pid = pid_of(job, 2)
    job.kill("perdure controller")
    os.kill(pid, signal.SIGKILL)
    job.wait_until(lambda: read(trail, 0)[-1]["epoch"] > 0, "the others' next step")
    check(job, trail, (0, 1))


@pytest.mark.slow
@pytest.mark.long
def test_a_world_without_a_survivor_starts_again_from_its_checkpoint(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    trail = tmp_path / "trail"
    (tmp_path / "job.toml").write_text("[checkpoint]\nevery_steps = 5\n")
    job = begin(start, trail, "-c", str(tmp_path / "job.toml"), more=HELD)
    job.wait_until(lambda: len(list((job.folder / "checkpoints").glob("step-*"))) >= 2, "two saves")
    for pid in [pid_of(job, rank) for rank in range(3)]:
        os.kill(pid, signal.SIGKILL)
    (trail / "hurry").touch()
    assert job.wait() == 0, job.text()[-3000:]
    for rank in range(3):
        rows = read(trail, rank)
        pids = list(dict.fromkeys(row["pid"] for row in rows))
        again = [row["step"] for row in rows if row["pid"] == pids[-1]]
        assert again[0] > 0
        assert again == list(range(again[0], STEPS))
