"""In the place of a detector, where another part of perdure does the watching.

Replica groups of a torchft job have no collective and no step in common outside a quorum; who is
silent or late there, perdure's lighthouse finds (`perdure.control.lighthouse.quorum`). Where that
is torchft's own, `perdure.control.lighthouse.watch` does.
"""

from perdure.model.events import AnyEvent
from perdure.model.job import DetectConfig
from perdure.model.signals.progress import NodeBeat


class Unwatched:
    """A detector that finds nothing."""

    def reconfigure(self, config: DetectConfig) -> None:
        """Take other thresholds."""

    def take_beat(self, now: float, beat: NodeBeat) -> list[AnyEvent]:
        """Take a heartbeat."""
        return []

    def note(self, now: float, event: AnyEvent) -> list[AnyEvent]:
        """Take an event of the journal."""
        return []

    def tick(self, now: float) -> list[AnyEvent]:
        """Do what is due."""
        return []

    def next_deadline(self) -> float | None:
        """Return when `tick` is wanted: never."""
        return None

    def suspects(self) -> set[int]:
        """Return the nodes under suspicion."""
        return set()
