"""Strategies for whatever a message may hold, derived from its type, and for what it may not.

`make_values(type)` gives messages that are well typed and extreme: numbers that are not finite or
do not fit into 64 bits, halves of surrogate pairs, empty and long texts. `make_poison(type)` gives
bytes that may or may not be one: fields missing, unknown or of another type, other tags, cut off.

A message is made from one drawn seed, not field by field: JobSpec alone has a hundred fields, and
a seed is drawn in no time.
"""

import json
import math
import re
from collections.abc import Callable
from operator import ge, gt, le, lt
from random import Random
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

TEXTS = (
    "", "x", "g0-r1-p7", "\ud800", "lo\udcffss", "\x00\x1b]52;c;aGk=\x07", "\u202e\u2028\n",
    "\U0001f525", '{"$numberDouble":"NaN"}', "\x1by" * 1000, "z" * 70_000,
)  # fmt: skip
FLOATS = (0.0, 1.5, -0.0, 1e3, 1.8e308, 5e-324, math.nan, math.inf, -math.inf)
INTS = (0, 0, 1, 1, 2, -1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30)
NONSENSE = (
    b"", b"null", b"[" * 100_000, b'{"a":' * 100_000, b'"\\ud800"', b"NaN", b"\xff\xfe", b"1e999",
    b"9" * 10_000,
)  # fmt: skip


def make_values(type_: Any) -> st.SearchStrategy[Any]:
    """Return well-typed values of `type_`, as extreme as it admits."""
    info = mi.type_info(type_)

    def make(random: Random) -> Any:
        return msgspec.convert(_make(info, random), type_, str_keys=True)

    return _seeded(make)


def make_poison(type_: Any) -> st.SearchStrategy[bytes]:
    """Return bytes that are nearly a message of `type_`."""
    info = mi.type_info(type_)

    def make(random: Random) -> bytes:
        kind = random.randrange(8)
        if kind == 0:
            return random.choice(NONSENSE)
        if kind == 1:
            return _dump(_make_any(random))
        plain = _make(info, random)
        data = _dump(_spoil(plain, random) if kind < 7 else plain)
        return data[: random.randrange(len(data))] if kind == 7 else data

    return _seeded(make)


def _seeded(make: Callable[[Random], Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 2**64 - 1).map(lambda seed: make(Random(seed)))


def _dump(plain: Any) -> bytes:
    """Return it as a peer may write it that is not perdure: what is not finite is no JSON."""
    return json.dumps(plain).encode()


def _spoil(plain: Any, random: Random) -> Any:
    """Return `plain` with one place in it changed."""
    place = plain
    while isinstance(place, dict | list) and place:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = random.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and random.random() < 0.7:
            place = place[key]
            continue
        what = random.randrange(3)
        if what == 0:
            del place[key]
        elif what == 1 and isinstance(place, dict):
            place[random.choice(TEXTS)] = _make_any(random)
        else:
            place[key] = _make_any(random)
        break
    return plain


def _make_any(random: Random, depth: int = 0) -> Any:
    kind = random.randrange(7 if depth < 3 else 5)
    match kind:
        case 0:
            return None
        case 1:
            return random.random() < 0.5
        case 2:
            return random.choice(INTS)
        case 3:
            return random.choice(FLOATS)
        case 4:
            return random.choice(TEXTS)
        case 5:
            return [_make_any(random, depth + 1) for _ in range(random.randrange(3))]
    return {random.choice(TEXTS): _make_any(random, depth + 1) for _ in range(random.randrange(3))}


def _make(info: Any, random: Random) -> Any:
    match info:
        case mi.StructType() | mi.DataclassType():
            return _make_struct(info, random)
        case mi.UnionType():
            return _make(random.choice(info.types), random)
        case mi.LiteralType():
            return random.choice(info.values)
        case mi.ListType() | mi.VarTupleType() | mi.SetType() | mi.FrozenSetType():
            return [_make(info.item_type, random) for _ in range(random.choice((0, 1, 1, 2)))]
        case mi.TupleType():
            return [_make(each, random) for each in info.item_types]
        case mi.DictType():
            size = random.choice((0, 1, 2))
            return {
                str(_make(info.key_type, random)): _make(info.value_type, random)
                for _ in range(size)
            }
        case mi.StrType():
            return random.choice([text for text in TEXTS if _is_like(text, info)])
        case mi.IntType():
            return random.choice([number for number in INTS if _is_within(number, info)])
        case mi.FloatType():
            return random.choice([number for number in FLOATS if _is_within(number, info)])
        case mi.BoolType():
            return random.random() < 0.5
        case mi.NoneType():
            return None
        case mi.AnyType():
            return _make_any(random)
    raise AssertionError(f"nothing is known of {info}")


def _is_within(number: float, info: Any) -> bool:
    return all(
        limit is None or holds(number, limit)
        for limit, holds in ((info.ge, ge), (info.gt, gt), (info.le, le), (info.lt, lt))
    )


def _is_like(text: str, info: Any) -> bool:
    lengths = (info.min_length or 0) <= len(text) <= (info.max_length or 1 << 30)
    return lengths and (info.pattern is None or re.search(info.pattern, text) is not None)


def _make_struct(info: Any, random: Random) -> Any:
    if getattr(info, "array_like", False):
        return [_make(one.type, random) for one in info.fields]
    made = {}
    if getattr(info, "tag_field", None):
        made[info.tag_field] = info.tag
    for one in info.fields:
        if one.required or random.random() < 0.5:
            made[one.encode_name] = _make(one.type, random)
    return made
