"""Which nodes were there when: the one shape that every recorded trace is read into.

A trace says nothing of the training. Times are seconds from its beginning, whatever the file
counts in; what is there at 0 counts, and the last change does not end the trace. It is built from
events or counts in order of time.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec


class Stay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One time that a node was there, from `begin_s` up to `end_s`."""

    begin_s: float
    end_s: float | None = None
    """None: it was still there when the trace ended."""
    notice_s: float = 0.0
    """How long before `end_s` its leaving was announced; 0: not at all."""


class TraceNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine by its name, and when it was there."""

    name: str
    stays: tuple[Stay, ...]
    slots: int = 1


class AvailabilityTrace(msgspec.Struct, frozen=True):
    """A recorded or generated history of availability."""

    name: str
    duration_s: float
    nodes: tuple[TraceNode, ...]
    named: bool = True
    """False: the source has counts only, and who left is made up (the last that came)."""

    @property
    def slots(self) -> dict[str, int]:
        """Slots by node."""
        return {node.name: node.slots for node in self.nodes}


class Departure(msgspec.Struct, frozen=True):
    """A node that leaves, and how long it was known."""

    node: str
    notice_s: float


class Change(msgspec.Struct, frozen=True):
    """All that leave and come at one instant. Who leaves has left before anyone comes."""

    at_s: float
    left: tuple[Departure, ...]
    joined: tuple[str, ...]


class Interval(msgspec.Struct, frozen=True):
    """A time in which nobody comes or goes."""

    begin_s: float
    end_s: float
    living: tuple[str, ...]
    """In order of arrival, the oldest first."""
    change: Change
    """What happened at its beginning."""

    @property
    def length_s(self) -> float:
        """Its length, seconds."""
        return self.end_s - self.begin_s


def list_changes(trace: AvailabilityTrace) -> list[Change]:
    """Return the changes before the trace's end, in order; the first is at 0, even if empty."""
    left: dict[float, list[Departure]] = {}
    joined: dict[float, list[str]] = {}
    for node in trace.nodes:
        for stay in node.stays:
            joined.setdefault(stay.begin_s, []).append(node.name)
            if stay.end_s is not None:
                left.setdefault(stay.end_s, []).append(Departure(node.name, stay.notice_s))
    times = sorted(t for t in {0.0, *left, *joined} if t < trace.duration_s)
    return [Change(t, tuple(left.get(t, ())), tuple(joined.get(t, ()))) for t in times]


def list_intervals(trace: AvailabilityTrace) -> list[Interval]:
    """Return the times between changes, from 0 to the trace's end."""
    changes = list_changes(trace)
    ends = [change.at_s for change in changes[1:]] + [trace.duration_s]
    living: dict[str, None] = {}
    found = []
    for change, end_s in zip(changes, ends, strict=True):
        for departure in change.left:
            living.pop(departure.node, None)
        living.update(dict.fromkeys(change.joined))
        found.append(Interval(change.at_s, end_s, tuple(living), change))
    return found


def guess_end(times_s: Sequence[float]) -> float:
    """Return when a record that names no end had ended: the last instant and a typical gap.

    So the last entry lasts as long as entries do, and is not cut off as it begins. The gap is the
    median of those between different instants; 0 where there is one instant only.
    """
    instants = sorted(set(times_s))
    gaps = sorted(b - a for a, b in pairwise(instants))
    return instants[-1] + (gaps[len(gaps) // 2] if gaps else 0.0)


class Misfit(Exception):
    """An entry that cannot follow those before it. `field` is the one that is wrong."""

    def __init__(self, field: Literal["time", "node"], what: str) -> None:
        """Keep which field, and what was expected."""
        super().__init__(what)
        self.field = field


class Builder:
    """Takes who comes and who leaves, in order of time."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self.here: dict[str, float] = {}
        self._stays: dict[str, list[Stay]] = {}
        self._now_s = 0.0

    def go_to(self, at_s: float) -> None:
        """Let what follows happen at `at_s`."""
        if not 0.0 <= at_s < float("inf"):
            raise Misfit("time", f"expected a time from 0 on, got {at_s:g} s")
        if at_s < self._now_s:
            raise Misfit(
                "time", f"expected a time not before the {self._now_s:g} s above, got {at_s:g} s"
            )
        self._now_s = at_s

    def add(self, node: str) -> None:
        """Let `node` come."""
        if node in self.here:
            raise Misfit("node", f"expected a node that is not there yet, got {node}")
        self.here[node] = self._now_s
        self._stays.setdefault(node, [])

    def add_new(self) -> str:
        """Let a node come that was never there; return its name."""
        node = f"node{len(self._stays)}"
        self.add(node)
        return node

    def remove(self, node: str, notice_s: float = 0.0) -> None:
        """Let `node` leave. A stay of no length is none."""
        if node not in self.here:
            raise Misfit("node", f"expected a node that is there, got {node}")
        begin_s = self.here.pop(node)
        if self._now_s > begin_s:
            self._stays[node].append(Stay(begin_s, self._now_s, notice_s))

    def finish(
        self,
        name: str,
        duration_s: float,
        *,
        named: bool = True,
        slots: Mapping[str, int] | None = None,
    ) -> AvailabilityTrace:
        """Return the trace; who is there stays to its end. A node has one slot if none are said."""
        for node, begin_s in self.here.items():
            self._stays[node].append(Stay(begin_s))
        nodes = tuple(
            TraceNode(node, tuple(stays), (slots or {}).get(node, 1))
            for node, stays in self._stays.items()
            if stays
        )
        return AvailabilityTrace(name, duration_s, nodes, named=named)


def from_counts(
    name: str, rows: Sequence[tuple[float, int]], duration_s: float
) -> AvailabilityTrace:
    """Return a trace of (seconds, nodes): who leaves is the last that came, who comes is new."""
    builder, here = Builder(), list[str]()
    for at_s, count in rows:
        builder.go_to(at_s)
        while len(here) > count:
            builder.remove(here.pop())
        while len(here) < count:
            here.append(builder.add_new())
    return builder.finish(name, duration_s, named=False)
