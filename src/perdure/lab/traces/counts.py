"""Traces of counts: how many nodes there were, and never which."""

import json
import math
from datetime import datetime, timedelta
from typing import Annotated

import msgspec

from perdure.lab.traces.build import from_counts
from perdure.lab.traces.nouns import AvailabilityTrace, find_intervals, guess_end
from perdure.model.source import Source

Count = Annotated[int, msgspec.Meta(ge=0)]
_STAMP = "%Y-%m-%d %H:%M:%S"


class _Sample(msgspec.Struct):
    Time: Annotated[float, msgspec.Meta(ge=0)]
    GPUs: Count


def read_sailor(source: Source) -> AvailabilityTrace:
    """Read `[{"Time": seconds, "GPUs": nodes}, ...]`: Sailor's, and the Varuna fork's."""
    samples: list[_Sample] = source.decode(list[_Sample])
    for index in range(1, len(samples)):
        if samples[index].Time < samples[index - 1].Time:
            before = samples[index - 1].Time
            source.fail_in([index, "Time"], f"expected a time not before the {before:g} s above")
    rows = [(s.Time, s.GPUs) for s in samples]
    return from_counts(source.name, rows, guess_end([0.0, *(t for t, _ in rows)]))


def write_sailor(trace: AvailabilityTrace, _gap_s: float) -> str:
    """Return an entry a change: names, notice and slots are lost, and the end is guessed."""
    rows = [json.dumps({"Time": i.begin_s, "GPUs": len(i.living)}) for i in find_intervals(trace)]
    return "[\n  " + ",\n  ".join(rows) + "\n]\n"


class _Metadata(msgspec.Struct):
    gap_seconds: Annotated[float, msgspec.Meta(gt=0)]


class _SkyPilot(msgspec.Struct):
    metadata: _Metadata
    data: tuple[Count, ...]


def read_skypilot(source: Source) -> AvailabilityTrace:
    """Read `{"metadata": {"gap_seconds": g}, "data": [nodes, ...]}`."""
    document: _SkyPilot = source.decode(_SkyPilot)
    gap_s = document.metadata.gap_seconds
    rows = [(index * gap_s, count) for index, count in enumerate(document.data)]
    return from_counts(source.name, rows, len(rows) * gap_s)


def write_skypilot(trace: AvailabilityTrace, gap_s: float) -> str:
    """Return the count every `gap_s`: names, notice, slots, and what is shorter, are lost."""
    intervals = find_intervals(trace)
    counts, at = [], 0
    for index in range(math.ceil(trace.duration_s / gap_s)):
        while intervals[at].end_s <= index * gap_s:
            at += 1
        counts.append(len(intervals[at].living))
    return json.dumps({"metadata": {"gap_seconds": gap_s}, "data": counts}) + "\n"


def read_polls(source: Source) -> AvailabilityTrace:
    """Read `date, time, nodes` a line, as a poll of the cloud writes it."""
    rows: list[tuple[float, int]] = []
    began: datetime | None = None
    for number, line in source.lines():
        fields = line.split(",")
        if len(fields) != 3:
            source.fail(number, len(line) + 1, f"expected date, time, nodes, got {line!r}")
        stamp = f"{fields[0].strip()} {fields[1].strip()}"
        try:
            at = datetime.strptime(stamp, _STAMP)
        except ValueError:
            source.fail(number, 1, f"expected YYYY-MM-DD, HH:MM:SS, got {stamp!r}")
        column = len(fields[0]) + len(fields[1]) + 3
        if not fields[2].strip().isdecimal():
            source.fail(number, column, f"expected a number of nodes, got {fields[2].strip()!r}")
        began = began or at
        at_s = (at - began).total_seconds()
        if rows and at_s < rows[-1][0]:
            source.fail(number, 1, "expected a time not before the one above")
        rows.append((at_s, int(fields[2])))
    return from_counts(source.name, rows, guess_end([0.0, *(t for t, _ in rows)]))


def write_polls(trace: AvailabilityTrace, gap_s: float) -> str:
    """Return the count every `gap_s`, from an arbitrary midnight; only counts are kept."""
    document = json.loads(write_skypilot(trace, gap_s))
    began = datetime(2000, 1, 1)
    stamps = [began + timedelta(seconds=i * gap_s) for i in range(len(document["data"]))]
    rows = zip(stamps, document["data"], strict=True)
    return "".join(f"{at:%Y-%m-%d, %H:%M:%S}, {count}\n" for at, count in rows)
