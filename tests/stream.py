"""The whole way of an event in one process: a rank's socket, agent, bus, controller, journal."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from perdure.model.bus.wire import (
    FromWorker,
    ToWorker,
    WorkerAck,
    WorkerEvent,
    WorkerHello,
    subject_events,
)
from perdure.model.codec import decode, encode
from perdure.model.events import (
    AnyEvent,
    Decision,
    GenerationStopped,
    JournalEntry,
    NodeRegistered,
    RanksStarted,
    StoreReady,
)
from perdure.model.job import JobSpec
from perdure.service.agent.outbox import Outbox
from perdure.service.agent.ranks import WorkerServer
from perdure.service.controller.journal import Journal
from perdure.service.controller.loop import ControllerService
from perdure.service.curves import CurveFiles, read_curves
from perdure.service.jobfiles import parse_journal
from perdure.service.part import LINE_MAX
from perdure.service.ports import Bus, JournalStream
from perdure.telemetry.curves import Curves
from tests.fakes import FakeBus, FakeServer, FakeStream
from tests.waiting import PATIENCE_S

SPEC = JobSpec(name="job", script="train.py", nproc=2)
STARTED: tuple[AnyEvent, ...] = (
    NodeRegistered(node=0, incarnation="a0-1", host="h", boot_id="b", slots=2),
    GenerationStopped(node=0, generation=-1, at_s=1000.0),
    StoreReady(generation=0, host="127.0.0.1", port=5000, agent_store=True),
    RanksStarted(node=0, generation=0, pids={0: 100, 1: 101}, at_s=1000.0, warm=True),
)


class Stream:
    """One controller and one agent; ranks connect with `connect`."""

    def __init__(self, agent: Bus, controller: Bus, stream: JournalStream, curves: str) -> None:
        self.stream, self.folder = stream, curves
        self.time_s = 1000.0
        self.outbox = Outbox(agent, subject_events("job", 0), node=0, source="a0-1")
        self.workers = WorkerServer("job", self.outbox, lambda said: None)
        self.service = ControllerService(
            SPEC,
            controller,
            Journal(stream, writer="c1"),
            clock=lambda: self.time_s,
            incarnation="c1",
            submitted_s=990.0,
            show=lambda snapshot: None,
            curves=CurveFiles(curves, "c1"),
        )

    async def entries(self) -> list[JournalEntry]:
        """Return the journal, as another process reads it."""
        return parse_journal(b"".join(await self.stream.read_all()).splitlines(keepends=True))

    async def bodies(self) -> list[AnyEvent | Decision]:
        return [entry.body for entry in await self.entries()]

    def curves(self) -> Curves:
        """Return what was logged, as another process reads it."""
        return read_curves(self.folder)


class FakeRank:
    """A rank's end of the line, which sends whatever bytes it is given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.acked = 0

    async def send(self, *lines: bytes) -> None:
        for line in lines:
            self.writer.write(line + b"\n")
            await self.writer.drain()

    async def emit(self, seq: int, event: AnyEvent) -> None:
        await self.send(encode(WorkerEvent(seq, event)))

    async def until_acked(self, seq: int) -> None:
        """Wait until the agent has taken over everything up to `seq`."""
        async with asyncio.timeout(PATIENCE_S):
            while self.acked < seq:
                line = await self.reader.readline()
                assert line, "the agent hung up"
                message: ToWorker = decode(line, ToWorker)
                if isinstance(message, WorkerAck):
                    self.acked = max(self.acked, message.seq)


@contextlib.asynccontextmanager
async def open_stream(
    path: str, stream: JournalStream | None = None, *buses: Bus
) -> AsyncIterator[
    tuple[Stream, Callable[[int], "contextlib.AbstractAsyncContextManager[FakeRank]"]]
]:
    """Yield a running stream and how a rank connects to it."""
    server = FakeServer()
    agent, controller = buses or (FakeBus(server), FakeBus(server))
    found = Stream(agent, controller, stream or FakeStream(), f"{path}-curves")
    await found.workers.start(path)
    tasks = [asyncio.create_task(found.service.run()), asyncio.create_task(found.outbox.run())]

    @contextlib.asynccontextmanager
    async def connect(rank: int) -> AsyncIterator[FakeRank]:
        reader, writer = await asyncio.open_unix_connection(path, limit=LINE_MAX)
        one = FakeRank(reader, writer)
        hello: FromWorker = WorkerHello("job", rank, 0, 100 + rank)
        await one.send(encode(hello))
        try:
            yield one
        finally:
            writer.close()
            await writer.wait_closed()

    for event in STARTED:  # Who is of no generation is not believed.
        found.outbox.put(event)
    assert await found.outbox.flush(PATIENCE_S)
    try:
        yield found, connect
    finally:
        await found.workers.close()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results), results
