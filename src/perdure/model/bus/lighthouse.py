"""torchft's lighthouse protocol: the bytes of its two gRPC calls, Quorum and Heartbeat.

Only the fields that a lighthouse needs are read. A member is kept as the bytes it came in, and
handed to the others as these, so that fields of newer versions pass through untouched.

    LighthouseQuorumRequest  { QuorumMember requester = 1 }
    LighthouseQuorumResponse { Quorum quorum = 1 }
    Quorum       { int64 quorum_id = 1; repeated QuorumMember participants = 2; Timestamp created = 3 }
    QuorumMember { replica_id = 1; address = 2; store_address = 3; step = 4; world_size = 5;
                   shrink_only = 6; data = 7; commit_failures = 8 }
    LighthouseHeartbeatRequest { string replica_id = 1 }

A lighthouse may also call a replica's manager: `Kill`, with a KillRequest { string msg = 1 }.
"""  # noqa: E501

from collections.abc import Iterator

import msgspec

from perdure.model.errors import ProtocolError

SERVICE = "torchft.LighthouseService"
KILL = "/torchft.ManagerService/Kill"
PATIENCE = {
    "TORCHFT_QUORUM_TIMEOUT_SEC": "86400",
    "TORCHFT_QUORUM_RETRIES": "1000000",  # 0.1 s apart
}
"""With these a manager waits where its group is held, and while the lighthouse is started anew."""
ENDED_KEPT = 32
"""Groups of those that others start of which nothing is heard any more: so many are remembered, and
shown. A month has thousands of them, and the journal has them all."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_STEP, _WORLD_SIZE = 4, 5
_TEXT_MAX = 1000
"""Bytes of a name or an address: each is journaled and shown."""


class Member(msgspec.Struct, frozen=True):
    """One replica group as it introduces itself with each request for a quorum."""

    replica: str
    """Its replica id, such as `train_0:9f2c...`; a new one with each life."""
    store: str
    """Where its own store listens: tells which group it is."""
    step: int
    """Committed steps."""
    shrink_only: bool
    commit_failures: int
    """In a row, this one included: the last step was not committed."""
    raw: bytes
    """The whole of it."""
    manager: str = ""
    """Where its manager listens, such as `http://host:port`."""
    ranks: int = 0
    """How many it has; 0: it does not say."""


def parse_request(data: bytes) -> Member:
    """Return who asks for a quorum.

    Raises:
        ProtocolError: it is no such request.
    """
    raw = next((value for field, value in _fields(data) if field == 1), None)
    if not isinstance(raw, bytes):
        raise ProtocolError("a request for a quorum without a requester")
    text = {1: b"", 2: b"", 3: b""}
    number = {_STEP: 0, _WORLD_SIZE: 0, 6: 0, 8: 0}
    for field, value in _fields(raw):
        if field in text and isinstance(value, bytes):
            text[field] = value
        elif field in number and isinstance(value, int):
            number[field] = value
    if not text[1]:
        raise ProtocolError("a request for a quorum without a replica id")
    if any(len(value) > _TEXT_MAX for value in text.values()):
        raise ProtocolError(f"a replica id or an address of more than {_TEXT_MAX} bytes")
    return Member(
        replica=text[1].decode("utf-8", "replace"),
        store=text[3].decode("utf-8", "replace"),
        step=_signed(number[_STEP]),
        shrink_only=bool(number[6]),
        commit_failures=_signed(number[8]),
        raw=raw,
        manager=text[2].decode("utf-8", "replace"),
        ranks=max(0, _signed(number[_WORLD_SIZE])),
    )


def parse_heartbeat(data: bytes) -> str:
    """Return whose heartbeat it is.

    Raises:
        ProtocolError: it is none.
    """
    value = next((value for field, value in _fields(data) if field == 1), b"")
    if not isinstance(value, bytes) or not value:
        raise ProtocolError("a heartbeat without a replica id")
    return value.decode("utf-8", "replace")


def encode_response(quorum_id: int, members: tuple[Member, ...], created_s: float) -> bytes:
    """Return the answer to everyone in a quorum."""
    parts = [_key(1, _VARINT) + _varint(quorum_id)]
    parts += [_field(2, member.raw) for member in members]
    seconds = int(created_s)
    nanos = int((created_s - seconds) * 1e9)
    created = _key(1, _VARINT) + _varint(seconds) + _key(2, _VARINT) + _varint(nanos)
    return _field(1, b"".join(parts) + _field(3, created))


def encode_kill(reason: str) -> bytes:
    """Return the request to a manager to end its process, which prints why."""
    return _field(1, reason.encode("utf-8", "replace"))


def set_step(member: Member, step: int) -> Member:
    """Return `member` with another step: a later value of a field replaces an earlier one."""
    raw = member.raw + _key(_STEP, _VARINT) + _varint(step)
    return msgspec.structs.replace(member, step=step, raw=raw)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ProtocolError(f"a field of unknown kind {kind}")
        if at + size > len(data):
            raise ProtocolError("a message that is cut short")
        yield key >> 3, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ProtocolError("a number that is cut short")


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _field(field: int, data: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(data)) + data
