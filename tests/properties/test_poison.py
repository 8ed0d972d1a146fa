"""T1, T2, T3 as properties: every message there is, with whatever it may and may not hold."""

import json
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.poison import make_poison, make_values

from perdure.model import events
from perdure.model.bus import wire
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.model.events import AnyEvent
from perdure.model.fitting import fit_beat, fit_event
from perdure.model.signals.progress import NodeBeat

EVENTS = typing.get_args(AnyEvent)
MESSAGES: list[Any] = [
    *EVENTS, *typing.get_args(wire.FromWorker), *typing.get_args(wire.ToWorker),
    *typing.get_args(wire.FromKeeper), *typing.get_args(wire.ToKeeper),
    events.Decision, events.JournalEntry, wire.EventMessage, wire.EventAck, wire.NodeOrder,
    wire.Command, wire.CommandReply, wire.Notice, wire.JoinRequest, NodeBeat,
]  # fmt: skip
each = pytest.mark.parametrize("type_", MESSAGES, ids=lambda type_: type_.__name__)


def refuse(word: str) -> None:
    pytest.fail(f"{word} is no JSON")


@each
@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_every_message_comes_back_as_it_was_and_fits(type_: Any, data: st.DataObject) -> None:
    value = data.draw(make_values(type_))
    document = encode(value)
    told = json.loads(document, parse_constant=refuse)
    assert json.loads(encode(decode(document, type_))) == told  # A default of 0 comes as 0.0.
    if type_ in EVENTS and (fitting := fit_event(value, 20_000)) is not None:
        assert type(fitting) is type_
        assert len(encode(fitting)) <= 20_000


@each
@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_whatever_is_no_message_is_refused_in_one_way(type_: Any, data: st.DataObject) -> None:
    document = data.draw(make_poison(type_))
    try:
        value = decode(document, type_)
    except ProtocolError:
        return
    assert encode(decode(encode(value), type_)) == encode(value)


@given(make_values(NodeBeat))
@settings(max_examples=20, deadline=None)
def test_a_heartbeat_keeps_what_it_is_for(beat: NodeBeat) -> None:
    thin = fit_beat(beat, 1000)
    assert [r.rank for r in thin.ranks] == [r.rank for r in beat.ranks]
