"""From events or counts in order of time to a trace."""

from collections.abc import Sequence
from typing import Literal

from perdure.lab.traces.nouns import AvailabilityTrace, Stay, TraceNode


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
        self._slots: dict[str, int] = {}
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

    def finish(self, name: str, duration_s: float, *, named: bool = True) -> AvailabilityTrace:
        """Return the trace; who is there stays to its end."""
        for node, begin_s in self.here.items():
            self._stays[node].append(Stay(begin_s))
        nodes = tuple(TraceNode(n, tuple(stays)) for n, stays in self._stays.items() if stays)
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
