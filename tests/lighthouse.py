"""What a manager of torchft says to its lighthouse and hears from it, in bytes."""

from perdure.model.bus.lighthouse import (
    _STEP,
    _VARINT,
    Member,
    _field,
    _fields,
    _key,
    _signed,
    _varint,
    parse_request,
)
from perdure.model.errors import ProtocolError


def encode_request(member: Member) -> bytes:
    """Return the request of `member`, as torchft's manager sends it."""
    return _field(1, member.raw)


def make_member(
    replica: str, store: str = "", step: int = 0, *, commit_failures: int = 0
) -> Member:
    """Return a member with its bytes."""
    raw = _field(1, replica.encode()) + _field(3, store.encode()) + _key(_STEP, _VARINT)
    raw += _varint(step) + _key(5, _VARINT) + _varint(1)
    if commit_failures:
        raw += _key(8, _VARINT) + _varint(commit_failures)
    return Member(replica, store, step, False, commit_failures, raw, ranks=1)


def parse_response(data: bytes) -> tuple[int, tuple[Member, ...]]:
    """Return quorum id and members of an answer.

    Raises:
        ProtocolError: it is none.
    """
    quorum = next((value for field, value in _fields(data) if field == 1), None)
    if not isinstance(quorum, bytes):
        raise ProtocolError("an answer without a quorum")
    quorum_id, members = 0, []
    for field, value in _fields(quorum):
        if field == 1 and isinstance(value, int):
            quorum_id = _signed(value)
        elif field == 2 and isinstance(value, bytes):
            members.append(parse_request(_field(1, value)))
    return quorum_id, tuple(members)
