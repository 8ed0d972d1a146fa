"""What was decided about failures, until the journal has it (`FailureDecided`).

A fact is no action: the shell writes it down before the decisions that follow from it. What a
controller that died did not write, its successor does, for it replays to the same state.
"""

from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from perdure.model.events import FailureDecided
from perdure.model.failures import Cause, Rung


@dataclass(slots=True)
class FailureBook:
    """The newest failures, and what the journal does not have yet."""

    newest: dict[int, FailureDecided] = field(default_factory=dict)
    """The newest failure of each replica group by its number; of a job's only world under -1."""
    nodes: tuple[int, ...] = ()
    """Those of the world that failed."""
    untold: dict[str, FailureDecided] = field(default_factory=dict)
    """Failures by id, the oldest first."""
    count: int = 0

    def decide(
        self,
        cause: Cause,
        rung: Rung,
        world: int,
        nodes: tuple[int, ...] = (),
        *,
        epoch: int = -1,
        group: int = -1,
        saved: bool = False,
    ) -> None:
        """Keep that `world` failed and what follows: one fact, until the world is over it."""
        known = self._newest_of(world)
        if known is None:
            self.count += 1
        said = structs.asdict(cause)
        fact = FailureDecided(
            id=known.id if known is not None else f"failure-{self.count}",
            world=world, rung=rung, epoch=epoch, group=group, saved=saved, at_s=0.0, **said,
        )  # fmt: skip
        if known is not None and (known.rung != "retry" or rung == "retry"):  # No loss known yet.
            first = min((known, fact), key=lambda f: f.failure_s)
            blamed = structs.asdict(msgspec.convert(first, Cause, from_attributes=True))
            blamed["detected_s"] = min(first.detected_s, known.detected_s)
            fact = structs.replace(fact, **blamed, at_s=known.at_s)
        self.nodes = nodes or self.nodes
        self._tell(fact)

    def correct(self, cause: Cause, world: int) -> None:
        """Blame what failed first, where that is heard of only now."""
        known = self._newest_of(world)
        if known is None or cause.failure_s >= known.failure_s:
            return
        detected_s = min(cause.detected_s, known.detected_s)
        said = structs.asdict(cause) | {"detected_s": detected_s}
        self._tell(structs.replace(known, **said))

    def close(self, world: int, epoch: int) -> None:
        """Close the failure once a member trains in `epoch`: what fails next is another one."""
        known = self._newest_of(world)
        if known is not None and 0 <= known.epoch <= epoch:
            del self.newest[known.group]

    def is_open(self, world: int) -> bool:
        """Return whether `world` has failed and is not over it."""
        return self._newest_of(world) is not None

    def take(self, event: FailureDecided) -> None:
        """Know that `event` is in the journal."""
        self.untold.pop(event.id, None)
        known = self.newest.get(event.group)
        if known is not None and known.id == event.id:
            self.newest[event.group] = event

    def pending(self, now: float) -> list[FailureDecided]:
        """Return what the journal does not have, each with when it was decided, or `now`."""
        facts = self.untold.values()
        return [fact if fact.at_s else structs.replace(fact, at_s=now) for fact in facts]

    def _newest_of(self, world: int) -> FailureDecided | None:
        return next((fact for fact in self.newest.values() if fact.world == world), None)

    def _tell(self, fact: FailureDecided) -> None:
        self.newest[fact.group] = fact
        self.untold.pop(fact.id, None)
        self.untold[fact.id] = fact
