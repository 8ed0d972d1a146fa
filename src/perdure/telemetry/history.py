"""The journal, sorted by generation and rank: what the ledger and the incidents are made from.

Nothing is computed here. A stamp that the journal lacks stays absent, so that the time it would
have explained ends up as `unattributed` and somebody asks why.
"""

from dataclasses import dataclass, field, replace

from perdure.model.events import (
    ActionWithheld,
    CheckpointRestored,
    CheckpointSaved,
    ControllerLost,
    Decision,
    ExitRecord,
    GenerationStepping,
    GenerationStopped,
    JobEnded,
    JobSubmitted,
    JournalEntry,
    KeeperLost,
    MachineReported,
    NodeCordoned,
    NodeDraining,
    NodeLost,
    NodeRegistered,
    PreemptionNoticed,
    PreemptionWithdrawn,
    ProgressNoted,
    RankExited,
    RankJoined,
    RanksStarted,
    VerdictReached,
    WorldBroken,
    WorldReformed,
)
from perdure.model.job import JobSpec
from perdure.model.report import WithheldRow
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Verdict
from perdure.telemetry.machines import MachineFold
from perdure.telemetry.notices import Notice, NoticeFold
from perdure.telemetry.presence import Presence
from perdure.telemetry.reforms import BROKEN, Reform
from perdure.telemetry.stalls import Stall, make_stall

WITHHELD_MAX = 100
"""The newest are kept of what would have been done."""
_WEIGHED = frozenset({"CommSlow", "Straggler", "UnhealthyDevice"})
"""Training goes on in spite of them, unless the policy decides otherwise."""


@dataclass(slots=True)
class RankHistory:
    """One rank in one generation."""

    account: RankAccount = field(default_factory=RankAccount)
    exit: ExitRecord | None = None
    detected_s: float = 0.0
    stalls: list[Stall] = field(default_factory=list)
    """What re-formations of an elastic world have cost it."""

    def take(self, account: RankAccount) -> None:
        """Keep the newest account; one read from a lost ring may know less than a heartbeat."""
        old = self.account
        if account.last_step_s >= old.last_step_s and account.first_step_s >= old.first_step_s:
            self.account = account


@dataclass(slots=True)
class Incident:
    """Why a generation ended, and when that was seen and decided upon."""

    cause: str
    culprit: str
    at_step: int
    failure_s: float
    detected_s: float
    reason: str
    decided_s: float | None = None
    saved: bool = False
    """Nobody failed: an operator's drain, up to which the ranks held for their checkpoint."""


@dataclass(slots=True)
class Generation:
    """One generation of the world."""

    number: int
    started: dict[int, RanksStarted] = field(default_factory=dict)
    ranks: dict[int, RankHistory] = field(default_factory=dict)
    stepping: GenerationStepping | None = None
    stopped: dict[int, float] = field(default_factory=dict)
    """Node -> when the last of its processes was gone."""
    restored: dict[int, int] = field(default_factory=dict)
    """Rank -> step it resumed from."""
    incident: Incident | None = None
    decided_s: float | None = None
    condensed: bool = False
    homes: dict[int, int] = field(default_factory=dict)
    """Rank -> node that started it."""
    left: set[int] = field(default_factory=set)
    """Ranks that were lost while the others went on in place."""
    joined: dict[int, float] = field(default_factory=dict)
    """Member started beside the first ranks -> when."""
    ready: dict[int, float] = field(default_factory=dict)
    """Rank -> when its script was ready to train."""
    broken: dict[int, float] = field(default_factory=dict)
    """Epoch -> when a member first said that it broke."""
    formed: dict[int, float] = field(default_factory=dict)
    """Member that was in an epoch formed in place -> when it was first ordered into one."""

    def condense(self) -> None:
        """Put one rank in the place of all: where the generation began, and how far it came."""
        start, resumable = self.start_step, self.resumable
        known_s = 1.0 if start is not None else 0.0
        account = RankAccount(
            start_step=start or 0,
            step=self.step,
            init_s=1.0 if resumable else 0.0,
            restored_s=known_s,
            first_step_s=known_s,
        )
        self.ranks = {min(self.ranks, default=0): RankHistory(account)}
        self.started.clear()
        self.stopped.clear()
        self.restored.clear()
        self.stepping = None
        self.condensed = True

    def rank(self, rank: int) -> RankHistory:
        """Return the history of `rank`, new where it has none."""
        return self.ranks.setdefault(rank, RankHistory())

    @property
    def resumable(self) -> bool:
        """Return whether its script declared steps."""
        return any(h.account.init_s > 0 or h.account.step >= 0 for h in self.ranks.values())

    @property
    def start_step(self) -> int | None:
        """Return the step it resumed from on every rank; None if it never came so far."""
        steps = [
            h.account.start_step
            for h in self.ranks.values()
            if h.account.restored_s > 0 or h.account.first_step_s > 0
        ]
        return min([*steps, *self.restored.values()], default=None)

    def find_early(self, record: ExitRecord) -> int | None:
        """Return the first rank that left with exit code 0 before `record`; None if none did."""
        ends = (h.exit for h in self.ranks.values() if h.exit is not None)
        left = [e for e in ends if not e.failed and not e.asked and e.at_s <= record.at_s]
        return min(left, key=lambda e: (e.at_s, e.rank)).rank if left else None

    @property
    def step(self) -> int:
        """Return the steps committed by every rank that declared any; -1 for none.

        Of an elastic world, by those that are there; once all have ended, by whoever came furthest.
        """
        if self.formed:
            ends = {rank: h.account.step for rank, h in self.ranks.items() if h.exit is not None}
            there = [h.account.step for r, h in self.ranks.items() if r not in ends]
            known = [step for step in there if step >= 0]
            return min(known) if known else max(ends.values(), default=-1)
        staying = [h for rank, h in self.ranks.items() if rank not in self.left]
        known = [h.account.step for h in staying if h.account.step >= 0]
        return min(known, default=-1)


@dataclass(slots=True)
class History:
    """The fold; `add` takes entries in the journal's order."""

    spec: JobSpec | None = None
    start_s: float = 0.0
    last_s: float = 0.0
    ended: JobEnded | None = None
    elastic: bool = False
    """Its ranks can be members of worlds that are formed in place."""
    generations: dict[int, Generation] = field(default_factory=dict)
    lost_parts: list[ControllerLost] = field(default_factory=list)
    checkpoints: list[CheckpointSaved] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    reason: str = ""
    reforms: list[Reform] = field(default_factory=list)
    draining: dict[int, str] = field(default_factory=dict)
    """Nodes that their ranks were to leave -> why."""
    notices: NoticeFold = field(default_factory=NoticeFold)
    machines: MachineFold = field(default_factory=MachineFold)
    presence: Presence = field(default_factory=Presence)
    withheld: list[WithheldRow] = field(default_factory=list)
    """What would have been done, the newest last, in a job that is only observed."""
    weighed: tuple[float, Verdict] | None = None
    """A verdict that ends nothing by itself, and when: it is an incident if the policy acts."""

    @property
    def newest(self) -> Generation | None:
        """Return the newest generation; None before the first."""
        return self.generations[max(self.generations)] if self.generations else None

    def ordered(self) -> list[Generation]:
        """Return the generations, oldest first."""
        return [self.generations[number] for number in sorted(self.generations)]

    def add(self, entry: JournalEntry) -> None:
        """Take one entry."""
        self.last_s = max(self.last_s, entry.at_s)
        self.presence.take(entry)
        match entry.body:
            case JobSubmitted() as event:
                self.spec, self.start_s = event.spec, event.at_s
            case JobEnded() as event:
                self.ended, self.reason = event, event.reason
            case Decision() as decision:
                self._decide(entry.at_s, decision)
            case RanksStarted() as event:
                generation = self._of(event.generation)
                generation.started.setdefault(event.node, event)
                for rank in event.pids:
                    generation.rank(rank)
                    generation.homes[rank] = event.node
                    if self._came_later(rank):
                        generation.joined.setdefault(rank, event.at_s)
            case GenerationStopped() as event:
                self._stop(event)
            case GenerationStepping() as event:
                generation = self._of(event.generation)
                generation.stepping = generation.stepping or event
                if generation is self.newest:
                    self.reason = ""  # It trains: nothing is left to be explained.
            case ControllerLost() as event:
                self.lost_parts.append(event)
            case ActionWithheld() as event:
                self._withhold(event)
            case ProgressNoted() as event:
                self._note(event)
            case CheckpointSaved() as event:
                self.checkpoints.append(event)
            case WorldBroken() as event:
                self._of(event.generation).broken.setdefault(event.epoch, event.at_s)
            case WorldReformed() as event if not event.finished:
                self._reform(event)
            case CheckpointRestored() as event:
                self._of(event.generation).restored[event.rank] = event.step
            case RankJoined() as event:
                generation = self._of(event.generation)
                generation.rank(event.rank)
                generation.ready.setdefault(event.rank, entry.at_s)
                self.elastic |= event.depth == "elastic"
            case _:
                self._add_cause(entry)

    def condense(self, before: int, checkpoints: int) -> None:
        """Keep of generations older than `before` only how far they came.

        For a picture of the present, which must not grow with the length of the past: whoever
        makes a ledger keeps everything. The newest `checkpoints` stay, and the one furthest on.
        """
        for generation in self.generations.values():
            if generation.number < before and not generation.condensed:
                generation.condense()
        furthest = max(self.checkpoints, key=lambda c: c.step, default=None)
        kept = self.checkpoints[-checkpoints:]
        if furthest is not None and furthest not in kept:
            kept = [furthest, *kept]
        self.checkpoints = kept

    def _came_later(self, rank: int) -> bool:
        """Return whether `rank` is no rank of a first world, but a member started beside it."""
        spec = self.spec
        return spec is not None and not spec.groups and rank >= spec.world_size

    def _of(self, number: int) -> Generation:
        return self.generations.setdefault(number, Generation(number))

    def _decide(self, at_s: float, decision: Decision) -> None:
        if decision.action != "AnswerCommand":  # Which only who asked has to know.
            self.reason = decision.reason or decision.summary
        acts = decision.action.startswith(("AssignNode", "ReformWorld"))
        if acts and self.weighed is not None and self.weighed[0] == at_s:
            verdict = self.weighed[1]
            self._blame(self._of(verdict.generation), _hang(verdict))
        newest = self.newest
        if newest is None or newest.incident is None or newest.decided_s is not None:
            return
        if acts:
            newest.decided_s = newest.incident.decided_s = at_s

    def _withhold(self, event: ActionWithheld) -> None:
        """Nothing is done: what was an incident by its verdict is none, for training was left."""
        generation = self.generations.get(event.generation)
        incident = generation.incident if generation is not None else None
        if generation is not None and incident is not None:
            same = incident.cause.partition(" (")[0] == event.cause
            if same and incident.culprit == event.culprit:
                generation.incident = generation.decided_s = None
        if event.would:
            row = WithheldRow(
                event.at_s, event.step, event.would, event.cause, event.culprit, event.reason
            )
            self.withheld = [*self.withheld[-WITHHELD_MAX + 1 :], row]

    def _reform(self, event: WorldReformed) -> None:
        """A member is in a new epoch: the incident that it ends did not end its generation."""
        generation = self._of(event.generation)
        new = event.rank in generation.joined and event.rank not in generation.formed
        generation.formed.setdefault(event.rank, event.ordered_s)
        generation.rank(event.rank).stalls.append(make_stall(event))
        incident = generation.incident
        if incident is not None:
            reform = Reform(
                cause=incident.cause,
                culprit=incident.culprit,
                at_step=incident.at_step,
                failure_s=incident.failure_s,
                detected_s=incident.detected_s,
                decided_s=incident.decided_s or incident.detected_s,
                epoch=event.epoch,
                generation=event.generation,
            )
            self.reforms.append(reform)
            generation.incident = generation.decided_s = None
            generation.left |= {
                r for r, h in generation.ranks.items() if h.exit is not None and h.exit.failed
            }
        elif event.epoch > 0 and not self._is_newest(event):
            broken_s = generation.broken.get(event.epoch - 1)
            at_s = broken_s or event.ordered_s
            reform = Reform(
                cause=BROKEN if broken_s else "",
                culprit="the world" if broken_s else "",
                at_step=event.step,
                failure_s=at_s,
                detected_s=at_s,
                decided_s=at_s,
                epoch=event.epoch,
                generation=event.generation,
            )
            self.reforms.append(reform)
        if self._is_newest(event):
            self.reforms[-1].take(event, new=new)

    def _formed_without(self, generation: Generation, event: KeeperLost) -> bool:
        """Return whether the others train without what the node ran, before its loss is told.

        If they had to go on without it, the loss is why. A spare's, or a drained node's, is not.
        """
        mine = {rank for rank, node in generation.homes.items() if node == event.node}
        was_in = mine & generation.formed.keys()
        newest = self.reforms[-1] if self.reforms else None
        if not was_in or newest is None or newest.generation != generation.number:
            return bool(generation.formed) and not was_in
        if mine & newest.members:
            return False
        ends = [generation.rank(rank).exit for rank in was_in]
        if newest.cause in ("", BROKEN) and any(end is None or end.failed for end in ends):
            newest.cause, newest.culprit = "keeper lost", f"node {event.node}"
        return True

    def _is_newest(self, event: WorldReformed) -> bool:
        """Return whether `event` is of the newest epoch that is known."""
        known = self.reforms[-1:]
        return [(r.generation, r.epoch) for r in known] == [(event.generation, event.epoch)]

    def _stop(self, event: GenerationStopped) -> None:
        known = [n for n in self.generations if n <= event.generation]
        if known:
            self.generations[max(known)].stopped.setdefault(event.node, event.at_s)

    def _note(self, event: ProgressNoted) -> None:
        generation = self._of(event.generation)
        for rank in event.accounts:
            generation.rank(rank)
        first = min(generation.ranks, default=0)
        for rank, account in event.accounts.items():
            self._take(generation, rank, account, first)

    def _take(self, generation: Generation, rank: int, account: RankAccount, first: int) -> None:
        """Keep a rank's account; the step time is that of rank `first`."""
        history = generation.rank(rank)
        old = history.account
        history.take(account)
        steps = account.step - max(old.step, old.start_step if old.step >= 0 else 0)
        if old.step < 0:
            steps = account.step - account.start_step
        if rank == first and steps > 0 and account.step_s > old.step_s:
            self.step_times_s.append((account.step_s - old.step_s) / steps)

    def _add_cause(self, entry: JournalEntry) -> None:
        match entry.body:
            case RankExited() as event:
                record = event.record
                generation = self._of(record.generation)
                first = min(generation.ranks, default=record.rank)
                self._take(generation, record.rank, event.account, min(first, record.rank))
                history = generation.rank(record.rank)
                if history.exit is None:
                    history.exit, history.detected_s = record, event.detected_s
                    outside = record.rank in generation.joined.keys() - generation.formed.keys()
                    if record.failed and not record.asked and not outside:
                        early = generation.find_early(record) if record.lost_peer else None
                        cause = _crash(event, history.account.step, early)
                        taken = self.notices.explain(event.node, record)
                        self._blame(generation, _announced(cause, taken))
            case VerdictReached() as event if event.verdict.kind in _WEIGHED:
                self.weighed = (entry.at_s, event.verdict)
            case VerdictReached() as event if event.verdict.actionable:
                self._blame(self._of(event.verdict.generation), _hang(event.verdict))
            case NodeLost() as event if self.newest is not None and self._is_missed(event.node):
                seen_s = event.last_seen_s or event.at_s
                step = self.newest.step
                node = f"node {event.node}"
                cause = Incident("NodeLost", node, step, seen_s, entry.at_s, event.reason)
                self._blame(self.newest, _announced(cause, self.notices.find(event.node, seen_s)))
            case NodeDraining() as event:
                self.draining.pop(event.node, None)
                if not event.over:
                    self.draining[event.node] = event.reason
            case NodeCordoned() as event if event.node in self.draining:
                self._leave(entry.at_s, event.node, self.draining.pop(event.node))
            case KeeperLost() as event if event.generation in self.generations:
                generation = self.generations[event.generation]
                if self._formed_without(generation, event):
                    return
                reason = "its keeper died, and its ranks with it"
                reason += f": it {event.cause}" if event.cause else ""
                self._lose_keeper(generation, event.node, event.at_s, entry.at_s, reason)
            case NodeRegistered() as event if self.newest is not None and self._has_lost_all(event):
                reason = "its ranks are gone, keeper and all"
                self._lose_keeper(self.newest, event.node, entry.at_s, entry.at_s, reason)
            case PreemptionNoticed() | PreemptionWithdrawn() as event:
                self.notices.take(event)
            case MachineReported() as event:
                self.machines.take(event)
            case _:
                pass

    def _lose_keeper(
        self, generation: Generation, node: int, lost_s: float, known_s: float, reason: str
    ) -> None:
        name, step = f"node {node}", generation.step
        cause = Incident("keeper lost", name, step, lost_s, known_s, reason)
        self._blame(generation, _announced(cause, self.notices.find(node, lost_s)))

    def _has_lost_all(self, event: NodeRegistered) -> bool:
        """Return whether agent and keeper died together: the next agent knows of no generation.

        Worlds that re-form in place tell of it otherwise.
        """
        newest = self.newest
        if newest is None or newest.formed or event.generation >= newest.number:
            return False
        return event.node in newest.homes.values() and self._is_missed(event.node)

    def _is_missed(self, node: int) -> bool:
        """Return whether the newest world had somebody on `node` who has not ended."""
        newest = self.newest
        assert newest is not None
        mine = {rank for rank, home in newest.homes.items() if home == node}
        mine -= newest.joined.keys() - newest.formed.keys()  # They had not come in yet.
        return not newest.homes or any(newest.rank(rank).exit is None for rank in mine)

    def _leave(self, at_s: float, node: int, reason: str) -> None:
        """A world that was ended so that its ranks leave a node, and for no failure."""
        newest = self.newest
        if newest is None or newest.incident is not None:
            return
        saved = bool(self.checkpoints) and self.checkpoints[-1].step >= newest.step >= 0
        step = self.checkpoints[-1].step if saved else newest.step
        newest.decided_s = at_s
        notice = self.notices.find(node, at_s)
        cause = f"moved, before a preemption ({notice.words})" if notice is not None else "moved"
        newest.incident = Incident(cause, f"node {node}", step, at_s, at_s, reason, at_s, saved)

    def _blame(self, generation: Generation, cause: Incident) -> None:
        """The earliest failure is the cause; those that come after it are consequences."""
        old = generation.incident
        if old is not None and old.failure_s <= cause.failure_s:
            return
        if old is None:
            later = [n for n in self.generations if n > generation.number]
            if later:
                return
        else:
            cause.detected_s = min(cause.detected_s, old.detected_s)
        cause.decided_s = generation.decided_s
        generation.incident = cause


def _crash(event: RankExited, step: int, early: int | None) -> Incident:
    """`early` is a rank whose leaving in good order took the others' connections away."""
    record = event.record
    culprit, cause = f"rank {record.rank}", record.cause
    where = f" at step {step}" if step >= 0 else ""
    reason = f"{culprit} ended with {record.cause}{where}"
    if early is not None:
        culprit, cause = f"rank {early}", f"left early; then {culprit}: {cause}"
        reason = f"{culprit} ended with exit code 0 while others needed it: {reason}"
    return Incident(cause, culprit, step, record.at_s, event.detected_s, reason)


def _announced(incident: Incident, notice: Notice | None) -> Incident:
    """Return a loss that was announced as what it is: the platform's doing."""
    if notice is None:
        return incident
    what = incident.cause if incident.culprit.startswith("node") else incident.reason
    cause, culprit = f"Preemption ({notice.words}); {what}", f"node {notice.node}"
    return replace(incident, cause=cause, culprit=culprit)


def _hang(verdict: Verdict) -> Incident:
    return Incident(
        f"{verdict.kind} ({verdict.activity})",
        str(verdict.culprit),
        verdict.step,
        verdict.first_seen_s,
        verdict.confirmed_s,
        verdict.reason,
    )
