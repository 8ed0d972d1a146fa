"""Rings read from outside the rank: at any moment, also while it is stopped or after its end."""

import os

from perdure.files.regular import open_regular
from perdure.model.errors import ProtocolError
from perdure.model.ring import (
    HEADER_BYTES,
    RECORDS_AT,
    RingReading,
    parse_ring,
    seqs_of,
)

_ATTEMPTS = 8


def read_ring(path: str, clock_offset_s: float) -> RingReading | None:
    """Return what the ring at `path` says now, or None where there is none (yet).

    The file is opened anew each time: 8 ranks at 5 Hz cost a millisecond a second, and a ring
    that was replaced in between is never confused with the old one.
    """
    fd = open_ring(path)
    if fd < 0:
        return None
    try:
        data, torn = copy_ring(fd)
    finally:
        os.close(fd)
    try:
        return parse_ring(data, clock_offset_s, torn=torn)
    except ProtocolError:
        return None  # Being made at this moment, or none of ours.


def open_ring(path: str) -> int:
    """Return a descriptor of the ring at `path`; -1 where there is none."""
    try:
        return open_regular(path)
    except OSError:
        return -1


def copy_ring(fd: int) -> tuple[bytes, bool]:
    """Return a consistent copy of everything but the records; else the last one and True."""
    data = b""
    for _ in range(_ATTEMPTS):
        data = os.pread(fd, RECORDS_AT, 0)
        if len(data) < RECORDS_AT:
            return data, False
        seqs = seqs_of(data)
        if not any(seq % 2 for seq in seqs) and seqs == seqs_of(os.pread(fd, HEADER_BYTES, 0)):
            return data, False
    return data, True
