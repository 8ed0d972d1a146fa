"""The agent's end of the line, with the rank's real end at the other."""

import asyncio
from pathlib import Path

from tests.fakes import FakeBus, FakeServer
from tests.waiting import PATIENCE_S

from perdure.agent.messages import WorkerSaid
from perdure.model.bus.wire import EventAck, EventMessage, WorkerHello, WorkerQuery, WorkerSignal
from perdure.model.codec import decode, encode
from perdure.model.events import AnyEvent, RankJoined
from perdure.model.orders import SendBoundary
from perdure.service.agent.outbox import Outbox
from perdure.service.agent.ranks import WorkerServer
from perdure.service.ports import Reply
from perdure.worker.control import Control

BOUNDARY = SendBoundary(
    id="b1.1", move="prepare", kind="stop", step=3, ranks=(1,), generation=0, reason=""
)


async def test_a_rank_and_two_agents(tmp_path: Path) -> None:
    server = FakeServer()
    journal: list[tuple[str, AnyEvent]] = []
    taken: dict[str, int] = {}
    tasks: list[asyncio.Future[None]] = []

    def take(data: bytes, reply: Reply) -> None:
        message: EventMessage = decode(data, EventMessage)
        for batch in message.batches:
            for seq, event in enumerate(batch.events, batch.first_seq):
                if seq == taken.get(batch.source, 0) + 1:
                    taken[batch.source] = seq
                    journal.append((batch.source, event))
        tasks.append(asyncio.ensure_future(reply(encode(EventAck(dict(taken))))))

    await FakeBus(server).serve("s", take)
    said: asyncio.Queue[WorkerSaid] = asyncio.Queue()
    heard: asyncio.Queue[SendBoundary] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    path = str(tmp_path / "a")
    control = Control(path, WorkerHello("j", 1, 0, 77))
    control.obey(lambda order: loop.call_soon_threadsafe(heard.put_nowait, order), SendBoundary)
    control.emit(RankJoined(generation=0, rank=1))
    control.start()
    try:
        for agent in ("a1", "a2"):
            outbox = Outbox(FakeBus(server), "s", node=0, source=agent)
            sending = asyncio.create_task(outbox.run())
            workers = WorkerServer("j", outbox, said.put_nowait)
            await workers.start(path)
            async with asyncio.timeout(PATIENCE_S):
                assert isinstance((await said.get()).message, WorkerHello)
                assert await asyncio.to_thread(control.drain, PATIENCE_S)
                control.query("b1.1")
                question = await said.get()
                assert question == WorkerSaid(rank=1, generation=0, message=WorkerQuery("b1.1"))
                workers.send(1, BOUNDARY)
                workers.send(0, BOUNDARY)
                assert await heard.get() == BOUNDARY
                control.signal(15)
                assert (await said.get()).message == WorkerSignal(15)
            await workers.close()
            sending.cancel()
            control.emit(RankJoined(generation=0, rank=1, start_step=5))
        assert journal == [
            ("g0-r1-p77", RankJoined(generation=0, rank=1)),
            ("g0-r1-p77", RankJoined(generation=0, rank=1, start_step=5)),
        ]
    finally:
        await asyncio.to_thread(control.close)
        await asyncio.gather(*tasks)


async def test_strangers_are_turned_away(tmp_path: Path) -> None:
    outbox = Outbox(FakeBus(), "s", node=0, source="a")
    said: list[WorkerSaid] = []
    workers = WorkerServer("j", outbox, said.append)
    path = str(tmp_path / "a")
    await workers.start(path)
    for line in (encode(WorkerHello("other", 1, 0, 77)), encode(WorkerQuery("b1")), b"{"):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line + b"\n")
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()
        await writer.wait_closed()
    assert said == []
    await workers.close()
