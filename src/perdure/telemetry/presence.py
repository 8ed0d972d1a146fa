"""When each node was there: a place by which a job may grow is paid for while somebody has it."""

from dataclasses import dataclass, field

from msgspec import structs

from perdure.model.events import JournalEntry, NodeLost, NodeRegistered
from perdure.model.job import JobSpec
from perdure.telemetry.segments import Segment


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
            case _:
                pass

    def come(self, node: int, at_s: float) -> None:
        """A node has registered, perhaps anew."""
        self.since.setdefault(node, at_s)

    def go(self, node: int, at_s: float) -> None:
        """A node was lost, or has left."""
        begin_s = self.since.pop(node, None)
        if begin_s is not None:
            self.gone.setdefault(node, []).append((begin_s, at_s))

    def find_gaps(self, node: int, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return when `node` was not there between the two."""
        spans = [*self.gone.get(node, ()), (self.since.get(node, end_s), end_s)]
        gaps, cursor = [], begin_s
        for come_s, gone_s in spans:
            if come_s > cursor:
                gaps.append((cursor, min(come_s, end_s)))
            cursor = max(cursor, gone_s)
        return [*gaps, (cursor, end_s)] if end_s > cursor else gaps

    def find_unpaid(
        self, spec: JobSpec, begin_s: float, end_s: float
    ) -> dict[int, list[tuple[float, float]]]:
        """Return the gaps of each node that a job has only now and then."""
        nodes = range(spec.nodes, spec.num_nodes) if spec.room else ()
        return {node: self.find_gaps(node, begin_s, end_s) for node in nodes}


def cut_idle(segment: Segment, gaps: list[tuple[float, float]]) -> list[Segment]:
    """Return what is left of a segment without the gaps, if it is idle; else the segment."""
    if not gaps or [account for account, _ in segment.seconds] != ["idle"]:
        return [segment]
    kept, cursor = [], segment.begin_s
    for begin_s, end_s in [*gaps, (segment.end_s, segment.end_s)]:
        until_s = min(begin_s, segment.end_s)
        if until_s > cursor:
            piece = (("idle", until_s - cursor),)
            kept.append(structs.replace(segment, begin_s=cursor, end_s=until_s, seconds=piece))
        cursor = max(cursor, end_s)
    return kept
