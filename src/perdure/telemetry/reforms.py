"""Worlds formed again in place: incidents that ended no generation, and joins.

Wall time on the critical path, as for a restart: a phase ends when the last member has passed it.
What it cost each rank is told by its own stamps (`stalls`).
"""

from dataclasses import dataclass, field

from perdure.model.events import FailureDecided, WorldReformed
from perdure.model.failures import BROKEN
from perdure.model.report import Recovery


@dataclass(slots=True)
class Reform:
    """One epoch, and the failure that it followed upon, if there was one."""

    epoch: int
    generation: int
    step: int
    """Applied when it was formed."""
    failure: FailureDecided | None = None
    began_s: float = 0.0
    """Where nothing had failed: since when members stood still for it."""
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
    def cause(self) -> str:
        """Return what had failed; empty where nothing had."""
        return self.failure.cause if self.failure is not None else ""

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
            self.began_s = min(self.began_s, event.began_s)
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
        failure, names = self.failure, ", ".join(map(str, self.new))
        failure_s = failure.failure_s if failure is not None else self.began_s
        detected_s = failure.detected_s if failure is not None else failure_s
        decided_s = (failure.at_s if failure is not None else 0.0) or detected_s
        known = failure.at_step if failure is not None else -1
        return Recovery(
            cause=self.cause or "join",
            culprit=failure.culprit if failure is not None else f"rank {names}",
            at_step=known if known >= 0 else self.step,
            at_s=failure_s,
            detect_s=max(0.0, detected_s - failure_s),
            decide_s=max(0.0, decided_s - detected_s),
            abort_s=max(0.0, ordered_s - decided_s),
            communicator_s=max(0.0, connected_s - ordered_s),
            state_s=max(0.0, formed_s - connected_s),
            warmup_s=0.0,
            total_s=max(0.0, formed_s - failure_s),
            lost_steps=self.back,
            lost_microbatches=self.redone,
            rung=self.rung,
            reason=f"epoch {self.epoch}: {why}",
        )
