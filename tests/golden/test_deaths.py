"""A controller may die after any entry; its successor takes over and says again what is open."""

import copy

import pytest

from perdure.control.memory import Memory, decode_memory, encode_memory
from perdure.control.orders import REPEAT_S, OrderBook
from perdure.model.events import ControllerStarted, Decision, JobSubmitted
from perdure.model.orders import RecordEvent, ResumeRanks, SendBoundary
from tests.golden.decisions import find_recorded, find_spec, read_recorded

RECORDED = [name for name in find_recorded() if not name.startswith("early-")]


def list_open(book: OrderBook) -> set[str]:
    """Return the levels that `book` would say again, but for agreements that something else ends.

    A later agreement ends one that was given up wherever it is heard of, and a resume whatever it
    resumes.
    """
    sent = copy.deepcopy(book).repeat(REPEAT_S)
    orders = [order for _, message in sent for order in message.orders]
    resumed = {order.id for order in orders if isinstance(order, ResumeRanks)}
    over = [
        order
        for order in orders
        if isinstance(order, SendBoundary) and (order.move == "abort" or order.id in resumed)
    ]
    return {order.level for order in orders if order not in over}


@pytest.mark.parametrize("name", RECORDED)
def test_a_successor_takes_over_after_any_entry_and_no_order_is_lost(name: str) -> None:
    entries = read_recorded(name)
    assert isinstance(entries[0].body, JobSubmitted)
    spec = entries[0].body.spec
    memory, book = Memory(spec), OrderBook(spec, "first")
    book.start(-REPEAT_S)
    for entry in entries:
        actions = memory.replay(entry)
        if not isinstance(entry.body, Decision):
            book.note(entry.body)
        for action in actions:
            book.take(action)
        successor, its = decode_memory(encode_memory(memory), spec).machine, OrderBook(spec, "next")
        its.start(-REPEAT_S)
        for action in successor.handle(entry.at_s, ControllerStarted(incarnation="next")):
            its.take(action)
        if not successor.state.over:
            assert list_open(its) >= list_open(book), entry


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_decision_adds_to_the_journal_is_added_by_whoever_takes_over(name: str) -> None:
    """A turn is several groups of the journal where it is large, and each may be the last."""
    memory, asked = Memory(find_spec(entries := read_recorded(name))), 0
    for entry in entries:
        actions = memory.replay(entry)
        records = [a.event for a in actions if isinstance(a, RecordEvent)]
        if not records:
            continue
        asked += len(records)
        successor = decode_memory(encode_memory(memory), memory.machine.state.the_spec()).machine
        again = successor.handle(entry.at_s, ControllerStarted(incarnation="next"))
        told = [type(a.event) for a in again if isinstance(a, RecordEvent)]
        assert not set(map(type, records)) - set(told), entry
    assert not memory.machine.state.unwritten
    assert asked or "invited" not in name
