"""A ring followed from heartbeat to heartbeat: what began, ended and was stepped since.

Only what is new is read: the header and communicators (21 KB), the spans begun since the last
look, and those that had not ended then. What goes into a heartbeat is thinned by sequence
number, so that all ranks of a communicator report the same collectives although nobody tells
them which: each keeps the multiples of a power of two, and of two powers the larger divides.
"""

import os
from collections.abc import Iterable

import msgspec

from perdure.adapters.rings import copy_ring, open_ring
from perdure.model.errors import ProtocolError
from perdure.model.ring import (
    AWAITED,
    ENDED,
    FAILED,
    HEADER_BYTES,
    P2P_SUFFIX,
    SPAN_BYTES,
    SPANS_MAX,
    STAGES_BYTES,
    STAGES_MAX,
    UNDER_WAY,
    RingReading,
    SpanReading,
    parse_ring,
    parse_span,
    parse_stages,
    span_at,
    spans_of,
    stages_at,
)
from perdure.model.signals.progress import CollectiveSpan, StepStages

SPANS_A_BEAT = 8
"""Of each communicator, about; a faster one is thinned."""
STAGES_A_BEAT = 8
PENDING_S = 0.25
"""What is under way for longer is reported in each heartbeat until it ends: sends and receives,
and collectives behind which others of their communicator were begun."""
PENDING_MAX = 16
"""The most pending collectives of one rank in a heartbeat; the oldest go first."""
_EASE_BEATS = 10
"""After so many heartbeats with less to say, twice as much is kept again."""
_RUN_GAP = 32
"""Spans closer together than this are read at once."""


class RingLook(msgspec.Struct, frozen=True):
    """A ring now, and what has ended in it since the look before."""

    reading: RingReading
    spans: tuple[CollectiveSpan, ...] = ()
    stages: tuple[StepStages, ...] = ()


class Stride:
    """The power of two of which one stream keeps the multiples."""

    def __init__(self, limit: int) -> None:
        """Keep about `limit` a heartbeat."""
        self.value = 1
        self._limit = limit
        self._eased = 0

    def note(self, count: int) -> int:
        """Return the stride for a heartbeat that has `count` to choose from.

        It grows at once and shrinks slowly, because ranks that differ in it have only the
        multiples of the larger one in common.
        """
        wanted = 1
        while count > wanted * self._limit:
            wanted *= 2
        if wanted >= self.value:
            self.value, self._eased = wanted, 0
        else:
            self._eased += 1
            if self._eased >= _EASE_BEATS:
                self.value, self._eased = self.value // 2, 0
        return self.value


class RingFollower:
    """Reads one ring again and again."""

    def __init__(self, path: str, clock_offset_s: float) -> None:
        """Follow the ring at `path`."""
        self._path, self._offset_s = path, clock_offset_s
        self._next_span = 0
        self._open: list[int] = []
        """Spans that had not ended at the last look, ascending."""
        self._next_stages = 0
        self._newest: dict[int, CollectiveSpan | None] = {}
        """Communicator -> its newest span, if thinned out: told once nothing follows on it.

        Where all stand still, the last one that ended is what says who did another than the rest.
        """
        self._strides: dict[int, Stride] = {}
        self._step_stride = Stride(STAGES_A_BEAT)

    def read(self, now: float) -> RingLook | None:
        """Return what it says at job time `now`; None where there is no ring (yet)."""
        fd = open_ring(self._path)
        if fd < 0:
            return None
        try:
            data, torn = copy_ring(fd)
            reading = parse_ring(data, self._offset_s, torn=torn)
            if reading.num_spans < self._next_span or reading.num_stages < self._next_stages:
                self.__init__(self._path, self._offset_s)  # type: ignore[misc]  # Made anew.
            spans = self._read_spans(fd, reading, now)
            stages = self._read_stages(fd, reading.num_stages)
        except ProtocolError:
            return None  # Being made at this moment, or none of ours.
        finally:
            os.close(fd)
        return RingLook(reading, spans, stages)

    def _read_spans(self, fd: int, reading: RingReading, now: float) -> tuple[CollectiveSpan, ...]:
        head = reading.num_spans
        first = max(self._next_span, head - SPANS_MAX)
        numbers = [n for n in self._open if n > head - SPANS_MAX]
        numbers += range(first, head)
        self._next_span, self._open = head, []
        ended: dict[int, list[CollectiveSpan]] = {}
        pending = []
        for number, span in self._parse(fd, numbers, reading):
            if span is None or span.state in (UNDER_WAY, AWAITED):
                self._open.append(number)
                if span is not None and _is_late(span.span, reading, now):
                    pending.append(span.span)
            elif span.state in (ENDED, FAILED):
                ended.setdefault(span.span.comm, []).append(span.span)
        chosen = []
        for comm in {**dict.fromkeys(self._strides), **ended}:
            stride = self._strides.setdefault(comm, Stride(SPANS_A_BEAT))
            found = ended.get(comm, [])
            step = stride.note(len(found))
            chosen += [span for span in found if span.seq % step == 0]
            if found:
                self._newest[comm] = found[-1] if found[-1].seq % step else None
            elif (newest := self._newest.pop(comm, None)) is not None:
                chosen.append(newest)
        return tuple(chosen + pending[:PENDING_MAX])

    def _parse(
        self, fd: int, numbers: list[int], reading: RingReading
    ) -> list[tuple[int, SpanReading | None]]:
        """Read `numbers` (ascending); what was overwritten meanwhile is left out."""
        found = []
        for run in _split_runs(numbers):
            data = os.pread(fd, (run[-1] - run[0] + 1) * SPAN_BYTES, span_at(run[0]))
            for number in run:
                at = (number - run[0]) * SPAN_BYTES
                if at + SPAN_BYTES <= len(data):
                    span = parse_span(data, at, number, reading.comms, self._offset_s)
                    found.append((number, span))
        if not numbers or reading.num_spans - numbers[0] < SPANS_MAX // 2:
            return found
        oldest = spans_of(os.pread(fd, HEADER_BYTES, 0)) - SPANS_MAX
        return [(number, span) for number, span in found if number > oldest]

    def _read_stages(self, fd: int, head: int) -> tuple[StepStages, ...]:
        first = max(self._next_stages, head - STAGES_MAX)
        self._next_stages = head
        found = []
        for number in range(first, head):
            data = os.pread(fd, STAGES_BYTES, stages_at(number))
            stages = parse_stages(data, 0, number, self._offset_s)
            if stages is not None:
                found.append(stages)
        stride = self._step_stride.note(len(found))
        return tuple(one for one in found if one.step % stride == 0)


def _is_late(span: CollectiveSpan, reading: RingReading, now: float) -> bool:
    """Whether `span` has been under way for long and no slot shows it: those have the newest."""
    if now - span.start_s <= PENDING_S or span.comm >= len(reading.comms):
        return False
    comm = reading.comms[span.comm]
    return comm.name.endswith(P2P_SUFFIX) or span.seq < comm.started_seq


def _split_runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return `numbers` in runs that lie close together and do not go round the ring's end."""
    runs: list[list[int]] = []
    for number in numbers:
        if (
            runs
            and number - runs[-1][-1] <= _RUN_GAP
            and number // SPANS_MAX == runs[-1][0] // SPANS_MAX
        ):
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
