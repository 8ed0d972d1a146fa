"""No event is lost, doubled or put out of order, whatever the other side does."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.fakes import FakeBus, FakeServer
from tests.waiting import PATIENCE_S

from perdure.model.bus.wire import EventAck, EventBatch, EventMessage
from perdure.model.codec import decode, encode
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    GenerationStopped,
    MetricsLogged,
    RankExited,
    RankJoined,
    RanksStarted,
)
from perdure.model.failures import ExitRecord
from perdure.model.signals.progress import RankAccount
from perdure.service.agent import outbox as agent_outbox
from perdure.service.agent.outbox import Outbox


class Journal:
    """The controller's side: takes what is new, may stay silent, may be away."""

    def __init__(self, server: FakeServer) -> None:
        self.bus = FakeBus(server)
        self.taken: dict[str, int] = {}
        self.got: list[tuple[str, int]] = []
        self.events: list[AnyEvent] = []
        self.silent = self.messages = 0

    async def serve(self) -> None:
        await self.bus.serve("s", self._take)

    def _take(self, data: bytes, reply: Callable[[bytes], Awaitable[None]]) -> None:
        message: EventMessage = decode(data, EventMessage)
        self.messages += 1
        for batch in message.batches:
            for seq, event in enumerate(batch.events, batch.first_seq):
                if seq == self.taken.get(batch.source, 0) + 1:
                    self.taken[batch.source] = seq
                    self.got.append((batch.source, seq))
                    self.events.append(event)
        if self.silent:
            self.silent -= 1
            return
        ack = encode(EventAck(dict(self.taken)))
        self.task = asyncio.ensure_future(reply(ack))  # type: ignore[arg-type]


def stopped(generation: int) -> GenerationStopped:
    return GenerationStopped(node=0, generation=generation, at_s=0.0)


def joined(rank: int) -> RankJoined:
    return RankJoined(generation=0, rank=rank)


def answered(rank: int) -> BoundaryAnswered:
    return BoundaryAnswered(id="b1.1", rank=rank, ok=True, step=0)


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
    assert await outbox.flush(PATIENCE_S)
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
    assert await outbox.flush(PATIENCE_S)
    assert done == [2, 3, 4]
    assert journal.got == [("r", 4)]
    outbox.put_from("r", 3, joined(0), lambda: done.append(33))
    assert done[-1] == 33
    task.cancel()


async def test_ranks_that_answer_together_share_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message costs the controller a sync of its disk; an agreement asks all at once."""
    server = FakeServer()
    journal = Journal(server)
    await journal.serve()
    outbox = Outbox(FakeBus(server), "s", node=0, source="b")
    outbox.company = 3
    task = asyncio.create_task(outbox.run())
    for rank in range(3):
        outbox.put_from(f"r{rank}", 1, answered(rank), lambda: None)
        await asyncio.sleep(0)
    assert await outbox.flush(PATIENCE_S)
    assert journal.messages == 1
    outbox.put_from("r0", 2, answered(0), lambda: None)  # The others stay silent.
    assert await outbox.flush(PATIENCE_S)
    monkeypatch.setattr(agent_outbox, "_COMPANY_S", 3600.0)
    outbox.put(stopped(0))  # Nothing to wait for: it is sent at once.
    assert await outbox.flush(PATIENCE_S)
    assert journal.messages == 3
    assert journal.got == [("r0", 1), ("r1", 1), ("r2", 1), ("r0", 2), ("b", 1)]
    task.cancel()


async def test_a_message_that_the_controller_refuses_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """T1: the same message again would be refused again, and everything waits behind it."""
    server = FakeServer()
    got: list[AnyEvent] = []
    taken = {"a": 0}
    tasks = []

    def take(data: bytes, reply: Callable[[bytes], Awaitable[None]]) -> None:
        (batch,) = decode(data, EventMessage).batches
        ack = EventAck(taken, refused="" if taken["a"] else "it is no message")
        if ack.refused and joined(0) not in batch.events:
            ack = EventAck(taken)
            if batch.first_seq - batch.skipped == 1:
                got.extend(batch.events)
                taken["a"] = batch.first_seq + len(batch.events) - 1
        tasks.append(asyncio.ensure_future(reply(encode(ack))))  # type: ignore[arg-type]

    await FakeBus(server).serve("s", take)
    outbox = Outbox(FakeBus(server), "s", node=0, source="a")
    done: list[int] = []
    for rank in range(40):
        outbox.put(joined(rank), lambda rank=rank: done.append(rank))  # type: ignore[misc]
    task = asyncio.create_task(outbox.run())
    assert await outbox.flush(PATIENCE_S)
    task.cancel()
    assert got == [joined(rank) for rank in range(32, 40)]
    assert done == list(range(40))
    assert "32 events dropped, which the controller refuses: it is no message" in caplog.text


async def test_an_event_that_cannot_be_made_small_enough_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = FakeServer(payload_max=64 << 10)
    journal = Journal(server)
    journal.taken["a"] = 1  # The number of the large one: nobody else comes to declare it skipped.
    await journal.serve()
    outbox = Outbox(FakeBus(server), "s", node=0, source="a")
    large = dict.fromkeys(range(10**9, 10**9 + 10_000), 1)
    outbox.put(RanksStarted(node=0, generation=0, pids=large, at_s=0.0, warm=True))
    outbox.put(stopped(0))
    task = asyncio.create_task(outbox.run())
    assert await outbox.flush(PATIENCE_S)
    task.cancel()
    assert journal.got == [("a", 2)]
    assert "event 1 of a dropped: it is too large" in caplog.text


async def test_numbers_that_never_came_are_declared_skipped() -> None:
    """T1: what the agent could not read has left a gap that nobody will ever fill."""
    server = FakeServer()
    taken = {"r": 3}
    sent: list[EventBatch] = []
    tasks = []

    def take(data: bytes, reply: Callable[[bytes], Awaitable[None]]) -> None:
        message: EventMessage = decode(data, EventMessage)
        for batch in message.batches:
            sent.append(batch)
            if batch.first_seq - batch.skipped <= taken[batch.source] + 1:
                taken[batch.source] = batch.first_seq + len(batch.events) - 1
        tasks.append(asyncio.ensure_future(reply(encode(EventAck(dict(taken))))))  # type: ignore[arg-type]

    await FakeBus(server).serve("s", take)
    outbox = Outbox(FakeBus(server), "s", node=0, source="a")
    for seq in (7, 8, 10):
        outbox.put_from("r", seq, joined(seq), lambda: None)
    task = asyncio.create_task(outbox.run())
    assert await outbox.flush(PATIENCE_S)
    task.cancel()
    assert taken == {"r": 10}
    assert {batch.first_seq: batch.skipped for batch in sent if batch.skipped} == {7: 3, 10: 1}


def metrics(values: int) -> MetricsLogged:
    return MetricsLogged(generation=0, rows=((1, {f"metric-{n}": 0.5 for n in range(values)}),))


def crashed(text: str) -> RankExited:
    record = ExitRecord(rank=1, generation=0, pid=7, at_s=1.0, code=1, traceback=text)
    return RankExited(node=0, record=record, account=RankAccount(), detected_s=1.0)


@pytest.mark.parametrize("payload_max", [64 << 10, 1 << 20, 8 << 20])
async def test_no_message_is_larger_than_the_server_takes_it(payload_max: int) -> None:
    """T3: 32 batches of metrics exceeded it, and a rank's end behind them was never journaled."""
    server = FakeServer(payload_max=payload_max)
    journal = Journal(server)
    await journal.serve()
    outbox = Outbox(FakeBus(server), "s", node=0, source="a")
    for rank in range(40):
        outbox.put_from(f"r{rank}", 1, metrics(10_000), lambda: None)
    outbox.put(crashed("x" * 20_000_000))
    outbox.put(stopped(0))
    task = asyncio.create_task(outbox.run())
    assert await outbox.flush(PATIENCE_S)
    task.cancel()
    assert journal.got == [*((f"r{rank}", 1) for rank in range(40)), ("a", 1), ("a", 2)]
    (end,) = [event for event in journal.events if isinstance(event, RankExited)]
    assert (end.record.rank, end.record.code) == (1, 1)
    assert "characters, cut]" in end.record.traceback
    told = [event for event in journal.events if isinstance(event, MetricsLogged)]
    assert sum(event.dropped + len(event.rows) * 10_000 for event in told) == 400_000
    assert any(event.dropped for event in told) == (payload_max < 1 << 18)


async def test_while_nobody_answers_metrics_are_dropped_and_facts_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T3: a queue is bounded in bytes."""
    monkeypatch.setattr(agent_outbox, "QUEUE_BYTES_MAX", 1 << 20)
    server = FakeServer()
    outbox = Outbox(FakeBus(server), "s", node=0, source="a")
    task = asyncio.create_task(outbox.run())
    for seq in range(1, 2001, 2):
        outbox.put_from("r", seq, metrics(1000), lambda: None)
        outbox.put_from("r", seq + 1, joined(seq), lambda: None)
    assert sum(len(encode(queued.event)) for queued in outbox._queue) < 1 << 20
    journal = Journal(server)
    await journal.serve()
    assert await outbox.flush(20)
    task.cancel()
    assert [e for e in journal.events if isinstance(e, RankJoined)] == [
        joined(seq) for seq in range(1, 2001, 2)
    ]
    told = [event for event in journal.events if isinstance(event, MetricsLogged)]
    assert sum(event.dropped + 1000 * len(event.rows) for event in told) == 1_000_000
    assert told[-1].rows  # The newest are told.


async def test_sources_that_have_nothing_to_tell_are_forgotten() -> None:
    """T3: each process of each generation is a source, and a peer may invent more."""
    server = FakeServer()
    journal = Journal(server)
    await journal.serve()
    outbox = Outbox(FakeBus(server), "s", node=0, source="a0-1")
    task = asyncio.create_task(outbox.run())
    done: list[int] = []
    try:
        for number in range(2 * agent_outbox.SOURCES_KEPT):
            outbox.put_from(f"g0-r0-p{number}", 1, joined(0), lambda: done.append(1))
        assert await outbox.flush(20)
        assert len(outbox._queued) <= agent_outbox.SOURCES_KEPT
        assert outbox._taken.keys() <= outbox._queued.keys()
        outbox.put_from("g0-r0-p0", 1, joined(0), lambda: done.append(0))
        outbox.put_from("g0-r0-p0", 2, joined(1), lambda: done.append(2))
        outbox.put(stopped(0))
        assert await outbox.flush(PATIENCE_S)
    finally:
        task.cancel()
    assert done == [*[1] * (2 * agent_outbox.SOURCES_KEPT), 0, 2]
    assert len(journal.got) == 2 * agent_outbox.SOURCES_KEPT + 2, "a repeated event is not doubled"
