"""Three real servers as one: the journal and the lease outlive any of them."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure.adapters.nats import SYSTEM, ElectionWatch, NatsBus, NatsLease, NatsServer, NatsStream
from perdure.files.private import locate_job
from perdure.model.errors import FencedError, PlatformError
from perdure.model.job import BusConfig, JobSpec
from perdure.model.paths import JobPaths
from perdure.service.access.credentials import make_servers, set_certificates, write_credentials
from perdure.service.controller.leading import LeaseLoop
from perdure.service.controller.process import restart_server
from perdure.service.jobfiles import load_endpoint, make_folders, remove_folders
from perdure.service.placement import HERE
from tests.waiting import PATIENCE_S

SPEC = JobSpec(name="three", script="s.py", nodes=3, bus=BusConfig(replicas=3))


class Cluster:
    """The servers of one job, as `perdure run` starts them."""

    def __init__(self, home: Path) -> None:
        self.paths: JobPaths = locate_job(str(home), SPEC.name)
        make_folders(self.paths)
        self.servers: list[NatsServer] = make_servers(SPEC, self.paths, HERE)
        set_certificates(self.servers, SPEC.nats)
        self.processes: list[subprocess.Popen[bytes]] = []
        url = self.servers[0].url
        write_credentials(SPEC, self.paths, self.servers, url=url, clock_offset_s=0)
        self.log = home / "nats.log"
        self.start()

    def start(self) -> None:
        self.processes.clear()
        with open(self.log, "ab") as log:
            for server in self.servers:
                command = server.command()
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        for server in self.servers:
            server.wait_ready(timeout_s=PATIENCE_S)

    def find_blocks(self, node: int) -> list[Path]:
        found = Path(self.servers[node].folder).rglob("*.blk")
        return [path for path in found if "JOURNAL" in str(path)]

    async def connect(self, user: str, near: int) -> NatsBus:
        return await NatsBus.connect(
            load_endpoint(self.paths, user), timeout_s=PATIENCE_S, near=near
        )

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        remove_folders(self.paths)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
async def buses(cluster: Cluster) -> AsyncIterator[list[NatsBus]]:
    buses = [await cluster.connect("controller", node) for node in range(3)]
    yield buses
    for bus in buses:
        await bus.close()


async def insist(call: Callable[..., Awaitable[Any]], *args: object, **named: object) -> Any:
    """Repeat what no leader answers yet."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await call(*args, **named)
            except PlatformError:
                await asyncio.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("victim", range(3))
async def test_what_one_of_three_has_lost_is_read_from_the_others(
    cluster: Cluster, buses: list[NatsBus], victim: int
) -> None:
    stream = await insist(NatsStream.open, buses[0], SPEC.name, replicas=3)
    assert isinstance(stream, NatsStream)
    words = [f"word {number}".encode() for number in range(20)]
    for number, word in enumerate(words):
        await insist(stream.append, word, expected_last=number, message_id=f"m{number}")
    for process in cluster.processes:
        process.terminate()
        process.wait()
    [block] = cluster.find_blocks(victim)
    data = bytearray(block.read_bytes())
    data[len(data) // 2] ^= 1
    block.write_bytes(data)
    cluster.start()
    stream = await insist(NatsStream.open, buses[(victim + 1) % 3], SPEC.name, replicas=3)
    assert isinstance(stream, NatsStream)
    assert await insist(stream.read_all) == words
    await insist(stream.append, b"after", expected_last=20, message_id="after")
    assert await insist(stream.read_all) == [*words, b"after"]


async def find_acting(loops: Sequence[LeaseLoop], nodes: Iterable[int]) -> int:
    """Return which of `nodes` holds the lease, once one does."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for node in nodes:
                with contextlib.suppress(FencedError):
                    loops[node].check()
                    return node
            await asyncio.sleep(0.02)


async def test_a_killed_leader_costs_neither_entries_nor_the_lease(
    cluster: Cluster, buses: list[NatsBus]
) -> None:
    streams = [await insist(NatsStream.open, bus, SPEC.name, replicas=3) for bus in buses]
    registers = [NatsLease(bus, SPEC.name, 3) for bus in buses]
    await insist(registers[0].open)
    for number in range(3):
        data = b"%d" % number
        await insist(streams[0].append, data, expected_last=number, message_id=f"m{number}")
    loops = [LeaseLoop(register, f"c{node}", 3.0) for node, register in enumerate(registers)]
    tasks = [asyncio.create_task(loop.run()) for loop in loops]
    holder = await find_acting(loops, range(3))
    term = loops[holder].lease.term
    assert (await insist(registers[holder].read))[1] == f"c{holder}"  # type: ignore[index]

    watcher = (holder + 1) % 3
    system = await cluster.connect(SYSTEM, watcher)
    elections = asyncio.create_task(ElectionWatch(system, 3).run())
    tasks[holder].cancel()
    cluster.processes[holder].kill()
    others = [node for node in range(3) if node != holder]
    heir = await find_acting(loops, others)
    assert loops[heir].lease.term > term
    loops[heir].check()
    assert await insist(streams[heir].read_all) == [b"0", b"1", b"2"]
    assert await insist(streams[heir].read_all, first=3) == [b"2"]
    assert await insist(streams[heir].append, b"3", expected_last=3, message_id="heir") == 4
    with pytest.raises(FencedError):
        await insist(streams[holder].append, b"x", expected_last=3, message_id="late")
    with pytest.raises(FencedError):
        loops[holder].check()
    for task in (*tasks, elections):
        task.cancel()
    await asyncio.gather(*tasks, elections, return_exceptions=True)
    await system.close()


async def test_of_three_servers_the_one_that_keeps_the_stuck_journal_is_started_anew(
    cluster: Cluster, buses: list[NatsBus], caplog: pytest.LogCaptureFixture
) -> None:
    stream = await insist(NatsStream.open, buses[0], SPEC.name, replicas=3)
    assert isinstance(stream, NatsStream)
    await insist(stream.append, b"0", expected_last=0, message_id="m0")
    leader = await stream.read_leader()
    await restart_server(SPEC, cluster.paths, stream)
    async with asyncio.timeout(PATIENCE_S):
        while all(process.poll() is None for process in cluster.processes):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    ended = [n for n, process in enumerate(cluster.processes) if process.poll() is not None]
    assert [f"perdure-{SPEC.name}-{node}" for node in ended] == [leader]
    assert f"{cluster.paths.nats}/{ended[0]} is started anew" in caplog.text
    other = NatsStream(buses[(ended[0] + 1) % 3], SPEC.name, replicated=True)
    assert await insist(other.append, b"1", expected_last=1, message_id="m1") == 2
    assert await other.read_leader() != leader
