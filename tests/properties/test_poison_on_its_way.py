"""T1 end to end in one process: whatever is sent, the next good fact comes into the journal.

A rank's socket, agent, outbox, bus, inbox, controller, journal; then all that is made of a journal.
"""

import asyncio
import contextlib
import json
import tempfile
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import FakeBus, FakeServer
from tests.journals import make_series
from tests.poison import make_poison, make_values
from tests.stream import SPEC, open_stream
from tests.waiting import PATIENCE_S

from perdure.control.memory import Memory
from perdure.dash.page import render_html
from perdure.dash.text import render_text
from perdure.model.bus.wire import (
    Command,
    EventMessage,
    FromWorker,
    JoinRequest,
    Notice,
    WorkerEvent,
    subject_beats,
    subject_commands,
    subject_events,
    subject_joins,
    subject_notices,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError, RequestError
from perdure.model.events import AnyEvent, JournalEntry, RankJoined
from perdure.model.signals.progress import NodeBeat
from perdure.telemetry.accounting.ledger import LedgerFold
from perdure.telemetry.links import read_delay_matrix
from perdure.telemetry.verdicts import list_verdicts

FACT = RankJoined(generation=0, rank=1, start_step=7)


def is_numbered(line: bytes) -> bool:
    """Return whether a rank's line would take the number of one of its good events."""
    try:
        return isinstance(decode(line, FromWorker), WorkerEvent)
    except ProtocolError:
        return False


POISON = make_poison(FromWorker).filter(lambda line: not is_numbered(line))
ELSEWHERE = st.one_of(
    st.tuples(st.just(subject_events("job", 0)), make_poison(EventMessage)),
    st.tuples(st.just(subject_beats("job", 0)), make_poison(NodeBeat)),
    st.tuples(st.just(subject_commands("job")), make_poison(Command)),
    st.tuples(st.just(subject_notices("job")), make_poison(Notice)),
    st.tuples(st.just(subject_joins("job")), make_poison(JoinRequest)),
)


def read_everything(entries: list[JournalEntry]) -> None:
    """Make of the journal whatever is ever made of one."""
    memory, fold = Memory(SPEC), LedgerFold()
    for entry in entries:
        memory.replay(entry)
        fold.add(entry)
    now = entries[-1].at_s + 1
    report, series, matrix = fold.report(now), make_series(entries, now), read_delay_matrix(entries)
    snapshot = memory.fold.snapshot(now)
    render_text(report, series, width=100)
    render_html(report, snapshot, series, matrix)
    for shown in (report, snapshot, list_verdicts(entries)):
        json.loads(encode(shown), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


async def send_all(
    path: str, lines: list[bytes], events: list[AnyEvent], others: list[tuple[str, bytes]]
) -> None:
    server = FakeServer()
    bus = FakeBus(server)
    async with (
        open_stream(path, None, FakeBus(server), FakeBus(server)) as (stream, connect),
        connect(1) as rank,
    ):
        random = Random(len(lines) + 10 * len(events))
        seq = 0
        for event in random.sample(events, len(events)):
            seq += 1
            await rank.emit(seq, event)
            stream.outbox.put(event)
            for line in lines:
                await rank.send(line.replace(b"\n", b" "))
            for subject, data in others:
                with contextlib.suppress(RequestError):
                    await bus.request(subject, data, timeout_s=0.01)
                await bus.publish(subject, data)
        seq += 1
        await rank.emit(seq, FACT)
        await rank.until_acked(seq)
        assert FACT in await stream.bodies()
        read_everything(await stream.entries())


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_the_next_fact_is_journaled_and_all_is_read(data: st.DataObject) -> None:
    lines = data.draw(st.lists(POISON, max_size=3))
    events = data.draw(st.lists(make_values(AnyEvent), min_size=1, max_size=6))
    others = data.draw(st.lists(ELSEWHERE, max_size=3))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(send_all(f"{folder}/a", lines, events, others), PATIENCE_S))
