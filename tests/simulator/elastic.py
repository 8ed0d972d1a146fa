"""A played member of an elastic world: what `worker.elastic` does, in virtual time.

The rules are its own: an order is looked for between two micro-batches, what was finished is kept,
a step is applied once its reduction has ended and not before, the reduced result is kept for one
step more. The decision (`plan.elastic.commit`) and the assignment (`plan.elastic.microbatches`) are
the real ones. Whatever a real medium may do, the played one does by chance: a reduction ends at
each member at a moment of its own, or, if one dies in it, at some and not at others; a death is
felt by those who wait for the dead, and through them by those who wait for them, or only told by
the controller.

A gradient is a hash of the parameters that it was computed from, the step and the micro-batch, and
the parameters are a hash of all that was applied. `Fabric` sees every member at once: a gradient
of other parameters, a micro-batch that counts twice or not at all, and two members that differ at
the same step are found at once.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from perdure.model.events import CheckpointSaved, RankJoined, WorldBroken, WorldReformed
from perdure.model.orders import Order, ReformWorld
from perdure.model.signals.progress import ProcSample, RankAccount, RankProgress
from perdure.plan.elastic.commit import FRESH, MemberProgress, Reformation, decide_reformation
from perdure.plan.elastic.microbatches import assign
from tests.simulator.network import VirtualClock
from tests.simulator.ranks import Broken, Rank, World
from tests.simulator.simulation import Scenario, Simulation

COUNT = 12
"""Micro-batches of a step."""
_MICRO_BATCH_S, _REDUCE_S, _LINE_S, _FEEL_S = 0.01, 0.005, 0.003, 0.3
_ORDER_S = 60.0
_MASK = (1 << 61) - 1


def mix(*parts: int) -> int:
    """Return a number that depends on all of `parts`, the same in every process."""
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = ((value ^ (part + 1)) * 0xBF58476D1CE4E5B9) & _MASK
        value ^= value >> 29
    return value


@dataclass(slots=True)
class Fabric(World):
    """One generation's store and connections, and the witness of its training."""

    clock: VirtualClock = field(kw_only=True)
    chance: random.Random = field(kw_only=True)
    truth: dict[int, int] = field(kw_only=True)
    """Steps applied -> parameters: of all generations, for a step has one outcome."""
    members: dict[int, "Member"] = field(default_factory=dict)
    progress: dict[int, dict[int, MemberProgress]] = field(default_factory=dict)
    connected: dict[int, set[int]] = field(default_factory=dict)
    reductions: dict[tuple[int, int], dict[int, dict[int, int]]] = field(default_factory=dict)
    """(Epoch, step) -> member -> micro-batch -> gradient: who takes part with what."""
    furthest: int = 0
    """Steps that some member has applied."""

    def step_at(self, now: float) -> int:
        """Return the steps that the furthest member has applied."""
        return max(self.start_step, self.furthest)

    def freeze(self, now: float) -> None:
        """Do nothing: a death stops nobody in an elastic world."""

    def soon(self, at_most_s: float, call: Callable[[], None]) -> None:
        """Have `call` made within that time."""
        self.clock.after(self.chance.random() * at_most_s, call)

    def feel(self, gone: "Member") -> None:
        """Tell whoever waits for a member that it has left its epoch, sooner or later.

        With its process goes the store that it served.
        """
        for member in self.members.values():
            near = member.epoch == gone.epoch or (member.meets_at(gone) and not gone.alive)
            if member is not gone and member.alive and near:
                self.soon(_FEEL_S, member.bind(member.feel_loss))


@dataclass(slots=True)
class Member(Rank):
    """One rank and its trainer."""

    world: Fabric
    applied: int = 0
    value: int = 0
    done: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    """The reduced result of the step before."""
    holds: bool = False
    fresh: bool = True
    todo: list[int] = field(default_factory=list)
    epoch: int = -1
    members: tuple[int, ...] = ()
    """Of its world."""
    newest: ReformWorld | None = None
    alive: bool = True
    turn: int = 0
    """Whatever was begun in an earlier turn is void."""
    waits: bool = False
    """In a reduction, or for the others of an epoch."""
    computes: bool = False
    left_s: float = 0.0
    ordered_s: float = 0.0

    @property
    def store(self) -> str:
        """Return the address of the store that it serves."""
        return f"member:{self.rank}"

    def meets_at(self, other: "Member") -> bool:
        """Return whether the world that it was ordered into meets at the other one's store."""
        return self.newest is not None and self.newest.store == other.store

    def bind(self, move: Callable[[], None], epoch: int | None = None) -> Callable[[], None]:
        """Return `move`, void once this turn has ended; or if it is dead, or not in `epoch`."""
        turn, there = self.turn, self.alive and epoch in (None, self.epoch)

        def perhaps() -> None:
            if there and self.turn == turn:
                move()

        return perhaps

    # --- beginning and end --------------------------------------------------------------------

    def begin(self) -> None:
        """The process is there; in a moment it has what it needs to be a member."""
        self.world.members[self.rank] = self
        self.world.clock.after(self.world.startup_s, self.start)

    def start(self) -> None:
        """Restore, say that it is ready, and go into the first world."""
        if not self.alive:
            return
        if self.world.disk.verified:
            self.applied, self.fresh = self.world.disk.verified, False
            self.value = self.world.truth[self.applied]
        self.world.truth.setdefault(0, 0)
        self.emit(
            RankJoined(
                generation=self.world.generation, rank=self.rank, depth="elastic", store=self.store
            )
        )
        if not self.joins:
            self.take(
                ReformWorld(
                    generation=self.world.generation,
                    epoch=0,
                    ranks=tuple(range(self.world.size)),
                    reason="first",
                )
            )

    def die(self) -> None:
        """The process has ended; connections close with it."""
        self.alive = False
        self.turn += 1
        if not self.ended:
            self.world.feel(self)

    # --- orders -------------------------------------------------------------------------------

    def hear(self, now: float, order: Order) -> None:
        """Take an order: to form a world, or what any rank is told."""
        if isinstance(order, ReformWorld):
            self.take(order)
        else:
            Rank.hear(self, now, order)

    def take(self, order: ReformWorld) -> None:
        """Take an order: at once where it waits, else between two micro-batches."""
        if not self.alive or self.ended:
            return
        if self.newest is not None and order.epoch <= self.newest.epoch:
            return
        self.newest = order
        self.ordered_s = self.world.clock.now
        if self.computes or (self.waits and not order.urgent):
            return
        self.form()

    def feel_loss(self) -> None:
        """Feel that a peer is gone, where it waits for one."""
        if self.waits:
            self.break_world("Connection reset by peer")

    def break_world(self, why: str) -> None:
        """Leave the world that broke, and wait for the next one."""
        self.disconnect()
        if self._overtaken():
            self.form()
            return
        self.emit(
            WorldBroken(
                generation=self.world.generation,
                epoch=self.epoch,
                rank=self.rank,
                at_s=self.world.clock.now,
                error=why,
            )
        )
        self.world.clock.after(_ORDER_S, self.bind(self._give_up))

    def _give_up(self) -> None:
        if not self._overtaken():
            self.end(1)

    def disconnect(self) -> None:
        """Disconnect; whoever waits for this member learns of it."""
        self.turn += 1
        self.waits = self.computes = False
        self.left_s = self.world.clock.now
        self.world.feel(self)

    def _overtaken(self) -> ReformWorld | None:
        """Return the order to form a newer world than it is in."""
        return self.newest if self.newest is not None and self.newest.epoch > self.epoch else None

    # --- forming a world ----------------------------------------------------------------------

    def form(self) -> None:
        """Publish how far it is, and wait for the others to do so."""
        order = self.newest
        assert order is not None
        self.disconnect()
        self.epoch, self.members = order.epoch, order.ranks
        if self.rank not in order.ranks:
            self.end(1)
            return
        if any(self.meets_at(m) and not m.alive for m in self.world.members.values()):
            self.break_world("the store is gone")
            return
        applied = FRESH if self.fresh else self.applied
        progress = self.world.progress.setdefault(order.epoch, {})
        progress[self.rank] = MemberProgress(applied, tuple(sorted(self.done)), self.holds)
        self.waits = True
        if set(progress) >= set(order.ranks):
            self._meet(Member.connect)

    def _meet(self, move: Callable[["Member"], None]) -> None:
        """Let every member make the next move in forming this epoch, if it does not leave it."""
        for number in self.members:
            member = self.world.members[number]
            self.world.soon(_LINE_S, member.bind(partial(member.go_on, move), self.epoch))

    def go_on(self, move: Callable[["Member"], None]) -> None:
        """Make the next move in forming a world, where nothing more urgent was ordered."""
        newer = self._overtaken()
        if self.waits and newer is not None and newer.urgent:
            self.form()
        elif self.waits:
            move(self)

    def connect(self) -> None:
        """Wait for the others' connections."""
        there = self.world.connected.setdefault(self.epoch, set())
        there.add(self.rank)
        if there >= set(self.members):
            self._meet(Member.come_together)

    def come_together(self) -> None:
        """Take what it lacks from who has it, if that one still lives in this epoch."""
        progress = {number: self.world.progress[self.epoch][number] for number in self.members}
        plan = decide_reformation(COUNT, progress)
        givers = [plan.holder] if self.rank in plan.forward else []
        if self.rank in plan.fresh:
            givers = list(plan.donors)
        gone = [g for g in givers if not self._is_there(self.world.members[g])]
        if gone:
            self.break_world(f"rank {gone[0]} was lost")
            return
        if self.rank in plan.forward:
            self._apply(self.world.members[plan.holder].kept)
        elif self.rank in plan.fresh:
            donor = self.world.members[plan.donors[0]]
            if donor.applied != plan.step:
                raise Broken(f"rank {donor.rank} went on while it had a state to give")
            self.applied, self.value, self.holds = donor.applied, donor.value, False
            self.done = {}
        if self.applied != plan.step:
            raise Broken(f"rank {self.rank} is at {self.applied}, the epoch at {plan.step}")
        self.fresh = False
        self.todo = list(plan.todo[self.rank])
        self._tell_formed(plan)
        self.waits = False
        self._compute()

    def _is_there(self, other: "Member") -> bool:
        return other.alive and other.epoch == self.epoch

    def _tell_formed(self, plan: Reformation | None, *, finished: bool = False) -> None:
        self.emit(
            WorldReformed(
                generation=self.world.generation,
                epoch=self.epoch,
                rank=self.rank,
                step=self.applied,
                began_s=self.left_s,
                ordered_s=self.ordered_s,
                formed_s=self.world.clock.now,
                redo=len(self.todo) if plan is not None and plan.redone else 0,
                reason=plan.reason if plan is not None else "",
                finished=finished,
            )
        )

    # --- a step -------------------------------------------------------------------------------

    def _compute(self) -> None:
        """Do the next micro-batch, or begin to reduce."""
        if self._overtaken():
            self.form()
            return
        if not self.todo:
            self._begin_reduction()
            return
        self.computes = True
        self.world.soon(2 * _MICRO_BATCH_S, self.bind(self._finish_micro_batch))

    def _finish_micro_batch(self) -> None:
        self.computes = False
        last = len(self.todo) == 1
        if not (last and self._overtaken() and self.world.chance.random() < 0.5):
            micro_batch = self.todo.pop(0)
            self.done[micro_batch] = mix(self.value, self.applied, micro_batch)
        self._compute()

    def _begin_reduction(self) -> None:
        """Take part; once all do, it ends for each of them at a moment of its own."""
        step = self.applied
        given = self.world.reductions.setdefault((self.epoch, step), {})
        given[self.rank] = dict(self.done) if step < self.world.target else {}
        self.waits = True
        members = [self.world.members[number] for number in self.members]
        if set(given) >= set(self.members):
            for member in members:
                self.world.soon(_REDUCE_S, member.bind(member.end_reduction, self.epoch))
        elif not all(member.rank in given or self._is_there(member) for member in members):
            self.world.soon(_FEEL_S, self.bind(self.feel_loss))  # It left while this one computed.

    def end_reduction(self) -> None:
        """Come to the end of a reduction: it may fail if a peer has died in it."""
        members = [self.world.members[n] for n in self.members]
        # Who has come to the end of it has sent all that others need.
        whole = all(m.ended or self._is_there(m) for m in members)
        if not whole and self.world.chance.random() < 0.5:
            return  # It waits for what the dead one still had to send.
        self.waits = False
        if self.applied >= self.world.target:
            self._finish()
            return
        self._save(self.applied)
        self._apply(self._sum(self.world.reductions[self.epoch, self.applied]))
        self.todo = list(assign(COUNT, self.members)[self.rank])
        self._compute()

    def _sum(self, given: dict[int, dict[int, int]]) -> dict[int, int]:
        total: dict[int, int] = {}
        for number in self.members:
            for micro_batch, gradient in given[number].items():
                if micro_batch in total:
                    raise Broken(f"micro-batch {micro_batch} counts twice: {self.applied}")
                total[micro_batch] = gradient
        return total

    def _apply(self, gradients: dict[int, int]) -> None:
        """Apply a step: every micro-batch once, each of these very parameters."""
        if sorted(gradients) != list(range(COUNT)):
            raise Broken(f"step {self.applied} was made of {sorted(gradients)}")
        stale = [m for m, g in gradients.items() if g != mix(self.value, self.applied, m)]
        if stale:
            raise Broken(f"rank {self.rank}, step {self.applied}: of other parameters: {stale}")
        self.value = mix(self.value, *(gradients[m] for m in range(COUNT)))
        self.applied += 1
        self.kept, self.holds, self.done = dict(gradients), True, {}
        if self.world.truth.setdefault(self.applied, self.value) != self.value:
            raise Broken(f"rank {self.rank} differs after step {self.applied}")
        self.world.furthest = max(self.world.furthest, self.applied)

    def _save(self, step: int) -> None:
        """The first member saves what all have applied: the step before is reduced by all."""
        if (
            step % self.world.save_every
            or self.rank != self.members[0]
            or step <= self.world.disk.verified
        ):
            return
        self.world.disk.verified = step
        self.emit(
            CheckpointSaved(
                generation=self.world.generation,
                step=step,
                path="disk",
                bytes=1,
                stall_s=0.0,
                save_s=0.1,
                at_s=self.world.clock.now,
            )
        )

    def _finish(self) -> None:
        """Everyone has applied the last step."""
        self.ended = True
        self._tell_formed(None, finished=True)
        self.world.soon(0.05, self.bind(partial(self.end, 0)))

    # --- what its ring says -------------------------------------------------------------------

    def progress(self, now: float, pid: int, spawned_s: float, *, stopped: bool) -> RankProgress:
        """Return its row of a heartbeat: how far it is itself."""
        return RankProgress(
            rank=self.rank,
            pid=pid,
            phase="step" if self.epoch >= 0 else "spawned",
            phase_since_s=spawned_s,
            heartbeat_s=now,
            account=RankAccount(start_step=0, step=self.applied, spawned_s=spawned_s),
            proc=ProcSample(state="S", cpu_s=now),
        )

    def account(self, now: float, spawned_s: float) -> RankAccount:
        """Return where its time went: what it has trained is its world's."""
        return RankAccount(start_step=self.world.start_step, spawned_s=spawned_s)


# --- the job --------------------------------------------------------------------------------------


class ElasticSimulation(Simulation):
    """One run of an elastic job: its ranks are members."""

    rank_type = Member

    def __init__(self, scenario: Scenario) -> None:
        """Set everything up; `run` lets time pass."""
        self.truth: dict[int, int] = {}
        super().__init__(scenario)

    def _make_world(self, generation: int) -> World:
        s = self.scenario
        return Fabric(
            generation, s.nodes * s.nproc, s.steps, s.step_s, s.startup_s, s.save_every,
            0.1, self.disk, start_step=self.disk.verified, clock=self.clock, chance=self.chance,
            truth=self.truth,
        )  # fmt: skip

    @property
    def reformed(self) -> int:
        """Epochs after each generation's first that some member has formed."""
        formed = [e.body for e in self.journal if isinstance(e.body, WorldReformed)]
        return len({(event.generation, event.epoch) for event in formed if event.epoch})

    def _fault(self, kind: str, node: int, rank: int, down_s: float) -> Callable[[], None]:
        if kind != "crash":
            return super()._fault(kind, node, rank, down_s)

        def crash() -> None:
            """Lose one of the processes that live there."""
            if self.ended is None:
                self.injected.append(f"crash on node {node} at {self.clock.now - self.start_s:.3f}")
                keeper = self.nodes[node].keeper
                if keeper is not None and keeper.running:
                    running = sorted(keeper.running)
                    self.nodes[node].end_rank(self.chance.choice(running), signal=9)

        return crash

    def _save(self) -> None:
        """Members tell of their checkpoints themselves."""
