"""No event is lost, doubled or put out of order, whatever the other side does."""

import asyncio
from collections.abc import Awaitable, Callable

from perdure.model.codec import decode, encode
from perdure.model.events import GenerationStopped, RankJoined
from perdure.model.wire import EventAck, EventMessage
from perdure.service.agent_outbox import Outbox
from perdure.service.ports import FakeBus, FakeServer


class Journal:
    """The controller's side: takes what is new, may stay silent, may be away."""

    def __init__(self, server: FakeServer) -> None:
        self.bus = FakeBus(server)
        self.taken: dict[str, int] = {}
        self.got: list[tuple[str, int]] = []
        self.silent = 0

    async def serve(self) -> None:
        await self.bus.serve("s", self._take)

    def _take(self, data: bytes, reply: Callable[[bytes], Awaitable[None]]) -> None:
        message: EventMessage = decode(data, EventMessage)
        for seq, _ in enumerate(message.events, message.first_seq):
            if seq == self.taken.get(message.source, 0) + 1:
                self.taken[message.source] = seq
                self.got.append((message.source, seq))
        if self.silent:
            self.silent -= 1
            return
        ack = encode(EventAck(self.taken.get(message.source, 0)))
        self.task = asyncio.ensure_future(reply(ack))  # type: ignore[arg-type]


def stopped(generation: int) -> GenerationStopped:
    return GenerationStopped(node=0, generation=generation, at_s=0.0)


def joined(rank: int) -> RankJoined:
    return RankJoined(generation=0, rank=rank)


async def test_order_is_kept_over_sources_and_outages() -> None:
    server = FakeServer()
    journal = Journal(server)
    outbox = Outbox(FakeBus(server), "s", node=0, source="a")
    done: list[str] = []
    task = asyncio.create_task(outbox.run())
    outbox.put(stopped(0), lambda: done.append("a1"))
    outbox.put_from("r", 1, joined(1), lambda: done.append("r1"))
    outbox.put_from("r", 2, joined(1), lambda: done.append("r2"))
    outbox.put_from("r", 2, joined(1), lambda: done.append("never"))
    outbox.put(stopped(1), lambda: done.append("a2"))
    assert not await outbox.flush(0.01)  # Nobody serves yet.
    assert done == []
    journal.silent = 1  # The first answer is lost.
    await journal.serve()
    assert await outbox.flush(5)
    assert journal.got == [("a", 1), ("r", 1), ("r", 2), ("a", 2)]
    assert done == ["a1", "r1", "r2", "a2"]
    task.cancel()


async def test_what_the_journal_has_is_acknowledged_at_once() -> None:
    """A rank that reconnects to the next agent repeats what that agent never saw."""
    server = FakeServer()
    journal = Journal(server)
    await journal.serve()
    journal.taken["r"] = 3
    outbox = Outbox(FakeBus(server), "s", node=0, source="b")
    task = asyncio.create_task(outbox.run())
    done: list[int] = []
    for seq in (2, 3, 4):
        outbox.put_from("r", seq, joined(0), lambda seq=seq: done.append(seq))  # type: ignore[misc]
    assert await outbox.flush(5)
    assert done == [2, 3, 4]
    assert journal.got == [("r", 4)]
    outbox.put_from("r", 3, joined(0), lambda: done.append(33))
    assert done[-1] == 33
    task.cancel()
