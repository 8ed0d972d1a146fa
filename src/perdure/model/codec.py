"""One codec for wire, journal and files: msgspec JSON, tagged by type.

JSON rather than MessagePack: a journal that a person can read at three in the morning is worth
more than the bytes.

JSON has no word for what is not a finite number, and none for half of a surrogate pair, and both
come out of training scripts: a loss that diverged, an exception that quotes a broken file name.
What is not finite is written as MongoDB's Extended JSON writes it, `{"$numberDouble": "NaN"}` (or
`Infinity`, `-Infinity`), which no text can be mistaken for, and is read back as the float that it
was. Half a pair is written as its escape, backslash, `ud800`, and stays that text.
"""

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from perdure.model.errors import ProtocolError

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_KEY = "$numberDouble"
_MARK = f'{{"{_KEY}":'
"""Inside a text its quotes would be escaped, so wherever this is found it is one."""
_MARK_BYTES = _MARK.encode()
_GONE = re.compile(r"unknown field `(?P<field>\w+)`(?: - at `\$(?P<path>[\w.]*)`)?")
_VALUES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: Any) -> bytes:
    """Return `value` as one JSON document without a newline."""
    try:
        data = _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_carry(msgspec.to_builtins(value, str_keys=True)))
    if b"null" not in data:  # Which is what msgspec makes of a float that is not finite.
        return data
    plain = msgspec.to_builtins(value, str_keys=True)
    return data if _is_finite(plain) else _encoder.encode(_carry(plain))


def decode(data: bytes | str, type_: type[T] | Any) -> T:
    """Return the `type_` in `data`.

    Raises:
        ProtocolError: `data` is not such a document; the message names the path in it.
    """
    decoder = _decoders.get(type_)
    try:
        if decoder is None:
            decoder = _decoders[type_] = msgspec.json.Decoder(type_)
        if (_MARK in data) if isinstance(data, str) else (_MARK_BYTES in data):
            plain = _restore(msgspec.json.decode(data))
            carried: T = msgspec.convert(plain, type_, str_keys=True)
            return carried
        value: T = decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # Not UTF-8; too deep.
        raise ProtocolError(f"malformed message: {error}") from error
    return value


def decode_stored(data: bytes, type_: type[T] | Any) -> T:
    """Return the `type_` in `data`, which an older perdure may have written.

    Fields that `type_` no longer has are left out. A job file by a person is not read by this: an
    unknown field there is an error.

    Raises:
        ProtocolError: `data` is not such a document; the message names the path in it.
    """
    value: T
    try:
        value = decode(data, type_)
    except ProtocolError as error:
        plain, found = None, _GONE.search(error.message)
        while found is not None:
            plain = _restore(msgspec.json.decode(data)) if plain is None else plain
            holder = plain
            for name in (found["path"] or "").split(".")[1:]:
                holder = holder.get(name) if isinstance(holder, dict) else None
            if not isinstance(holder, dict) or found["field"] not in holder:
                raise
            del holder[found["field"]]
            try:
                value = msgspec.convert(plain, type_, str_keys=True)
            except msgspec.ValidationError as next_:
                found = _GONE.search(str(next_))
            else:
                return value
        raise
    return value


def make_encodable(text: str) -> str:
    """Return `text` with each half of a surrogate pair as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _is_finite(plain: Any) -> bool:
    try:
        json.dumps(plain, allow_nan=False)  # At the speed of C.
    except ValueError:
        return False
    return True


def _carry(plain: Any) -> Any:
    match plain:
        case float() if not math.isfinite(plain):
            return {_KEY: "NaN" if plain != plain else "Infinity" if plain > 0 else "-Infinity"}
        case str():
            return make_encodable(plain)
        case dict():
            return {_carry(key): _carry(each) for key, each in plain.items()}
        case list() | tuple():
            return [_carry(each) for each in plain]
    return plain


def _restore(plain: Any) -> Any:
    match plain:
        case dict():
            text = plain.get(_KEY) if len(plain) == 1 else None
            if isinstance(text, str) and text in _VALUES:
                return _VALUES[text]
            return {key: _restore(each) for key, each in plain.items()}
        case list():
            return [_restore(each) for each in plain]
    return plain
