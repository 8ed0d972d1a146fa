"""T15: whatever is killed in whatever order, nothing is left behind but what is meant to be."""

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import wait_until

FAMILY = str(SCRIPTS / "quiet_family.py")
PARTS = {
    "run": "",
    "nats-server": "nats-server",
    "controller": "perdure controller",
    "agent": "perdure agent",
    "guard": "guard.py",
    "keeper": "perdure keeper",
    "zygote": "perdure zygote",
    "store": "perdure store",
    "rank": "perdure rank",
    "rank's child": "sleep 1000",
}
PAIRS = list(itertools.combinations(PARTS, 2))
SAMPLE = [("run", "guard")]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(*options: str) -> Job:
        jobs.append(Job(tmp_path, "left", *options))
        jobs[-1].wait_until(lambda: "[rank 1] up" in jobs[-1].text(), "ranks")
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()
        wait_empty(job)


def wait_empty(job: Job) -> None:
    """Wait until nothing of the job lives; the supervisor itself is not reaped meanwhile."""
    wait_until(lambda: not job.leftovers(), "end of all that the job had started")


def kill_at_once(job: Job, *parts: str) -> None:
    pids = []
    for part in parts:
        pids.append(job.process.pid if part == "run" else job.pid_of(PARTS[part]))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def check_pair(start: Callable[..., Job], pair: tuple[str, str], *options: str) -> None:
    job = start("--nproc-per-node", "2", *options, FAMILY)
    kill_at_once(job, *pair)
    if "run" in pair:
        wait_empty(job)
        return
    # The supervisor lives, so the job goes on, and what it ends leaves nothing.
    job.wait_until(lambda: len(job.find("perdure rank")) == 2, "two ranks")
    job.wait_until(lambda: job.find("perdure controller") and job.find("guard.py"), "its parts")
    job.process.send_signal(signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    assert job.leftovers() == []


@pytest.mark.parametrize("pair", SAMPLE, ids="+".join)
def test_nothing_outlives_the_supervisor_and_one_of_its_parts(
    start: Callable[..., Job], pair: tuple[str, str]
) -> None:
    """T15: nats-server ran for ever where the controller had died as well, or nobody had reaped."""
    check_pair(start, pair, "--cold")


@pytest.mark.long
@pytest.mark.parametrize("pair", [p for p in PAIRS if p not in SAMPLE], ids="+".join)
def test_nothing_is_left_by_any_pair(start: Callable[..., Job], pair: tuple[str, str]) -> None:
    check_pair(start, pair)


def test_what_could_not_be_ended_is_named_and_ended_by_ps(start: Callable[..., Job]) -> None:
    """T15: with supervisor, controller and guard killed at once nobody ends the server."""
    job = start("--nproc-per-node", "2", "--cold", FAMILY)
    server = job.pid_of("nats-server")
    kill_at_once(job, "run", "controller", "guard")
    rows = json.loads(job.cli("status", "--json").stdout)["left_behind"]
    assert server in [row["pid"] for row in rows]
    assert f"pid {server}, ended" in job.cli("status", "--clean").stdout
    wait_empty(job)
    assert json.loads(job.cli("status", "--json").stdout)["left_behind"] == []
