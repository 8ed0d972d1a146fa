"""Training goes on while the bus is away, full, or cut off; afterwards nothing is missing."""

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats.js.errors
import pytest

from perdure.adapters.nats import NatsBus, NatsServer, User
from perdure.model.bus.access import ROLES, Access, build_access
from perdure.model.bus.endpoint import Endpoint
from tests.e2e.harness import SCRIPTS, Job
from tests.lab.network import Lab, sh, why_not
from tests.waiting import PATIENCE_S

SCRIPT = SCRIPTS / "train_paced.py"
STEP_S = 0.1
JOB = "outage"


class Cluster:
    """A user's own NATS server, with a user a role and one who may do everything."""

    def __init__(self, folder: Path) -> None:
        users = [User(r, f"secret-of-{r}", build_access(r, JOB)) for r in ROLES]
        users.append(User("admin", "secret-of-admin", Access(publish=(">",), subscribe=(">",))))
        self.files = NatsServer(
            folder=str(folder / "own"), token="", users=tuple(users), max_bytes=40_000_000
        )
        self.log = folder / "own.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.creds = folder / "creds"
        self.creds.mkdir()
        for user in users[:-1]:
            login = {"user": user.name, "password": user.password}
            (self.creds / f"{user.name}.json").write_text(json.dumps(login))

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.files.command(), stdout=log, stderr=log)
        self.files.wait_ready()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def fill(self) -> None:
        """Store until there is no room left."""
        asyncio.run(self._fill())

    def clear(self) -> None:
        asyncio.run(self._clear())

    async def _connect(self) -> NatsBus:
        endpoint = Endpoint(self.files.url, "secret-of-admin", 0.0, user="admin")
        return await NatsBus.connect(endpoint, timeout_s=PATIENCE_S)

    async def _fill(self) -> None:
        bus = await self._connect()
        js = bus.client.jetstream(timeout=PATIENCE_S)
        await js.add_stream(name="FILL", subjects=["fill"])
        for size in (500_000, 20_000, 200):
            with contextlib.suppress(nats.js.errors.Error):
                while True:
                    await js.publish("fill", b"x" * size)
        await bus.close()

    async def _clear(self) -> None:
        bus = await self._connect()
        await bus.client.jetstream(timeout=PATIENCE_S).delete_stream("FILL")
        await bus.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.start()
    yield cluster
    cluster.kill()


def launch(start: Callable[..., Job], folder: Path, *options: str, more: str = "") -> Job:
    config = folder / "job.toml"
    config.write_text(f"[checkpoint]\nevery_steps = 20\n{more}")
    script = (str(SCRIPT), "--trail", str(folder), "--steps", "100000", "--step-s", str(STEP_S))
    return start(JOB, "-c", str(config), *options, *script)


def steps_made(folder: Path) -> int:
    return min(len((folder / f"rank-{rank}.txt").read_text().splitlines()) for rank in (0, 1))


def journal(job: Job) -> list[dict[str, Any]]:
    lines = (job.folder / "journal.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))
    return [entry["body"] for entry in entries]


def saved(job: Job) -> list[int]:
    return [body["step"] for body in journal(job) if body["type"] == "CheckpointSaved"]


def check_end(job: Job, nodes: int = 1) -> None:
    """Stop it; no step was made twice, and every checkpoint of it is in the journal."""
    step = json.loads(job.cli("stop", JOB, "--json").stdout)["step"]
    assert job.wait() == 0, job.text()
    assert count(job, "RanksStarted") == nodes
    assert count(job, "NodeLost") == 0
    assert set(range(20, step, 20)) <= set(saved(job))


def count(job: Job, kind: str) -> int:
    return sum(body["type"] == kind for body in journal(job))


@pytest.mark.slow
def test_a_killed_and_a_full_server_stop_no_step_and_lose_no_event(
    start: Callable[..., Job], tmp_path: Path, cluster: Cluster
) -> None:
    own = ("--nats", cluster.files.url, "--nats-creds", str(cluster.creds))
    job = launch(start, tmp_path, "-n", "2", *own)
    job.wait_step(10)

    cluster.kill()
    before = steps_made(tmp_path)
    job.wait_until(lambda: steps_made(tmp_path) > before + 45, "steps without a server")
    assert max(saved(job), default=0) < before + 15  # nothing is written down meanwhile
    cluster.start()
    job.wait_until(lambda: max(saved(job), default=0) >= before + 20, "what was missed")

    cluster.fill()
    before, known = steps_made(tmp_path), len(journal(job))
    refused = job.cli("checkpoint", JOB, "--timeout-s", "2", check=False)
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert len(journal(job)) <= known + 2  # a small one may just have fitted in
    job.wait_until(lambda: steps_made(tmp_path) > before + 10, "steps beside a full server")
    assert (
        "nothing is decided until it can be written"
        in (job.folder / "logs" / "controller.log").read_text()
    )
    cluster.clear()
    job.wait_until(lambda: len(journal(job)) > known + 5, "the journal to go on")
    assert json.loads(job.cli("checkpoint", JOB, "--json").stdout)["step"] > before
    check_end(job)
    text = cluster.log.read_text() + (job.folder / "logs" / "controller.log").read_text()
    assert "Violation" not in text
    assert "secret-of" not in text + (job.folder / "job.json").read_text() + job.text()


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"no network laboratory: {why_not()}")
@pytest.mark.long
def test_a_partition_between_controller_and_agents_is_no_loss_of_nodes(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    with Lab(2) as lab:
        placement = ("--placement", str(lab.write_placement(tmp_path)))
        more = "[detect]\nnode_lost_s = 4.0\n"
        nodes = ("--nodes", "2", "-n", "1")
        job = launch(start, tmp_path, *nodes, *placement, more=more)
        job.wait_step(10)
        for cut in ((0, 1), (1,)):
            before = steps_made(tmp_path)
            for node in cut:
                sh("ip", "-n", lab.space(node), "route", "add", "blackhole", lab.gateway)
            time.sleep(6.0)  # For longer than a node may be silent.
            job.wait_until(lambda least=before + 15: steps_made(tmp_path) > least, "steps")
            for node in cut:
                sh("ip", "-n", lab.space(node), "route", "del", "blackhole", lab.gateway)
            job.wait_until(lambda want=before + 30: job.state()["step"] > want, "catch-up")
        check_end(job, nodes=2)
