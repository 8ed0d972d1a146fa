"""T1: no message can stop the stream: what cannot be read is dropped, and what follows goes on."""

import math
from pathlib import Path

import pytest
from tests.fakes import FakeBus, FakeServer
from tests.stream import FakeRank, Stream, open_stream
from tests.waiting import PATIENCE_S

from perdure.model.bus.wire import EventAck, EventBatch, EventMessage, WorkerEvent, subject_events
from perdure.model.codec import decode, encode
from perdure.model.events import GenerationStopped, MetricsLogged, RankJoined
from perdure.service.controller.inbox import NAMES_MAX

JOINED = RankJoined(generation=0, rank=1)


async def check_alive(stream: Stream, rank: FakeRank, seq: int, of: int = 1) -> None:
    """The next good fact comes into the journal, and its rank hears so."""
    fact = RankJoined(generation=0, rank=of, start_step=seq)
    await rank.emit(seq, fact)
    await rank.until_acked(seq)
    assert fact in await stream.bodies()


POISONS = {
    "what older ranks made of nan": b'{"type":"WorkerEvent","seq":1,"event":{"type":'
    b'"MetricsLogged","generation":0,"rows":[[1,{"loss":null}]]}}',
    "truncated": encode(WorkerEvent(1, JOINED))[:-9],
    "an unknown event": b'{"type":"WorkerEvent","seq":1,"event":{"type":"RankSaidMore"}}',
    "no number": b'{"type":"WorkerEvent","event":{}}',
    "half a pair": encode(WorkerEvent(1, JOINED)).replace(b"resumable", b"") + b'"\\ud800"',
    "not UTF-8": b"\xff\xfe\x00",
    "too deep": b'{"type":"WorkerEvent","seq":1,"event":' + b"[" * 100_000,
    "too long": b"x" * (17 << 20),
}


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
async def test_a_line_that_cannot_be_read_stops_nothing(
    tmp_path: Path, poison: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_stream(str(tmp_path / "a")) as (stream, connect), connect(1) as rank:
        await rank.send(poison)
        await check_alive(stream, rank, 2)
        (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("dropped: ")]
        assert line.startswith("dropped: of rank 1: malformed message")
        assert line.isprintable()


async def test_a_flood_of_nonsense_costs_the_journal_little(tmp_path: Path) -> None:
    async with open_stream(str(tmp_path / "a")) as (stream, connect), connect(1) as rank:
        bad = POISONS["an unknown event"]
        for seq in range(1, 3001):
            await rank.send(bad.replace(b'"seq":1', b'"seq":%d' % seq))
        await check_alive(stream, rank, 3001)
        assert len(await stream.entries()) < 20


async def test_values_that_are_not_finite_arrive(tmp_path: Path) -> None:
    async with open_stream(str(tmp_path / "a")) as (stream, connect), connect(0) as rank:
        await rank.emit(1, MetricsLogged(generation=0, rows=((3, {"loss": math.nan}),)))
        await rank.until_acked(1)
        assert math.isnan(stream.curves().list_newest()["loss"])


async def test_a_lying_agent_delays_nobody(tmp_path: Path) -> None:
    """An event that cannot be read is dropped alone."""
    server = FakeServer()
    bus = FakeBus(server)
    buses = (FakeBus(server), FakeBus(server))
    async with open_stream(str(tmp_path / "a"), None, *buses) as (stream, connect):
        subject = subject_events("job", 0)
        good = encode(EventMessage(0, (EventBatch("g0-r1-p9", 1, (JOINED, JOINED)),)))
        async with connect(1) as rank:
            await check_alive(stream, rank, 1)
        for number in range(100):
            bad = good.replace(b'"rank":1', b'"rank":"one"', 1).replace(b"-p9", b"-p9%d" % number)
            await bus.request(subject, bad, timeout_s=PATIENCE_S)
        stream.time_s += 61.0
        async with connect(0) as rank:
            await check_alive(stream, rank, 1, of=0)
        known = {entry.source for entry in await stream.entries()}
        assert len(known) <= NAMES_MAX + 30


async def test_a_number_that_lies_swallows_nothing(tmp_path: Path) -> None:
    """T1: taken at its word, everything that the rank says afterwards would be old."""
    async with open_stream(str(tmp_path / "a")) as (stream, connect), connect(1) as rank:
        await rank.emit(1, JOINED)
        for number in (2**64, 2**62, 40):
            await rank.emit(number, JOINED)
            bad = POISONS["an unknown event"].replace(b'"seq":1', b'"seq":%d' % (number % 10**18))
            await rank.send(bad)
        await check_alive(stream, rank, 2)
        await check_alive(stream, rank, 3)


async def test_a_peer_that_invents_sources_delays_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """T3: the number of the newest event of each was remembered for ever."""
    server = FakeServer()
    bus = FakeBus(server)
    buses = (FakeBus(server), FakeBus(server))
    async with open_stream(str(tmp_path / "a"), None, *buses) as (stream, connect):
        event = GenerationStopped(node=0, generation=0, at_s=1000.0)
        for number in range(400):
            message = EventMessage(0, (EventBatch(f"a0-{number}", 1, (event,)),))
            answer = await bus.request(
                subject_events("job", 0), encode(message), timeout_s=PATIENCE_S
            )
        assert decode(answer, EventAck).seqs == {"a0-399": 0}
        stream.time_s += 61.0
        async with connect(1) as rank:
            await check_alive(stream, rank, 1)
        entries = await stream.entries()
        assert len({entry.source for entry in entries}) <= NAMES_MAX + 30
    assert "event of the agent of node 0: more new sources of events" in caplog.text
