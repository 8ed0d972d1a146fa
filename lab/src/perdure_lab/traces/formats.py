"""All formats of traces: how each is recognised, read and written.

They are perdure's own; events, as `t_ms,add|remove,node` a line (Bamboo, Oobleck) and Parcae's JSON
lines; counts, which say how many nodes there were, and never which; and faults
(InfiniteHBD-Trace), where nodes are there except from a fault's start to its end. Nodes that never
failed are not in such a record; `add_quiet` says how many there were in all.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated, Literal, NamedTuple

import msgspec

from perdure.model.errors import ConfigError
from perdure.model.input.source import Path, Source, locate_value, split_place
from perdure_lab.traces.nouns import (
    AvailabilityTrace,
    Builder,
    Misfit,
    Stay,
    TraceNode,
    from_counts,
    guess_end,
    list_changes,
    list_intervals,
)

VERSION = 1


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    perdure_trace: int
    name: str
    duration_s: Annotated[float, msgspec.Meta(gt=0)]
    nodes: tuple[TraceNode, ...]
    named: bool = True


def read_native(source: Source) -> AvailabilityTrace:
    """Read `{"perdure_trace": 1, "name", "duration_s", "nodes": [{"name", "stays", "slots"}]}`."""
    document: _Document = source.decode(_Document)
    if document.perdure_trace != VERSION:
        source.fail_in(["perdure_trace"], f"expected version {VERSION}")
    seen: set[str] = set()
    for at, node in enumerate(document.nodes):
        if node.name in seen:
            source.fail_in(["nodes", at, "name"], f"expected each name once, got {node.name} again")
        if node.slots < 1:
            source.fail_in(["nodes", at, "slots"], f"expected slots from 1 on, got {node.slots}")
        seen.add(node.name)
        free_s = 0.0
        for number, stay in enumerate(node.stays):
            path: list[str | int] = ["nodes", at, "stays", number]
            end_s = float("inf") if stay.end_s is None else stay.end_s
            if stay.begin_s < free_s:
                source.fail_in([*path, "begin_s"], f"expected a time not before {free_s:g} s")
            if end_s <= stay.begin_s:
                source.fail_in([*path, "end_s"], f"expected a time after {stay.begin_s:g} s")
            if stay.notice_s < 0:
                source.fail_in([*path, "notice_s"], "expected seconds from 0 on")
            free_s = end_s
    return AvailabilityTrace(document.name, document.duration_s, document.nodes, document.named)


def write_native(trace: AvailabilityTrace, _gap_s: float) -> str:
    """Return all of it."""
    document = _Document(VERSION, trace.name, trace.duration_s, trace.nodes, trace.named)
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def read_events(source: Source) -> AvailabilityTrace:
    """Read `t_ms,add|remove,node`."""
    builder, times = Builder(), [0.0]
    for number, line in source.lines():
        fields = line.split(",")
        if len(fields) != 3:
            source.fail(number, 1, f"expected t_ms,add|remove,node, got {line.strip()!r}")
        at, verb, node = (field.strip() for field in fields)
        columns = {"time": 1, "verb": len(fields[0]) + 2}
        columns["node"] = columns["verb"] + len(fields[1]) + 1
        try:
            at_s = float(at) / 1000.0
        except ValueError:
            source.fail(number, 1, f"expected milliseconds, got {at!r}")
        if verb not in ("add", "remove"):
            source.fail(number, columns["verb"], f"expected add or remove, got {verb!r}")
        if not node:
            source.fail(number, columns["node"], "expected a node's name")
        try:
            builder.go_to(at_s)
            (builder.add if verb == "add" else builder.remove)(node)
        except Misfit as error:
            source.fail(number, columns[error.field], str(error))
        times.append(at_s)
    return builder.finish(source.name, guess_end(times))


def write_events(trace: AvailabilityTrace, _gap_s: float) -> str:
    """Return it as `t_ms,add|remove,node`: notice, slots and the end are lost."""
    rows = []
    for change in list_changes(trace):
        at_ms = f"{change.at_s * 1000:.0f}"
        rows += [f"{at_ms},remove,{gone.node}\n" for gone in change.left]
        rows += [f"{at_ms},add,{node}\n" for node in change.joined]
    return "".join(rows)


class _Detail(msgspec.Struct):
    nodes: tuple[str, ...]
    duration: float
    """How long the tick lasts, milliseconds."""


class _Tick(msgspec.Struct, array_like=True):
    at_ms: float
    verb: Literal["add", "remove", "no-op", "migration"]
    detail: _Detail


def read_parcae(source: Source) -> AvailabilityTrace:
    """Read a JSON array a line.

    It is `[t_ms, verb, {"nodes": [...], "duration": ms}]`; verbs are add, remove, no-op and
    migration, and other keys are left alone.
    """
    builder, end_s = Builder(), 0.0
    for number, line in source.lines():
        path: Path = [0]
        try:
            tick = msgspec.json.decode(line, type=_Tick)
            builder.go_to(tick.at_ms / 1000.0)
            for index, node in enumerate(tick.detail.nodes):
                path = [2, "nodes", index]
                if tick.verb == "add":
                    builder.add(node)
                elif tick.verb == "remove":
                    builder.remove(node)
        except Misfit as error:
            source.fail(number, locate_value(line, path) + 1, str(error))
        except msgspec.ValidationError as error:
            what, path = split_place(str(error))
            source.fail(number, locate_value(line, path) + 1, what)
        except msgspec.DecodeError as error:
            source.fail(number, 1, f"{error}; expected one JSON array on the line")
        end_s = (tick.at_ms + max(0.0, tick.detail.duration)) / 1000.0
    return builder.finish(source.name, end_s)


def write_parcae(trace: AvailabilityTrace, _gap_s: float) -> str:
    """Return it as Parcae's lines: notice and slots are lost."""
    rows = []
    for interval in list_intervals(trace):
        change = interval.change
        lasts = round(interval.length_s * 1000)
        gone = [departure.node for departure in change.left]
        if gone:
            detail = {"nodes": gone, "duration": 0 if change.joined else lasts}
            rows.append(json.dumps([round(change.at_s * 1000), "remove", detail]))
        if change.joined or not gone:
            verb = "add" if change.joined else "no-op"
            detail = {"nodes": list(change.joined), "duration": lasts}
            rows.append(json.dumps([round(change.at_s * 1000), verb, detail]))
    return "".join(row + "\n" for row in rows)


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
    rows = [json.dumps({"Time": i.begin_s, "GPUs": len(i.living)}) for i in list_intervals(trace)]
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
    if not math.isfinite(len(rows) * gap_s):
        source.fail_in(["metadata", "gap_seconds"], f"expected an end, got {len(rows)} such gaps")
    return from_counts(source.name, rows, len(rows) * gap_s)


def write_skypilot(trace: AvailabilityTrace, gap_s: float) -> str:
    """Return the count every `gap_s`: names, notice, slots, and what is shorter, are lost."""
    intervals = list_intervals(trace)
    counts, at = [], 0
    for index in range(math.ceil(trace.duration_s / gap_s)):
        while intervals[at].end_s <= index * gap_s:
            at += 1
        counts.append(len(intervals[at].living))
    return json.dumps({"metadata": {"gap_seconds": gap_s}, "data": counts}) + "\n"


_DISORDER_MAX = timedelta(minutes=10)
"""Pollers that share a file are this far apart at most; what is older is another recording."""
_NAMED_MAX = 10


def read_polls(source: Source) -> AvailabilityTrace:
    """Read `date, time, nodes` a line, as a poll of the cloud writes it.

    Where several pollers write one file, lines come a little out of order: they are sorted, and
    named in `source.notes`. A time of more than `_DISORDER_MAX` before the newest is an error.
    """
    rows: list[tuple[datetime, int]] = []
    newest: datetime | None = None
    early: list[int] = []
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
        newest = max(at, newest or at)
        if newest - at > _DISORDER_MAX:
            source.fail(number, 1, f"expected a time not long before {newest:%Y-%m-%d, %H:%M:%S}")
        if at < newest:
            early.append(number)
        rows.append((at, int(fields[2])))
    if early:
        lines = ", ".join(map(str, early[:_NAMED_MAX])) + (
            "" if len(early) <= _NAMED_MAX else ", ..."
        )
        source.notes.append(
            f"{len(early)} lines were not in the order of time, and sorted: {lines}"
        )
    rows.sort(key=lambda row: row[0])
    counts = [((at - rows[0][0]).total_seconds(), count) for at, count in rows]
    return from_counts(source.name, counts, guess_end([0.0, *(t for t, _ in counts)]))


def write_polls(trace: AvailabilityTrace, gap_s: float) -> str:
    """Return the count every `gap_s`, from an arbitrary midnight; only counts are kept."""
    document = json.loads(write_skypilot(trace, gap_s))
    began = datetime(2000, 1, 1)
    stamps = [began + timedelta(seconds=i * gap_s) for i in range(len(document["data"]))]
    rows = zip(stamps, document["data"], strict=True)
    return "".join(f"{at:%Y-%m-%d, %H:%M:%S}, {count}\n" for at, count in rows)


DAY_S = 86_400.0


class _Fault(msgspec.Struct):
    node_id: str
    event_time: Annotated[float, msgspec.Meta(ge=0)]
    """Days."""
    event_type: Literal["fault_start", "fault_end"]


def read_faults(source: Source) -> AvailabilityTrace:
    """Read `[{"node_id", "event_time" (days), "event_type": "fault_start" | "fault_end"}, ...]`.

    A node with two faults at once is back when both have ended.
    """
    faults: list[_Fault] = source.decode(list[_Fault])
    builder, open_faults = Builder(), Counter[str]()
    for node in dict.fromkeys(fault.node_id for fault in faults):
        builder.add(node)
    for index, fault in enumerate(faults):
        node, begins = fault.node_id, fault.event_type == "fault_start"
        if not begins and open_faults[node] == 0:
            source.fail_in([index, "event_type"], "expected a fault that has started")
        open_faults[node] += 1 if begins else -1
        try:
            builder.go_to(fault.event_time * DAY_S)
        except Misfit as error:
            source.fail_in([index, "event_time"], str(error))
        if begins and open_faults[node] == 1:
            builder.remove(node)
        elif not begins and open_faults[node] == 0:
            builder.add(node)
    return builder.finish(source.name, guess_end([0.0, *(f.event_time * DAY_S for f in faults)]))


def write_faults(trace: AvailabilityTrace, _gap_s: float) -> str:
    """Return the times between stays as faults: notice, slots, quiet nodes and the end are lost."""
    rows = []
    for node in trace.nodes:
        gone_s = 0.0
        for stay in node.stays:
            if stay.begin_s > gone_s:
                rows += [(gone_s, node.name, "fault_start"), (stay.begin_s, node.name, "fault_end")]
            gone_s = trace.duration_s if stay.end_s is None else stay.end_s
        if gone_s < trace.duration_s:
            rows.append((gone_s, node.name, "fault_start"))
    lines = [
        json.dumps({"node_id": name, "event_time": at_s / DAY_S, "event_type": kind})
        for at_s, name, kind in sorted(rows)
    ]
    return "[\n  " + ",\n  ".join(lines) + "\n]\n" if lines else "[]\n"


def add_quiet(trace: AvailabilityTrace, count: int) -> AvailabilityTrace:
    """Return `trace` with nodes that were always there, so that there are `count` in all."""
    quiet = tuple(TraceNode(f"quiet{n}", (Stay(0.0),)) for n in range(count - len(trace.nodes)))
    return msgspec.structs.replace(trace, nodes=trace.nodes + quiet)


class Format(NamedTuple):
    """A way to write a trace down."""

    name: str
    looks: str
    """An entry, in short."""
    begins: str
    """Matched at the file's first word, a regular expression."""
    read: Callable[[Source], AvailabilityTrace]
    write: Callable[[AvailabilityTrace, float], str]
    """Second argument: seconds between entries, where the format has entries at fixed gaps."""
    loses: str
    """What it has no place for."""


FORMATS = (
    Format(
        "perdure",
        '{"perdure_trace": 1, ...}',
        r'\{\s*"perdure_trace"',
        read_native,
        write_native,
        "",
    ),
    Format(
        "events",
        "t_ms,add|remove,node",
        r"[^,\s]*\s*,\s*[a-z]+\s*,",
        read_events,
        write_events,
        "notice, slots and the end",
    ),
    Format(
        "parcae",
        '[t_ms, "add", {"nodes": [...], "duration": ms}]',
        r"\[\s*[-\d]",
        read_parcae,
        write_parcae,
        "notice and slots",
    ),
    Format(
        "sailor",
        '[{"Time": seconds, "GPUs": nodes}]',
        r'\[\s*\{\s*"(Time|GPUs)"',
        read_sailor,
        write_sailor,
        "names, notice, slots and the end",
    ),
    Format(
        "skypilot",
        '{"metadata": {"gap_seconds": s}, "data": [nodes, ...]}',
        r'\{\s*"(metadata|data)"',
        read_skypilot,
        write_skypilot,
        "names, notice, slots and all between two entries",
    ),
    Format(
        "polls",
        "date, time, nodes",
        r"\d+-\d+-\d+\s*,",
        read_polls,
        write_polls,
        "names, notice, slots and all between two entries",
    ),
    Format(
        "faults",
        '[{"node_id": name, "event_time": days, "event_type": "fault_start"}]',
        r'\[\s*\{\s*"(node_id|event_\w+|fault_type)"',
        read_faults,
        write_faults,
        "notice, slots, nodes without a fault, and the end",
    ),
)


def find_format(name: str) -> Format:
    """Return the format called `name`."""
    for format_ in FORMATS:
        if format_.name == name:
            return format_
    raise ConfigError(
        f"no format `{name}`", hint="one of " + ", ".join(format_.name for format_ in FORMATS)
    )


def read_trace(
    text: str,
    name: str,
    *,
    format_name: str | None = None,
    duration_s: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> AvailabilityTrace:
    """Return the trace in `text`, whichever format it has.

    Args:
        text: All of the file.
        name: What it is called, in errors and in reports.
        format_name: Its format, instead of the one that its beginning tells.
        duration_s: Its end, instead of the one that it says or lets guess.
        tell: Takes each line about what was odd in it, and was put right.

    Raises:
        ConfigError: It is malformed; names line, column and what was expected.
    """
    source = Source(name, text)
    format_ = find_format(format_name) if format_name else _recognise(source)
    trace = format_.read(source)
    for text in source.notes:
        tell(f"{name}: {text}")
    if duration_s is not None:
        trace = msgspec.structs.replace(trace, duration_s=duration_s)
    if not trace.duration_s > 0:
        raise ConfigError(f"{name}: it has one instant only, and no end", hint="--duration SECONDS")
    return trace


def _recognise(source: Source) -> Format:
    lines = source.lines()
    number, line = lines[0] if lines else (1, "")
    begin = source.text.find(line) if lines else 0
    for format_ in FORMATS:
        if re.match(r"\s*" + format_.begins, source.text[begin:]):
            return format_
    looks = "; or ".join(f"{f.looks} ({f.name})" for f in FORMATS)
    source.fail(number, 1, f"expected {looks}, got {line.strip()[:40]!r}")
