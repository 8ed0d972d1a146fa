"""The file of the NCCL plugin, read whole; perdure follows it from look to look instead."""

import struct
from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from perdure.files.regular import open_regular
from perdure.model.errors import ProtocolError
from perdure.model.signals.nccl import (
    HEADER_BYTES,
    HEADER_WORDS,
    MAGIC,
    REGIONS,
    VERSION,
    WORDS,
    NcclComm,
    NcclLink,
    read_comm,
    read_link,
    read_text,
    read_time,
    region_at,
)

_BYTES_MAX = 16 << 20
Wait = Literal["send_gpu", "send_peer", "send_net", "recv_net", "recv_flush", "recv_gpu"]
"""What a transfer waits for, in the order of the file."""
WAITS: tuple[Wait, ...] = get_args(Wait)
KINDS = ("collective", "p2p", "ce")


class NcclRecord(msgspec.Struct, frozen=True):
    """A record with a number, of one communicator."""

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
    """The other rank of a send or receive, or the root of a collective."""
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
    """What the newest transfer waits for."""
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


def read_nccl(ring: str, clock_offset_s: float) -> NcclReading | None:
    """Return the plugin's records of the rank with this `ring`; None if there are none."""
    try:
        with open(f"{ring}.nccl", "rb", opener=open_regular) as file:
            data = file.read(_BYTES_MAX)
            file.seek(0)
            again = file.read(_BYTES_MAX)
        return parse_nccl(data, again, clock_offset_s)
    except (OSError, ProtocolError):
        return None


class _Reader:
    """Words of a record as job time."""

    def __init__(self, offset_s: float) -> None:
        self.offset_s = offset_s

    def at(self, ns: int) -> float:
        return read_time(ns, self.offset_s)

    def op(self, w: tuple[int, ...]) -> NcclOp:
        return NcclOp(
            number=w[0],
            comm=w[1],
            kind=KINDS[w[2]] if 0 <= w[2] < len(KINDS) else "?",
            op=read_text(w[20:22]),
            seq=w[3],
            count=w[4],
            dtype=read_text(w[26:28]).removeprefix("nccl").lower(),
            bytes=w[5],
            peer=w[6],
            channels=w[7],
            algo=read_text(w[22:24]),
            proto=read_text(w[24:26]),
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
    found = {name: list(_records(data, again, header, name)) for name in REGIONS}
    comms = {
        index: read_comm(index, w, clock_offset_s) for index, w in found["comms"] if w[0] == w[-1]
    }
    rows = {
        name: sorted(w for _, w in found[name] if w[0] == w[-1] and w[1] in comms)
        for name in REGIONS[1:-1]
    }
    links = [read_link(w, clock_offset_s) for _, w in found["links"] if w[1] in comms]
    return NcclReading(
        pid=header[2],
        api=header[3],
        mask=header[4],
        started_s=reader.at(header[5]),
        beat_s=reader.at(header[6]),
        dropped={name: header[region_at(name) + 4] for name in REGIONS},
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


def _records(
    data: bytes, again: bytes, header: tuple[int, ...], name: str
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield slot and words of each record of a region that both copies know by one number."""
    first, words, count = header[region_at(name) : region_at(name) + 3]
    if words != WORDS[name] or 8 * (first + words * count) > min(len(data), len(again)):
        raise ProtocolError(f"region {name} of the NCCL plugin's file is not as it should be")
    record, number = struct.Struct(f"={words}q"), struct.Struct("=q")
    for slot in range(count):
        at = 8 * (first + slot * words)
        head = number.unpack_from(data, at)[0]
        if head not in (0, -1) and head == number.unpack_from(again, at)[0]:
            yield slot, record.unpack_from(data, at)


def _wait(code: int) -> Wait | None:
    return WAITS[code] if 0 <= code < len(WAITS) else None
