"""Pieces of one rank's time, what ledgers are sums of; and when each node was there.

A place by which a job may grow is paid for while somebody has it.
"""

from dataclasses import dataclass, field

import msgspec

from perdure.model.events import FailureDecided, JournalEntry, NodeLost, NodeRegistered
from perdure.model.job import JobSpec

RECONFIGURATION = "reconfiguration."
"""What the accounts of a recovery's phases begin with."""


class Segment(msgspec.Struct, frozen=True):
    """A stretch of one rank's time and what it was spent on."""

    rank: int
    generation: int
    begin_s: float
    end_s: float
    seconds: tuple[tuple[str, float], ...]
    """Account -> seconds. Together at most `end_s - begin_s`."""
    member: int | None = None
    """Who had the slot `rank` then, where that may be another: in an elastic world."""


def fit_pieces(pieces: dict[str, float], room_s: float) -> tuple[tuple[str, float], ...]:
    """Return the pieces that took any time, made smaller where they exceed the room.

    What was counted twice is taken off once more, so that it is shown as unattributed and
    flatters nobody.
    """
    total_s = sum(pieces.values())
    scale = max(0.0, 2 * room_s - total_s) / total_s if total_s > room_s else 1.0
    return tuple((name, s * scale) for name, s in pieces.items() if s * scale > 0)


@dataclass(slots=True, kw_only=True)
class Timeline:
    """One slot's time, walked forward: pieces never overlap, and what has no stamps stays out."""

    rank: int
    end_s: float
    cursor: float
    """Up to here the time was dealt with."""
    member: int | None = None
    """Whose time it is from here on, if not the slot's own."""
    found: list[Segment] = field(default_factory=list)

    def put(self, generation: int, account: str, begin_s: float, end_s: float) -> None:
        """Attribute what is left of a stretch."""
        begin, end = max(begin_s, self.cursor), min(end_s, self.end_s)
        if end > begin:
            piece = ((account, end - begin),)
            self.found.append(Segment(self.rank, generation, begin, end, piece, self.member))
            self.cursor = end

    def take(
        self, generation: int, account: str, begin_s: float | None, end_s: float | None
    ) -> None:
        """Attribute a stretch; without both of its stamps it stays unattributed."""
        if begin_s and end_s:
            self.put(generation, account, begin_s, end_s)

    def spend(
        self, generation: int, pieces: dict[str, float], begin_s: float, end_s: float
    ) -> None:
        """Attribute a stretch of training to what the rank itself has counted in it."""
        seconds = fit_pieces(pieces, end_s - begin_s)
        self.found.append(Segment(self.rank, generation, begin_s, end_s, seconds, self.member))
        self.cursor = end_s

    def recover(
        self, generation: int, failure: FailureDecided, since_s: float, stopped_s: float | None
    ) -> None:
        """Attribute what lies between a failure and the end of the last process."""
        self.take(generation, RECONFIGURATION + "detect", since_s, failure.detected_s)
        self.take(generation, RECONFIGURATION + "decide", failure.detected_s, failure.at_s)
        self.take(generation, RECONFIGURATION + "abort", failure.at_s, stopped_s)


@dataclass(slots=True)
class Presence:
    """Spans of time by node, from its registrations and losses."""

    since: dict[int, float] = field(default_factory=dict)
    """Node that is there -> since when."""
    gone: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """Node -> when it was there before."""

    def take(self, entry: JournalEntry) -> None:
        """Take one entry of the journal."""
        match entry.body:
            case NodeRegistered() as event:
                self.come(event.node, entry.at_s)
            case NodeLost() as event:
                self.go(event.node, event.last_seen_s or event.at_s)

    def come(self, node: int, at_s: float) -> None:
        """A node has registered, perhaps anew."""
        self.since.setdefault(node, at_s)

    def go(self, node: int, at_s: float) -> None:
        """A node was lost, or has left."""
        begin_s = self.since.pop(node, None)
        if begin_s is not None:
            self.gone.setdefault(node, []).append((begin_s, at_s))

    def list_gaps(self, node: int, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return when `node` was not there between the two."""
        spans = [*self.gone.get(node, ()), (self.since.get(node, end_s), end_s)]
        gaps, cursor = [], begin_s
        for come_s, gone_s in spans:
            if come_s > cursor:
                gaps.append((cursor, min(come_s, end_s)))
            cursor = max(cursor, gone_s)
        return [*gaps, (cursor, end_s)] if end_s > cursor else gaps

    def list_unpaid(
        self, spec: JobSpec, begin_s: float, end_s: float
    ) -> dict[int, list[tuple[float, float]]]:
        """Return the gaps of each node that a job has only now and then."""
        nodes = range(spec.nodes, spec.num_nodes) if spec.growth else ()
        return {node: self.list_gaps(node, begin_s, end_s) for node in nodes}


def cut_idle(segment: Segment, gaps: list[tuple[float, float]]) -> list[Segment]:
    """Return what is left of a segment without the gaps, if it is idle; else the segment."""
    if not gaps or [account for account, _ in segment.seconds] != ["idle"]:
        return [segment]
    kept, cursor = [], segment.begin_s
    for begin_s, end_s in [*gaps, (segment.end_s, segment.end_s)]:
        until_s = min(begin_s, segment.end_s)
        if until_s > cursor:
            piece = (("idle", until_s - cursor),)
            kept.append(
                msgspec.structs.replace(segment, begin_s=cursor, end_s=until_s, seconds=piece)
            )
        cursor = max(cursor, end_s)
    return kept
