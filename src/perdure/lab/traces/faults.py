"""Traces of faults (InfiniteHBD-Trace): nodes are there, except from a fault's start to its end.

Nodes that never failed are not in such a record; `add_quiet` says how many there were in all.
"""

import json
from typing import Annotated, Literal

import msgspec

from perdure.lab.traces.build import Builder, Misfit
from perdure.lab.traces.nouns import AvailabilityTrace, Stay, TraceNode, guess_end
from perdure.model.source import Source

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
    builder, open_faults = Builder(), dict[str, int]()
    for node in dict.fromkeys(fault.node_id for fault in faults):
        open_faults[node] = 0
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
    more = range(count - len(trace.nodes))
    quiet = tuple(TraceNode(f"quiet{n}", (Stay(0.0),)) for n in more)
    return msgspec.structs.replace(trace, nodes=trace.nodes + quiet)
