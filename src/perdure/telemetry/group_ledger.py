"""The ledger of a torchft job: every replica group has a timeline of its own.

    start-up --first quorum--> training --its rank ends--> detect, decide, abort --its processes
    are gone--> communicator --first quorum--> (healing) training ...

Where training went each rank has stamped itself (`RankAccount`): committed steps are useful;
steps that were not committed are lost work; waiting for a changed quorum and forming its process
group is `communicator`; the first step, or one in which it healed, is `state` or start-up. A
spare that is held at the lighthouse is idle, and so is a group that stands in a pause or that has
left. A group that is left out while it lives is being detected until it is left out.

While a rank runs its account is in its ring and not in the journal: until it has ended, its time
since its first quorum counts as useful.
"""

from dataclasses import dataclass, field

from perdure.model.events import (
    ExitRecord,
    GenerationStopped,
    JobEnded,
    JobResumed,
    JobSubmitted,
    JournalEntry,
    KeeperLost,
    KeysDeclared,
    NodeRestored,
    QuorumFormed,
    RankExited,
    RanksStarted,
    ReplicaSeen,
)
from perdure.model.job import JobSpec
from perdure.model.report import Recovery
from perdure.model.signals.progress import RankAccount
from perdure.telemetry.segments import RECONFIGURATION as _RE
from perdure.telemetry.segments import Segment, fit_pieces


@dataclass(slots=True)
class RankEnd:
    """How a rank ended, and what it had stamped."""

    record: ExitRecord
    account: RankAccount
    detected_s: float
    decided_s: float


@dataclass(slots=True)
class Eviction:
    """A time for which a group was left out while it lived."""

    at_s: float
    why: str
    step: int
    """The others' last committed step then."""
    back_s: float | None = None
    """When it trained with them again."""
    back_step: int = -1


@dataclass(slots=True)
class Life:
    """One generation of one group."""

    generation: int
    group: int
    started_s: float
    replica: str = ""
    asked_s: float | None = None
    """It came to the lighthouse for the first time."""
    held_s: float | None = None
    """It was held there before its first quorum: a spare."""
    joined_s: float | None = None
    """Its first quorum."""
    gone_s: float | None = None
    """Since when it is left out while it lives."""
    gone_why: str = ""
    evictions: list[Eviction] = field(default_factory=list)
    lost_s: float | None = None
    """Its keeper died."""
    stopped_s: float | None = None
    restored_s: float | None = None
    """When it was to be started again, after an operator had it left."""
    stands_s: float | None = None
    stood_s: float = 0.0
    """Held though it had trained: in pauses, or because another had taken its place."""
    ends: dict[int, RankEnd] = field(default_factory=dict)

    @property
    def away_s(self) -> float | None:
        """Return since when it was left out while it lived; None where it was not."""
        over_s = min((e.record.at_s for e in self.ends.values()), default=None)
        if self.gone_s is None or (over_s is not None and over_s <= self.gone_s):
            return None
        return self.gone_s

    @property
    def failure(self) -> RankEnd | None:
        """Return the first end that was a failure; None where there was none."""
        ends = [e for e in self.ends.values() if e.record.failed and not e.record.asked]
        return min(ends, key=lambda e: e.record.at_s, default=None)


@dataclass(slots=True)
class GroupLedger:
    """Folds a journal into segments and recoveries of replica groups."""

    spec: JobSpec | None = None
    start_s: float = 0.0
    ended: bool = False
    lives: dict[int, Life] = field(default_factory=dict)
    """By generation."""
    step: int = -1

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        match entry.body:
            case JobSubmitted() as event:
                self.spec, self.start_s = event.spec, event.at_s
            case RanksStarted() as event:
                life = Life(event.generation, event.node, event.at_s)
                self.lives.setdefault(event.generation, life)
            case ReplicaSeen() as event:
                self._see(event)
            case QuorumFormed() as event:
                self._form(event)
                members = (e for e in self.lives.values() if e.replica in event.members)
                self._end_standing(list(members), event.at_s)
            case KeysDeclared() as event if event.generation in self.lives:
                life = self.lives[event.generation]
                # Its first commit. Of quorums only perdure's own lighthouse tells.
                life.joined_s = life.joined_s or entry.at_s
            case RankExited(record=record) as event:
                self.step = max(self.step, event.account.step)
                known = self.lives.get(record.generation)
                if known is not None:
                    end = RankEnd(record, event.account, event.detected_s, entry.at_s)
                    known.ends.setdefault(record.rank, end)
            case KeeperLost() as event if event.generation in self.lives:
                self.lives[event.generation].lost_s = event.at_s
            case GenerationStopped() as event:
                self._stop(event)
            case NodeRestored() as event:
                newest = self._newest(event.node)
                if newest is not None and newest.restored_s is None:
                    newest.restored_s = event.at_s
            case JobResumed() as event:
                self._end_standing(list(self.lives.values()), event.at_s)
            case JobEnded() as event:
                self.ended = True
                self._end_standing(list(self.lives.values()), event.at_s)
            case _:
                pass

    def _newest(self, group: int) -> Life | None:
        mine = [n for n, life in self.lives.items() if life.group == group]
        return self.lives[max(mine)] if mine else None

    def _see(self, event: ReplicaSeen) -> None:
        life = self._newest(event.group)
        if life is None or event.at_s < life.started_s:
            return
        if event.gone:
            if event.replica == life.replica and life.joined_s is not None:
                life.gone_s, life.gone_why = event.at_s, event.reason
                step = max(event.step, self.step)
                life.evictions.append(Eviction(event.at_s, event.reason, step))
            return
        if not event.replica:  # It moves again; of quorums nobody has told.
            life.gone_s = None
            del life.evictions[-1:]
            return
        life.replica = event.replica
        life.asked_s = life.asked_s or event.at_s
        if event.held and life.joined_s is None:
            life.held_s = life.held_s or event.at_s
        elif event.held:
            life.stands_s = life.stands_s or event.at_s

    def _form(self, event: QuorumFormed) -> None:
        self.step = max(self.step, event.step)
        for life in self.lives.values():
            if life.replica and life.replica in event.members:
                life.joined_s = life.joined_s or event.at_s
                life.gone_s = None
                if life.evictions and life.evictions[-1].back_s is None:
                    life.evictions[-1].back_s = event.at_s
                    life.evictions[-1].back_step = event.step

    def _stop(self, event: GenerationStopped) -> None:
        mine = [n for n, e in self.lives.items() if e.group == event.node and n <= event.generation]
        if mine and self.lives[max(mine)].stopped_s is None:
            self.lives[max(mine)].stopped_s = event.at_s

    def _end_standing(self, lives: list[Life], at_s: float) -> None:
        for life in lives:
            if life.stands_s is not None:
                over_s = min((e.record.at_s for e in life.ends.values()), default=at_s)
                life.stood_s += max(0.0, min(over_s, at_s) - life.stands_s)
                life.stands_s = None

    # --- out ----------------------------------------------------------------------------------

    def segments(self, end_s: float) -> tuple[Segment, ...]:
        """Return every rank's time, spare groups' too, in order of rank and time."""
        assert self.spec is not None, "a journal begins with JobSubmitted"
        found: list[Segment] = []
        for rank in range(self.spec.groups * self.spec.nproc):
            mine = [e for e in self.lives.values() if e.group == rank // self.spec.nproc]
            lives = sorted(mine, key=lambda life: life.generation)
            found += _Timeline(rank, lives, self.start_s, end_s).build()
        return tuple(found)

    def step_s(self) -> float | None:
        """Return the median over all lives of the time of a committed step."""
        times = []
        for life in self.lives.values():
            for end in life.ends.values():
                steps = end.account.step - end.account.start_step
                if steps > 0 and end.account.step_s > 0:
                    times.append(end.account.step_s / steps)
        times.sort()
        return times[len(times) // 2] if times else None

    def recoveries(self, end_s: float) -> tuple[Recovery, ...]:
        """Return what became of each group that was lost, or was left out while it lived."""
        found = []
        for life in self.lives.values():
            found += [_describe_eviction(life, one, end_s) for one in self._find_evictions(life)]
            loss = self._describe(life, end_s)
            if loss is not None:
                found.append(loss)
        return tuple(sorted(found, key=lambda r: (r.at_s, r.culprit)))

    def _find_evictions(self, life: Life) -> list[Eviction]:
        """Return those that no end of the group accounts for: not its death, nor its restart."""
        over_s = min((e.record.at_s for e in life.ends.values()), default=life.lost_s)
        alive = [e for e in life.evictions if over_s is None or e.at_s < over_s]
        return [e for e in alive if e.back_s is not None or over_s is None]

    def _describe(self, life: Life, end_s: float) -> Recovery | None:
        failure = life.failure
        if failure is not None:
            at_s, detected_s, decided_s = (
                failure.record.at_s, failure.detected_s, failure.decided_s
            )  # fmt: skip
            cause, who = failure.record.cause, f", rank {failure.record.rank}"
            step = failure.account.step
        elif life.lost_s is not None:
            at_s = detected_s = decided_s = life.lost_s
            cause, who, step = "its keeper died", "", -1
        elif life.away_s is not None and life.ends:
            last = [e.account.last_step_s for e in life.ends.values() if e.account.last_step_s]
            at_s, detected_s = max(last, default=life.away_s), life.away_s
            decided_s = min(e.record.at_s for e in life.ends.values())
            cause, who = life.gone_why, ""
            step = max(e.account.step for e in life.ends.values())
        else:
            return None
        later = [e for e in self.lives.values() if e.group == life.group]
        newer = [e for e in later if e.generation > life.generation]
        after = min(newer, key=lambda e: e.generation, default=None)
        stopped_s = life.stopped_s or decided_s
        back_s = (after.joined_s or after.held_s) if after is not None else None
        heal_s = max((e.account.heal_s for e in after.ends.values()), default=0.0) if after else 0.0
        spare = after is not None and after.held_s is not None and back_s == after.held_s
        return Recovery(
            cause=cause,
            culprit=f"group {life.group}{who}",
            at_step=step,
            at_s=at_s,
            detect_s=max(0.0, detected_s - at_s),
            decide_s=max(0.0, decided_s - detected_s),
            abort_s=max(0.0, stopped_s - decided_s),
            communicator_s=max(0.0, (back_s or stopped_s) - stopped_s),
            state_s=heal_s,
            warmup_s=0.0,
            total_s=max(0.0, (back_s or end_s) - at_s),
            lost_steps=int(life.away_s is not None),
            lost_microbatches=None,
            rung="restart" if after is not None else "give up",
            reason="the others trained on" + ("; it stands by as a spare" if spare else ""),
        )


def _describe_eviction(life: Life, eviction: Eviction, end_s: float) -> Recovery:
    """Return it as an incident: the step that the group was in is void, and it heals."""
    over_s = end_s if eviction.back_s is None else eviction.back_s
    reason = "it lives, and has not come back"
    if eviction.back_s is not None:
        without = max(0, eviction.back_step - max(0, eviction.step))
        reason = f"it came back by itself and healed; {without} steps were made without it"
    return Recovery(
        cause=eviction.why,
        culprit=f"group {life.group}",
        at_step=eviction.step,
        at_s=eviction.at_s,
        detect_s=0.0,
        decide_s=0.0,
        abort_s=0.0,
        communicator_s=max(0.0, over_s - eviction.at_s),
        state_s=0.0,
        warmup_s=0.0,
        total_s=max(0.0, over_s - eviction.at_s),
        lost_steps=1,
        lost_microbatches=None,
        rung="left out",
        reason=reason,
    )


@dataclass(slots=True)
class _Timeline:
    """Walks one rank through the lives of its group; pieces never overlap."""

    rank: int
    lives: list[Life]
    cursor: float
    end_s: float
    found: list[Segment] = field(default_factory=list)
    generation: int = -1

    def build(self) -> list[Segment]:
        if not self.lives:
            self._take("startup", self.end_s)
        for index, life in enumerate(self.lives):
            self.generation = life.generation
            self._walk(life, "startup" if not index else _RE + "communicator")
            self._leave(life, index == len(self.lives) - 1)
        return self.found

    def _take(self, account: str, until_s: float | None) -> None:
        """Attribute the time up to `until_s`; without a stamp nothing."""
        if until_s is None:
            return
        until_s = min(until_s, self.end_s)
        if until_s > self.cursor:
            piece = ((account, until_s - self.cursor),)
            self.found.append(
                Segment(self.rank, self.generation, self.cursor, until_s, piece)
            )  # fmt: skip
            self.cursor = until_s

    def _walk(self, life: Life, starting: str) -> None:
        """From the order to start it up to its end."""
        end = life.ends.get(self.rank)
        account = end.account if end is not None else RankAccount()
        over_s = end.record.at_s if end is not None else life.lost_s
        if over_s is None and life.stopped_s is None:
            over_s = self.end_s  # It runs.
        first_s = account.first_step_s or life.joined_s
        if life.held_s is not None:
            self._take(starting, life.held_s)
            self._take("idle", first_s or over_s)
        if first_s is None:
            self._take(starting, over_s)
            return
        self._take(starting, first_s)
        if not account.first_step_s:
            self._take("useful", life.away_s or over_s)
        else:
            self._work(life, account, starting)
        if life.away_s is not None:
            self._take(_RE + "detect", life.away_s)
            self._take(_RE + "abort", over_s)
        elif end is not None and not end.record.failed and not end.record.asked:
            self._take("idle", over_s)
        else:
            self._take("lost_work", over_s)

    def _work(self, life: Life, account: RankAccount, starting: str) -> None:
        """What the rank has stamped of its training, up to its last step's end."""
        last_s = min(account.last_step_s, self.end_s)
        room_s = last_s - self.cursor
        if room_s <= 0:
            return
        waited_s = account.reform_s
        stood_s = min(life.stood_s, waited_s + account.step_s)
        from_wait_s = min(stood_s, waited_s)
        first = starting == "startup" and life.held_s is None
        joining = "startup" if first else _RE + "state"
        pieces = {
            "useful": account.step_s - (stood_s - from_wait_s),
            "lost_work": account.lost_s,
            _RE + "communicator": waited_s - from_wait_s,
            joining: account.heal_s,
            "steady_overhead": account.boundary_s + account.overhead_s,
            "idle": stood_s,
        }
        seconds = fit_pieces(pieces, room_s)
        self.found.append(Segment(self.rank, self.generation, self.cursor, last_s, seconds))
        self.cursor = last_s

    def _leave(self, life: Life, last: bool) -> None:
        """From its end up to the order to start the next."""
        failure, end = life.failure, life.ends.get(self.rank)
        if failure is not None:
            self._take(_RE + "detect", failure.detected_s)
            self._take(_RE + "decide", failure.decided_s)
        left = end is not None and failure is None and life.away_s is None
        if failure is not None or not left:
            self._take(_RE + "abort", life.stopped_s)
        if not last:
            self._take("idle", life.restored_s or (life.stopped_s if left else None))
        elif end is not None or life.stopped_s is not None:
            self._take("idle", self.end_s)
