"""The NCCL plugin's file followed from heartbeat to heartbeat: what ended on the device since.

Only what is new is read: the header, the operations begun since the last look and those that had
not ended then, and their communicators. A record is taken where two copies of it are the same.
Nothing is taken from a file that another process wrote, or that has no times of a GPU's clock.

Only collectives are told of in which every rank needs what every other has, so that the last to
arrive is inside shortest. Of a broadcast or a reduction to one, somebody may leave before others
have come.
"""

import os
from collections.abc import Iterable, Sequence

import msgspec

from perdure.adapters.ring_follow import SPANS_A_BEAT, Stride
from perdure.files.regular import open_regular
from perdure.model.signals.nccl import (
    COMM_BYTES,
    HEADER_BYTES,
    OP_BYTES,
    NcclComm,
    NcclLayout,
    TimedOp,
    parse_comm,
    parse_layout,
    parse_timed_op,
)
from perdure.model.signals.progress import CollectiveSpan, CommProgress, DeviceComm

MUTUAL = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll")
STALE_S = 10.0
"""What ended before that is not told: an agent that begins anew would tell it a second time."""
ABANDONED_S = 60.0
"""What was enqueued so long ago and has not ended is not waited for: of a graph, perhaps, whose
kernels nobody tells of."""
PENDING_MAX = 512
"""Operations that are looked at again while they have not ended; the newest are."""
BEING_WRITTEN_MAX = 64
"""Of so many of the newest a record that cannot be read is looked at again."""
STREAMS_MAX = 64
"""Communicators, with each kind of collective, that a rank's heartbeat tells of."""
RANKS_A_BEAT = 16
"""Of a node with more ranks than this, some are looked at in each heartbeat, and all in turn."""
_RUN_GAP = 32


class _Stream(msgspec.Struct):
    """Collectives of one kind in one communicator."""

    comm: NcclComm
    name: str
    stride: Stride
    seen_s: float
    """When the newest of them was seen to have ended."""


class NcclFollower:
    """Reads one rank's file again and again."""

    def __init__(self, ring: str, clock_offset_s: float) -> None:
        """Follow the file beside the ring at `ring`."""
        self._path, self._offset_s = f"{ring}.nccl", clock_offset_s
        self._forget(None)

    def _forget(self, source: tuple[int, int, int] | None) -> None:
        self._source = source
        """Inode, process and begin of the file that is followed."""
        self._last_op = 0
        self._pending: list[int] = []
        """Operations that had not ended at the last look, ascending."""
        self._streams: dict[tuple[int, int, str], _Stream] = {}
        """(slot, serial, kind) -> what is told of it, in the order in which they were first seen"""

    def read(
        self, rank: int, pid: int, ring: Sequence[CommProgress], now: float
    ) -> tuple[DeviceComm, ...]:
        """Return what it says at job time `now`; nothing where there is nothing to be believed.

        `ring` are the communicators of the rank's ring, which know the global ranks.
        """
        try:
            fd = open_regular(self._path)
        except OSError:
            return ()
        try:
            layout = parse_layout(os.pread(fd, HEADER_BYTES, 0))
            if layout is None or layout.pid != pid or not layout.has_device_times:
                return ()
            source = (os.fstat(fd).st_ino, layout.pid, layout.started_ns)
            if source != self._source or layout.last_op < self._last_op:
                self._forget(source)
            ended = self._read_ended(fd, layout, now)
            self._follow_comms(fd, layout, ended, now)
            return self._tell(rank, ring, ended)
        except OSError:
            return ()
        finally:
            os.close(fd)

    # --- operations ---------------------------------------------------------------------------

    def _read_ended(self, fd: int, layout: NcclLayout, now: float) -> list[TimedOp]:
        """Return what has ended since the last look, in the order in which it was enqueued."""
        first = max(self._last_op + 1, layout.last_op - layout.num_ops + 1)
        numbers = [*self._pending, *range(first, layout.last_op + 1)]
        self._last_op, self._pending = layout.last_op, []
        now_ns = int((now - self._offset_s) * 1e9)
        ended = []
        for number, op, moving in _read_ops(fd, layout, numbers):
            if op is None:  # Being written, dropped, or overwritten.
                if moving or number > layout.last_op - BEING_WRITTEN_MAX:
                    self._pending.append(number)
            elif op.is_over(now_ns):
                if op.is_plausible(now_ns) and now_ns - op.seen_ns <= STALE_S * 1e9:
                    ended.append(op)
            elif now_ns - op.enqueued_ns <= ABANDONED_S * 1e9:
                self._pending.append(number)
        del self._pending[:-PENDING_MAX]
        return [op for op in ended if op.op in MUTUAL]

    # --- communicators ------------------------------------------------------------------------

    def _follow_comms(
        self, fd: int, layout: NcclLayout, ended: Iterable[TimedOp], now: float
    ) -> None:
        """Note the communicators of what `ended`, and forget those that are closed.

        Where there are too many, one that has been idle for long makes room: it was aborted, and
        nobody has closed it.
        """
        wanted = {op.comm for op in ended} | {slot for slot, _, _ in self._streams}
        comms = {slot: read_comm(fd, layout, slot) for slot in wanted if slot < layout.num_comms}
        for key in list(self._streams):
            comm = comms.get(key[0])
            if comm is None or comm.serial != key[1] or comm.closed_s:
                del self._streams[key]
        for op in ended:
            comm = comms.get(op.comm)
            if comm is None or comm.closed_s:
                continue
            key = (op.comm, comm.serial, op.op)
            if key in self._streams:
                self._streams[key].seen_s = now
                continue
            if len(self._streams) >= STREAMS_MAX:
                idle = min(self._streams, key=lambda known: self._streams[known].seen_s)
                if now - self._streams[idle].seen_s < ABANDONED_S:
                    continue
                del self._streams[idle]
            name = f"{comm.name or 'NCCL'} {op.op} {comm.hash & 0xFFFFFFFF:08x}"
            self._streams[key] = _Stream(comm, name, Stride(SPANS_A_BEAT), now)

    def _tell(
        self, rank: int, ring: Sequence[CommProgress], ended: Iterable[TimedOp]
    ) -> tuple[DeviceComm, ...]:
        found: dict[tuple[int, str], list[TimedOp]] = {}
        for op in ended:
            found.setdefault((op.comm, op.op), []).append(op)
        told = []
        for (slot, _, kind), stream in self._streams.items():
            ops = found.get((slot, kind), [])
            step = stream.stride.note(len(ops))
            index = find_ring_comm(rank, stream.comm, ring)
            if index is not None:
                spans = (self._make_span(op) for op in ops if op.seq % step == 0)
                told.append(DeviceComm(stream.name, index, tuple(spans)))
        return tuple(told)

    def _make_span(self, op: TimedOp) -> CollectiveSpan:
        begin_s = op.begun_ns / 1e9 + self._offset_s
        return CollectiveSpan(0, op.seq, op.op, op.bytes, begin_s, begin_s + op.device_s)


def _read_ops(
    fd: int, layout: NcclLayout, numbers: Sequence[int]
) -> list[tuple[int, TimedOp | None, bool]]:
    """Read `numbers`, each with None where two copies differ or its place has another's.

    And with whether they differ: it moves at this moment.
    """
    found: list[tuple[int, TimedOp | None, bool]] = []
    for run in _split_runs(numbers, layout.num_ops):
        at = layout.ops_at + run[0] % layout.num_ops * OP_BYTES
        size = (run[-1] - run[0] + 1) * OP_BYTES
        data, again = os.pread(fd, size, at), os.pread(fd, size, at)
        for number in run:
            where = (number - run[0]) * OP_BYTES
            record = data[where : where + OP_BYTES]
            moving = record != again[where : where + OP_BYTES]
            whole = not moving and len(record) == OP_BYTES
            found.append((number, parse_timed_op(record, number) if whole else None, moving))
    return found


def _split_runs(numbers: Iterable[int], count: int) -> list[list[int]]:
    """Return `numbers` in runs that lie close together and do not go round the region's end."""
    runs: list[list[int]] = []
    for number in numbers:
        last = runs[-1] if runs else None
        if last and number - last[-1] <= _RUN_GAP and number // count == last[0] // count:
            last.append(number)
        else:
            runs.append([number])
    return runs


def read_comm(fd: int, layout: NcclLayout, slot: int) -> NcclComm | None:
    """Return the communicator in `slot`; None where it is being written.

    Raises:
        OSError: the file cannot be read.
    """
    data = os.pread(fd, COMM_BYTES, layout.comms_at + slot * COMM_BYTES) if slot >= 0 else b""
    return parse_comm(data, slot) if len(data) == COMM_BYTES else None


def find_ring_comm(rank: int, comm: NcclComm, ring: Sequence[CommProgress]) -> int | None:
    """Return which of the ring's communicators has the ranks of NCCL's; None where unsure.

    PyTorch need not give NCCL its own name of the group: any of as many ranks, in which this one
    has the place that NCCL says, has the same ranks, unless two such differ. To compare no more is
    needed: NCCL's id is in the name, and only what all of its ranks tell is compared.
    """
    like = [
        (index, known)
        for index, known in enumerate(ring)
        if known.stamps == "enqueued"
        and known.size == len(known.ranks) == comm.num_ranks > 1
        and 0 <= comm.rank < comm.num_ranks
        and known.ranks[comm.rank] == rank
    ]
    named = [(index, known) for index, known in like if known.name == comm.name]
    like = named or like
    if not like or any(known.ranks != like[0][1].ranks for _, known in like):
        return None
    return like[0][0]
