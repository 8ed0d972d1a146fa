"""Messages of the kernel as bytes: attributes in other places, none at all, an error."""

import struct

import pytest

from perdure.adapters.network.netlink import Dump, SockDiag
from perdure.model.errors import PlatformError

DONE = struct.pack("<IHHIII", 20, 3, 2, 1, 0, 0)


def message(inode: int, *, before: int = 0, info: int = 240, acked: int = 0) -> bytes:
    """A connection: `before` bytes of other attributes, then TCP_INFO of `info` bytes."""
    head = struct.pack(
        "<BBBB2H16s16sII", 2, 1, 0, 0, 0x5000, 0x6000, b"\x0a\0\0\1", b"\x0a\0\0\2", 0, 0
    )
    # After the addresses: interface, cookie; then expires, rqueue, wqueue, uid, inode.
    body = head + bytes(4) + struct.pack("<IIIII", 0, 7, 9, 0, inode)
    assert len(body) == 72
    if before:
        body += struct.pack("<HH", before, 15) + bytes(before - 4)
    if info:
        tcp = bytearray(info)
        tcp[4] = 3
        struct.pack_into("<I", tcp, 56, 250)
        struct.pack_into("<I", tcp, 68, 1234)
        if info >= 176:
            struct.pack_into("<IxxxxxxxxxxxxxxxxQ", tcp, 100, 5, acked)
            struct.pack_into("<II16xQ", tcp, 144, 11, 77, 90_000)
        body += struct.pack("<HH", 4 + info, 2) + bytes(tcp)
    return struct.pack("<IHHII", 16 + len(body), 20, 2, 1, 0) + body


class FakeDiag(SockDiag):
    def __init__(self, *parts: bytes) -> None:
        self.layouts, self._parts = {}, list(parts)

    def receive(self) -> bytes:
        return self._parts.pop(0)


def test_numbers_whatever_stands_before_tcp_info() -> None:
    parts = (
        message(1, acked=10**10) + message(2, before=8) + message(3, before=8),
        message(4) + message(5, before=16) + DONE,
    )
    found = {n[2]: n for n in Dump(FakeDiag(*parts))}
    assert sorted(found) == [1, 2, 3, 4, 5]
    assert found[1] == (7, 9, 1, 2, 3, 250, 1234, 5, 10**10, 11, 77, 90_000)
    assert found[5][8] == 0
    assert found[5][3:8] == (2, 3, 250, 1234, 5)


def test_the_same_length_with_another_order_is_noticed() -> None:
    one, other = message(1, before=8), bytearray(message(2, before=8))
    at = 16 + 72  # TCP_INFO first, the other attribute behind it.
    info = other[at + 8 :]
    other[at:] = info + other[at : at + 8]
    found = [n[2] for n in Dump(FakeDiag(bytes(one) + bytes(other) + bytes(one) + DONE))]
    assert found == [1, 2, 1]


def test_sockets_without_tcp_info_and_old_kernels_are_left_out() -> None:
    parts = message(1, info=0) + message(2, info=104) + message(3) + DONE
    assert [n[2] for n in Dump(FakeDiag(parts))] == [3]


def test_addresses_of_the_connection_at_hand() -> None:
    dump = Dump(FakeDiag(message(1) + DONE))
    (address,) = [dump.address() for _ in dump]
    assert address.local.startswith("10.0.0.1:")
    assert address.remote.startswith("10.0.0.2:")


def test_a_refusal_is_an_error() -> None:
    refusal = struct.pack("<IHHIIi", 36, 2, 0, 1, 0, -1) + bytes(16)
    with pytest.raises(PlatformError, match="Operation not permitted"):
        list(Dump(FakeDiag(refusal)))
