"""What platforms had announced when something died: evidence for verdicts and incidents."""

from dataclasses import dataclass, field

from perdure.model.events import PreemptionNoticed, PreemptionWithdrawn
from perdure.model.failures import LATE_S, ExitRecord, is_explained


@dataclass(slots=True)
class Notice:
    """One that was not withdrawn."""

    node: int
    source: str
    id: str
    reason: str
    at_s: float
    gone_s: float

    @property
    def words(self) -> str:
        """Return who has said what."""
        return f"{self.source}: {self.reason}" if self.reason else self.source


@dataclass(slots=True)
class NoticeFold:
    """Keeps the notices that are in force, one event at a time; a mere risk is none."""

    open: list[Notice] = field(default_factory=list)

    def take(self, event: PreemptionNoticed | PreemptionWithdrawn) -> Notice | None:
        """Return the notice that `event` is about, its deadline moved nearer; None for a risk."""
        key = (event.node, event.source, event.id)
        known = next((n for n in self.open if (n.node, n.source, n.id) == key), None)
        if isinstance(event, PreemptionWithdrawn):
            if known is not None:
                self.open.remove(known)
            return known
        if not event.certain:
            return None
        gone_s = event.at_s + event.grace_s
        if known is not None:
            known.gone_s = min(known.gone_s, gone_s)
            return known
        new = Notice(event.node, event.source, event.id, event.reason, event.at_s, gone_s)
        self.open.append(new)
        return new

    def find(self, node: int, at_s: float) -> Notice | None:
        """Return what explains the loss of `node`."""
        found = [n for n in self.open if n.node == node and n.at_s <= at_s <= n.gone_s + LATE_S]
        return min(found, key=lambda n: n.gone_s, default=None)

    def explain(self, node: int, record: ExitRecord) -> Notice | None:
        """Return what explains the end of a rank: its own node's notice, or a peer's."""
        for notice in sorted(self.open, key=lambda n: (n.node != node, n.gone_s)):
            here = notice.node == node
            if notice.at_s <= record.at_s and is_explained(record, notice.gone_s, here=here):
                return notice
        return None
