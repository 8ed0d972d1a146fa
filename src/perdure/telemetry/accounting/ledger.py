"""The goodput ledger: every slot-second paid for, in exactly one account.

Each account is a difference of two stamps that different parties made (ranks, agents, detector,
controller), or a sum that a rank kept itself. No account but `unattributed` is what the others
leave over: a stamp that is missing or wrong shows there, instead of flattering its neighbour.
A rank that counted more seconds than its wall clock allows is as wrong as one that counted too
few, so the excess is taken off its accounts and shown as unattributed, too.

Where the pieces of a restart end: `communicator` includes the start of the processes.
"""

from collections.abc import Iterable

from perdure.model.events import JournalEntry, ProgressNoted
from perdure.model.job import JobSpec
from perdure.model.report import ACCOUNTS, Account, Recovery, Report
from perdure.telemetry.accounting.history import History
from perdure.telemetry.accounting.incidents import (
    list_group_recoveries,
    list_part_deaths,
    list_recoveries,
    name_state,
)
from perdure.telemetry.accounting.lives import LifeFold
from perdure.telemetry.accounting.segments import Segment, cut_idle
from perdure.telemetry.accounting.timeline import GroupTimeline, WorldTimeline, list_worlds


class LedgerFold:
    """Folds a journal into a `Report`."""

    def __init__(self) -> None:
        """Begin before the first entry."""
        self.history = History()
        self.lives = LifeFold()
        """Of a torchft job, whose groups have no generation in common."""

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        self.history.add(entry)
        if self.history.spec is None or self.history.spec.groups:
            self.lives.add(entry)

    def take_newest(self, progress: ProgressNoted | None) -> None:
        """Take how far the ranks are now, which no entry says yet."""
        if progress is not None and progress.generation in self.history.generations:
            generation = self.history.generations[progress.generation]
            for rank in progress.accounts.keys() & generation.ranks.keys():
                generation.rank(rank).take(progress.accounts[rank])

    def report(self, now: float, segments: Iterable[Segment] | None = None) -> Report:
        """Return the report; `now` matters only while the job runs.

        Whoever has the `segments` of that moment brings them: of many ranks they are most of it.
        """
        history = self.history
        assert history.spec is not None, "a journal begins with JobSubmitted"
        spec = history.spec
        end_s = history.ended.at_s if history.ended else max(now, history.last_s)
        wall_s = max(0.0, end_s - history.start_s)
        unpaid = history.presence.list_unpaid(spec, history.start_s, end_s)
        unpaid_s = {node: sum(e - b for b, e in gaps) for node, gaps in unpaid.items()}
        slot_s = wall_s * spec.slots - spec.nproc * sum(unpaid_s.values())
        sums = dict.fromkeys(ACCOUNTS, 0.0)
        for segment in self.segments(now) if segments is None else segments:
            for account, seconds in segment.seconds:
                sums[account] += seconds
        if spec.served:
            slot_s = sum(sums.values())
        unused = range(spec.spares % spec.nproc)
        if not spec.groups:
            unused = range(self._count_slots(), spec.slots)
        sums["idle"] += sum(wall_s - unpaid_s.get(spec.node_of(slot), 0.0) for slot in unused)
        sums["unattributed"] = max(0.0, slot_s - sum(sums.values()))
        fraction = 1.0 / slot_s if slot_s > 0 else 0.0
        steps, times = count_committed_steps(history), history.step_times_s
        if spec.groups:
            steps, times = max(self.lives.step, 0), self.lives.step_times_s()
        recoveries = self.list_recoveries(end_s)
        step_s = sorted(times)[len(times) // 2] if times else None
        return Report(
            job=spec.name,
            state=self._name_state(),
            wall_s=wall_s,
            slot_s=slot_s,
            steps_committed=steps,
            ranks=self._count_ranks(spec),
            ledger={name: Account(s, s * fraction) for name, s in sums.items()},
            goodput=sums["useful"] * fraction,
            step_s=step_s,
            recoveries=recoveries,
            reason=history.reason,
            observed=spec.observe,
            withheld=tuple(history.withheld),
            notes=tuple(history.notes),
            mended=tuple(history.mended),
            skipped=tuple(history.skipped),
            exact=history.exact.judge(),
            windows=tuple(row for row in history.windows.values() if row.used_s),
            hung_saves=tuple(history.hung_saves),
            empty_slots=tuple(history.empty_slots),
            ranks_left=history.count_ranks_left(),
            incidents=sum(r.rung != "join" for r in recoveries),
            lost_unknown=sums["useful"] > 0
            and any(r.failed and r.rung != "stop" and r.lost_steps is None for r in recoveries),
        )

    def list_recoveries(self, end_s: float) -> tuple[Recovery, ...]:
        """Return all incidents by time; what is not over yet lasts until `end_s`."""
        history = self.history
        if history.spec is not None and history.spec.groups:
            return (*list_part_deaths(history), *list_group_recoveries(self.lives, end_s))
        return list_recoveries(history, end_s)

    def _name_state(self) -> str:
        """Return the job's state; one whose groups others start has no generation of its own."""
        state, spec = name_state(self.history), self.history.spec
        if spec is None or not spec.served or state != "pending":
            return state
        newest = [lives[-1] for lives in self.lives.groups.values()]
        return "running" if any(life.joined_s and not life.away for life in newest) else "forming"

    def segments(self, now: float) -> tuple[Segment, ...]:
        """Return every rank's time, piece by piece, in order of rank and time."""
        history = self.history
        assert history.spec is not None, "a journal begins with JobSubmitted"
        end_s = history.ended.at_s if history.ended else max(now, history.last_s)
        spec, start_s, found = history.spec, history.start_s, list[Segment]()
        if spec.groups:
            for rank in self._list_group_ranks(spec):
                lives = self.lives.of_group(rank // spec.nproc)
                found += GroupTimeline(rank=rank, end_s=end_s, cursor=start_s, lives=lives).build()
            return tuple(found)
        unpaid = history.presence.list_unpaid(spec, start_s, end_s)
        worlds = list_worlds(history, map_kept_steps(history))
        for slot in range(self._count_slots()):
            gaps = unpaid.get(spec.node_of(slot), [])
            walk = WorldTimeline(
                rank=slot, end_s=end_s, cursor=start_s, history=history, worlds=worlds
            )
            for segment in walk.build():
                found += cut_idle(segment, gaps)
        return tuple(found)

    def _count_ranks(self, spec: JobSpec) -> int:
        known = self._list_group_ranks(spec) if spec.served else ()
        return len(known) if spec.served else spec.world_size

    def _list_group_ranks(self, spec: JobSpec) -> list[int]:
        """Return the ranks of all replica groups, or of those that others have started so far."""
        if not spec.served:
            return list(range(spec.groups * spec.nproc))
        return [rank for group in sorted(self.lives.groups) for rank in spec.ranks_of(group)]

    def _count_slots(self) -> int:
        """Return how many slots have ever had a process: spare ones only in an elastic world."""
        spec = self.history.spec
        assert spec is not None
        later = [m for g in self.history.generations.values() for m in g.joined]
        return max([spec.world_size, *(spec.slot_of(m) + 1 for m in later)])


def map_kept_steps(history: History) -> dict[int, int | None]:
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


def count_committed_steps(history: History) -> int | None:
    """Return the steps that the job has to show; None where the script declares none."""
    kept = map_kept_steps(history)
    for generation in reversed(history.ordered()):
        if generation.step >= 0:
            limit = kept[generation.number]
            return generation.step if limit is None else min(limit, generation.step)
    return None


def make_report(
    entries: Iterable[JournalEntry], now: float, newest: ProgressNoted | None = None
) -> Report:
    """Return what a whole journal says at job time `now`, and `newest`, what it does not yet."""
    fold = LedgerFold()
    for entry in entries:
        fold.add(entry)
    fold.take_newest(newest)
    return fold.report(now)
