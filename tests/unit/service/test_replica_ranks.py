"""The lighthouse's line to ranks that others have started, over a real socket."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.waiting import PATIENCE_S

from perdure.files.private import find_private
from perdure.model.bus.wire import (
    ReplicaHello,
    ReplicaWelcome,
    ToWorker,
    WorkerAck,
    WorkerEvent,
    WorkerHello,
    subject_events,
)
from perdure.model.codec import decode, encode
from perdure.model.events import KeysDeclared
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.orders import LIGHTHOUSE, FenceAbort, SendBoundary
from perdure.model.paths import JobPaths, lighthouse_door
from perdure.service.agent.outbox import Outbox
from perdure.service.lighthouse.replica_ranks import ReplicaRanks

SPEC = JobSpec(script="", name="ft", nproc=2, torchft=TorchftConfig(replicas=1, elsewhere=True))
PROMISE = SendBoundary(
    id="b1", move="prepare", kind="set", step=9, ranks=(3,), generation=5, number=1, reason="r"
)


class Lighthouse:
    def __init__(self, folder: Path) -> None:
        self.ended: list[tuple[int, str]] = []
        self.outbox = Outbox(None, subject_events("ft", LIGHTHOUSE), node=-1, source="l1")
        self.taken: list[tuple[str, int, Any]] = []
        self.outbox.put_from = self._take  # type: ignore[method-assign]
        self.ranks = ReplicaRanks(
            SPEC,
            self.outbox,
            clock=lambda: 1.0,
            clock_offset_s=7.0,
            find=self._find,
            ended=lambda life, why: self.ended.append((life, why)),
        )
        self.paths = JobPaths(str(folder), str(folder), str(folder))
        self.held = socket.socket()
        """Keeps the port, and so the door, from other tests that run at the same time."""
        self.held.bind(("127.0.0.1", 0))
        self.port = int(self.held.getsockname()[1])
        self.door = lighthouse_door(find_private("/tmp"), self.port)

    async def _find(self, name: str) -> tuple[int, int]:
        return (1, 5) if name == "train_1:ab" else (-1, -1)

    def _take(self, source: str, seq: int, event: Any, done: Any) -> None:
        self.taken.append((source, seq, event))
        done()

    async def ask(self, **more: Any) -> ReplicaWelcome:
        said = {"replica": "train_1:ab", "local_rank": 1, "ranks": 2, "pid": os.getpid(), **more}
        reader, writer = await asyncio.open_unix_connection(self.door)
        writer.write(encode(ReplicaHello(**said)) + b"\n")
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return decode(answer, ReplicaWelcome)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def lighthouse(tmp_path: Path) -> AsyncIterator[Lighthouse]:
    served = Lighthouse(tmp_path)
    os.makedirs(os.path.dirname(served.door), mode=0o700, exist_ok=True)
    await served.ranks.start(served.paths, served.port, "run 2")
    yield served
    await served.ranks.close()
    os.unlink(served.door)
    served.held.close()


async def read_message(reader: asyncio.StreamReader) -> Any:
    return decode(await asyncio.wait_for(reader.readline(), PATIENCE_S), ToWorker)


@pytest.mark.asyncio
async def test_a_rank_is_told_who_it_is_or_why_it_is_not_taken(lighthouse: Lighthouse) -> None:
    told = await lighthouse.ask()
    assert (told.job, told.rank, told.generation, told.clock_offset_s) == ("ft", 3, 5, 7.0)
    assert told.line == "run 2"
    assert told.refusal == ""
    assert "perdure serve -n 4" in (await lighthouse.ask(ranks=4)).refusal
    assert "does not know train_9:x" in (await lighthouse.ask(replica="train_9:x")).refusal
    assert (await lighthouse.ask(local_rank=2)).refusal


@pytest.mark.asyncio
async def test_events_go_one_way_and_orders_the_other(lighthouse: Lighthouse) -> None:
    reader, writer = await asyncio.open_unix_connection(lighthouse.door)
    event = KeysDeclared(generation=5, keys=())
    writer.write(encode(WorkerHello("run 2", 3, 5, os.getpid())) + b"\n")
    writer.write(encode(WorkerEvent(1, event)) + b"\n")
    assert await read_message(reader) == WorkerAck(1)
    assert lighthouse.taken == [(f"g5-r3-p{os.getpid()}", 1, event)]
    assert lighthouse.ranks.take(PROMISE)
    assert await read_message(reader) == PROMISE
    fence = FenceAbort(quorum_id=4, groups=(1,), reason="a peer is gone")
    lighthouse.ranks.tell_groups((0,), fence)
    lighthouse.ranks.tell_groups((1,), fence)
    assert await read_message(reader) == fence
    older = SendBoundary(
        id="b2", move="prepare", kind="set", step=9, ranks=(3,), generation=4, number=2, reason="r"
    )
    assert not lighthouse.ranks.take(older), "of a life that nobody has a line of"
    writer.close()


@pytest.mark.asyncio
async def test_of_very_many_groups_that_train_each_hears_what_is_for_it(
    lighthouse: Lighthouse,
) -> None:
    lines = []
    for group in range(100):
        reader, writer = await asyncio.open_unix_connection(lighthouse.door)
        hello = WorkerHello("run 2", 2 * group, group, os.getpid())
        writer.write(
            encode(hello)
            + b"\n"
            + encode(WorkerEvent(1, KeysDeclared(generation=group, keys=())))
            + b"\n"
        )
        assert isinstance(await read_message(reader), WorkerAck)
        lines.append((reader, writer))
    everybody = tuple(range(100))
    lighthouse.ranks.tell_groups(everybody, FenceAbort(quorum_id=1, groups=everybody, reason="r"))
    for reader, writer in lines:
        assert isinstance(await read_message(reader), FenceAbort)
        writer.close()


@pytest.mark.asyncio
async def test_the_end_of_a_line_is_the_end_of_a_rank_only_where_its_process_has_ended(
    lighthouse: Lighthouse,
) -> None:
    child = await asyncio.create_subprocess_exec("sleep", "3600")
    look, looked = lighthouse.ranks._look, list[int]()

    def note(hello: WorkerHello) -> None:
        look(hello)
        looked.append(hello.pid)

    lighthouse.ranks._look = note  # type: ignore[method-assign]

    def holds(pid: int) -> bool:
        known = lighthouse.ranks._lives.get(5)
        return bool(known and known.state.keeper and known.state.keeper.running.get(3) == pid)

    for pid in (os.getpid(), child.pid):
        _, writer = await asyncio.open_unix_connection(lighthouse.door)
        writer.write(encode(WorkerHello("run 2", 3, 5, pid)) + b"\n")
        await lighthouse.until(lambda pid=pid: holds(pid))  # type: ignore[misc]
        if pid == child.pid:
            child.kill()
            await child.wait()
        writer.close()
        await lighthouse.until(lambda pid=pid: pid in looked)  # type: ignore[misc]
        assert bool(lighthouse.ended) == (pid == child.pid)
    assert lighthouse.ended == [(5, "rank 3: its process has ended")]


@pytest.mark.asyncio
async def test_a_line_of_an_earlier_run_is_not_taken_for_a_life_of_this_one(
    lighthouse: Lighthouse,
) -> None:
    child = await asyncio.create_subprocess_exec("sleep", "3600")
    reader, writer = await asyncio.open_unix_connection(lighthouse.door)
    writer.write(encode(WorkerHello("run 1", 3, 5, child.pid)) + b"\n")
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b"", "it is hung up on"
    child.kill()
    await child.wait()
    writer.close()
    _, other = await asyncio.open_unix_connection(lighthouse.door)
    other.write(encode(WorkerHello("run 2", 2, 6, child.pid)) + b"\n")
    await lighthouse.until(lambda: lighthouse.ranks.lines)
    other.close()
    await lighthouse.until(lambda: lighthouse.ended)  # It is looked at after the other line's end.
    known = [life for life, _ in lighthouse.ended]
    assert known == [6], "another group has the number 5 now"
