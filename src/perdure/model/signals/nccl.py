"""What the NCCL profiler plugin wrote beside a rank's ring, and how to read it.

The file's layout is `worker/native/nccl/layout.h`, drawn in `docs/nccl.md`. It says of itself
where its regions lie; what the words of a record mean is fixed by its version. Nobody locks it:
a record whose number is being changed, or differs between two copies, is left out.

Ranks and peers in here are ranks *within the communicator*, as NCCL counts them, and a
collective's sequence number counts calls of the same kind in its communicator. Host times become
job time; `gpu_*_ns` are the device's own clock and compare only with one another on one device.
"""

import struct
from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from perdure.model.errors import ProtocolError

MAGIC = b"PERDNCCL"
VERSION = 2
HEADER_WORDS = 64
HEADER_BYTES = 8 * HEADER_WORDS
_REGIONS = ("comms", "ops", "proxies", "steps", "kernels", "nets", "links")
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

Wait = Literal["send_gpu", "send_peer", "send_net", "recv_net", "recv_flush", "recv_gpu"]
"""What a transfer waits for: data from the GPU to send; the peer's permission to send; the network
to have sent; data from the network; its flush to the GPU; the GPU to have taken it."""
WAITS: tuple[Wait, ...] = get_args(Wait)
KINDS = ("collective", "p2p", "ce")


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


class NcclRecord(msgspec.Struct, frozen=True):
    """Base of what is numbered, and belongs to a communicator."""

    number: int
    comm: int


class NcclOp(NcclRecord, frozen=True):
    """One collective, send or receive of one rank."""

    kind: str
    """`collective`, `p2p`, or `ce` (by the copy engines)."""
    op: str
    seq: int
    """Counts calls of the same `op` in its communicator; 0 for a send or receive."""
    count: int
    dtype: str
    bytes: int
    """`count` elements of it."""
    peer: int
    """Of a send or receive; a collective's root."""
    channels: int
    algo: str
    proto: str
    start_s: float
    launched_s: float
    """The host has enqueued it; it may run later. 0: not yet."""
    kernels_started: int
    kernels_stopped: int
    first_kernel_s: float
    last_kernel_s: float
    gpu_start_ns: int
    gpu_stop_ns: int
    proxies_started: int
    proxies_stopped: int

    @property
    def ended(self) -> bool:
        """Whether everything that is known to have begun for it has ended."""
        return (
            self.launched_s > 0
            and self.kernels_started == self.kernels_stopped
            and self.proxies_started == self.proxies_stopped
        )


class NcclProxy(NcclRecord, frozen=True):
    """One channel of one operation in one direction, as the proxy thread serves it."""

    op: int
    """Number of its `NcclOp`; 0 where that is another process's (PXN)."""
    channel: int
    peer: int
    is_send: bool
    num_steps: int
    chunk_bytes: int
    pid: int
    """Process whose operation it is."""
    rank: int
    start_s: float
    stop_s: float
    in_progress_s: float
    steps_started: int
    steps_stopped: int
    bytes: int
    wait: Wait | None
    """Of its newest transfer."""
    wait_since_s: float
    waits_s: tuple[float, ...]
    """Spent in each of `WAITS`, over all of its transfers."""


class NcclStep(NcclRecord, frozen=True):
    """One network transfer."""

    proxy: int
    step: int
    start_s: float
    stop_s: float
    wait: Wait | None
    wait_since_s: float
    bytes: int
    waits_s: tuple[float, ...]


class NcclKernel(NcclRecord, frozen=True):
    """One channel of an operation on the GPU; host times are when the proxy thread saw it."""

    op: int
    channel: int
    start_s: float
    stop_s: float
    gpu_start_ns: int
    gpu_stop_ns: int


class NcclNet(NcclRecord, frozen=True):
    """One event of the network plugin: a work request or a socket operation."""

    step: int
    plugin: int
    """1 InfiniBand, 2 sockets; others' data is not read."""
    version: int
    type: int
    device: int
    """Network device, or descriptor of the socket."""
    opcode: int
    qp: int
    work: int
    bytes: int
    start_s: float
    stop_s: float
    updates: int


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


class NcclReading(msgspec.Struct, frozen=True):
    """The file at one moment; each tuple is in the order in which things began."""

    pid: int
    api: int
    mask: int
    started_s: float
    beat_s: float
    """When NCCL last called in."""
    dropped: dict[str, int]
    """Records of each region for which there was no room."""
    comms: tuple[NcclComm, ...]
    ops: tuple[NcclOp, ...]
    proxies: tuple[NcclProxy, ...]
    steps: tuple[NcclStep, ...]
    kernels: tuple[NcclKernel, ...]
    nets: tuple[NcclNet, ...]
    links: tuple[NcclLink, ...]


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
        first, words, count, last = header[_region_at(name) : _region_at(name) + 4]
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
    return _Reader(0.0).comm(index, w)


def parse_links(data: bytes, clock_offset_s: float) -> Iterator[NcclLink]:
    """Yield what the region of links `data` holds; what two threads began twice comes twice."""
    reader = _Reader(clock_offset_s)
    for at in range(0, len(data) - LINK_BYTES + 1, LINK_BYTES):
        if data[at : at + 8] not in _UNUSED:
            yield reader.link(_LINK.unpack_from(data, at))


class _Reader:
    """Words of a record as job time."""

    def __init__(self, offset_s: float) -> None:
        self.offset_s = offset_s

    def at(self, ns: int) -> float:
        return ns / 1e9 + self.offset_s if ns else 0.0

    def comm(self, index: int, w: tuple[int, ...]) -> NcclComm:
        return NcclComm(
            index=index,
            serial=w[0],
            hash=w[1] % 2**64,
            name=_text(w[12:20]),
            num_ranks=w[2],
            num_nodes=w[3],
            rank=w[4],
            api=w[7],
            closed_s=self.at(w[6]),
            colls=w[8],
            p2ps=w[9],
        )

    def op(self, w: tuple[int, ...]) -> NcclOp:
        return NcclOp(
            number=w[0],
            comm=w[1],
            kind=KINDS[w[2]] if 0 <= w[2] < len(KINDS) else "?",
            op=_text(w[20:22]),
            seq=w[3],
            count=w[4],
            dtype=_text(w[26:28]).removeprefix("nccl").lower(),
            bytes=w[5],
            peer=w[6],
            channels=w[7],
            algo=_text(w[22:24]),
            proto=_text(w[24:26]),
            start_s=self.at(w[8]),
            launched_s=self.at(w[9]),
            kernels_started=w[10],
            kernels_stopped=w[11],
            first_kernel_s=self.at(w[12]),
            last_kernel_s=self.at(w[13]),
            gpu_start_ns=w[14],
            gpu_stop_ns=w[15],
            proxies_started=w[16],
            proxies_stopped=w[17],
        )

    def proxy(self, w: tuple[int, ...]) -> NcclProxy:
        return NcclProxy(
            number=w[0],
            comm=w[1],
            op=w[2],
            channel=w[3],
            peer=w[4],
            is_send=bool(w[5]),
            num_steps=w[6],
            chunk_bytes=w[7],
            pid=w[8],
            rank=w[9],
            start_s=self.at(w[10]),
            stop_s=self.at(w[11]),
            in_progress_s=self.at(w[12]),
            steps_started=w[13],
            steps_stopped=w[14],
            bytes=w[15],
            wait=_wait(w[16]),
            wait_since_s=self.at(w[17]),
            waits_s=tuple(ns / 1e9 for ns in w[20:26]),
        )

    def step(self, w: tuple[int, ...]) -> NcclStep:
        waits = tuple(ns / 1e9 for ns in w[9:15])
        began, ended, since = self.at(w[4]), self.at(w[5]), self.at(w[7])
        return NcclStep(w[0], w[1], w[2], w[3], began, ended, _wait(w[6]), since, w[8], waits)

    def kernel(self, w: tuple[int, ...]) -> NcclKernel:
        return NcclKernel(w[0], w[1], w[2], w[3], self.at(w[4]), self.at(w[5]), w[6], w[7])

    def net(self, w: tuple[int, ...]) -> NcclNet:
        return NcclNet(
            number=w[0],
            comm=w[1],
            step=w[2],
            plugin=w[3] >> 16 & 0xFFFF,
            version=w[3] & 0xFFFF,
            type=w[4],
            device=w[5],
            opcode=w[6],
            qp=w[7],
            work=w[8],
            bytes=w[9],
            start_s=self.at(w[10]),
            stop_s=self.at(w[11]),
            updates=w[12],
        )

    def link(self, w: tuple[int, ...]) -> NcclLink:
        waits = tuple(ns / 1e9 for ns in w[9:15])
        busy_s, since_s = w[18] / 1e9, self.at(w[17])
        return NcclLink(
            w[1], w[0] >> 33, w[2], bool(w[3]), w[4], w[5], w[6], w[7], waits, busy_s, since_s
        )


def parse_nccl(data: bytes, again: bytes, clock_offset_s: float) -> NcclReading:
    """Return what two copies of the file, one taken after the other, agree on, in job time.

    Raises:
        ProtocolError: it is no such file, or of another version.
    """
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        raise ProtocolError("not a file of the NCCL plugin")
    header = struct.unpack_from(f"={HEADER_WORDS}q", data)
    if header[1] != VERSION:
        raise ProtocolError(f"a file of the NCCL plugin of version {header[1]}, expected {VERSION}")
    reader = _Reader(clock_offset_s)
    found = {name: list(_records(data, again, header, name)) for name in _REGIONS}
    comms = {index: reader.comm(index, w) for index, w in found["comms"] if w[0] == w[-1]}
    rows = {
        name: sorted(w for _, w in found[name] if w[0] == w[-1] and w[1] in comms)
        for name in _REGIONS[1:-1]
    }
    links = [reader.link(w) for _, w in found["links"] if w[1] in comms]
    return NcclReading(
        pid=header[2],
        api=header[3],
        mask=header[4],
        started_s=reader.at(header[5]),
        beat_s=reader.at(header[6]),
        dropped={name: header[_region_at(name) + 4] for name in _REGIONS},
        comms=tuple(sorted(comms.values(), key=lambda comm: comm.serial)),
        ops=tuple(map(reader.op, rows["ops"])),
        proxies=tuple(map(reader.proxy, rows["proxies"])),
        steps=tuple(map(reader.step, rows["steps"])),
        kernels=tuple(map(reader.kernel, rows["kernels"])),
        nets=tuple(map(reader.net, rows["nets"])),
        links=tuple(sorted(links, key=lambda li: (li.comm, li.peer, li.is_send))),
    )


def describe_open(reading: NcclReading, now_s: float) -> list[str]:
    """Return a line on each operation that has not ended, and on what each transfer of it waits."""
    names = {comm.index: comm.name or f"{comm.hash:x}" for comm in reading.comms}
    lines = []
    for op in reading.ops:
        if op.ended:
            continue
        what = f"{op.op} #{op.seq}" if op.kind != "p2p" else f"{op.op} with rank {op.peer}"
        lines.append(
            f"{what} of {names[op.comm]}, {op.bytes} bytes, for {now_s - op.start_s:.2f} s: "
            f"{op.kernels_stopped} of {op.kernels_started} kernel channels and "
            f"{op.proxies_stopped} of {op.proxies_started} transfers ended"
        )
        for proxy in reading.proxies:
            if proxy.op == op.number and not proxy.stop_s and proxy.wait is not None:
                way = "to" if proxy.is_send else "from"
                lines.append(
                    f"  channel {proxy.channel} {way} rank {proxy.peer}: step "
                    f"{proxy.steps_stopped} of {proxy.num_steps}, {proxy.wait} for "
                    f"{now_s - proxy.wait_since_s:.2f} s"
                )
    return lines


def _region_at(name: str) -> int:
    return _REGIONS_AT + _REGION_WORDS * _REGIONS.index(name)


def _records(
    data: bytes, again: bytes, header: tuple[int, ...], name: str
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield slot and words of each record of a region that both copies know by one number."""
    first, words, count = header[_region_at(name) : _region_at(name) + 3]
    if words != WORDS[name] or 8 * (first + words * count) > min(len(data), len(again)):
        raise ProtocolError(f"region {name} of the NCCL plugin's file is not as it should be")
    record, number = struct.Struct(f"={words}q"), struct.Struct("=q")
    for slot in range(count):
        at = 8 * (first + slot * words)
        head = number.unpack_from(data, at)[0]
        if head not in (0, -1) and head == number.unpack_from(again, at)[0]:
            yield slot, record.unpack_from(data, at)


def _text(words: tuple[int, ...]) -> str:
    return struct.pack(f"={len(words)}q", *words).split(b"\0", 1)[0].decode("utf-8", "replace")


def _wait(code: int) -> Wait | None:
    return WAITS[code] if 0 <= code < len(WAITS) else None
