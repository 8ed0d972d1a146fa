"""The bytes of torchft's two calls; what is unknown passes through."""

import pytest
from tests.lighthouse import encode_request, make_member, parse_response

from perdure.model.bus.lighthouse import encode_response, parse_heartbeat, parse_request, set_step
from perdure.model.errors import ProtocolError


def test_a_member_is_read_back() -> None:
    member = make_member("train_0:a", "host:1", 7, commit_failures=2)
    assert parse_request(encode_request(member)) == member


def test_negative_steps_survive() -> None:
    member = set_step(make_member("a", step=4), -1)
    assert parse_request(encode_request(member)).step == -1


def test_unknown_fields_pass_through() -> None:
    known = make_member("a", "s", 3)
    extra = known.raw + bytes([0x9A, 0x06, 3]) + b"new"  # field 99, bytes
    asked = parse_request(bytes([0x0A, len(extra)]) + extra)
    assert asked.step == 3
    quorum_id, members = parse_response(encode_response(9, (asked,), 1.5))
    assert quorum_id == 9
    assert members[0].raw == extra


@pytest.mark.parametrize("data", [b"", b"\x0a\x05ab", b"\x0a\x02\x08\x01", b"\x0f", b"\x0a"])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_request(data)


def test_a_heartbeat_names_its_replica() -> None:
    assert parse_heartbeat(b"\x0a\x03abc") == "abc"
    with pytest.raises(ProtocolError):
        parse_heartbeat(b"")
