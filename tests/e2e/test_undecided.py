"""The control plane dies in the middle of an agreement: the ranks settle it, and train on."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.e2e.test_elastic_nodes import kill_node

pytestmark = [pytest.mark.torch, pytest.mark.slow]
RANKS = 4
_SCRIPT = """
import os
import runpy
import sys
from pathlib import Path

from perdure.worker.steering import boundary

HOME, RANK = Path({home!r}), int(os.environ["RANK"])
handle = boundary.BoundaryGate.handle


def lose_commits(gate, order, **how):
    if (HOME / f"unasked-{{RANK}}").exists():
        return
    (HOME / f"asked-{{RANK}}").touch()
    commits = getattr(order, "move", "") == "commit"
    if commits and (HOME / f"deaf-{{RANK}}").exists():
        (HOME / f"lost-{{RANK}}").touch()
        return
    handle(gate, order, **how)
    if commits:
        (HOME / f"heard-{{RANK}}").touch()


boundary.BoundaryGate.handle = lose_commits
boundary.DROP_S = {drop_s}
runpy.run_path({script!r}, run_name="__main__")
"""
Start = Callable[..., Job]


def launch(
    start: Start,
    home: Path,
    drop_s: float,
    name: str = "train_settings.py",
    world: tuple[str, ...] = ("-n", str(RANKS)),
) -> Job:
    """Start ranks; those with a file `deaf-RANK` lose each commit."""
    (home / "trail").mkdir()
    script = _SCRIPT.format(home=str(home), drop_s=drop_s, script=str(SCRIPTS / name))
    (home / "train.py").write_text(script)
    options = ("train.py", "--trail", str(home / "trail"), "--steps", "1000000")
    job = start("undecided", *world, *options)
    job.wait_step(20)
    return job


def begin_set(job: Job) -> "subprocess.Popen[bytes]":
    """Ask for another learning rate, and wait for no answer."""
    command = [sys.executable, "-m", "perdure", "set", "undecided", "lr=0.5", "--timeout-s", "5"]
    return subprocess.Popen(
        command, env=job.env, cwd=job.home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def kill_control_plane(job: Job) -> list[Path]:
    """SIGKILL nats-server and controller, which cannot be started again: no log can be written.

    Return what stands in their way.
    """
    logs = job.folder / "logs"
    refused = [path for path in logs.glob("*.log") if path.stem in ("controller", "nats-server")]
    assert len(refused) == 2, sorted(logs.glob("*.log"))
    for log in refused:
        log.rename(log.with_suffix(".before"))
        log.mkdir()
    job.kill("nats-server")
    job.kill("perdure controller")
    return refused


def rows(home: Path, ranks: Iterable[int] = range(RANKS)) -> dict[int, list[dict[str, float]]]:
    """Return the steps that each rank wrote down."""
    found: dict[int, list[dict[str, float]]] = {}
    for rank in ranks:
        lines = (home / "trail" / f"rank-{rank}.jsonl").read_text().split("\n")[:-1]
        found[rank] = [json.loads(line) for line in lines]
    return found


def steps(home: Path) -> int:
    """Return how far the last rank is."""
    return int(min(rank[-1]["step"] for rank in rows(home).values()))


def first_steps(home: Path) -> set[float]:
    """Return the steps from which on ranks ran with the new value."""
    return {
        next((row["step"] for row in rank if row["lr"] == 0.5), -1) for rank in rows(home).values()
    }


def end(job: Job) -> None:
    """End a job whose control plane is away: by the second SIGTERM."""
    job.process.terminate()
    job.wait_until(lambda: "once more ends it" in job.text(), "an answer to SIGTERM")
    job.process.terminate()
    job.wait()


def test_a_commit_that_reached_one_rank_of_four_is_applied_by_all(
    start: Start, tmp_path: Path
) -> None:
    job = launch(start, tmp_path, drop_s=3600.0)
    for rank in (0, 2, 3):
        (tmp_path / f"deaf-{rank}").touch()
    asked = begin_set(job)
    job.wait_until(lambda: (tmp_path / "heard-1").exists(), "a commit that reaches rank 1")
    kill_control_plane(job)
    before = steps(tmp_path)
    job.wait_until(lambda: steps(tmp_path) > before + 200, "200 more steps")
    asked.wait()
    (step,) = first_steps(tmp_path)
    assert step > 0
    assert {row["generation"] for rank in rows(tmp_path).values() for row in rank} == {0}
    assert not [rank for rank in (0, 2, 3) if (tmp_path / f"heard-{rank}").exists()]
    end(job)


@pytest.mark.long
def test_a_commit_that_reached_no_rank_is_dropped_by_all_and_asked_again(
    start: Start, tmp_path: Path
) -> None:
    job = launch(start, tmp_path, drop_s=3.0)
    for rank in range(RANKS):
        (tmp_path / f"deaf-{rank}").touch()
    asked = begin_set(job)
    job.wait_until(lambda: any(tmp_path.glob("lost-*")), "a commit that is lost")
    refused = kill_control_plane(job)
    before = steps(tmp_path)
    job.wait_until(lambda: steps(tmp_path) > before + 200, "200 more steps")
    assert first_steps(tmp_path) == {-1}
    asked.wait()
    for rank in range(RANKS):
        (tmp_path / f"deaf-{rank}").unlink()
    for log in refused:
        log.rmdir()
    job.wait_until(lambda: -1 not in first_steps(tmp_path), "the new value, asked for again")
    (step,) = first_steps(tmp_path)
    assert step > before
    assert {row["generation"] for rank in rows(tmp_path).values() for row in rank} == {0}
    job.cli("stop", "undecided", "--now")
    job.wait()


@pytest.mark.long
def test_a_question_that_missed_one_rank_of_four_is_dropped_by_all(
    start: Start, tmp_path: Path
) -> None:
    """The rank goes on into a step that the others do not begin, and votes from there."""
    job = launch(start, tmp_path, drop_s=3.0)
    (tmp_path / "unasked-1").touch()
    asked = begin_set(job)
    job.wait_until(lambda: len(list(tmp_path.glob("asked-*"))) == 3, "a question")
    refused = kill_control_plane(job)
    before = steps(tmp_path)
    job.wait_until(lambda: steps(tmp_path) > before + 200, "200 more steps")
    assert first_steps(tmp_path) == {-1}
    asked.wait()
    (tmp_path / "unasked-1").unlink()
    for log in refused:
        log.rmdir()
    job.wait_until(lambda: -1 not in first_steps(tmp_path), "the new value, asked for again")
    assert len(first_steps(tmp_path)) == 1
    assert {row["generation"] for rank in rows(tmp_path).values() for row in rank} == {0}
    job.cli("stop", "undecided", "--now")
    job.wait()


@pytest.mark.long
def test_an_elastic_world_drops_it_at_a_store_that_lives(start: Start, tmp_path: Path) -> None:
    """The generation's store was on the first node, which is lost."""
    job = launch(start, tmp_path, 3.0, "elastic.py", ("-n", "1", "--nodes", "3"))
    kill_node(job, 0, rank=0)
    job.wait_until(
        lambda: rows(tmp_path, [1])[1][-1]["epoch"] > 0, "a world without the first node"
    )
    for rank in range(10):
        (tmp_path / f"deaf-{rank}").touch()
    asked = begin_set(job)
    job.wait_until(lambda: any(tmp_path.glob("lost-*")), "a commit that is lost")
    kill_control_plane(job)
    before = rows(tmp_path, [1])[1][-1]["step"]
    job.wait_until(lambda: rows(tmp_path, [1])[1][-1]["step"] > before + 50, "50 more steps")
    asked.wait()
    assert {row["rate"] for rank in rows(tmp_path, (1, 2)).values() for row in rank} == {0.01}
    end(job)
