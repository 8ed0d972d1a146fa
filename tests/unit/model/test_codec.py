"""The codec carries what JSON has no word for, and refuses the rest in one way."""

import json
import math
import tracemalloc
from typing import Any

import msgspec
import pytest

from perdure.model.bus.wire import WorkerEvent
from perdure.model.codec import decode, decode_stored, encode
from perdure.model.errors import ProtocolError
from perdure.model.events import (
    CommandReceived,
    JobSubmitted,
    JournalEntry,
    MetricsLogged,
    RankJoined,
)
from perdure.model.input.plain import make_plain
from perdure.model.job import BusConfig, JobSpec


def test_what_is_not_finite_comes_back_as_it_was() -> None:
    """T1: a loss that diverged is a value like any other, in valid JSON."""
    rows = ((3, {"loss": math.nan, "up": math.inf, "down": -math.inf, "null": 1.5}),)
    data = encode(WorkerEvent(1, MetricsLogged(generation=0, rows=rows)))
    json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    event = decode(data, WorkerEvent).event
    assert math.isnan(event.rows[0][1]["loss"])
    assert {k: v for k, v in event.rows[0][1].items() if k != "loss"} == {
        "up": math.inf, "down": -math.inf, "null": 1.5,
    }  # fmt: skip
    assert encode(WorkerEvent(1, event)) == data


@pytest.mark.parametrize("value", [math.inf, None, "null", "NaN", '{"$numberDouble":"NaN"}', 2**70])
def test_values_of_any_type_are_not_mistaken_for_each_other(value: Any) -> None:
    event = CommandReceived(id="c", kind="set", args={"deep": [{"x": value}]})
    assert decode(encode(event), CommandReceived) == event


def test_halves_of_surrogate_pairs_become_text() -> None:
    """T2: a text that cannot be encoded is told by its escapes."""
    event = MetricsLogged(generation=0, rows=((1, {"lo\udc80ss": 1.0}),))
    back = decode(encode(event), MetricsLogged)
    assert back.rows == ((1, {"lo\\udc80ss": 1.0}),)
    assert decode(encode({"a": ["\ud800", math.nan]}), Any)["a"][0] == "\\ud800"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\x00", b"\xff\xfe", b'"\xff"', b'"\\ud800"', b"NaN", b"1e999", b"null",
        b"[" * 100_000, b'{"a":' * 100_000, b'{"type":"Nobody"}', b'{"type":"RankJoined"}',
        b'{"type":"RankJoined","generation":{"$numberDouble":"NaN"},"rank":0}',
        b'{"type":"RankJoined","generation":0,"rank":{"$numberDouble":[]}}',
        b'{"type":"RankJoined","generation":0,"rank":0,"depth":"\xed\xa0\x80"}',
    ],
)  # fmt: skip
def test_whatever_is_no_message_is_refused_in_one_way(data: bytes) -> None:
    """T1: an error that no door expects would end the loop that reads."""
    with pytest.raises(ProtocolError):
        decode(data, RankJoined)


def test_an_example_is_printable_bounded_and_cheap() -> None:
    data = b"\x1b]52;c;aGk=\x07\xff\xed\xa0\x80" + b"x" * 10_000_000
    tracemalloc.start()
    text = make_plain(data)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert text.isprintable()
    assert len(text) <= 200
    assert make_plain("kept: Größe, §1") == "kept: Größe, §1"
    assert make_plain("a\n\x1b[2J\u202e\udc80") == "a\\n\\x1b[2J\\u202e\\udc80"


def test_a_document_of_an_older_version_is_read_without_the_fields_that_are_gone() -> None:
    """Each removed setting made the journals unreadable that name it."""
    entry = JournalEntry(1, 2.0, JobSubmitted(spec=JobSpec(name="a", script="x.py"), at_s=1.0))
    old = msgspec.json.decode(encode(entry))
    old["body"]["spec"]["bus"] = {"replicas": 3, "lease_s": None, "orphan_s": 7.0}
    old["body"]["spec"]["gone"] = [1]
    old["body"]["gone"] = {}
    found = decode_stored(msgspec.json.encode(old), JournalEntry)
    assert found.body.spec.bus == BusConfig(orphan_s=7.0)
    with pytest.raises(ProtocolError, match="unknown field"):
        decode(msgspec.json.encode(old), JournalEntry)
    old["body"]["spec"]["nproc"] = "two"
    with pytest.raises(ProtocolError, match="malformed"):
        decode_stored(msgspec.json.encode(old), JournalEntry)
