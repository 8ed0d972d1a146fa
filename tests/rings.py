"""Everything that is in a ring, read at once; perdure follows one from look to look instead."""

from perdure.adapters.rings import open_regular
from perdure.model.errors import ProtocolError
from perdure.model.ring import (
    RING_BYTES,
    SPANS_MAX,
    STAGES_MAX,
    RingReading,
    SpanReading,
    StepRecord,
    parse_records,
    parse_ring,
    parse_span,
    parse_stages,
    span_at,
    stages_at,
)
from perdure.model.signals.progress import StepStages


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
    return parse_records(data, clock_offset_s) if reading is not None else ()


def _read_whole(path: str, clock_offset_s: float) -> tuple[bytes, RingReading | None]:
    """Return a ring's bytes, and what its header says; no reading where it is no ring."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read(RING_BYTES)
        return data, parse_ring(data, clock_offset_s) if len(data) == RING_BYTES else None
    except (OSError, ProtocolError):
        return b"", None
