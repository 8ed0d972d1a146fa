"""A played rank: what `worker.boundary` and `worker.loop` do about agreements, in virtual time.

The rules are theirs: an acknowledgement only while fewer than S steps are committed, a gate at S
until the decision is known, a promise that stands when it is asked for again, and a veto from
whoever has left the loop. Ranks differ by a fraction of a step, as real ones do, so that one may
have passed S when another has not. `Agreements` sees all of them at once, as no real part does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from perdure.model.events import AnyEvent, BoundaryAnswered, BoundaryReached
from perdure.model.orders import SendBoundary
from perdure.sim.training import World

WAIT_S_MAX = 30.0
ASK_EVERY_S = 1.0


class Broken(Exception):
    """Something about agreements that must never be was."""


@dataclass(slots=True)
class Agreements:
    """What all ranks together have made of every agreement: the invariants' witness."""

    decided: dict[str, str] = field(default_factory=dict)
    """Id -> commit or abort, as the first rank heard it."""
    carried: dict[tuple[int, str], dict[int, int]] = field(default_factory=dict)
    """(Generation, id) -> rank -> step at which it did what was agreed."""
    stopped: dict[int, set[int]] = field(default_factory=dict)
    """Generation -> steps at which its ranks stopped."""

    def hear(self, order: SendBoundary) -> None:
        """A rank hears a decision: it must be everybody's."""
        if self.decided.setdefault(order.id, order.move) != order.move:
            raise Broken(f"{order.id} is committed for one rank and aborted for another")

    def carry(self, generation: int, order: SendBoundary, rank: int, step: int) -> None:
        """A rank does what was agreed: once, and at the step of all others."""
        done = self.carried.setdefault((generation, order.id), {})
        if rank in done:
            raise Broken(f"rank {rank} did {order.id} twice")
        done[rank] = step
        if len(set(done.values())) > 1:
            raise Broken(f"{order.id} at different steps: {done}")
        if order.kind == "stop":
            self.stopped.setdefault(generation, set()).add(step)

    def check_end(self, generation: int, size: int) -> None:
        """The world `generation` came to its end: what one rank of it did, all did."""
        for (number, id_), done in self.carried.items():
            if number == generation and len(done) != size:
                raise Broken(f"{id_} was carried out by ranks {sorted(done)} of {size} only")
        if len(self.stopped.get(generation, ())) > 1:
            raise Broken(f"stopped at different steps: {self.stopped[generation]}")


@dataclass(slots=True)
class Rank:
    """One rank's gate and control thread."""

    rank: int
    world: World
    late_s: float
    """How much later than the first rank it comes to each step."""
    emit: Callable[[AnyEvent], None]
    ask: Callable[[str], None]
    witness: Agreements
    committed: int = 0
    ended: bool = False
    open: dict[str, tuple[SendBoundary, bool]] = field(default_factory=dict)
    """Id -> (order, whether it is committed)."""
    answers: dict[str, BoundaryAnswered] = field(default_factory=dict)
    waits_since_s: float | None = None
    asked_s: float = 0.0

    def look(self, now: float) -> int:
        """Return its committed steps, which never shrink."""
        self.committed = max(self.committed, self.world.step_at(now - self.late_s))
        return self.committed

    def hear(self, now: float, order: SendBoundary) -> None:
        """Take one move of an agreement."""
        self.look(now)
        if order.move == "prepare":
            self.emit(self._prepare(now, order))
            return
        entry = self.open.get(order.id)
        if entry is None or entry[1]:
            return
        self.witness.hear(order)
        if order.move == "commit":
            self.open[order.id] = (order, True)
        else:
            del self.open[order.id]
            self._set_hold(now)

    def _prepare(self, now: float, order: SendBoundary) -> BoundaryAnswered:
        known = self.answers.get(order.id)
        if known is not None:
            return known
        reason = "the loop has ended" if self.ended else ""
        if self.committed >= order.step:
            reason = f"already at step {self.committed}"
        if not reason:
            self.open[order.id] = (order, False)
            self._set_hold(now)
        answer = BoundaryAnswered(
            id=order.id, rank=self.rank, ok=not reason, step=self.committed, reason=reason
        )
        self.answers[order.id] = answer
        return answer

    def advance(self, now: float) -> bool:
        """Do what is due at the step it has come to; False once it has waited for too long."""
        committed = self.look(now)
        due = [order for order, _ in self.open.values() if order.step <= committed]
        for order in due:
            if not self.open[order.id][1]:
                return self._wait(now, order.id)
            if order.step == committed:
                self._carry_out(now, order)
            del self.open[order.id]
        self.waits_since_s = None
        self._set_hold(now)
        return True

    def _carry_out(self, now: float, order: SendBoundary) -> None:
        self.witness.carry(self.world.generation, order, self.rank, order.step)
        if order.kind == "stop":
            self.world.target = order.step
        self.world.save_at(order.step, now)
        self.emit(BoundaryReached(id=order.id, rank=self.rank, step=order.step, at_s=now))

    def _wait(self, now: float, id_: str) -> bool:
        if self.waits_since_s is None:
            self.waits_since_s = self.asked_s = now
        if now - self.asked_s >= ASK_EVERY_S:
            self.asked_s = now
            self.ask(id_)
        return now - self.waits_since_s < WAIT_S_MAX

    def leave(self, now: float) -> None:
        """End the loop: what was promised and cannot be kept is said."""
        self.ended = True
        for order, _ in self.open.values():
            error = f"the loop has ended at step {self.committed}, before step {order.step}"
            step = self.committed
            self.emit(
                BoundaryReached(id=order.id, rank=self.rank, step=step, at_s=now, error=error)
            )
        self.open.clear()
        self.world.holds.pop(self.rank, None)

    def _set_hold(self, now: float) -> None:
        steps = [order.step for order, _ in self.open.values()]
        self.world.hold(self.rank, min(steps, default=None), now)
