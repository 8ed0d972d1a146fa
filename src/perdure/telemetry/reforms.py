"""Incidents that ended no generation: the world was formed again in place.

Wall time on the critical path, as for a restart: a phase ends when the last member has passed it.
What it cost each rank is in its own accounts (`steady_overhead`, and redone work in its steps).
"""

from dataclasses import dataclass

from perdure.model.events import WorldReformed
from perdure.model.report import Recovery


@dataclass(slots=True)
class Reform:
    """One incident and the epoch that ended it."""

    cause: str
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
    how: str = ""

    def take(self, event: WorldReformed) -> None:
        """Take one member's word."""
        self.ordered_s = max(self.ordered_s, event.ordered_s)
        self.formed_s = max(self.formed_s, event.formed_s)
        self.redone += event.redo
        self.connected_s = max(self.connected_s, event.connected_s)
        if event.back >= self.back:
            self.back, self.how = event.back, event.reason

    def describe(self) -> Recovery:
        """Return the line of the report."""
        ordered_s, formed_s = self.ordered_s, self.formed_s
        connected_s = self.connected_s or formed_s
        why = self.how if self.back else "the others went on in place"
        return Recovery(
            cause=self.cause,
            culprit=self.culprit,
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
            rung="morph" if self.back else "reform",
            reason=f"epoch {self.epoch}: {why}",
        )
