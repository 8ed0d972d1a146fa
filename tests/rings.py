"""Everything that is in a ring, read at once; perdure follows one from look to look instead."""

import struct

import msgspec

from perdure.files.regular import open_regular
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
