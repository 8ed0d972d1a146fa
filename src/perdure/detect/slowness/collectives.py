"""Slow communication, from the durations of one collective on all its ranks.

For one (communicator, sequence) the smallest duration is pure communication, because the last to
arrive waits for nobody; who is late is told from the others (`lateness`). The smallest is looked at
first: under slow communication lateness grows as well. Only rows in which every rank
is present count, for without the last to arrive the minimum means nothing. No two clocks are
compared. Sends and receives are left to the links: their numbers differ by design.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from perdure.detect.slowness.lateness import LatenessWatch
from perdure.detect.slowness.persistence import IMPACT, Baseline, Persistence, is_duration
from perdure.detect.slowness.shifts import Passed
from perdure.model.signals.progress import CommProgress, RankProgress

PENDING = 32
"""Rows kept of one communicator while ranks are missing in them."""
ROW_COST, COST_A_LOOK = 16, 12_000
"""What a row costs beside its spans, and what a look may cost; above it, rows are thinned."""
CROWD, CROWD_EVERY = 2_000, 4
"""Of more rows in one look than this, usual ones are learned from one in so many."""
USUAL = 1.1
PACE_ROWS = 9
"""Rows over which the time a collective is taken: several collectives make a step."""
UNDECLARED = 2
"""Where nothing is known of steps, one is taken for so many collectives."""
COMM_SLOW_RATIO = 1.3
"""A communicator is slow from this multiple of its learned pure communication time."""
COMM_SLOW_FLOOR_S = 0.002
"""Seconds of extra time a collective below which communication is never slow."""
ACCOUNTED = 0.5
PACE_RATIO = 1.02
"""Slow communication that makes nothing slower is hidden behind work, and nobody's concern."""


class Row(msgspec.Struct):
    """One collective, while its ranks report it."""

    op: str
    bytes: int
    durations: dict[int, float]
    starts: dict[int, float]
    """When each rank began, by its own clock, where lateness is of use."""
    end_s: float = 0.0
    """At the communicator's first rank, by its own clock."""


class Comm:
    """One communicator."""

    def __init__(self, progress: CommProgress) -> None:
        """Begin with the first rank that shows it."""
        self.name, self.size = progress.name, progress.size
        self.ranks, self.stamps = progress.ranks, progress.stamps
        self.first = progress.ranks[0] if progress.ranks else -1
        self.rows: dict[int, Row] = {}
        self.done = -1
        self.mask = 0
        self.baselines: dict[tuple[str, int], Baseline] = {}
        self.pace = Baseline()
        self.ends: deque[tuple[int, float]] = deque(maxlen=PACE_ROWS)
        self.pace_now = 0.0
        self.slow: Persistence | None = None
        self.worst: dict[str, object] = {}
        self.worst_s = 0.0
        self.worst_extra_s = 0.0
        """How much longer than usual that was."""
        self.judged_s = 0.0
        self.passed = 0

    def compute_pace(self) -> float:
        """Return the time a collective over its learned value, other work included; 0: unknown."""
        return self.pace_now / self.pace.value if self.pace.known else 0.0


class CollectiveWatch:
    """Watches how long the collectives of a generation's communicators take."""

    def __init__(self, passed: Passed, world_size: int) -> None:
        """Begin a generation; `passed` is slowness of ranks that ended by itself."""
        self._world_size = world_size
        self._comms: dict[tuple[str, int, int, int], Comm] = {}
        self._sorted: list[Comm] = []
        self._of: dict[int, list[tuple[str, Comm]]] = {}
        """Rank -> those that it shows, in its order."""
        self._replaced = False
        """Whether any rank shows another one in the place of one since it was last looked."""
        self.point_to_point: set[str] = set()
        """Names of communicators in which something was sent or received."""
        self.senders: set[int] = set()
        """Ranks that have sent or received something."""
        self._ready: list[tuple[Comm, int]] = []
        self.lateness = LatenessWatch(passed)
        self.by_lateness = True
        """Whether lateness is of use: stages tell more, where there are any."""
        self.step_s = 0.0
        """Learned step time of the job; 0 where it declares no steps."""
        self.grown = 0
        """Counts new communicators and senders, so that what is derived from them is renewed."""

    def comms(self) -> list[Comm]:
        """Return the communicators by name."""
        if not self._sorted:
            self._sorted = [self._comms[key] for key in sorted(self._comms)]
        return self._sorted

    def take(self, now: float, progress: RankProgress) -> None:
        """Take what one rank saw end."""
        rank = progress.rank
        mine = self._of.setdefault(rank, [])
        comms = progress.comms
        for index, seen in enumerate(comms):
            if index >= len(mine):
                mine.append((seen.name, self._open_comm(seen)))
            elif mine[index][0] != seen.name:
                mine[index] = (seen.name, self._open_comm(seen))
                self._replaced = True
        num = len(mine)
        for span in progress.spans:
            index = span.comm
            if span.peer >= 0:
                if index < num:
                    self.point_to_point.add(mine[index][0])
                if rank not in self.senders:
                    self.senders.add(rank)
                    self.grown += 1
                continue
            end_s = span.end_s
            duration_s = end_s - span.start_s
            if index >= num or not is_duration(duration_s) or not duration_s:
                continue
            comm = mine[index][1]
            seq = span.seq
            if seq & comm.mask or seq <= comm.done:
                continue
            row = comm.rows.get(seq)
            if row is None:
                row = comm.rows[seq] = Row(span.op, span.bytes, {}, {})
            row.durations[rank] = duration_s
            if self.by_lateness:
                row.starts[rank] = span.start_s
            if rank == comm.first:
                row.end_s = end_s
            if len(row.durations) == comm.size:
                self._ready.append((comm, seq))

    def _open_comm(self, seen: CommProgress) -> Comm:
        first, last = (seen.ranks[0], seen.ranks[-1]) if seen.ranks else (-1, -1)
        key = (seen.name, seen.size, first, last)
        comm = self._comms.get(key)
        if comm is None:
            comm = self._comms[key] = Comm(seen)
            self._sorted = []
            self.grown += 1
        return comm

    def forget(self, rank: int) -> None:
        """Forget a rank that has left."""
        self._replaced |= self._of.pop(rank, None) is not None
        self.lateness.forget(rank)

    def _forget_gone(self) -> None:
        """Forget communicators that no rank shows any more: of an earlier epoch, or destroyed."""
        self._replaced = False
        shown = {id(comm) for mine in self._of.values() for _, comm in mine}
        kept = {key: comm for key, comm in self._comms.items() if id(comm) in shown}
        if len(kept) < len(self._comms):
            self._comms = kept
            self._sorted = []
            self.point_to_point &= {comm.name for comm in kept.values()}
            self.grown += 1

    def look(self, now: float, pace: float) -> None:
        """Judge the rows that are complete; `pace` is the job's step time over the learned one."""
        cost, rows = 0, dict[tuple[str, int], int]()
        crowded = len(self._ready) > CROWD and not self.by_lateness
        for comm, seq in self._ready:
            row = comm.rows.pop(seq, None)
            if row is not None:
                if crowded:
                    comm.passed += 1
                    if comm.passed % CROWD_EVERY and self._is_usual(comm, row):
                        continue
                cost += comm.size + ROW_COST
                key = (comm.name, comm.first)
                rows[key] = rows.get(key, 0) + 1
                self._judge(now, comm, seq, row, pace)
        self._ready.clear()
        if self._replaced:
            self._forget_gone()
        self.skip()
        self.lateness.look(now)
        for comm in self._comms.values():
            if comm.slow is not None and comm.slow.is_over(now, 30.0):
                comm.slow = None
            if cost > COST_A_LOOK and comm.mask < 63 and rows.get((comm.name, comm.first), 0) > 1:
                comm.mask = 2 * comm.mask + 1  # Fewer rows of those that have many.

    def skip(self) -> None:
        """Keep no more than a few rows of each communicator."""
        del self._ready[:-CROWD]
        for comm in self._comms.values():
            late = len(comm.rows) - PENDING
            for seq in sorted(comm.rows)[:late] if late > 0 else ():
                comm.done = max(comm.done, seq)
                del comm.rows[seq]

    def _is_usual(self, comm: Comm, row: Row) -> bool:
        base = comm.baselines.get((row.op, row.bytes))
        if base is None or comm.slow is not None or not base.known:
            return False
        return min(row.durations.values()) <= USUAL * base.value

    def _judge(self, now: float, comm: Comm, seq: int, row: Row, pace: float) -> None:
        durations = row.durations
        least_s = min(durations.values())
        base = comm.baselines.get((row.op, row.bytes))
        if base is None:
            if len(comm.baselines) >= 64:
                del comm.baselines[next(iter(comm.baselines))]
            base = comm.baselines[(row.op, row.bytes)] = Baseline()
        each_s = self._follow_pace(now, comm, seq, row)
        comm.judged_s = now
        slow = False
        if base.known:
            excess = least_s / base.value - 1.0
            extra_s = least_s - base.value
            paces = [p for p in (comm.compute_pace(), pace) if p]
            lost = 1.0 - 1.0 / max(paces) if paces and max(paces) > 1.0 else 0.0
            # What a collective takes longer must account for what training loses.
            share = max(IMPACT, ACCOUNTED * lost)
            heavy = extra_s >= COMM_SLOW_FLOOR_S and (not each_s or extra_s >= share * each_s)
            slower = not paces or max(paces) >= PACE_RATIO
            slow = excess >= COMM_SLOW_RATIO - 1.0 and heavy and slower
            if slow and comm.slow is None:
                every_s = max(self.step_s, comm.pace.value)
                comm.slow = Persistence(now, COMM_SLOW_RATIO - 1.0, every_s)
            if comm.slow is not None and (
                slow or excess < (COMM_SLOW_RATIO - 1.0) / 2 or not slower
            ):
                comm.slow.add(now, excess if slow else 0.0)
            if slow:
                comm.worst_s, comm.worst_extra_s = least_s, extra_s
                comm.worst = {
                    "communicator": comm.name,
                    "op": row.op,
                    "bytes": row.bytes,
                    "collective": seq,
                    "min_dur_ms": round(least_s * 1e3, 3),
                    "usual_ms": round(base.value * 1e3, 3),
                }
        base.add(now, least_s, COMM_SLOW_RATIO)
        if self.by_lateness:
            self._follow_lateness(now, comm, seq, row, slow=slow)

    def _follow_pace(self, now: float, comm: Comm, seq: int, row: Row) -> float:
        """Return seconds a collective by the clock of the first rank; 0 where unknown."""
        if row.end_s <= 0.0 or (comm.ends and seq <= comm.ends[-1][0]):
            return comm.pace_now
        comm.ends.append((seq, row.end_s))
        first_seq, first_s = comm.ends[0]
        if len(comm.ends) == PACE_ROWS:
            comm.pace_now = (row.end_s - first_s) / (seq - first_seq)
            comm.pace.add(now, max(comm.pace_now, 1e-9), 1.25)
        return comm.pace_now

    def _follow_lateness(self, now: float, comm: Comm, seq: int, row: Row, *, slow: bool) -> None:
        """Who was late is told where communication is as usual: else both grow."""
        key = (comm.name, comm.first)
        if slow or row.end_s <= 0.0 or len(row.starts) < comm.size:
            self.lateness.skip(key)
            return
        alike = comm.size < self._world_size or self.senders.isdisjoint(comm.ranks)
        arrived = (seq, row.end_s, row.starts, row.durations)
        step_s = self.step_s or UNDECLARED * comm.pace.value
        self.lateness.take(now, key, arrived, alike=alike, step_s=step_s)


def group_peers(
    comms: Sequence[Comm], apart: set[str], senders: set[int], world_size: int
) -> list[list[int]]:
    """Return groups of ranks whose work is alike: joined by collectives of more than a pair.

    Sends and receives, in the communicators `apart`, join nobody: a stage without copies is a
    group of its own. A communicator of the whole world joins the `senders`, which may be stages of
    a pipeline, for a norm or a barrier and says nothing about their work.
    """
    groups: dict[int, list[int]] = {rank: [rank] for comm in comms for rank in comm.ranks}
    for comm in comms:
        joined = () if comm.name in apart else comm.ranks
        if comm.size == world_size:
            joined = tuple(rank for rank in joined if rank not in senders)
        for rank in joined[1:]:
            small, large = sorted((groups[joined[0]], groups[rank]), key=len)
            if small is not large:
                large += small
                groups.update(dict.fromkeys(small, large))
    return sorted(
        sorted(group) for group in {id(group): group for group in groups.values()}.values()
    )
