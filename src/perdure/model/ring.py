"""Layout of a rank's progress ring, and how to read one. Drawn in `docs/ring.md`.

The ring is a file that the rank maps and everybody else only reads: it survives the rank's
death and can be read while the rank is stopped. Nobody locks it. Each of its two writers (the
training thread: progress; the recorder: communicators) brackets its changes with a counter that
is odd meanwhile; a reader takes the copy whose counters were even and the same before and
after, or, where a writer died between the two, the copy as it is, marked `torn`. The compiled
recorder, which any thread of the rank may be in, moves a communicator's counters and writes the
record of a collective (a *span*) by atomic stores of single words instead; the last word written
of a span is its number, and 0 stands there while it is being made.

All numbers are native 64-bit words, times CLOCK_MONOTONIC in nanoseconds, 0 for "not reached".
"""

import struct
import sys
from typing import get_args

import msgspec

from perdure.model.errors import ProtocolError
from perdure.model.signals.progress import (
    WORK_MAX,
    BusyPhase,
    CollectiveSpan,
    CommProgress,
    Phase,
    ProcSample,
    RankAccount,
    RankProgress,
    Stamps,
    StepStages,
)

MAGIC = int.from_bytes(b"PERDURE\0", sys.byteorder)
VERSION = 3

(
    W_MAGIC, W_VERSION, W_RANK, W_GENERATION, W_PID, W_RECORDER, W_PROGRESS_SEQ, W_PHASE,
    W_PHASE_SINCE, W_BEAT, W_COMM_BEAT, W_START_STEP, W_STEP, W_STEP_NS, W_CHECKPOINT_NS,
    W_BOUNDARY_NS, W_OVERHEAD_NS, W_SPAWNED, W_SCRIPT, W_INIT, W_GROUP, W_RESTORED, W_FIRST_STEP,
    W_LAST_STEP, W_FINISHED, W_NUM_MARKS, W_NUM_RECORDS, W_NUM_SPANS, W_COMM_SEQ, W_NUM_COMMS,
    W_NUM_STAGES, W_PAUSED_NS, W_MARKS,
) = range(33)  # fmt: skip
"""Words of the header, in their order.

`W_PID` is 0 until the rank has claimed the ring; no other process may write it afterwards.
`W_RECORDER` is an index in `RECORDERS`. `W_BEAT` is the last write of the training thread,
`W_COMM_BEAT` the last time the recorder saw a collective begin or end. `W_NUM_MARKS`, `_RECORDS`,
`_SPANS` and `_STAGES` count what was ever made or begun; the last `MARKS_MAX` and so on are kept.
Span `n` (from 0) lies at `n % SPANS_MAX`.

A mark (from `W_MARKS` on) is (committed step, ns). Of a rank of a replica group, which saves
nothing, the marks are accounts instead, `GROUP_MARKS` in the place of the step."""
MARKS_MAX = 16
GROUP_MARKS = (-2, -3, -4)
"""lost, reform, heal"""
W_BUSY_SINCE, W_BUSY_UNTIL, W_BUSY_NAME = range(64, 67)
"""The busy phase that the script has declared; its end, 0 without one, is written last. Its name is
UTF-8, padded with zeros."""
BUSY_NAME_BYTES = 64
COMPILE_WORD = 74
"""Nanoseconds that torch took to compile in the first steps, a part of `W_STEP_NS`. No W_ word: the
compiled recorder, which is built anew for each change of these, has no use for it."""
NUM_STEPS_WORD = 75
"""So many steps the loop is to make, counted over the whole run; 0, as in older rings: not known.
No W_ word either."""
ALONE_WORD = 76
"""Bit n is 1 if perdure alone handles signal n in the rank: nothing of the script's does."""

HEADER_BYTES = 640
COMMS_MAX = 64
COMM_BYTES = 320
C_SIZE, C_STARTED, C_ENDED, C_SINCE, C_BYTES, C_KIND, C_TIMEOUT, C_STAMPS = range(8)
"""Words of a communicator's slot; `C_KIND` is as in a span, without the slot; `C_TIMEOUT` is the
process group's own time-out in nanoseconds, 0 where it is not known; `C_STAMPS` is an index
in `STAMPS`, 0 in older rings."""
STAMPS: tuple[Stamps, ...] = get_args(Stamps)
COMM_RANKS_MAX = 63
COMM_RANGE = 0xFFFF
"""In the place of a count: the ranks are a range, given by first, step and count."""
RANGES_MAX = 4 * 0xFFFF
"""Ranks of all communicators together that are told: a broken ring may name millions."""
COMM_TEXT = struct.Struct("32s64s")
"""op and name, UTF-8, padded with zeros; the op counts where `C_KIND` names none."""
COMM_RANKS = struct.Struct(f"{1 + COMM_RANKS_MAX}H")
COMM_TEXT_AT = 64
COMM_RANKS_AT = 160
RECORDS_AT = HEADER_BYTES + COMMS_MAX * COMM_BYTES
RECORD_BYTES = 64
RECORDS_MAX = 1024
SPANS_AT = RECORDS_AT + RECORDS_MAX * RECORD_BYTES
SPAN_BYTES = 64
SPANS_MAX = 2048
S_NUMBER, S_START, S_END, S_WAIT, S_SEQ, S_BYTES, S_KIND, S_STATE = range(8)
"""Words of a span. `S_NUMBER` is its number plus one, 0 while it is being written. `S_KIND` is
operation + (dtype << 8) + (communicator slot << 16) + (peer + 1 << 32), the peer by its rank
within the group. `S_STATE` is one of the states below + (thread id << 32)."""
UNDER_WAY, ENDED, FAILED, UNSEEN, AWAITED = range(5)
"""States of a span; `UNSEEN`: its end cannot be told by anybody; `AWAITED`: it is under way, and a
thread is blocked until it ends."""
STAGES_AT = SPANS_AT + SPANS_MAX * SPAN_BYTES
STAGES_BYTES = 128
STAGES_MAX = 512
RING_BYTES = STAGES_AT + STAGES_MAX * STAGES_BYTES

PHASES: tuple[Phase, ...] = get_args(Phase)
PHASE_INDEX: dict[str, int] = {phase: index for index, phase in enumerate(PHASES)}
RECORDERS = ("off", "status", "", "compiled")
"""Recorders that write the communicator slots; "status" polls Flight Recorder.

No recorder has number 2 any more.
"""

OPS = (
    "", "other", "allreduce", "allreduce_coalesced", "allgather", "allgather_base",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "broadcast", "reduce", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "alltoall", "alltoall_base", "barrier", "monitored_barrier", "send", "recv",
    "recv_any_source",
)  # fmt: skip
"""Operations by their number: names of c10d's operators without the outer underscores."""
OP_INDEX = {op: index for index, op in enumerate(OPS)}
POINT_TO_POINT = ("send", "recv", "recv_any_source")
P2P_SUFFIX = " p2p"
"""Ends the name of the slot that counts a group's sends and receives."""
DTYPES = (
    "", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    "complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16",
    "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float8_e5m2",
    "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64",
)  # fmt: skip
"""Element types: PyTorch's own numbers (c10::ScalarType) plus one, 0 for unknown."""

STAMP_WORDS = {
    "spawned": W_SPAWNED,
    "script": W_SCRIPT,
    "init": W_INIT,
    "group": W_GROUP,
    "restored": W_RESTORED,
    "first_step": W_FIRST_STEP,
    "last_step": W_LAST_STEP,
    "finished": W_FINISHED,
}

_HEADER = struct.Struct(f"={HEADER_BYTES // 8}q")
_COMM_HEAD = struct.Struct("=8q")
_SPAN = struct.Struct("=6q2Q")
_STAGES = struct.Struct("=10qd")


class RingReading(msgspec.Struct, frozen=True):
    """A ring at one moment."""

    rank: int
    generation: int
    pid: int
    recorder: str
    phase: Phase
    phase_since_s: float
    heartbeat_s: float
    account: RankAccount
    comms: tuple[CommProgress, ...] = ()
    torn: bool = False
    """A writer was in the middle of a change, for good if it is dead or stopped."""
    num_spans: int = 0
    """Collectives ever recorded; the newest are kept."""
    num_stages: int = 0
    """Steps whose stages were ever recorded."""
    busy_phase: BusyPhase | None = None
    num_steps: int = 0
    """So many steps its loop is to make; 0: it does not say."""

    def progress(self, proc: ProcSample) -> RankProgress:
        """Return it as a rank's part of a heartbeat, with what /proc says beside it."""
        return RankProgress(
            rank=self.rank,
            pid=self.pid,
            phase=self.phase,
            phase_since_s=self.phase_since_s,
            heartbeat_s=self.heartbeat_s,
            account=self.account,
            comms=self.comms,
            proc=proc,
            recorder=self.recorder,
            busy_phase=self.busy_phase,
            num_steps=self.num_steps,
        )


class SpanReading(msgspec.Struct, frozen=True):
    """One span of a ring, as it was at one moment."""

    number: int
    span: CollectiveSpan
    state: int
    """`UNDER_WAY`, `ENDED`, `FAILED`, `UNSEEN` or `AWAITED`."""
    dtype: str = ""
    thread: int = 0


def parse_ring(data: bytes, clock_offset_s: float, *, torn: bool = False) -> RingReading:
    """Return what the first `RECORDS_AT` bytes of a ring say, in job time.

    Raises:
        ProtocolError: it is no ring, or of another version.
    """
    if len(data) < RECORDS_AT:
        raise ProtocolError(f"a ring of {len(data)} bytes is shorter than {RECORDS_AT}")
    words = _HEADER.unpack_from(data)
    if words[W_MAGIC] != MAGIC:
        raise ProtocolError("not a ring: its first eight bytes are not PERDURE\\0")
    if words[W_VERSION] != VERSION:
        raise ProtocolError(f"ring of version {words[W_VERSION]}, expected {VERSION}")
    phase, recorder = words[W_PHASE], words[W_RECORDER]
    beat = max(words[W_BEAT], words[W_COMM_BEAT], words[W_SPAWNED])
    return RingReading(
        rank=words[W_RANK],
        generation=words[W_GENERATION],
        pid=words[W_PID],
        recorder=RECORDERS[recorder] if 0 <= recorder < len(RECORDERS) else "?",
        phase=PHASES[phase] if 0 <= phase < len(PHASES) else "spawned",
        phase_since_s=_stamp(words[W_PHASE_SINCE], clock_offset_s),
        heartbeat_s=_stamp(beat, clock_offset_s),
        account=_parse_account(words, clock_offset_s),
        comms=_parse_comms(data, words[W_NUM_COMMS], clock_offset_s),
        torn=torn,
        num_spans=words[W_NUM_SPANS],
        num_stages=words[W_NUM_STAGES],
        busy_phase=_parse_busy(data, words, clock_offset_s),
        num_steps=max(0, words[NUM_STEPS_WORD]),
    )


def span_at(number: int) -> int:
    """Return the offset in bytes of span `number`."""
    return SPANS_AT + (number % SPANS_MAX) * SPAN_BYTES


def stages_at(number: int) -> int:
    """Return the offset in bytes of step stages `number`."""
    return STAGES_AT + (number % STAGES_MAX) * STAGES_BYTES


def parse_span(
    data: bytes, at: int, number: int, comms: tuple[CommProgress, ...], clock_offset_s: float
) -> SpanReading | None:
    """Return span `number` from `data` at `at`; None while it is made, or where it is another.

    The peer is translated to its global rank by `comms`, of the same reading; -1 if unknown.
    """
    mark, start, end, wait, seq, size, kind, state = _SPAN.unpack_from(data, at)
    if mark != number + 1:
        return None
    op, dtype, comm, peer = kind & 255, kind >> 8 & 255, kind >> 16 & 0xFFFF, (kind >> 32) - 1
    if peer >= 0:
        ranks = comms[comm].ranks if comm < len(comms) else ()
        peer = ranks[peer] if peer < len(ranks) else -1
    span = CollectiveSpan(
        comm=comm,
        seq=seq,
        op=OPS[op] if op < len(OPS) else "other",
        bytes=size,
        start_s=_stamp(start, clock_offset_s),
        end_s=_stamp(end, clock_offset_s),
        wait_s=wait / 1e9,
        peer=peer,
        awaited=state & 0xFFFFFFFF == AWAITED,
    )
    name = DTYPES[dtype] if dtype < len(DTYPES) else ""
    return SpanReading(number, span, state & 0xFFFFFFFF, name, state >> 32)


def parse_stages(data: bytes, at: int, number: int, clock_offset_s: float) -> StepStages | None:
    """Return step stages `number` from `data` at `at`; None where they are others' by now."""
    index, step, begin, end, *parts, work = _STAGES.unpack_from(data, at)
    if index != number + 1:
        return None
    begin_s, end_s = _stamp(begin, clock_offset_s), _stamp(end, clock_offset_s)
    work = work if 0.0 < work <= WORK_MAX else 0.0
    return StepStages(step, begin_s, end_s, *(*(ns / 1e9 for ns in parts), work))


def seqs_of(data: bytes) -> tuple[int, int]:
    """Return the counters of the two writers; a copy is whole while both are even and stay."""
    words = _HEADER.unpack_from(data)
    return words[W_PROGRESS_SEQ], words[W_COMM_SEQ]


def spans_of(data: bytes) -> int:
    """Return how many spans were ever begun."""
    return int(_HEADER.unpack_from(data)[W_NUM_SPANS])


def comm_at(slot: int) -> int:
    """Return the offset in bytes of communicator slot `slot`."""
    return HEADER_BYTES + slot * COMM_BYTES


def _stamp(ns: int, clock_offset_s: float) -> float:
    return ns / 1e9 + clock_offset_s if ns else 0.0


def _parse_busy(data: bytes, words: tuple[int, ...], offset: float) -> BusyPhase | None:
    since, until = words[W_BUSY_SINCE], words[W_BUSY_UNTIL]
    if until <= since:
        return None
    name = _text(data[8 * W_BUSY_NAME : 8 * W_BUSY_NAME + BUSY_NAME_BYTES])
    return BusyPhase(name, _stamp(since, offset), _stamp(until, offset))


def _parse_account(words: tuple[int, ...], offset: float) -> RankAccount:
    total = words[W_NUM_MARKS]
    marks = []
    for number in range(max(0, total - MARKS_MAX), total):
        at = W_MARKS + 2 * (number % MARKS_MAX)
        marks.append((words[at], words[at + 1] / 1e9))
    lost_s, reform_s, heal_s = (dict(marks).get(mark, 0.0) for mark in GROUP_MARKS)
    return RankAccount(
        start_step=words[W_START_STEP],
        step=words[W_STEP],
        step_s=words[W_STEP_NS] / 1e9,
        checkpoint_s=words[W_CHECKPOINT_NS] / 1e9,
        boundary_s=words[W_BOUNDARY_NS] / 1e9,
        overhead_s=words[W_OVERHEAD_NS] / 1e9,
        paused_s=words[W_PAUSED_NS] / 1e9,
        **{f"{name}_s": _stamp(words[at], offset) for name, at in STAMP_WORDS.items()},
        marks=tuple(mark for mark in marks if mark[0] >= 0),
        lost_s=lost_s,
        reform_s=reform_s,
        heal_s=heal_s,
        compile_s=words[COMPILE_WORD] / 1e9,
    )


def _parse_comms(data: bytes, count: int, offset: float) -> tuple[CommProgress, ...]:
    comms, room = [], RANGES_MAX
    for slot in range(min(max(count, 0), COMMS_MAX)):
        at = comm_at(slot)
        size, started, ended, since, nbytes, kind, timeout, stamps = _COMM_HEAD.unpack_from(
            data, at
        )
        text, name = COMM_TEXT.unpack_from(data, at + COMM_TEXT_AT)
        op, dtype, peer = kind & 255, kind >> 8 & 255, (kind >> 32) - 1
        ranks = _parse_ranks(data, at + COMM_RANKS_AT, room)
        room -= len(ranks)
        comms.append(
            CommProgress(
                name=_text(name),
                size=size,
                started_seq=started,
                ended_seq=ended,
                op=OPS[op] if 0 < op < len(OPS) else _text(text),
                since_s=_stamp(since, offset),
                ranks=ranks,
                bytes=nbytes,
                dtype=DTYPES[dtype] if dtype < len(DTYPES) else "",
                peer=ranks[peer] if 0 <= peer < len(ranks) else -1,
                timeout_s=max(timeout, 0) / 1e9,
                stamps=STAMPS[stamps] if 0 <= stamps < len(STAMPS) else "enqueued",
            )
        )
    return tuple(comms)


def _parse_ranks(data: bytes, at: int, room: int) -> tuple[int, ...]:
    count, *ranks = COMM_RANKS.unpack_from(data, at)
    if count == COMM_RANGE:
        first, step, num = ranks[:3]
        return tuple(range(first, first + step * num, step)) if step and num <= room else ()
    return tuple(ranks[: min(count, COMM_RANKS_MAX)])


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")
