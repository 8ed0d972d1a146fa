"""One policy through one trace, from change to change: what it commits, and where the time goes.

Between two changes everything is known, so time advances in closed form; nothing is sampled. At
any moment a policy trains, stands still in a phase of a change, or has no shape that fits. Lost
work is taken back from what was counted as useful.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from perdure.plan.checkpoints import daly
from perdure_lab.policies.policies import Policy
from perdure_lab.policies.throughput import Throughput, has_lost_neighbours
from perdure_lab.report import PHASES, Phases, Physics
from perdure_lab.simulation.ledger import Ledger, Work
from perdure_lab.simulation.respond import Responder, Target
from perdure_lab.traces import AvailabilityTrace, Departure, Interval, list_intervals
from perdure_lab.traces.transform import delay

_EPSILON_S = 1e-9
_Copies = Literal["whole", "snapshot", "none"]
"""Of the state of those that left: as of this step, as of some steps before, or not at all."""

_DEAR = 50.0
"""A snapshot that is taken sooner than it has to be takes a fiftieth of the time at most."""


class Outcome(msgspec.Struct, frozen=True):
    """What a policy made of a trace."""

    committed: float
    """Samples."""
    slot_s: float
    ledger: dict[str, float]
    """Share of the slot-seconds by account."""
    losses: int
    """Changes in which it lost a node that trained."""
    changes: int
    """Changes of its own will."""
    restarts: int
    """Losses after which nobody that lives had the state, where others than storage have it."""
    rates: tuple[tuple[float, float], ...]
    """(seconds, samples a second from then on)."""


@dataclass(slots=True)
class _Pause:
    """Phases to stand still in: (end, account), in order. `saving`: a checkpoint, nothing else."""

    phases: list[tuple[float, str]] = field(default_factory=list)
    saving: bool = False

    @property
    def end_s(self) -> float:
        return self.phases[-1][0] if self.phases else 0.0


class Replay:
    """The state of one policy in the course of a trace."""

    def __init__(
        self, policy: Policy, trace: AvailabilityTrace, table: Throughput, physics: Physics
    ) -> None:
        """Begin before the trace does; `run` does the rest."""
        self.policy, self.table, self.physics = policy, table, physics
        self.slots, self.intervals = trace.slots, list_intervals(delay(trace, policy.start_s))
        self.slot_s = sum(i.length_s * self._weigh(i.living) for i in list_intervals(trace))
        self.respond = Responder(policy, table, physics.bytes_per_s)
        self.ledger, self.now_s = Ledger(), 0.0
        self.target: Target | None = None
        """What trains, or is being formed."""
        self.active, self.paid = 0.0, 0
        """Slots of the shape, and of all who are there."""
        self.pause = _Pause()
        self.aside: tuple[float, Target] | None = None
        """State moves to newcomers until then, beside training."""
        self.turned = False
        """Since the last change it has gone to another shape of its own will, or has no need."""
        self.unsaved, self.since_save_s = Work(), 0.0
        self.formed_s = 0.0
        """How long it has trained since its grid was formed: a step began with it."""
        self.losses = self.changes = self.restarts = self.seen = 0
        self.dwell_s = 0.0
        """How long it is thought to be until the next change: the mean gap so far."""
        self.rates: list[tuple[float, float]] = []
        self.save_interval_s = self._choose_save_interval_s(trace)

    def _choose_save_interval_s(self, trace: AvailabilityTrace) -> float:
        if self.policy.save_interval_s is not None:
            return self.policy.save_interval_s
        instants = sum(bool(i.change.left) for i in self.intervals)
        if not instants or not self.policy.save_s:
            return float("inf")
        return daly(self.policy.save_s, trace.duration_s / instants)

    def run(self, progress: Callable[[float], None] = lambda _: None) -> Outcome:
        """Go through the trace."""
        for number, interval in enumerate(self.intervals):
            self._meet(interval)
            self._advance(interval)
            progress((number + 1) / len(self.intervals))
        there_s = sum(i.length_s * self._weigh(i.living) for i in self.intervals)
        self.ledger.spend("startup", self.slot_s - there_s)
        return Outcome(
            committed=self.ledger.samples,
            slot_s=self.slot_s,
            ledger=self.ledger.close(self.slot_s),
            losses=self.losses,
            changes=self.changes,
            restarts=self.restarts,
            rates=tuple(self.rates),
        )

    def _weigh(self, nodes: Sequence[str]) -> int:
        return sum(self.slots[node] for node in nodes)

    # --- changes

    def _meet(self, interval: Interval) -> None:
        """Take what happens at the interval's beginning."""
        self.seen, self.turned = self.seen + (interval.begin_s > 0), False
        self.dwell_s = interval.begin_s / max(1, self.seen)
        self.paid = self._weigh(interval.living)
        lost: list[Departure] = []
        if self.target is not None:
            members = set(self.target.grid.members)
            lost = [d for d in interval.change.left if d.node in members]
        if self.aside is not None:
            gone = {d.node for d in interval.change.left}
            if lost or gone & set(self.aside[1].grid.members):
                self.aside = None
        if self.target is None:
            self._start(interval.living)
        elif lost:
            self._lose(lost, interval.living)
        else:
            self._grow(interval.living)

    def _start(self, living: Sequence[str]) -> None:
        """Start on what is there: at first for free, later from storage."""
        target = self.respond.start(living)
        if target is None:
            return
        first = not self.rates and self.ledger.samples == 0.0
        self._take(target)
        if not first:
            phases = self.policy.loss if self.policy.copies == "storage" else self.policy.restart
            self._stand(phases, target.move_s, detect_s=0.0)

    def _lose(self, lost: list[Departure], living: Sequence[str]) -> None:
        """Go on after members have left."""
        grid, shape, _ = self._here()
        self.losses += 1
        policy, waiting = self.policy, bool(self.pause.phases) and not self.pause.saving
        told = policy.announced is not None and all(d.notice_s > 0 for d in lost)
        notice_s = min(d.notice_s for d in lost) if told else 0.0
        copies = self._judge_copies(lost, notice_s)
        lives = copies != "none"
        if not waiting:
            self._lose_work(len(lost), copies, told=told)
        target = self.respond.after_loss(grid, shape, living, self.dwell_s)
        if not lives and policy.copies != "storage":
            self.restarts += 1
            target = self.respond.start(living)
        if target is None:
            self.target = None
            self.pause = _Pause()
            self._note(0.0)
            return
        self._take(target)
        self.turned = target.move_s > 0
        if told and lives:
            assert policy.announced is not None
            self._stand(policy.announced, max(0.0, target.move_s - notice_s), 0.0)
            return
        phases = policy.loss if lives or policy.copies == "storage" else policy.restart
        detect_s = max(phases.detect_s, self.physics.detect_s)
        if waiting and self._phase() == "reconfiguration.detect":
            detect_s = self.physics.detect_s  # found together with what it is waiting to find
        self._stand(phases, target.move_s, detect_s)

    def _judge_copies(self, lost: list[Departure], notice_s: float) -> _Copies:
        """Return what those that live have of the state, or were handed in time."""
        grid = self._here().grid
        gone = {d.node for d in lost}
        if self.policy.copies == "storage":
            saved = self.policy.saves_first and notice_s >= self.policy.save_s
            return "whole" if saved else "none"
        slice_s = self.table.state_bytes / grid.stages / self.physics.bytes_per_s
        handed = notice_s >= slice_s
        if self.policy.copies != "neighbours":
            handed = handed or grid.without(gone).count_copies() > 0
        if handed or self.policy.copies == "stage":
            return "whole" if handed else "none"
        if has_lost_neighbours(grid, gone):
            return "none"
        return "snapshot" if self.policy.snapshot_steps else "whole"

    def _choose_snapshot_steps(self, step_s: float) -> int:
        """Return how many steps there are from a snapshot to the next."""
        policy = self.policy
        if not policy.snapshot_s:
            return policy.snapshot_steps
        grid = self._here().grid
        sent_s = self.table.state_bytes / grid.stages / self.physics.bytes_per_s
        soon = math.ceil(max(policy.snapshot_s, _DEAR * sent_s) / step_s)
        return min(soon, policy.snapshot_steps)

    def _lose_work(self, nodes: int, copies: _Copies, *, told: bool) -> None:
        """Take back what the loss of so many members has undone."""
        shape = self._here().shape
        policy, lost, step_s = self.policy, self.unsaved, self.table.compute_step_s(shape)
        if copies == "snapshot":
            lost = self._train(self.formed_s % (self._choose_snapshot_steps(step_s) * step_s))
        elif copies == "whole" and told:  # handed over at a step's end, or saved just in time
            lost = Work()
            if policy.copies == "storage" and self.unsaved.seconds > 0:
                share = min(1.0, policy.save_s / self.unsaved.seconds)
                self.ledger.take_back(self.unsaved.scale(share), "checkpoint")
        elif copies == "whole":
            share = nodes / shape.nodes if policy.keeps == "microbatches" else 1.0
            lost = self._train(self.formed_s % step_s).scale(min(1.0, share))
        self.ledger.take_back(lost)
        if policy.copies == "storage" or copies == "none":
            self.unsaved, self.since_save_s = Work(), 0.0
        else:
            self.unsaved.add(lost, -1.0)

    def _grow(self, living: Sequence[str]) -> None:
        """Take in who has come, where that is faster."""
        grid, shape, _ = self._here()
        if self.pause.saving:
            return
        target = self.respond.after_join(grid, shape, living, self.dwell_s)
        if target is None:
            return
        if self.pause.phases:  # it stands anyway: who comes joins what is being formed
            self._take(target)
            self.turned = True
            self._stand(self.policy.join, target.move_s, 0.0)
            return
        if self.policy.overlap and target.move_s > 0:
            begun_s = self.aside[0] if self.aside else 0.0
            self.aside = (max(begun_s, self.now_s + target.move_s), target)
        else:
            self._turn_to(target, target.move_s)

    def _turn_to(self, target: Target, move_s: float) -> None:
        """Change to another shape of its own will."""
        self.changes += 1
        saved_s = 0.0
        if self.policy.copies == "storage":
            if self.policy.saves_first:
                saved_s = self.policy.save_s
            else:
                self.ledger.take_back(self.unsaved)
            self.unsaved, self.since_save_s = Work(), 0.0
        self._take(target)
        self.turned = True
        self._stand(self.policy.join, move_s, 0.0, saved_s=saved_s)

    def _stand(
        self, phases: Phases, move_s: float, detect_s: float, *, saved_s: float = 0.0
    ) -> None:
        """Stand still from now on in the phases of a change; never shorter than before."""
        times = {name: getattr(phases, f"{name}_s") for name in PHASES}
        times |= {"detect": detect_s, "state": max(phases.state_s, move_s)}
        at_s, ends = self.now_s + saved_s, list[tuple[float, str]]()
        if saved_s:
            ends.append((at_s, "checkpoint"))
        for name in PHASES:
            if times[name] > 0:
                at_s += times[name]
                ends.append((at_s, f"reconfiguration.{name}"))
        if at_s > self.pause.end_s or self.pause.saving:
            self.pause = _Pause(ends)
        self.formed_s = 0.0
        if self.pause.phases:
            self._note(0.0)

    def _take(self, target: Target) -> None:
        """Let `target` be what trains or is being formed."""
        self.target = target
        members = target.grid.members
        self.active = self._weigh(members) * target.shape.nodes / len(members)

    def _here(self) -> Target:
        """Return the grid that trains or is being formed, and the shape that sets its pace."""
        assert self.target is not None
        return self.target

    def _phase(self) -> str:
        return self.pause.phases[0][1]

    # --- time

    def _advance(self, interval: Interval) -> None:
        """Let time pass until the interval ends."""
        while self.now_s < interval.end_s - _EPSILON_S:
            if self.target is None:
                self.ledger.spend("idle", (interval.end_s - self.now_s) * self.paid)
                self.now_s = interval.end_s
            elif self.pause.phases:
                self._wait(interval)
            else:
                self._go_on(interval)
        self.now_s = interval.end_s

    def _wait(self, interval: Interval) -> None:
        """Stand still until the phase ends."""
        end_s, account = self.pause.phases[0]
        until_s = min(end_s, interval.end_s)
        self.ledger.spend(account, self.active * (until_s - self.now_s))
        self.ledger.spend("packing", (self.paid - self.active) * (until_s - self.now_s))
        self.now_s = until_s
        if until_s < end_s:
            return
        self.pause.phases.pop(0)
        if self.pause.phases:
            return
        if self.pause.saving:
            self.pause = _Pause()
            self._save()
        if not self.turned and self.aside is None and until_s < interval.end_s - _EPSILON_S:
            self._grow(interval.living)

    def _go_on(self, interval: Interval) -> None:
        """Train until something is due."""
        shape = self._here().shape
        rate = self.table.rates[shape] * self.policy.efficiency
        if not self.rates or self.rates[-1][1] != rate:
            self._note(rate)
        due_s = interval.end_s if self.aside is None else min(interval.end_s, self.aside[0])
        due_s = max(due_s, self.now_s)
        cycles = 0
        if self.since_save_s == 0.0 and self.save_interval_s < due_s - self.now_s:
            cycles = int((due_s - self.now_s) / (self.save_interval_s + self.policy.save_s))
        if cycles:  # whole ones, from a checkpoint to the next, at once
            self._train_for(cycles * self.save_interval_s)
            self.ledger.spend("checkpoint", self.active * cycles * self.policy.save_s)
            self.ledger.spend("packing", (self.paid - self.active) * cycles * self.policy.save_s)
            self.now_s += cycles * self.policy.save_s
            self._save()
            return
        self._train_for(min(due_s - self.now_s, self.save_interval_s - self.since_save_s))
        if self.aside is not None and self.now_s >= self.aside[0] - _EPSILON_S:
            target, self.aside = self.aside[1], None
            self._turn_to(target, 0.0)
        elif self.since_save_s >= self.save_interval_s - _EPSILON_S:
            if self.policy.save_s > 0:
                self.pause = _Pause([(self.now_s + self.policy.save_s, "checkpoint")], saving=True)
            else:
                self._save()

    def _train_for(self, seconds: float) -> None:
        """Train, and let who waits beside it wait."""
        work = self._train(seconds)
        self.ledger.keep(work)
        self.unsaved.add(work)
        coming = self._count_coming()
        self.ledger.spend("reconfiguration.state", coming * seconds)
        self.ledger.spend("packing", (self.paid - self.active - coming) * seconds)
        self.now_s += seconds
        self.since_save_s += seconds
        self.formed_s += seconds

    def _save(self) -> None:
        self.unsaved, self.since_save_s = Work(), 0.0

    def _train(self, seconds: float) -> Work:
        """Return what the present shape makes in so long."""
        shape = self._here().shape
        rate, efficiency = self.table.rates[shape], self.policy.efficiency
        return Work(
            seconds,
            rate * efficiency * seconds,
            self.active * efficiency * seconds,
            self.active * (1.0 - efficiency) * seconds,
        )

    def _count_coming(self) -> int:
        """Return the slots of those that state is being moved to."""
        if self.aside is None or self.target is None:
            return 0
        members = set(self.target.grid.members)
        return self._weigh([n for n in self.aside[1].grid.members if n not in members])

    def _note(self, rate: float) -> None:
        self.rates.append((self.now_s, rate))
