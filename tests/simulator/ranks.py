"""The simulated training, and a rank in it: the agreement and the loop in virtual time.

A `World` is what one generation of ranks achieves, as a function of time: synchronous steps of
equal length, from the last verified checkpoint on; the first rank that dies or stops freezes all
of them, because the others wait for it. A rank that waits at a boundary holds all of them up in
the same way, until it knows the decision.

`Rank` is one of any depth: what a node, its keeper and its agent have to do with. A member of an
elastic world (`sim.elastic`) is a rank that does more of its own.

Agreements are made by the real gate (`worker.steering.boundary`): only its clock, its line and the
cells of its generation are played. Ranks differ by a fraction of a step, as real ones do, so that
one may have passed S when another has not. `Agreements` sees all of them at once, as no real part
does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from perdure.model.errors import ProtocolError
from perdure.model.events import AnyEvent, BoundaryReached
from perdure.model.orders import Order, SendBoundary
from perdure.model.signals.progress import CommProgress, ProcSample, RankAccount, RankProgress
from perdure.worker.steering.boundary import ASK_EVERY_S, LOOK_S, NEVER, Agreed, BoundaryGate
from perdure.worker.steering.cells import Cells


@dataclass(slots=True)
class Disk:
    """What outlives every process."""

    verified: int = 0
    """Step of the newest verified checkpoint."""
    agreed: set[tuple[int, int]] = field(default_factory=set)
    """(Generation, step) of every verified checkpoint that was agreed on."""


@dataclass(slots=True)
class World:
    """One generation."""

    generation: int
    size: int
    target: int
    step_s: float
    startup_s: float
    save_every: int
    save_s: float
    disk: Disk
    spawned: dict[int, float] = field(default_factory=dict)
    first_step_s: float = 0.0
    start_step: int = 0
    frozen_s: float | None = None
    holds: dict[int, int] = field(default_factory=dict)
    """Rank -> step that it does not pass without a decision."""
    paused_s: float = 0.0
    """Waited at boundaries so far."""
    agreed: dict[int, list[float]] = field(default_factory=dict)
    """Step -> when each rank began the checkpoint that was agreed on for it."""
    cells: Cells = field(default_factory=Cells)

    def spawn(self, rank: int, now: float) -> bool:
        """Add a rank; True once the world is whole, which fixes when its first step begins."""
        self.spawned[rank] = now
        if len(self.spawned) < self.size:
            return False
        self.first_step_s = now + self.startup_s
        self.start_step = self.disk.verified
        return True

    def step_at(self, now: float) -> int:
        """Return the committed steps at `now`."""
        if not self.first_step_s or now < self.first_step_s:
            return self.start_step
        end = now if self.frozen_s is None else min(now, self.frozen_s)
        done = int(max(0.0, end - self.first_step_s - self.paused_s) / self.step_s + 1e-9)
        return min([self.target, self.start_step + done, *self.holds.values()])

    def time_of(self, step: int) -> float:
        """Return when `step` was, or would be, committed."""
        return self.first_step_s + self.paused_s + (step - self.start_step) * self.step_s

    def hold(self, rank: int, step: int | None, now: float) -> None:
        """Have `rank` wait at `step`, or at none; time spent waiting is lost to all."""
        before = min(self.holds.values(), default=None)
        if step is None:
            self.holds.pop(rank, None)
        else:
            self.holds[rank] = step
        after = min(self.holds.values(), default=None)
        until_s = now if self.frozen_s is None else min(now, self.frozen_s)
        if before is not None and (after is None or after > before) and self.first_step_s:
            self.paused_s += max(0.0, until_s - self.time_of(before))

    def freeze(self, now: float) -> None:
        """Stop all progress; what was verified by now stays."""
        if self.frozen_s is None:
            self.flush(now)
            self.frozen_s = now

    def save_at(self, step: int, now: float) -> None:
        """Let one rank begin its part of the checkpoint that was agreed on for `step`."""
        self.agreed.setdefault(step, []).append(now)

    def flush(self, now: float) -> None:
        """Bring the disk up to date: a checkpoint counts `save_s` after its step."""
        if not self.first_step_s:
            return
        saved = self.step_at(now - self.save_s) // self.save_every * self.save_every
        self.disk.verified = max(self.disk.verified, saved)
        end = now if self.frozen_s is None else min(now, self.frozen_s)
        for step, begun in self.agreed.items():
            if len(begun) == self.size and max(begun) + self.save_s <= end:
                self.disk.verified = max(self.disk.verified, step)
                self.disk.agreed.add((self.generation, step))


class Broken(Exception):
    """Raised where something about agreements happened that must never happen."""


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
        """Check that a decision which a rank hears is everybody's."""
        if self.decided.setdefault(order.id, order.move) != order.move:
            raise Broken(f"{order.id} is committed for one rank and aborted for another")

    def carry(self, generation: int, agreed: Agreed, rank: int, step: int) -> None:
        """Check that a rank does what was agreed once, and at the step of all others."""
        done = self.carried.setdefault((generation, agreed.id), {})
        if rank in done:
            raise Broken(f"rank {rank} did {agreed.id} twice")
        done[rank] = step
        if len(set(done.values())) > 1:
            raise Broken(f"{agreed.id} at different steps: {done}")
        if agreed.kind == "stop":
            self.stopped.setdefault(generation, set()).add(step)

    def check_end(self, generation: int, size: int) -> None:
        """Check at the end of world `generation` that what one rank of it did, all did."""
        for (number, id_), done in self.carried.items():
            if number == generation and len(done) != size:
                raise Broken(f"{id_} was carried out by ranks {sorted(done)} of {size} only")
        if len(self.stopped.get(generation, ())) > 1:
            raise Broken(f"stopped at different steps: {self.stopped[generation]}")


@dataclass(slots=True)
class Rank:
    """One rank's gate, and the threads that call it."""

    rank: int
    world: World
    late_s: float
    """How much later than the first rank it comes to each step."""
    emit: Callable[[AnyEvent], None]
    ask: Callable[[str], None]
    end: Callable[[int], None]
    """Has the process end with that exit code."""
    witness: Agreements
    joins: bool = False
    """It comes into a world that exists."""
    committed: int = 0
    ended: bool = False
    gate: BoundaryGate = field(init=False)
    now: float = 0.0
    asked_s: float = 0.0
    looked_s: float = 0.0

    def __post_init__(self) -> None:
        """Make the gate."""
        self.gate = BoundaryGate(
            rank=self.rank,
            emit=self.emit,
            ask=self.ask,
            now=lambda: self.now,
            cells=self.world.cells,
        )

    def look(self, now: float) -> int:
        """Return its committed steps, which never shrink."""
        self.now = now
        self.committed = max(self.committed, self.world.step_at(now - self.late_s))
        self.gate.advance(self.committed)
        return self.committed

    def begin(self) -> None:
        """The process is there; its loop begins when the world's does."""

    def die(self) -> None:
        """The process has ended; the world knows that by itself."""

    def hear(self, now: float, order: Order) -> None:
        """Take an order: one move of an agreement, or what this rank knows nothing of."""
        if not isinstance(order, SendBoundary):
            return
        self.look(now)
        if order.move != "prepare" and order.id in {one.id for one, _ in self.gate.promises()}:
            self.witness.hear(order)
        self.gate.handle(order)
        self._set_hold(now)

    @property
    def waits(self) -> bool:
        """Whether it has promised what is not done yet."""
        return self.gate.next_step != NEVER

    def advance(self, now: float) -> bool:
        """Do what is due at the step it has come to; False once it has waited for too long."""
        committed = self.look(now)
        due: list[Agreed] | None = []
        if self.waits and committed >= self.gate.next_step:
            try:
                due = self.gate.poll(committed)
            except ProtocolError:
                return False
        if due is None and now - self.asked_s >= ASK_EVERY_S:
            self.asked_s = now
            for agreed, decided in self.gate.promises():
                if not decided:
                    self.ask(agreed.id)
        if now - self.looked_s >= (LOOK_S if due is not None else ASK_EVERY_S):
            self.looked_s = now
            self.gate.look()
        for agreed in due or ():
            self._carry_out(now, agreed)
        self._set_hold(now)
        return True

    def _carry_out(self, now: float, agreed: Agreed) -> None:
        self.witness.carry(self.world.generation, agreed, self.rank, agreed.step)
        self.gate.drop_hold(agreed.id)
        if agreed.kind == "stop":
            self.world.target = agreed.step
        self.world.save_at(agreed.step, now)
        self.emit(BoundaryReached(id=agreed.id, rank=self.rank, step=agreed.step, at_s=now))

    def has_finished(self, now: float) -> bool:
        """Return whether it has come to the last step, and has done all that was agreed on."""
        committed = self.look(now)
        return committed == self.world.target and committed < self.gate.next_step

    def leave(self, now: float) -> None:
        """End the loop: what was promised and cannot be kept is said."""
        self.ended = True
        for agreed in self.gate.close(f"the loop has ended at step {self.committed}"):
            error = f"the loop has ended at step {self.committed}, before step {agreed.step}"
            step = self.committed
            self.emit(
                BoundaryReached(id=agreed.id, rank=self.rank, step=step, at_s=now, error=error)
            )
        self.gate.look()
        self.world.holds.pop(self.rank, None)

    def _set_hold(self, now: float) -> None:
        self.world.hold(self.rank, self.gate.next_step if self.waits else None, now)

    # --- what its ring says -------------------------------------------------------------------

    def progress(self, now: float, pid: int, spawned_s: float, *, stopped: bool) -> RankProgress:
        """Return its row of a heartbeat."""
        world, step = self.world, self.world.step_at(now)
        stepping = world.first_step_s and now >= world.first_step_s
        at_s = min(now, world.frozen_s) if world.frozen_s is not None else now
        comm = CommProgress("world", world.size, step + (not stopped), step, since_s=at_s)
        return RankProgress(
            rank=self.rank,
            pid=pid,
            phase="step" if stepping else "spawned",
            phase_since_s=world.first_step_s or spawned_s,
            heartbeat_s=max(spawned_s, at_s - world.step_s),
            account=self.account(now, spawned_s),
            comms=(comm,) if stepping else (),
            proc=ProcSample(state="T" if stopped else "S", cpu_s=1.0 if stopped else now),
        )

    def account(self, now: float, spawned_s: float) -> RankAccount:
        """Return where its time went."""
        world, step = self.world, self.world.step_at(now)
        if not world.first_step_s or now < world.first_step_s:
            return RankAccount(start_step=world.start_step, spawned_s=spawned_s)
        done = step - world.start_step
        marks = range(
            -(-(world.start_step + 1) // world.save_every) * world.save_every,
            step + 1,
            world.save_every,
        )
        first = world.first_step_s
        last_s = world.time_of(step)
        return RankAccount(
            start_step=world.start_step,
            step=step,
            step_s=done * world.step_s,
            boundary_s=world.paused_s,
            spawned_s=spawned_s,
            script_s=spawned_s,
            init_s=spawned_s,
            group_s=first,
            restored_s=first,
            first_step_s=first,
            last_step_s=last_s,
            finished_s=last_s if step == world.target else 0.0,
            marks=tuple((mark, (mark - world.start_step) * world.step_s) for mark in marks),
        )
