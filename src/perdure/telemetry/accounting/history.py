"""The journal, sorted by generation and rank: what the ledger and the incidents are made from.

Nothing is computed here. A stamp that the journal lacks stays absent, so that the time it would
have explained ends up as `unattributed` and somebody asks why.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from msgspec import structs

from perdure.model.events import (
    ActionWithheld,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    CommandReceived,
    ControllerLost,
    Decision,
    FailureDecided,
    GenerationStepping,
    GenerationStopped,
    JobEnded,
    JobSubmitted,
    JournalEntry,
    JournalMended,
    MachineReported,
    OperatorNoted,
    OwnChecked,
    PreemptionNoticed,
    ProgressNoted,
    QuorumFormed,
    RankExited,
    RankJoined,
    RanksStarted,
    ReplicaSeen,
    ResumeCompared,
    RoomNoted,
    SlotLeftEmpty,
    VerdictReached,
    VerdictWithdrawn,
    WorldReformed,
)
from perdure.model.failures import ExitRecord, explain_verdict
from perdure.model.job import JobSpec
from perdure.model.report import (
    EmptySlotRow,
    HungSaveRow,
    MendRow,
    NoteRow,
    SkipRow,
    WindowRow,
    WithheldRow,
)
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import HANGS, Culprit, Verdict
from perdure.telemetry.accounting.reforms import Reform, Stall, make_stall
from perdure.telemetry.accounting.segments import Presence
from perdure.telemetry.exactness import ExactFold
from perdure.telemetry.platforms import MachineFold

MENDED_MAX = 20
NOTES_MAX = 1000
"""Remarks that a report has; the newest of them."""
_GONE_S = 10.0
"""Seconds after its announced end in which a machine counts as gone on time."""
REFORMS_KEPT = 100
"""Worlds formed in place that a picture of the present knows of."""
WITHHELD_MAX = 100
"""The newest are kept of what would have been done."""


@dataclass(slots=True)
class RankHistory:
    """One rank in one generation."""

    account: RankAccount = field(default_factory=RankAccount)
    exit: ExitRecord | None = None
    stalls: list[Stall] = field(default_factory=list)
    """What re-formations of an elastic world have cost it."""

    def take(self, account: RankAccount) -> None:
        """Keep the newest account; one read from a lost ring may know less than a heartbeat."""
        old = self.account
        if account.last_step_s >= old.last_step_s and account.first_step_s >= old.first_step_s:
            self.account = account


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
    incident: FailureDecided | None = None
    """Why it ended, as was decided; in place, until a member is in the next epoch."""
    hangs: dict[str, Verdict] = field(default_factory=dict)
    """Those that stand, and that nothing was decided about."""
    condensed: bool = False
    first: int = sys.maxsize
    """The lowest of its ranks."""
    noted: int = -1
    """Steps committed by every rank, as noted last; the accounts of most may be older."""
    homes: dict[int, int] = field(default_factory=dict)
    """Rank -> node that started it."""
    left: set[int] = field(default_factory=set)
    """Ranks that were lost while the others went on in place."""
    joined: dict[int, float] = field(default_factory=dict)
    """Member started beside the first ranks -> when."""
    awaited: dict[int, str] = field(default_factory=dict)
    """Such a member -> what its start had waited for."""
    ready: dict[int, float] = field(default_factory=dict)
    """Rank -> when its script was ready to train."""
    formed: dict[int, float] = field(default_factory=dict)
    """Member that was in an epoch formed in place -> when it was first ordered into one."""
    epoch: int = -1
    members: set[int] = field(default_factory=set)
    """Of that epoch, the newest that was formed in place: who is lost with its node is in none."""

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
        self.first = min(self.ranks, default=0)
        self.ranks = {self.first: RankHistory(account)}
        self.started.clear()
        self.stopped.clear()
        self.restored.clear()
        self.stepping = None
        self.condensed = True

    def rank(self, rank: int) -> RankHistory:
        """Return the history of `rank`, new where it has none."""
        known = self.ranks.get(rank)
        if known is None:
            known = self.ranks[rank] = RankHistory()
            self.first = min(self.first, rank)
        return known

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

    @property
    def step(self) -> int:
        """Return the steps committed by every rank that declared any; -1 for none.

        Of an elastic world, by those that are there; once all have ended, by whoever came furthest.
        """
        if self.formed:
            ends = {rank: h.account.step for rank, h in self.ranks.items() if h.exit is not None}
            there = [
                self.ranks[r].account.step for r in self.members & self.ranks.keys() - ends.keys()
            ]
            known = [step for step in there if step >= 0]
            return max(min(known), self.noted) if known else max(ends.values(), default=-1)
        staying = [h for rank, h in self.ranks.items() if rank not in self.left]
        known = [h.account.step for h in staying if h.account.step >= 0]
        return max(min(known), self.noted) if known else -1


@dataclass(slots=True)
class History:
    """The fold; `add` takes entries in the journal's order."""

    spec: JobSpec | None = None
    start_s: float = 0.0
    last_s: float = 0.0
    ended: JobEnded | None = None
    asked_s: float = 0.0
    """When somebody first asked for the end of the newest generation's job; 0: nobody has."""
    lost: bool = False
    """It was ended, and no entry says so; whoever sees its processes says it here."""
    here: set[int] = field(default_factory=set)
    """Replica groups that others have started, and that have not gone."""
    meets: bool = False
    """Its ranks serve stores at which worlds meet that are formed in place."""
    generations: dict[int, Generation] = field(default_factory=dict)
    newest_number: int = -1
    lost_parts: list[ControllerLost] = field(default_factory=list)
    checkpoints: list[CheckpointSaved] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    reason: str = ""
    reforms: list[Reform] = field(default_factory=list)
    machines: MachineFold = field(default_factory=MachineFold)
    presence: Presence = field(default_factory=Presence)
    withheld: list[WithheldRow] = field(default_factory=list)
    """What would have been done, the newest last, in a job that is only observed."""
    notes: list[NoteRow] = field(default_factory=list)
    """Remarks of operators, the newest last."""
    mended: list[MendRow] = field(default_factory=list)
    """What was found damaged of the journal, the newest last."""
    skipped: list[SkipRow] = field(default_factory=list)
    """Checkpoints that could not be used, each told once, by whichever rank says it first."""
    exact: ExactFold = field(default_factory=ExactFold)
    waits: dict[int, str] = field(default_factory=dict)
    """Node -> what room its ranks wait for before they start."""
    hung_saves: list[HungSaveRow] = field(default_factory=list)
    """Checkpoints whose disk hung, each told once."""
    windows: dict[str, WindowRow] = field(default_factory=dict)
    """Notices by node and id."""
    empty_slots: list[EmptySlotRow] = field(default_factory=list)
    """Slots of an elastic world that were given up."""
    dropped: int = 0
    """Generations that are only counted any more, and the number of the newest of them."""
    dropped_to: int = -1
    dropped_incidents: int = 0
    dropped_parts: int = 0

    @property
    def num_generations(self) -> int:
        """Return how many there were."""
        return self.dropped + len(self.generations)

    @property
    def num_incidents(self) -> int:
        """Return how many generations, or worlds in place, have failed, and own parts died."""
        failed = sum(self.find_incident(g) is not None for g in self.generations.values())
        failed += sum(reform.failed for reform in self.reforms)
        return self.dropped_incidents + failed + self.num_parts_lost

    @property
    def num_parts_lost(self) -> int:
        """Return how often a part of perdure's own died."""
        return self.dropped_parts + len(self.lost_parts)

    @property
    def newest(self) -> Generation | None:
        """Return the newest generation; None before the first."""
        return self.generations.get(self.newest_number)

    def find_incident(self, generation: Generation) -> FailureDecided | None:
        """Return what ended a generation: what was decided, or a hang in which it was left."""
        over = self.ended is not None or self.lost or generation is not self.newest
        return self.explain(generation) if over else generation.incident

    def explain(self, generation: Generation) -> FailureDecided | None:
        """Return since when, and why, a generation trains no more: also while it hangs."""
        done = self.ended is not None and self.ended.status == "done"
        if generation.incident is not None or not generation.hangs or done:
            return generation.incident
        cause = explain_verdict(min(generation.hangs.values(), key=attrgetter("first_seen_s")))
        asked_s = self.asked_s or (self.ended.at_s if self.ended is not None else 0.0)
        if asked_s:
            asked_s = max(asked_s, cause.detected_s)
        return FailureDecided(
            id=f"hang-{generation.number}", world=generation.number, rung="stop", at_s=asked_s,
            **structs.asdict(cause),
        )  # fmt: skip

    def ordered(self) -> list[Generation]:
        """Return the generations, oldest first."""
        return [self.generations[number] for number in sorted(self.generations)]

    def add(self, entry: JournalEntry) -> None:
        """Take one entry."""
        self.last_s = max(self.last_s, entry.at_s)
        self.presence.take(entry)
        match entry.body:
            case ProgressNoted() as event:  # The first four are the most frequent ones.
                generation = self._of(event.generation)
                generation.noted = event.step
                first = min((generation.first, *event.accounts))
                for rank, account in event.accounts.items():
                    self._take_account(generation, rank, account, first)
            case CheckpointRestored() as event:
                self._note_restored(entry.at_s, event)
            case ResumeCompared() as event:
                self.exact.take(event)
            case RankJoined() as event:
                self._of(event.generation).rank(event.rank)
                self._of(event.generation).ready.setdefault(event.rank, entry.at_s)
                self.meets |= bool(event.store)
            case RankExited() as event:
                self._end(event)
            case JobSubmitted() as event:
                self.spec, self.start_s = event.spec, event.at_s
            case JobEnded() as event:
                self.ended, self.reason = event, event.reason
            case VerdictReached() | VerdictWithdrawn() as event:
                self._note_verdict(event)
            case CommandReceived(kind="stop" | "kill") as event:
                self.asked_s = self.asked_s or entry.at_s
                self._note_window(event)
            case PreemptionNoticed(certain=True) as event:
                self._note_window(event)
            case Decision() as decision if decision.action != "AnswerCommand":
                self.reason = decision.reason or decision.summary
            case FailureDecided() as event:
                self._fail(event)
            case RoomNoted() as event if event.node >= 0:
                self.waits[event.node] = f"{event.reason}: {event.place}"
            case RanksStarted() as event:
                self._start(event)
            case GenerationStopped() as event:
                stopped = self._find_at_most(event.generation)
                if stopped is not None:
                    stopped.stopped.setdefault(event.node, event.at_s)
            case GenerationStepping() as event:
                generation = self._of(event.generation)
                generation.stepping = generation.stepping or event
                if generation is self.newest:
                    self.reason = ""  # It trains: nothing is left to be explained.
            case ReplicaSeen() as event if self.spec and self.spec.served:
                self.here.discard(event.group)
                self.here |= set() if event.gone else {event.group}
            case QuorumFormed() as event if self.spec:
                if len(event.members) >= (len(self.here) if self.spec.served else self.spec.nodes):
                    self.reason = ""  # All groups train.
            case ControllerLost() as event:
                self.lost_parts.append(event)
            case OperatorNoted() | JournalMended() | ActionWithheld() | OwnChecked() as event:
                self._note(entry.at_s, event)
            case MachineReported() as event:
                self.machines.take(event)
            case CheckpointFailed() as event if event.writing >= 0:
                self._note_hung_save(event)
            case CheckpointSaved() as event:
                self.checkpoints.append(event)
                self._end_hung_save(event)
            case SlotLeftEmpty() as event:
                self._note_empty(event)
            case WorldReformed() as event if not event.finished:
                self._reform(event)

    def _start(self, event: RanksStarted) -> None:
        self.waits.pop(event.node, None)
        generation = self._of(event.generation)
        generation.started.setdefault(event.node, event)
        for rank in event.pids:
            generation.rank(rank)
            generation.homes[rank] = event.node
            self._fill_slot(event.at_s, rank)
            if self.spec and not self.spec.groups and rank >= self.spec.world_size:
                # It is no rank of a first world, but a member started beside it.
                generation.joined.setdefault(rank, event.at_s)
                if event.awaited:
                    generation.awaited[rank] = event.awaited

    def _note(
        self, at_s: float, event: OperatorNoted | JournalMended | ActionWithheld | OwnChecked
    ) -> None:
        match event:
            case OwnChecked():
                self._note_torn(at_s, event.moved)
                self._note_torn(at_s, event.fetched, fetched=True)
            case OperatorNoted():
                note = NoteRow(event.at_s, event.step, event.who, event.text)
                self.notes = [*self.notes[-NOTES_MAX + 1 :], note]
            case JournalMended():
                mend = MendRow(at_s, event.restored, event.lost, event.reason)
                self.mended = [*self.mended[-MENDED_MAX + 1 :], mend]
            case ActionWithheld(would=would) if would:
                row = WithheldRow(
                    event.at_s, event.step, would, event.cause, event.culprit, event.reason
                )
                self.withheld = [*self.withheld[-WITHHELD_MAX + 1 :], row]

    def _fill_slot(self, at_s: float, rank: int) -> None:
        """A process was started: the slot that it is in is not empty."""
        for at, row in enumerate(self.empty_slots):
            if self.spec and row.slot == self.spec.slot_of(rank) and not row.over_s:
                self.empty_slots[at] = structs.replace(row, over_s=at_s)

    def count_ranks_left(self) -> int:
        """Return the members of the last world if slots stayed empty to the job's end, else 0."""
        empty = any(not row.over_s for row in self.empty_slots)
        newest = self.newest
        return len(newest.members) if empty and self.ended and newest is not None else 0

    def _note_skipped(self, at_s: float, event: CheckpointRestored) -> None:
        if not event.skipped:
            return
        known = {row.why for row in self.skipped}
        new = [SkipRow(at_s, why, event.step) for why in event.skipped if why not in known]
        self.skipped = [*self.skipped, *new][-MENDED_MAX:]

    def _note_restored(self, at_s: float, event: CheckpointRestored) -> None:
        self._of(event.generation).restored[event.rank] = event.step
        self._note_skipped(at_s, event)
        self.exact.take(event)

    def _note_empty(self, event: SlotLeftEmpty) -> None:
        row = EmptySlotRow(event.at_s, event.slot, event.node, event.reason)
        self.empty_slots = [*self.empty_slots, row][-MENDED_MAX:]

    def _note_torn(self, at_s: float, whys: Iterable[str], *, fetched: bool = False) -> None:
        """Remember checkpoints of the script's own; ranks that fail together tell of the same."""
        known = {row.why for row in self.skipped if row.resumed < 0}
        new = [SkipRow(at_s, why, -1, fetched) for why in whys if why not in known]
        self.skipped = [*self.skipped, *new][-MENDED_MAX:]

    def _note_window(self, event: CommandReceived | PreemptionNoticed) -> None:
        """Remember the time that a platform leaves; the same notice again is no other one."""
        window: object
        if isinstance(event, PreemptionNoticed):
            words = f"{event.source}: {event.reason}" if event.reason else event.source
            node, who, window = event.node, f"node {event.node} ({words})", event.grace_s
        else:
            node, who, window = -1, event.who, event.args.get("window_s")
        if isinstance(window, int | float) and 0 < window < math.inf:
            row = WindowRow(event.at_s, who, window, node=node)
            self.windows.setdefault(f"{node} {event.id}", row)
        while len(self.windows) > MENDED_MAX:
            del self.windows[next(iter(self.windows))]

    def _use_windows(self, node: int, ended_s: float) -> None:
        for key, row in self.windows.items():
            used_s = ended_s - row.at_s
            if row.node in (-1, node) and row.used_s < used_s <= row.window_s + _GONE_S:
                self.windows[key] = structs.replace(row, used_s=used_s)

    def _note_hung_save(self, event: CheckpointFailed) -> None:
        rows = self.hung_saves
        row = HungSaveRow(event.at_s, event.writing, event.error)
        if rows and not rows[-1].over_s:
            row = structs.replace(rows.pop(), step=row.step, why=row.why)
        self.hung_saves = [*rows, row][-MENDED_MAX:]

    def _end_hung_save(self, event: CheckpointSaved) -> None:
        if self.hung_saves and not self.hung_saves[-1].over_s:
            row = self.hung_saves.pop()
            row = structs.replace(row, over_s=event.at_s, skipped=event.skipped)
            self.hung_saves.append(row)

    def condense(self, before: int, checkpoints: int) -> None:
        """Keep of generations older than `before` only how far they came.

        For a picture of the present, which must not grow with the length of the past: whoever
        makes a ledger keeps everything. The newest `checkpoints` stay, and the one furthest on.
        """
        for generation in self.generations.values():
            if generation.number < before and not generation.condensed:
                generation.condense()
            for history in generation.ranks.values() if generation.formed else ():
                history.stalls.clear()
        if self.spec is not None and not self.spec.groups:  # A group's own may be an old one.
            self._drop(before)
        self.dropped_parts += len(self.lost_parts)
        self.lost_parts.clear()
        self.dropped_incidents += sum(r.failed for r in self.reforms[:-REFORMS_KEPT])
        del self.reforms[:-REFORMS_KEPT]
        furthest = max(self.checkpoints, key=lambda c: c.step, default=None)
        kept = self.checkpoints[-checkpoints:]
        if furthest is not None and furthest not in kept:
            kept = [furthest, *kept]
        self.checkpoints = kept

    def _drop(self, before: int) -> None:
        """Only count what nothing hangs on any more of generations older than `before`.

        What the job has to show is what the newest has committed that committed any, as far as
        later ones did not go further back.
        """
        old = [g for g in reversed(self.ordered()) if g.number < before]
        known = next((g for g in old if g.step >= 0), None)
        known = known or next((g for g in old if g.resumable), None)
        first = known.number if known is not None else before
        for generation in old:
            silent = generation.step < 0 and generation.start_step is None
            if generation is not known and (silent or generation.number < first):
                del self.generations[generation.number]
                self.dropped += 1
                self.dropped_to = max(self.dropped_to, generation.number)
                self.dropped_incidents += self.find_incident(generation) is not None

    def _find_at_most(self, number: int) -> Generation | None:
        """Return the newest generation that is not newer than `number`."""
        number = min(number, self.newest_number)
        if number not in self.generations:
            number = max((n for n in self.generations if n <= number), default=-1)
        return self.generations.get(number)

    def find_next(self, number: int) -> Generation | None:
        """Return the generation that came after the one with this number."""
        after = self.generations.get(number + 1)
        if after is None and number < self.newest_number:
            after = self.generations[min(n for n in self.generations if n > number)]
        return after

    def _of(self, number: int) -> Generation:
        known = self.generations.get(number)
        if known is None:
            known = Generation(number)
            if number > self.dropped_to:
                self.generations[number] = known
                if number > self.newest_number:
                    self.newest_number, self.asked_s = number, 0.0
        return known

    def _reform(self, event: WorldReformed) -> None:
        """A member is in a new epoch: the incident that it ends did not end its generation."""
        generation = self._of(event.generation)
        new = event.rank in generation.joined and event.rank not in generation.formed
        generation.formed.setdefault(event.rank, event.ordered_s)
        if event.epoch > generation.epoch:
            generation.epoch, generation.members = event.epoch, set()
        if event.epoch == generation.epoch:
            generation.members.add(event.rank)
        generation.rank(event.rank).stalls.append(make_stall(event))
        incident = generation.incident
        if incident is not None and 0 <= incident.epoch <= event.epoch:
            self.reforms.append(Reform(event.epoch, event.generation, event.step, incident))
            generation.incident = None
            generation.left |= {
                r for r, h in generation.ranks.items() if h.exit is not None and h.exit.failed
            }
        elif event.epoch > 0 and not self._is_newest(event):
            began_s = event.ordered_s
            self.reforms.append(Reform(event.epoch, event.generation, event.step, began_s=began_s))
        if self._is_newest(event):
            self.reforms[-1].take(event, new=new)
            self.reason = ""  # It trains on.

    def _is_newest(self, event: WorldReformed) -> bool:
        """Return whether `event` is of the newest epoch that is known."""
        known = self.reforms[-1:]
        return [(r.generation, r.epoch) for r in known] == [(event.generation, event.epoch)]

    def _take_account(
        self, generation: Generation, rank: int, account: RankAccount, first: int
    ) -> None:
        """Keep a rank's account; the step time is that of rank `first`."""
        history = generation.rank(rank)
        old = history.account
        history.take(account)
        if rank != first:
            return
        steps = account.step - max(old.step, old.start_step if old.step >= 0 else 0)
        if old.step < 0:
            steps = account.step - account.start_step
        if steps > 0 and account.step_s > old.step_s:
            self.step_times_s.append((account.step_s - old.step_s) / steps)

    def _end(self, event: RankExited) -> None:
        record, generation = event.record, self._of(event.record.generation)
        first = min(generation.first, record.rank)
        self._take_account(generation, record.rank, event.account, first)
        history = generation.rank(record.rank)
        if history.exit is None:
            history.exit = record
        if record.torn_why:
            self._note_torn(event.detected_s, (record.torn_why,))
        if record.saving:
            text = f"rank {record.rank} was killed while it wrote {record.saving}"
            self._note_torn(event.detected_s, (text,))
        self._use_windows(event.node, record.at_s)
        if not record.failed and not record.asked:  # It was on its way out.
            mine = Culprit(rank=record.rank)
            generation.hangs = {k: v for k, v in generation.hangs.items() if v.culprit != mine}

    def _note_verdict(self, event: VerdictReached | VerdictWithdrawn) -> None:
        """Keep which hangs of a generation stand."""
        verdict = event.verdict
        generation = self.generations.get(verdict.generation)
        if generation is None or verdict.kind not in HANGS:
            return
        key = f"{verdict.kind} {verdict.culprit}"
        if isinstance(event, VerdictReached):
            generation.hangs.setdefault(key, verdict)
        else:
            generation.hangs.pop(key, None)

    def _fail(self, event: FailureDecided) -> None:
        """Keep what was decided: of a generation, or of an epoch that members are in already."""
        for reform in self.reforms:
            if (reform.generation, reform.epoch) == (event.world, event.epoch):
                reform.failure = event
                return
        generation = self._of(event.world)
        in_place = event.epoch >= 0 and bool(generation.formed)  # The next epoch says its step.
        if event.at_step < 0 and not in_place:
            event = structs.replace(event, at_step=generation.step)
        generation.incident = event if event.rung != "none" else None
        if generation.incident is not None:
            generation.hangs.clear()
