"""The goodput ledger: every slot-second paid for, in exactly one account.

Each account is a difference of two stamps that different parties made (ranks, agents, detector,
controller), or a sum that a rank kept itself. No account but `unattributed` is what the others
leave over: a stamp that is missing or wrong shows there, instead of flattering its neighbour.
A rank that counted more seconds than its wall clock allows is as wrong as one that counted too
few, so the excess is taken off its accounts and shown as unattributed, too.

Where the pieces of a restart end: `communicator` includes the start of the processes.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from perdure.model.events import JournalEntry
from perdure.model.report import ACCOUNTS, Account, Report
from perdure.model.signals.progress import RankAccount
from perdure.telemetry.group_ledger import GroupLedger
from perdure.telemetry.history import Generation, History, Incident, RankHistory
from perdure.telemetry.incidents import find_recoveries, find_state
from perdure.telemetry.presence import cut_idle
from perdure.telemetry.segments import RECONFIGURATION as _RE
from perdure.telemetry.segments import Segment, fit_pieces
from perdure.telemetry.stalls import take_stalls

Stage = tuple[str, float | None, float | None]
"""Account, begin and end of a stage before training; an absent stamp is None."""


class LedgerFold:
    """Folds a journal into a `Report`."""

    def __init__(self) -> None:
        """Begin before the first entry."""
        self.history = History()
        self.groups = GroupLedger()
        """Of a torchft job, whose groups have no generation in common."""

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        self.history.add(entry)
        self.groups.add(entry)

    def report(self, now: float) -> Report:
        """Return the report; `now` matters only while the job runs."""
        history = self.history
        assert history.spec is not None, "a journal begins with JobSubmitted"
        spec = history.spec
        end_s = history.ended.at_s if history.ended else max(now, history.last_s)
        wall_s = max(0.0, end_s - history.start_s)
        unpaid = history.presence.find_unpaid(spec, history.start_s, end_s)
        unpaid_s = {node: sum(e - b for b, e in gaps) for node, gaps in unpaid.items()}
        slot_s = wall_s * spec.slots - spec.nproc * sum(unpaid_s.values())
        sums = dict.fromkeys(ACCOUNTS, 0.0)
        for segment in self.segments(now):
            for account, seconds in segment.seconds:
                sums[account] += seconds
        of_groups = spec.torchft.replicas > 0
        unused = range(spec.spares % spec.nproc)
        if not of_groups:
            unused = range(self._find_slots(), spec.slots)
        sums["idle"] += sum(wall_s - unpaid_s.get(spec.node_of(slot), 0.0) for slot in unused)
        sums["unattributed"] = max(0.0, slot_s - sum(sums.values()))
        fraction = 1.0 / slot_s if slot_s > 0 else 0.0
        times = sorted(history.step_times_s)
        step_s = times[len(times) // 2] if times else None
        steps, recoveries = find_committed(history), find_recoveries(history, end_s)
        if of_groups:
            parts = tuple(r for r in recoveries if r.rung == "none")
            step_s, steps = self.groups.step_s(), max(self.groups.step, 0)
            recoveries = (*parts, *self.groups.recoveries(end_s))
        return Report(
            job=spec.name,
            state=find_state(history),
            wall_s=wall_s,
            slot_s=slot_s,
            steps_committed=steps,
            ranks=spec.world_size,
            ledger={name: Account(s, s * fraction) for name, s in sums.items()},
            goodput=sums["useful"] * fraction,
            step_s=step_s,
            recoveries=recoveries,
            reason=history.reason,
            observed=spec.observe,
            withheld=tuple(history.withheld),
        )

    def segments(self, now: float) -> tuple[Segment, ...]:
        """Return every rank's time, piece by piece, in order of rank and time."""
        history = self.history
        assert history.spec is not None, "a journal begins with JobSubmitted"
        end_s = history.ended.at_s if history.ended else max(now, history.last_s)
        kept = find_kept(history)
        if history.spec.torchft.replicas:
            return self.groups.segments(end_s)
        found: list[Segment] = []
        unpaid = history.presence.find_unpaid(history.spec, history.start_s, end_s)
        for slot in range(self._find_slots()):
            gaps = unpaid.get(history.spec.node_of(slot), [])
            for segment in _Timeline(history, slot, end_s, kept).build():
                found += cut_idle(segment, gaps)
        return tuple(found)

    def _find_slots(self) -> int:
        """Return how many slots have ever had a process: spare ones only in an elastic world."""
        spec = self.history.spec
        assert spec is not None
        later = [m for g in self.history.generations.values() for m in g.joined]
        return max([spec.world_size, *(spec.slot_of(m) + 1 for m in later)])


def find_kept(history: History) -> dict[int, int | None]:
    """Return, by generation, up to which step its work was kept; None keeps all.

    A later generation that had to go further back takes away from all before it. A job that
    failed keeps what its last checkpoint holds: the rest died with its processes.
    """
    kept: dict[int, int | None] = {}
    limit: int | None = None
    if history.ended is not None and history.ended.status == "failed":
        limit = max((c.step for c in history.checkpoints), default=0)
    for generation in reversed(history.ordered()):
        kept[generation.number] = limit
        start = generation.start_step
        if start is not None:
            limit = start if limit is None else min(limit, start)
    return kept


def find_committed(history: History) -> int | None:
    """Return the steps that the job has to show; None where the script declares none."""
    kept = find_kept(history)
    for generation in reversed(history.ordered()):
        if generation.step >= 0:
            limit = kept[generation.number]
            return generation.step if limit is None else min(limit, generation.step)
    return None


@dataclass(slots=True)
class _Timeline:
    """Walks one rank through its generations; pieces never overlap."""

    history: History
    rank: int
    end_s: float
    kept: dict[int, int | None]
    _segments: list[Segment] = field(default_factory=list)
    _cursor: float = 0.0
    """Up to here the rank's time was dealt with."""
    _before: Generation | None = None

    def build(self) -> list[Segment]:
        self._cursor = self.history.start_s
        generations = [g for g in self.history.ordered() if g.started or g.ranks]
        if not generations:
            self._take(-1, "startup", self.history.start_s, self.end_s)
        for index, generation in enumerate(generations):
            last = index == len(generations) - 1
            self._walk(generation, last)
            self._before = generation
        return self._segments

    def _take(
        self, generation: int, account: str, begin_s: float | None, end_s: float | None
    ) -> None:
        """Attribute a stretch; without both of its stamps it stays unattributed."""
        if not begin_s or not end_s:
            return
        begin, end = max(begin_s, self._cursor), min(end_s, self.end_s)
        if end > begin:
            piece = ((account, end - begin),)
            self._segments.append(Segment(self.rank, generation, begin, end, piece))
            self._cursor = end

    def _walk(self, generation: Generation, last: bool) -> None:
        """Walk who has had this slot, one after another: one, but in an elastic world."""
        spec = self.history.spec
        assert spec is not None
        numbers = sorted(m for m in generation.joined if spec.slot_of(m) == self.rank)
        if self.rank < spec.world_size:
            numbers = [self.rank, *numbers]
        else:
            until_s = generation.joined[numbers[0]] if numbers else self.end_s if last else None
            self._take(generation.number, "idle", self._cursor, until_s)
        for number, successor in pairwise([*numbers, None]):
            assert number is not None
            history = generation.ranks.get(number) or RankHistory()
            until_s = generation.joined[successor] if successor is not None else None
            if number < spec.world_size:
                stages = self._find_stages(generation, history.account, history)
            else:
                stages = self._find_late_stages(generation, number, history.account)
            self._walk_one(generation, number, stages, last, until_s)

    def _find_late_stages(
        self, generation: Generation, number: int, account: RankAccount
    ) -> list[Stage]:
        """Return the stages of a member that came later: it may be held as a spare at first."""
        ready_s, called_s = generation.ready.get(number), generation.formed.get(number)
        first_s, over_s = account.first_step_s or None, called_s or self.end_s
        return [
            (_RE + "warmup", generation.joined[number], ready_s or account.first_step_s or None),
            ("idle", ready_s, over_s),
            (_RE + "state", called_s, first_s),
        ]

    def _walk_one(
        self,
        generation: Generation,
        number: int,
        stages: list[Stage],
        last: bool,
        until_s: float | None,
    ) -> None:
        """Account for one process; `until_s` is when its successor in the slot was started."""
        history = generation.ranks.get(number) or RankHistory()
        account, incident = history.account, generation.incident
        first_s = stages[-1][2]
        fail_s = incident.failure_s if incident else None
        if first_s and (fail_s is None or first_s <= fail_s):
            for name, begin_s, end_s in stages:
                self._take(generation.number, name, begin_s, end_s)
            worked_s = self._work(generation, history, first_s, fail_s)
        else:
            worked_s = None
            if not account.last_step_s:  # Else it trained, and when it began to is not known.
                self._take_partial(generation.number, stages, fail_s or self._until(history, last))
        ended_s = self._find_good_end(history, worked_s)
        if history.exit is not None and (until_s is not None or number in generation.left):
            # The others went on without it.
            spent_on = "lost_work" if history.exit.failed else "idle"
            self._take(generation.number, spent_on, worked_s, history.exit.at_s)
            away_s = until_s or fail_s or self.end_s
            self._take(generation.number, "idle", history.exit.at_s, away_s)
            if until_s is None and incident is not None:
                self._recover(generation, incident, last)
        elif incident is not None:
            if ended_s is not None and ended_s <= incident.failure_s:
                self._take(generation.number, "idle", ended_s, incident.failure_s)
            elif worked_s is not None:
                self._take_unseen(generation, account)
                spent_on = "checkpoint" if incident.saved else "lost_work"
                self._take(generation.number, spent_on, worked_s, incident.failure_s)
            self._recover(generation, incident, last)
        elif ended_s is not None:
            self._take(generation.number, "idle", ended_s, self.end_s if last else None)
        elif history.exit is not None:
            # Ended by an operator in the middle of a step.
            self._take(generation.number, "lost_work", worked_s, history.exit.at_s)
            self._take(generation.number, "idle", history.exit.at_s, self.end_s)

    def _until(self, history: RankHistory, last: bool) -> float | None:
        if history.exit is not None:
            return history.exit.at_s
        return self.end_s if last else None

    def _find_stages(
        self, generation: Generation, account: RankAccount, history: RankHistory
    ) -> list[Stage]:
        """Return (account, begin, end) of the stages before training; an absent stamp is None."""
        first_s: float | None = account.first_step_s or None
        started = next((e for e in generation.started.values() if self.rank in e.pids), None)
        started_s = started.at_s if started else None
        if not generation.resumable:
            first_s = generation.stepping.at_s if generation.stepping else None
            if first_s is None and history.exit is not None and not history.exit.failed:
                first_s = account.script_s or started_s
        if self._before is None:
            return [("startup", self.history.start_s, first_s)]
        stopped_s = max(self._before.stopped.values(), default=None)
        if not generation.resumable:
            return [
                (_RE + "communicator", stopped_s, started_s),
                (_RE + "state", None, None),
                (_RE + "warmup", started_s, first_s),
            ]
        group_s = account.group_s or account.init_s or None
        restored_s = account.restored_s or None
        return [
            (_RE + "communicator", stopped_s, group_s),
            (_RE + "state", group_s, restored_s),
            (_RE + "warmup", restored_s, first_s),
        ]

    def _take_partial(
        self,
        generation: int,
        stages: list[Stage],
        until_s: float | None,
    ) -> None:
        """It never trained: stages as far as it came, the last of them cut off."""
        for name, begin_s, end_s in stages:
            if until_s and begin_s and begin_s < until_s:
                self._take(generation, name, begin_s, min(end_s or until_s, until_s))

    def _work(
        self, generation: Generation, history: RankHistory, first_s: float, fail_s: float | None
    ) -> float:
        """Attribute training; return up to when it is accounted for."""
        account = history.account
        if not generation.resumable:
            exit_s = history.exit.at_s if history.exit else None
            until_s = min(t for t in (fail_s, exit_s, self.end_s) if t is not None)
            self._take(generation.number, "useful", first_s, until_s)
            return until_s
        last_s = min(account.last_step_s, self.end_s)
        begin_s = max(first_s, self._cursor)
        if last_s <= begin_s:
            return max(first_s, last_s)
        useful_s, lost_s = self._split(generation, account)
        pieces = {
            "useful": useful_s,
            "lost_work": lost_s,
            "checkpoint": account.checkpoint_s,
            "steady_overhead": account.boundary_s + account.overhead_s,
            "idle": account.paused_s,
        }
        epochs = {
            r.epoch: r
            for r in self.history.reforms
            if r.cause and r.generation == generation.number
        }
        stalls = [
            (stall, epochs.get(stall.epoch))
            for stall in history.stalls
            if begin_s <= stall.began_s and stall.formed_s <= last_s
        ]
        seconds = fit_pieces(take_stalls(pieces, stalls), last_s - begin_s)
        self._segments.append(Segment(self.rank, generation.number, begin_s, last_s, seconds))
        self._cursor = last_s
        return last_s

    def _take_unseen(self, generation: Generation, account: RankAccount) -> None:
        """Steps after its last account (its ring was lost) that a checkpoint proves were done."""
        limit = self.kept[generation.number]
        if limit is None or not 0 <= account.step < limit:
            return
        for saved in self.history.checkpoints:
            if saved.generation == generation.number and saved.step == limit:
                snapshot_s = saved.at_s - saved.save_s
                self._take(generation.number, "useful", account.last_step_s, snapshot_s)

    def _split(self, generation: Generation, account: RankAccount) -> tuple[float, float]:
        """Return the seconds of steps that were kept and of those that were lost."""
        limit = self.kept[generation.number]
        steps = account.step - account.start_step
        if limit is None or limit >= account.step or steps <= 0:
            return account.step_s, 0.0
        if limit <= account.start_step:
            return 0.0, account.step_s
        marks = [(account.start_step, 0.0), *account.marks, (account.step, account.step_s)]
        (low, low_s) = max(m for m in marks if m[0] <= limit)
        (high, high_s) = min(m for m in marks if m[0] >= limit)
        share = (limit - low) / (high - low) if high > low else 0.0
        kept_s = low_s + share * (high_s - low_s)
        return kept_s, max(0.0, account.step_s - kept_s)

    def _find_good_end(self, history: RankHistory, worked_s: float | None) -> float | None:
        """Return since when the rank had nothing left to do; None if it was cut off."""
        finished = history.account.finished_s > 0
        left = history.exit is not None and not history.exit.failed and not history.exit.asked
        if not finished and not left:
            return None
        if worked_s is not None:
            return worked_s
        return history.exit.at_s if history.exit is not None else history.account.finished_s

    def _recover(self, generation: Generation, incident: Incident, last: bool) -> None:
        number, stopped_s = generation.number, max(generation.stopped.values(), default=None)
        self._take(number, _RE + "detect", incident.failure_s, incident.detected_s)
        self._take(number, _RE + "decide", incident.detected_s, incident.decided_s)
        self._take(number, _RE + "abort", incident.decided_s, stopped_s)
        if not last:
            return
        if self.history.ended is not None:
            self._take(number, "idle", stopped_s, self.end_s)
            return
        # Still at it: the phase that has begun last is the one that runs.
        running = (
            ("communicator", stopped_s),
            ("abort", incident.decided_s),
            ("decide", incident.detected_s),
        )
        name, since_s = next((p for p in running if p[1]), ("detect", incident.failure_s))
        self._take(number, _RE + name, since_s, self.end_s)
