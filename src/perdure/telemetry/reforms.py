"""Worlds formed again in place: incidents that ended no generation, and joins.

Wall time on the critical path, as for a restart: a phase ends when the last member has passed it.
What it cost each rank is told by its own stamps (`stalls`).
"""

from dataclasses import dataclass, field

from perdure.model.events import WorldReformed
from perdure.model.report import Recovery

BROKEN = "the world broke"
"""Cause of an epoch that was formed again although nobody was lost."""


@dataclass(slots=True)
class Reform:
    """One epoch, and the incident that it ended, if there was one."""

    cause: str
    """Empty where nothing had failed."""
    culprit: str
    at_step: int
    failure_s: float
    detected_s: float
    decided_s: float
    epoch: int
    generation: int
    ordered_s: float = 0.0
    formed_s: float = 0.0
    redone: int = 0
    connected_s: float = 0.0
    back: int = 0
    morphed: bool = False
    how: str = ""
    new: list[int] = field(default_factory=list)
    """Members that have come in with it, and were in no world before."""
    members: set[int] = field(default_factory=set)
    """Those that are known to be in it."""

    @property
    def told(self) -> bool:
        """Return whether anything of note has happened."""
        return bool(self.cause or self.new)

    @property
    def rung(self) -> str:
        """Return what was done, in a word."""
        if self.back:
            return "morph"
        if not self.cause:
            return "join"
        if self.morphed:
            return "morph"
        return "retry" if self.cause == BROKEN else "replace" if self.new else "shrink"

    def take(self, event: WorldReformed, *, new: bool = False) -> None:
        """Take one member's word; `new` ones stood still for nothing."""
        self.members.add(event.rank)
        if new:
            self.new.append(event.rank)
        elif not self.cause:
            began_s = min(self.failure_s, event.began_s)
            self.failure_s = self.detected_s = self.decided_s = began_s
        self.ordered_s = max(self.ordered_s, event.ordered_s)
        self.formed_s = max(self.formed_s, event.formed_s)
        self.redone += event.redo
        self.connected_s = max(self.connected_s, event.connected_s)
        self.morphed |= event.morphed
        if event.back >= self.back:
            self.back, self.how = event.back, event.reason

    def describe(self) -> Recovery:
        """Return the line of the report."""
        ordered_s, formed_s = self.ordered_s, self.formed_s
        connected_s = self.connected_s or formed_s
        why = self.how if self.rung == "morph" else "the others went on in place"
        if self.rung not in ("morph", "shrink"):
            names = ", ".join(map(str, self.new))
            why = {"join": f"rank {names} came in", "retry": "the same members went on"}.get(
                self.rung, f"rank {names} stood in at once"
            )
        return Recovery(
            cause=self.cause or "join",
            culprit=self.culprit or f"rank {', '.join(map(str, self.new))}",
            at_step=self.at_step,
            at_s=self.failure_s,
            detect_s=max(0.0, self.detected_s - self.failure_s),
            decide_s=max(0.0, self.decided_s - self.detected_s),
            abort_s=max(0.0, ordered_s - self.decided_s),
            communicator_s=max(0.0, connected_s - ordered_s),
            state_s=max(0.0, formed_s - connected_s),
            warmup_s=0.0,
            total_s=max(0.0, formed_s - self.failure_s),
            lost_steps=self.back,
            lost_microbatches=self.redone,
            rung=self.rung,
            reason=f"epoch {self.epoch}: {why}",
        )
