"""What platforms say of machines: what they had announced, and why one is gone.

A notice is evidence for verdicts and incidents once something dies. A silence is all that is seen
of a pod that was OOMKilled: what its platform says of it comes a moment later, or earlier, and is
put beside it.
"""

from dataclasses import dataclass, field

import msgspec

from perdure.model.events import MachineReported, PreemptionNoticed, PreemptionWithdrawn
from perdure.model.failures import LATE_S, ExitRecord, is_explained
from perdure.model.report import Recovery
from perdure.model.verdicts import Culprit, Verdict


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

    def find_notice_of(self, node: int, at_s: float) -> Notice | None:
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


_NEAR_S = 30.0
"""Between a machine's end by its platform's clock and the last that was heard of it."""
_GRACE_S = 300.0
"""Between the word that a machine is to go and its end."""
_KEPT = 200


@dataclass(slots=True)
class MachineFold:
    """Keeps what was said, the newest last."""

    told: list[MachineReported] = field(default_factory=list)

    def take(self, event: MachineReported) -> None:
        """Keep one report."""
        self.told = [*self.told[1 - _KEPT :], event]

    def find_report(self, node: int | None, at_s: float) -> MachineReported | None:
        """Return what was said of a loss of `node` at `at_s`, of any node where it is None."""
        near = [e for e in self.told if node in (None, e.node) and _is_near(e, at_s)]
        return min(near, key=lambda e: abs((e.ended_s or e.at_s) - at_s), default=None)

    def complete(self, verdict: Verdict) -> Verdict:
        """Return a verdict on a node with what its platform says of it."""
        node = verdict.culprit.node
        found = self.find_report(node, verdict.first_seen_s) if node is not None else None
        if found is None:
            return verdict
        words = "" if found.reason in verdict.reason else f"{found.reason}; "
        evidence = {**verdict.evidence, "platform": found.reason, "told_by": found.source}
        return msgspec.structs.replace(verdict, reason=words + verdict.reason, evidence=evidence)

    def list_unseen_ends(self, verdicts: list[Verdict]) -> list[Verdict]:
        """Return a verdict for each end that no verdict is about: the job itself was away then."""
        seen = [(v.culprit.node, v.first_seen_s) for v in verdicts]
        return [
            Verdict(
                kind="NodeLost",
                culprit=Culprit(node=event.node),
                generation=-1,
                first_seen_s=event.ended_s,
                confirmed_s=event.at_s,
                confidence=1.0,
                reason=event.reason,
                actionable=True,
                certain=True,
                evidence={"platform": event.reason, "told_by": event.source},
            )
            for event in self.told
            if event.ended_s and not any(n == event.node and _is_near(event, t) for n, t in seen)
        ]

    def explain(self, recovery: Recovery) -> Recovery:
        """Return an incident with what a platform says of the node that was its culprit.

        A world that broke without a loss that was known by then has the nearest end as its cause.
        """
        kind, _, number = recovery.culprit.partition(" ")
        if kind not in ("node", "the") or not recovery.failed:
            return recovery
        found = self.find_report(int(number) if kind == "node" else None, recovery.at_s)
        if found is None:
            return recovery
        cause, culprit = f"{recovery.cause} ({found.reason})", f"node {found.node}"
        return msgspec.structs.replace(recovery, cause=cause, culprit=culprit)


def _is_near(event: MachineReported, at_s: float) -> bool:
    if event.ended_s:
        return abs(event.ended_s - at_s) <= _NEAR_S
    return event.at_s - _NEAR_S <= at_s <= event.at_s + _GRACE_S
