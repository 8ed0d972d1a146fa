"""Documents that prove themselves: the last field of each is the hash of the bytes before it.

One that has no hash was written by a version before, or by a person, and is believed if it can be
read. Against decay, not malice, as the journal's lines (`model/chain.py`).
"""

from typing import Any, TypeVar

import xxhash

from perdure.model.codec import decode_stored, encode
from perdure.model.errors import ProtocolError

T = TypeVar("T")

_HASH, _END = b',"hash":"', b'"}'
_DIGITS = 16
_HASH_AT = -(len(_HASH) + _DIGITS + len(_END))


def encode_record(value: Any) -> bytes:
    """Return `value` as a document that ends in its hash; one that has no fields as it is.

    >>> from perdure.model.bus.version import Spoken
    >>> encode_record(Spoken(2, 1)).decode()
    '{"protocol":2,"protocol_min":1,"hash":"f06cda1aeb2c0e69"}'
    """
    data = encode(value)
    if not data.endswith(b"}") or len(data) < 3:
        return data
    body = data[:-1]
    return body + _HASH + xxhash.xxh3_64_hexdigest(body).encode() + _END


def decode_record(data: bytes, type_: type[T] | Any) -> T:
    """Return the `type_` in the document `data`.

    Raises:
        ProtocolError: it is none, or not as it was written.
    """
    text = data.rstrip(b"\n")
    body, tail = text[:_HASH_AT], text[_HASH_AT:]
    sealed = tail.startswith(_HASH) and tail.endswith(_END)
    if sealed and tail[len(_HASH) : -len(_END)] != xxhash.xxh3_64_hexdigest(body).encode():
        raise ProtocolError("it is not what was written: its hash is another")
    value: T = decode_stored(body + b"}" if sealed else text, type_)
    return value
