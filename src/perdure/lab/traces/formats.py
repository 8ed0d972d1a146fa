"""All formats of traces: how each is recognised, read and written."""

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from perdure.lab.traces.counts import (
    read_polls,
    read_sailor,
    read_skypilot,
    write_polls,
    write_sailor,
    write_skypilot,
)
from perdure.lab.traces.events import read_events, read_parcae, write_events, write_parcae
from perdure.lab.traces.faults import read_faults, write_faults
from perdure.lab.traces.native import read_native, write_native
from perdure.lab.traces.nouns import AvailabilityTrace
from perdure.model.errors import ConfigError
from perdure.model.source import Source


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
    text: str, name: str, *, format_name: str | None = None, duration_s: float | None = None
) -> AvailabilityTrace:
    """Return the trace in `text`, whichever format it has.

    Args:
        text: All of the file.
        name: What it is called, in errors and in reports.
        format_name: Its format, instead of the one that its beginning tells.
        duration_s: Its end, instead of the one that it says or lets guess.

    Raises:
        ConfigError: It is malformed; names line, column and what was expected.
    """
    source = Source(name, text)
    format_ = find_format(format_name) if format_name else _recognise(source)
    trace = format_.read(source)
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
