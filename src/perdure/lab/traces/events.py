"""Traces of events: `t_ms,add|remove,node` a line (Bamboo, Oobleck), and Parcae's JSON lines."""

import json
from typing import Literal

import msgspec

from perdure.lab.traces.build import Builder, Misfit
from perdure.lab.traces.nouns import AvailabilityTrace, find_changes, guess_end
from perdure.model.source import Path, Source, find_value, split_place


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
    for change in find_changes(trace):
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
            source.fail(number, find_value(line, path) + 1, str(error))
        except msgspec.ValidationError as error:
            what, path = split_place(str(error))
            source.fail(number, find_value(line, path) + 1, what)
        except msgspec.DecodeError as error:
            source.fail(number, 1, f"{error}; expected one JSON array on the line")
        end_s = (tick.at_ms + max(0.0, tick.detail.duration)) / 1000.0
    return builder.finish(source.name, end_s)


def write_parcae(trace: AvailabilityTrace, _gap_s: float) -> str:
    """Return it as Parcae's lines: notice and slots are lost."""
    changes = find_changes(trace)
    ends = [change.at_s for change in changes[1:]] + [trace.duration_s]
    rows = []
    for change, end_s in zip(changes, ends, strict=True):
        lasts = round((end_s - change.at_s) * 1000)
        gone = [departure.node for departure in change.left]
        if gone:
            both = 0 if change.joined else lasts
            detail = {"nodes": gone, "duration": both}
            rows.append(json.dumps([round(change.at_s * 1000), "remove", detail]))
        if change.joined or not gone:
            verb = "add" if change.joined else "no-op"
            detail = {"nodes": list(change.joined), "duration": lasts}
            rows.append(json.dumps([round(change.at_s * 1000), verb, detail]))
    return "".join(row + "\n" for row in rows)
