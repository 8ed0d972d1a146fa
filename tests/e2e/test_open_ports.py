"""Strangers attack each socket that a live job listens on; it trains on and tells them nothing.

The attacker is a process of its own (`tests/attacker.py`). If root runs the tests, it is another
user. The tests find the job's sockets in the kernel's tables. `bench/bench_attack.py` measures the
steps beside an attack.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.attacker import JOB, OPEN_PROTOCOLS, PROTOCOLS, Attacker, Place, find_places
from tests.e2e.box import find_port
from tests.e2e.harness import SCRIPTS, Job
from tests.pages import serve
from tests.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.slow]
SECRET_BYTES = 4096
"""A stranger who gets more than this has got part of a state, a page, or a journal."""
WIDTH = "300000"
"""Width of the hidden layer. Its state is too large to be sent within a join."""
FOR_EVER = "100000000"
METRICS = "metrics"


def list_pids(root: int) -> list[int]:
    """Return the pids of a process and all that descend from it."""
    return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]


def find_ranks(job: Job) -> dict[int, int]:
    """Return the pid of each rank."""
    return {row["rank"]: row["pid"] for row in job.state()["ranks"]}


def read_progress(job: Job) -> int:
    """Return how far the ranks are: their step, or the number of their last collective."""
    state = job.state()
    collectives = [re.search(r"#(\d+)", row["collective"]) for row in state.get("ranks", [])]
    return max([state.get("step", -1), *(int(found[1]) for found in collectives if found)])


def write_config(folder: Path) -> tuple[Path, int]:
    """Write a job file that opens the optional ports; return it and the port of the metrics."""
    webhook, metrics = find_port(), find_port()
    path = folder / "job.toml"
    path.write_text(f"[notify]\nwebhook_port = {webhook}\n[metrics]\nprometheus_port = {metrics}\n")
    return path, metrics


@contextmanager
def attack(job: Job, *pids: int, protocols: tuple[str, ...]) -> Iterator[Attacker]:
    """Attack all that the job and `pids` listen on by all `protocols`, and go on in the block."""
    words = ["--stores"] if set(protocols) & set(OPEN_PROTOCOLS) else []
    with Attacker(*words) as attacker:
        places: set[Place] = set()

        def aim() -> bool:
            """Attack what is open now; return whether all of it was attacked by everything."""
            nonlocal places
            roots = [job.process.pid, *pids]
            found = find_places(pid for root in roots for pid in list_pids(root))
            if os.geteuid() != 0:  # A private folder is open to its own user.
                found = {place for place in found if not str(place[1]).startswith("/")}
            if found != places:
                attacker.aim(found)
                places = found
            return attacker.has_attacked(found, protocols)

        job.wait_until(aim, "an attack on each place")
        assert any(host for host, _ in places)
        yield attacker
        print(f"user {attacker.user} has attacked {len(places)} places of user {os.getuid()}")


def check_told(attacker: Attacker, metrics: int) -> None:
    """The stranger got no state, page, or journal, and reached no socket of a private folder."""
    told = attacker.look().values()
    assert [one for one in told if one.bytes > SECRET_BYTES and one.place[1] != metrics] == []
    if attacker.user != os.getuid():
        reached = [one for one in told if one.connected and str(one.place[1]).startswith("/")]
        assert reached == []


KINDS: dict[str, tuple[str, ...]] = {
    "plain": ("-n", "2", str(SCRIPTS / "allreduce.py"), "--steps", FOR_EVER),
    "resumable": (
        "-n", "2", str(SCRIPTS / "train_paced.py"), "--trail", "{trail}", "--steps", FOR_EVER,
    ),
    "elastic": (
        "-n", "2", str(SCRIPTS / "elastic.py"), "--trail", "{trail}", "--steps", FOR_EVER,
        "--pace-s", "0.02",
    ),
    "nodes": (
        "-n", "1", "--nodes", "2", str(SCRIPTS / "train_paced.py"), "--trail", "{trail}",
        "--steps", FOR_EVER,
    ),
    "torchft": (
        "--torchft", "--replicas", "2", "-n", "1", str(SCRIPTS / "torchft_groups.py"), FOR_EVER,
        "{trail}",
    ),
}  # fmt: skip


OFTEN = ("elastic",)
"""Kinds that `make test` tries. `make campaign` tries the others."""


def start_prey(kind: str, start: Callable[..., Job], folder: Path) -> tuple[Job, int]:
    """Start a job of a kind, with all ports; return it and the port of its metrics."""
    if kind == "torchft":
        pytest.importorskip("torchft")
    pytest.importorskip("prometheus_client")
    trail = folder / "trail"
    trail.mkdir()
    config, metrics = write_config(folder)
    words = [word.format(trail=trail) for word in KINDS[kind]]
    job = start(JOB, "-c", str(config), *words)
    job.wait_until(lambda: len(find_ranks(job)) == 2 if job.state() else False, "two ranks")
    job.wait_until(lambda: read_progress(job) > 5, "steps")
    return job, metrics


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.long) for kind in KINDS]
)
def test_no_stranger_at_a_port_ends_a_rank(
    kind: str, start: Callable[..., Job], tmp_path: Path
) -> None:
    job, metrics = start_prey(kind, start, tmp_path)
    ranks = find_ranks(job)
    with serve(job.home / "state") as page:
        with attack(job, page.process.pid, protocols=tuple(PROTOCOLS)) as attacker:
            before = read_progress(job)
            job.wait_until(lambda: read_progress(job) > before + 20, "steps beside the attack")
            check_told(attacker, metrics)
        assert page.ask("/")[0] == 401
    assert find_ranks(job) == ranks
    assert job.report()["recoveries"] == []


@pytest.mark.long
def test_no_stranger_at_a_port_ends_a_served_group(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    from tests.e2e.test_serve import Serving, read_commands

    first, block, *_ = read_commands()
    serving = Serving(tmp_path, first[0].replace("marduk", JOB))
    try:
        for group in range(2):
            serving.start_group(group, block, line=True)
        for group in range(2):
            serving.wait_group(group, "training")
        serving.wait_members(2, 0.0, 0, 1)
        pids = [serving.worker(group).pid for group in range(2)]
        with attack(serving, *pids, protocols=tuple(PROTOCOLS)) as attacker:
            began = serving.commits(0, 0.0)[-1]["t"]
            serving.wait_until(
                lambda: all(len(serving.commits(group, began)) > 20 for group in range(2)),
                "steps beside the attack",
            )
            check_told(attacker, 0)
        assert [serving.worker(group).pid for group in range(2)] == pids
        assert serving.report()["recoveries"] == []
    finally:
        serving.end_groups()
        serving.end()
    assert serving.leftovers() == []


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_in_what_has_no_login_makes_perdure_blame_nobody(
    kind: str, start: Callable[..., Job], tmp_path: Path
) -> None:
    """A stranger may restart a world, because torch's store, gloo, and torchft have no login."""
    job, _ = start_prey(kind, start, tmp_path)
    with attack(job, protocols=tuple(OPEN_PROTOCOLS)):
        before = read_progress(job)
        job.wait_until(lambda: read_progress(job) > before + 20, "steps beside the attack")
    job.wait_until(lambda: len(find_ranks(job)) == 2, "two ranks")
    assert find_blamed(job) == []
    culprits = [recovery["culprit"] for recovery in job.report()["recoveries"]]
    assert [culprit for culprit in culprits if culprit.startswith(("rank", "group"))] == []


def read_bodies(job: Job, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind in the job's journal."""
    path = job.folder / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    bodies = [json.loads(line)["body"] for line in lines if line.endswith("}")]
    return [body for body in bodies if body["type"] == kind]


def find_blamed(job: Job) -> list[int]:
    """Return the ranks that a verdict has named as the culprit."""
    verdicts = [body["verdict"] for body in read_bodies(job, "VerdictReached")]
    named = [verdict["culprit"].get("rank") for verdict in verdicts]
    return [rank for rank in named if rank is not None and rank >= 0]


@pytest.mark.long
def test_a_stranger_at_a_join_gets_no_state_and_hurts_nobody(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    trail = tmp_path / "trail"
    job = start(
        JOB, "-n", "2", str(SCRIPTS / "elastic.py"), "--trail", str(trail),
        "--steps", FOR_EVER, "--pace-s", "0.05", "--width", WIDTH,
    )  # fmt: skip
    job.wait_until(lambda: len(read_bodies(job, "RankJoined")) == 2, "two members")
    job.wait_step(5)
    donors = [body["feed"] for body in read_bodies(job, "RankJoined")]
    doors = {(host, int(port)) for host, _, port in (one.rpartition(":") for one in donors)}

    def find_open() -> set[Place]:
        return doors & find_places(list_pids(job.process.pid))

    assert not find_open(), "no join is under way"
    survivor = find_ranks(job)[0]
    with Attacker() as attacker:
        attacker.aim(doors)
        os.kill(find_ranks(job)[1], 9)
        job.wait_until(lambda: read_bodies(job, "MemberReady"), "a rank that has followed")
        joined = read_bodies(job, "MemberReady")[0]["rank"]
        job.wait_until(lambda: joined in find_ranks(job), "the rank in the world")
        job.wait_step(job.state()["step"] + 5)
        check_told(attacker, 0)
    assert find_ranks(job)[0] == survivor
    assert 0 not in find_blamed(job)
    wait_until(lambda: not find_open(), "a closed port")
