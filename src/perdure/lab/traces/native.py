"""perdure's own format: JSON, with everything that a trace can hold."""

from typing import Annotated

import msgspec

from perdure.lab.traces.nouns import AvailabilityTrace, TraceNode
from perdure.model.source import Source

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
