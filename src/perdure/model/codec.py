"""One codec for wire, journal and files: msgspec JSON, tagged by type.

JSON rather than MessagePack: a journal that a person can read at three in the morning is worth
more than the bytes.
"""

from typing import Any, TypeVar

import msgspec

from perdure.model.errors import ProtocolError

T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode(value: Any) -> bytes:
    """Return `value` as one JSON document without a newline."""
    return _encoder.encode(value)


def decode(data: bytes | str, type_: type[T] | Any) -> T:
    """Return the `type_` in `data`.

    Raises:
        ProtocolError: `data` is not such a document; the message names the path in it.
    """
    decoder = _decoders.get(type_)
    if decoder is None:
        decoder = _decoders[type_] = msgspec.json.Decoder(type_)
    try:
        value: T = decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
    return value
