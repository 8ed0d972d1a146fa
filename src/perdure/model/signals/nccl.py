"""What the NCCL profiler plugin wrote beside a rank's ring, and how to read it.

The file's layout is `worker/native/nccl/layout.h`, drawn in `docs/nccl.md`. It says of itself
where its regions lie; what the words of a record mean is fixed by its version. Nobody locks it:
a record whose number is being changed, or differs between two copies, is left out.

Ranks and peers in here are ranks *within the communicator*, as NCCL counts them, and a
collective's sequence number counts calls of the same kind in its communicator. Host times become
job time; `gpu_*_ns` are the device's own clock and compare only with one another on one device.
"""

import struct
from collections.abc import Iterator, Sequence

import msgspec

MAGIC = b"PERDNCCL"
VERSION = 2
HEADER_WORDS = 64
HEADER_BYTES = 8 * HEADER_WORDS
REGIONS = ("comms", "ops", "proxies", "steps", "kernels", "nets", "links")
_REGIONS_AT = 8
_REGION_WORDS = 5
WORDS = {
    "comms": 24,
    "ops": 32,
    "proxies": 32,
    "steps": 16,
    "kernels": 16,
    "nets": 16,
    "links": 24,
}
"""Of a record; a file that says otherwise is of another version."""


class NcclComm(msgspec.Struct, frozen=True):
    """A communicator."""

    index: int
    """What records call it."""
    serial: int
    hash: int
    """NCCL's id of it, the same on all of its ranks."""
    name: str
    """PyTorch's name of the group, where it gave one."""
    num_ranks: int
    """0 where the interface (v3) does not say."""
    num_nodes: int
    rank: int
    api: int
    """Version of the interface that NCCL chose."""
    closed_s: float
    colls: int
    p2ps: int


class NcclLink(msgspec.Struct, frozen=True):
    """Totals of one direction to one peer: a cell of the delay matrix."""

    comm: int
    serial: int
    """Of its communicator, 30 bits: another one may have its place by now."""
    peer: int
    is_send: bool
    ops_started: int
    ops_stopped: int
    steps: int
    bytes: int
    waits_s: tuple[float, ...]
    busy_s: float
    """In which the network had something of it to send, up to `busy_since_s` where that is set."""
    busy_since_s: float
    """Since when it has now; 0 for nothing."""


COMM_BYTES, OP_BYTES, LINK_BYTES = (8 * WORDS[name] for name in ("comms", "ops", "links"))
TIMED_API = 4
"""The first interface of which the GPU's clock is told."""
KERNELS = 1 << 6
"""In the mask: kernel channels, of which it is told."""
SETTLED_S = 0.25
"""An operation of which fewer channels began than NCCL said is over once none has for so long."""
PLAUSIBLE, PLAUSIBLE_S = 1.1, 0.005
"""A kernel runs for no longer than since its operation was enqueued, by the host's clock, but for
the difference of the two clocks: a GPU that was reset meanwhile seems to."""
_RECORDS_MAX = 4096
_WORDS_MAX = 1 << 21
_COUNT_MAX = 1 << 53


class NcclLayout(msgspec.Struct, frozen=True):
    """What a file's header says to who reads times of collectives, or links, again and again."""

    pid: int
    started_ns: int
    has_device_times: bool
    """Kernel channels are recorded, by the GPU's clock."""
    comms_at: int
    """Byte at which the communicators begin."""
    num_comms: int
    ops_at: int
    num_ops: int
    last_op: int
    """Number of the newest operation."""
    links_at: int
    num_links: int


class TimedOp(msgspec.Struct, frozen=True):
    """As much of an operation's record as its times need; host times are of CLOCK_MONOTONIC."""

    comm: int
    seq: int
    op: str
    bytes: int
    enqueued_ns: int
    begun_ns: int
    """When the host first saw one of its kernels; 0: it has not."""
    seen_ns: int
    """When the host last saw one of them end."""
    device_s: float
    """From the first kernel's begin to the last one's end, by the GPU's clock."""
    is_collective: bool
    all_ended: bool
    """All of the channels that NCCL announced have ended."""
    some_ended: bool
    """All of those that have begun have ended."""

    def is_over(self, now_ns: int) -> bool:
        """Return whether its last kernel has ended."""
        return self.all_ended or (self.some_ended and now_ns - self.seen_ns > SETTLED_S * 1e9)

    def is_plausible(self, now_ns: int) -> bool:
        """Return whether the GPU's times and the host's can both be true."""
        host_s = (self.seen_ns - self.enqueued_ns) / 1e9
        return (
            self.is_collective
            and 0 <= self.seq < _COUNT_MAX
            and 0 <= self.bytes < _COUNT_MAX
            and 0 < self.enqueued_ns <= self.begun_ns <= self.seen_ns <= now_ns + 1_000_000_000
            and 0.0 < self.device_s <= PLAUSIBLE * host_s + PLAUSIBLE_S
        )


_LINK = struct.Struct(f"={WORDS['links']}q")
_UNUSED = (bytes(8), b"\xff" * 8)
"""Numbers of records that were never used, or are being written."""
_TIMED = struct.Struct("=4q8xq8x9q32x16s72xq")
"""Number, communicator, kind, sequence; bytes; channels to `gpu_stop_ns`; name; number again."""


def parse_layout(data: bytes) -> NcclLayout | None:
    """Return what the header `data` says; None where it is none, or of another version."""
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        return None
    header = struct.unpack_from(f"={HEADER_WORDS}q", data)
    if header[1] != VERSION:
        return None
    found = []
    for name in ("comms", "ops", "links"):
        first, words, count, last = header[region_at(name) : region_at(name) + 4]
        if words != WORDS[name] or not 0 < count <= _RECORDS_MAX or last < 0:
            return None
        if not HEADER_WORDS <= first <= _WORDS_MAX - words * count:
            return None
        found.append((8 * first, count, last))
    (comms_at, num_comms, _), (ops_at, num_ops, last_op), (links_at, num_links, _) = found
    return NcclLayout(
        pid=header[2],
        started_ns=header[5],
        has_device_times=header[3] >= TIMED_API and bool(header[4] & KERNELS),
        comms_at=comms_at,
        num_comms=num_comms,
        ops_at=ops_at,
        num_ops=num_ops,
        last_op=last_op,
        links_at=links_at,
        num_links=num_links,
    )


def parse_timed_op(record: bytes, number: int) -> TimedOp | None:
    """Return the operation; None where `record` is no whole one of this number."""
    (head, comm, kind, seq, size, channels, enqueued, _, begun, ended, first, last, start, stop,
     name, again) = _TIMED.unpack(record)  # fmt: skip
    if head != number or again != number:
        return None
    return TimedOp(
        comm=comm,
        seq=seq,
        op=name.split(b"\0", 1)[0].decode("ascii", "replace"),
        bytes=size,
        enqueued_ns=enqueued,
        begun_ns=first,
        seen_ns=last,
        device_s=(stop - start) / 1e9 if start > 0 else 0.0,
        is_collective=kind == 0,
        all_ended=begun == ended >= max(channels, 1),
        some_ended=begun == ended > 0,
    )


def parse_comm(data: bytes, index: int) -> NcclComm | None:
    """Return the communicator whose record is `data`; None where it is being written."""
    w = struct.unpack(f"={WORDS['comms']}q", data)
    if w[0] <= 0 or w[0] != w[-1]:
        return None
    return read_comm(index, w, 0.0)


def parse_links(data: bytes, clock_offset_s: float) -> Iterator[NcclLink]:
    """Yield what the region of links `data` holds; what two threads began twice comes twice."""
    for at in range(0, len(data) - LINK_BYTES + 1, LINK_BYTES):
        if data[at : at + 8] not in _UNUSED:
            yield read_link(_LINK.unpack_from(data, at), clock_offset_s)


def read_comm(index: int, w: Sequence[int], clock_offset_s: float) -> NcclComm:
    """Return the communicator of which a record has the words `w`."""
    return NcclComm(
        index=index,
        serial=w[0],
        hash=w[1] % 2**64,
        name=read_text(w[12:20]),
        num_ranks=w[2],
        num_nodes=w[3],
        rank=w[4],
        api=w[7],
        closed_s=read_time(w[6], clock_offset_s),
        colls=w[8],
        p2ps=w[9],
    )


def read_link(w: Sequence[int], clock_offset_s: float) -> NcclLink:
    """Return the link of which a record has the words `w`."""
    waits = tuple(ns / 1e9 for ns in w[9:15])
    busy_s, since_s = w[18] / 1e9, read_time(w[17], clock_offset_s)
    return NcclLink(
        w[1], w[0] >> 33, w[2], bool(w[3]), w[4], w[5], w[6], w[7], waits, busy_s, since_s
    )


def read_time(ns: int, clock_offset_s: float) -> float:
    """Return job time; 0 stays 0, which means never."""
    return ns / 1e9 + clock_offset_s if ns else 0.0


def read_text(words: Sequence[int]) -> str:
    """Return the text that `words` hold, up to its first zero byte."""
    return struct.pack(f"={len(words)}q", *words).split(b"\0", 1)[0].decode("utf-8", "replace")


def region_at(name: str) -> int:
    """Return the word of the header at which the description of a region begins."""
    return _REGIONS_AT + _REGION_WORDS * REGIONS.index(name)
