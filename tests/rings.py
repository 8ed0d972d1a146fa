"""Everything that is in a ring, read at once; perdure follows one from look to look instead."""

import struct

import msgspec

from perdure.files.regular import open_regular
from perdure.model import ring as layout
from perdure.model.errors import ProtocolError
from perdure.model.ring import (
    RECORD_BYTES,
    RECORDS_AT,
    RECORDS_MAX,
    RING_BYTES,
    SPANS_MAX,
    STAGES_MAX,
    W_NUM_RECORDS,
    RingReading,
    SpanReading,
    parse_ring,
    parse_span,
    parse_stages,
    span_at,
    stages_at,
)
from perdure.model.signals.progress import StepStages
from perdure.worker.ring import RingWriter

_SPAN = struct.Struct("@6q2Q")


class StepRecord(msgspec.Struct, frozen=True):
    """One committed step. Seconds; `begin_s` and `end_s` in job time."""

    step: int
    """Committed steps after it."""
    begin_s: float
    end_s: float
    step_s: float
    checkpoint_s: float
    """Of the boundary before it and of gates inside it."""
    boundary_s: float
    overhead_s: float


def read_spans(path: str, clock_offset_s: float) -> tuple[SpanReading, ...]:
    """Return the last collectives recorded in the ring at `path`, oldest first."""
    data, reading = _read_whole(path, clock_offset_s)
    if reading is None:
        return ()
    numbers = range(max(0, reading.num_spans - SPANS_MAX), reading.num_spans)
    found = (parse_span(data, span_at(n), n, reading.comms, clock_offset_s) for n in numbers)
    return tuple(span for span in found if span is not None)


def read_stages(path: str, clock_offset_s: float) -> tuple[StepStages, ...]:
    """Return the stages of the last steps recorded in the ring at `path`, oldest first."""
    data, reading = _read_whole(path, clock_offset_s)
    if reading is None:
        return ()
    numbers = range(max(0, reading.num_stages - STAGES_MAX), reading.num_stages)
    found = (parse_stages(data, stages_at(n), n, clock_offset_s) for n in numbers)
    return tuple(stages for stages in found if stages is not None)


def read_records(path: str, clock_offset_s: float) -> tuple[StepRecord, ...]:
    """Return the last committed steps recorded in the ring at `path`, oldest first."""
    data, reading = _read_whole(path, clock_offset_s)
    if reading is None:
        return ()
    total = struct.unpack_from("=q", data, 8 * W_NUM_RECORDS)[0]
    records = []
    for number in range(max(0, total - RECORDS_MAX), total):
        at = RECORDS_AT + (number % RECORDS_MAX) * RECORD_BYTES
        index, step, begin, end, *spent = struct.unpack_from("=8q", data, at)
        if index == number:  # Else it was overwritten while it was copied.
            begin_s, end_s = (ns / 1e9 + clock_offset_s if ns else 0.0 for ns in (begin, end))
            records.append(StepRecord(step, begin_s, end_s, *(ns / 1e9 for ns in spent)))
    return tuple(records)


def _read_whole(path: str, clock_offset_s: float) -> tuple[bytes, RingReading | None]:
    """Return a ring's bytes, and what its header says; no reading where it is no ring."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read(RING_BYTES)
        return data, parse_ring(data, clock_offset_s) if len(data) == RING_BYTES else None
    except (OSError, ProtocolError):
        return b"", None


class SpanWriter(RingWriter):
    """Writes collectives into a ring as the compiled recorder does."""

    def set_comm_kind(self, slot: int, nbytes: int, kind: int) -> None:
        """Note size and kind (operation and dtype) of a communicator's last collective."""
        at = layout.comm_at(slot) // 8
        self._words[at + layout.C_BYTES], self._words[at + layout.C_KIND] = nbytes, kind

    def begin_span(self, seq: int, kind: int, nbytes: int, now: int, state: int) -> int:
        """Record that a collective began at `now`; return the number of its span."""
        words = self._words
        number = int(words[layout.W_NUM_SPANS])
        words[layout.W_NUM_SPANS] = number + 1
        at = layout.span_at(number)
        words[at // 8] = 0
        _SPAN.pack_into(self._memory, at, 0, now, 0, 0, seq, nbytes, kind, state)
        words[at // 8] = number + 1
        return number

    def end_span(self, number: int, now: int, state: int = layout.ENDED) -> None:
        """Record that span `number` ended at `now`, unless it was overwritten since."""
        words = self._words
        at = layout.span_at(number) // 8
        if words[at] == number + 1 and not words[at + layout.S_END]:
            words[at + layout.S_END] = now
            words[at + layout.S_STATE] = words[at + layout.S_STATE] & ~0xFFFFFFFF | state
