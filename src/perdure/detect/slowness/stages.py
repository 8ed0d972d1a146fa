"""Whose own work takes longer: from the stages of each step, where waiting is a stage apart.

All ranks of a job take equally long for a step, because an all-reduce makes them; their *own*
work (data, forward, backward, optimizer; never time blocked in a collective) tells them apart,
whatever communicator the others wait in. A rank is compared with its peers, the ranks that take
part in the same collectives other than send and receive (stages of a pipeline differ by design),
and with its own share of the work until now, so that what concerns all of them, such as another
batch size, is nobody's fault. Durations only: no two clocks are ever compared.

The account of exposed time is StageFrontier's (arXiv 2606.06751): with C(r, s) the own time of
rank r up to the end of stage s, the frontier F(s) is the largest of them, and its increments are
an exact, additive account of the step.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import islice

import msgspec

from perdure.detect.slowness.persistence import Baseline, compute_interval, is_duration
from perdure.detect.slowness.shifts import Excursion, Passed, PeerShifts
from perdure.detect.slowness.work import Compared, DeclaredWork
from perdure.model.signals.progress import WORK_MAX, StepStages
from perdure.model.verdicts import Slowness

NAMES = ("data", "forward", "backward", "optimizer")
KEPT = 12
"""Finished rows kept for evidence."""
PENDING = 24
LATE_S, LATE_STEPS = 2.0, 2.0
"""A row that lacks ranks is taken as it is after so long, and so many steps: a rank that is slow
after the last collective of a step ends it later than the others."""
LIED, LIED_S = 1.01, 0.001
"""A step whose stages add up to so much more than itself, and this, tells nothing."""
SAMPLED = 101
"""Ranks asked for the length of a step, which is nearly the same for all."""
REST_STEPS = 5
COMPARED = 1024
"""Ranks among which the one that waits least is looked for."""
LEARN = 0.3
"""Weight of one block's last step in what a rank's stages usually take."""
THINNED_MAX = 64
"""Of so many steps one is told at least."""

GAINED_EVERY_S, GAINED_KEPT = 0.1, 1024
"""How often what a suspect costs is noted, and how many of these notes are kept."""

Row = tuple[float, float, float, float, float, float, float]
"""Own seconds by stage, their sum, the whole step, and the work that was declared for it."""


class Share(msgspec.Struct, frozen=True):
    """One rank's part in a slow window."""

    stage: str
    extra_s: dict[str, float]
    """Extra seconds a step by stage."""
    frontier_s: dict[str, float]
    """Exposed seconds a step by stage: the account of the whole group."""
    step_s: float


class StageWatch:
    """Steps of all ranks, matched by their number."""

    def __init__(
        self,
        home: Callable[[int], int] = lambda rank: rank,
        passed: Passed | None = None,
    ) -> None:
        """Begin a generation; `home` is what is replaced with a rank: its node."""
        self._home = home
        self._rows: dict[int, dict[int, Row]] = {}
        self._since: dict[int, float] = {}
        self._taken = self._judged = -1
        self._back: set[int] = set()
        """Ranks whose newest step is far below those that were taken."""
        self.set_peers(())
        self._parts: dict[int, tuple[float, ...]] = {}
        self._recent: deque[dict[int, Row]] = deque(maxlen=KEPT)
        self._scales: deque[dict[int, float]] = deque(maxlen=KEPT)
        """Of the same: rank -> its time for the usual work over that for what it declared."""
        self._step = Baseline()
        self._step_now: deque[float] = deque(maxlen=3)
        self._rest, self._rest_now = Baseline(), deque[float](maxlen=REST_STEPS)
        self._offset_s = 0.0
        self._gains: dict[int, deque[tuple[float, float, float]]] = {}
        """Home of a suspect -> time, ratio of its work, share of the step that it costs."""
        self._waits = deque[tuple[float, float]](maxlen=GAINED_KEPT)
        """Time, and the share of the step that communication costs."""
        self._gained_s = 0.0
        self.passed = Passed() if passed is None else passed
        """Slowness that ended by itself, in this generation and before."""
        self._shifts: dict[int, PeerShifts] = {}
        """Lowest rank of a group of peers -> who of them is slower than usual."""
        self._alone = PeerShifts(alike=False, passed=self.passed)
        """The same of all ranks that have no peers."""
        self._declares = False
        """Whether anybody has ever declared work."""
        self._works: dict[int, DeclaredWork] = {}
        """Lowest rank of a group of peers -> what their declared work explains."""
        self.suspects: dict[int, Excursion] = {}
        """Ranks that are slower than usual by more than most noise, confirmed or not."""

    @property
    def seen(self) -> bool:
        """Whether most ranks show stages: those of one, as of the one that logs, tell nothing."""
        return bool(self._recent)

    @property
    def pace(self) -> float:
        """Return the step time over its learned value; 0 where unknown."""
        if not self._step.known or not self._step_now:
            return 0.0
        return sorted(self._step_now)[len(self._step_now) // 2] / self._step.value

    @property
    def step_s(self) -> float:
        """Return what a step usually takes; 0 where unknown."""
        return self._step.value

    @property
    def exposed(self) -> float | None:
        """Return the share of a step that even the busiest rank waits beyond what is usual.

        A slow rank does not wait, and work that grows for all is no waiting, so this is what
        communication costs. None where unknown.
        """
        if not self._rest.known or len(self._rest_now) < REST_STEPS:
            return None
        rest_s = sorted(self._rest_now)[len(self._rest_now) // 2]
        step_s = sorted(self._step_now)[len(self._step_now) // 2]
        return max(0.0, rest_s - self._rest.value) / max(step_s, 1e-9)

    def estimate_exposed(
        self, now: float, window_s: float, *, sure: bool
    ) -> tuple[float, float, float] | None:
        """Return `exposed` of the last `window_s` as an interval; None where unknown."""
        since_s = now - window_s
        return compute_interval((share for at_s, share in self._waits if at_s > since_s), sure=sure)

    def measure(self, now: float, rank: int, window_s: float, *, sure: bool) -> Slowness | None:
        """Return what suspect `rank` and the others of its home cost; None where unknown.

        It is that of the last `window_s`.
        """
        since_s = now - window_s
        seen = [g for g in self._gains.get(self._home(rank), ()) if g[0] > since_s]
        ratio = compute_interval((g[1] for g in seen), sure=sure)
        share = compute_interval((g[2] for g in seen), sure=sure)
        if ratio is None or share is None:
            return None
        return make_slowness(ratio, share[1], share[0])

    def set_peers(self, groups: Iterable[Sequence[int]]) -> None:
        """Take the groups of ranks whose work is alike."""
        self._groups: list[tuple[int, Sequence[int]]] = [(group[0], group) for group in groups]
        self._peers = {rank: key for key, group in self._groups for rank in group}
        """Rank -> lowest rank of its peers."""

    def take(self, now: float, rank: int, stages: Iterable[StepStages]) -> None:
        """Take the ended steps of one rank."""
        for s in stages:
            own = (s.data_s, s.forward_s, s.backward_s, s.optimizer_s)
            whole_s = s.end_s - s.begin_s - s.other_s
            if s.step < self._taken - PENDING:
                self._back.add(rank)
            else:
                self._back.discard(rank)
            if s.step <= self._taken or not all(map(is_duration, (*own, whole_s))):
                continue
            if sum(own) > LIED * whole_s + LIED_S:
                continue
            self._since.setdefault(s.step, now)
            work = s.work if 0.0 < s.work <= WORK_MAX else 0.0
            self._declares = self._declares or work > 0.0
            self._rows.setdefault(s.step, {})[rank] = (*own, sum(own), whole_s, work)

    def look(self, now: float, num_live: int) -> None:
        """Judge the rows that are complete, or will not be."""
        if 2 * len(self._back) > num_live:
            # They have gone back to a checkpoint, or begun another loop: numbers count anew.
            self._taken = -1
            self._rows, self._since = {}, {}
            self._back.clear()
        for step in sorted(self._rows):
            row = self._rows[step]
            late_s = max(LATE_S, LATE_STEPS * self.step_s)
            late = now - self._since[step] > late_s or len(self._rows) > PENDING
            if len(row) < num_live and not late:
                break
            del self._rows[step], self._since[step]
            if 2 * len(row) > num_live:
                self._taken = step  # One that a few tell of may be any number.
                if len(row) > 1:
                    self._judge(now, step, row)

    def skip(self) -> None:
        """Keep no more than a few rows: nobody judges them at present."""
        late = len(self._rows) - PENDING
        for step in sorted(self._rows)[:late] if late > 0 else ():
            del self._rows[step], self._since[step]

    def forget(self, rank: int) -> None:
        """Forget a rank that has left: nobody waits for it any more."""
        self._back.discard(rank)
        self._shifts_of(rank).forget(rank)
        declared = self._works.get(self._peers.get(rank, -1))
        if declared is not None:
            declared.forget(rank)
        self._parts.pop(rank, None)
        if self.suspects.pop(rank, None) and self._home(rank) not in map(self._home, self.suspects):
            self._gains.pop(self._home(rank), None)

    def _judge(self, now: float, step: int, row: dict[int, Row]) -> None:
        self._recent.append(row)
        self._scales.append({})
        some = sorted(v[5] for v in islice(row.values(), SAMPLED))
        whole_s = some[len(some) // 2]
        self._step_now.append(whole_s)
        self._step.add(now, whole_s, 1.25)
        # A wait may be next to nothing: a step is added, so that its growth is one of the step.
        self._offset_s = self._offset_s or whole_s
        least_s = min(v[5] - v[4] for v in islice(row.values(), COMPARED))
        self._rest_now.append(max(least_s, 0.0) + self._offset_s)
        self._rest.add(now, self._rest_now[-1], 1.1)
        # Of very short steps only one in so many is told.
        seconds = whole_s * min(max(step - self._judged, 1), THINNED_MAX)
        self._judged = step
        own = {rank: v[4] for rank, v in row.items()}
        alone: dict[int, float] = {}
        for key, ranks in self._list_peer_groups(row):
            group = {r: own[r] for r in ranks if r in own}
            if len(ranks) == 1:
                alone |= group
            elif len(group) > 1:
                self._compare(key, Compared(now, seconds, group), row)
        everybody = sorted(own.values())
        if alone and self._alone.take(now, seconds, alone, everybody):
            self._note_suspects(row, alone, self._alone)
        if now - self._gained_s >= GAINED_EVERY_S:
            self._gained_s = now
            self._note_costs(now, row, max(whole_s, 1e-6))

    def _compare(self, key: int, step: Compared, row: dict[int, Row]) -> None:
        """Compare the peers of group `key` in a step."""
        steps = self._apply_work(key, step, row) if self._declares else [step]
        shifts = self._shifts.get(key)
        if shifts is None:
            shifts = self._shifts[key] = PeerShifts(alike=True, passed=self.passed)
        for each in steps:
            ordered, taken = sorted(each.own.values()), each.taken
            if shifts.take(each.at_s, each.seconds, each.own, ordered, taken):
                self._note_suspects(row, step.own, shifts)

    def _apply_work(self, key: int, step: Compared, row: dict[int, Row]) -> list[Compared]:
        """Return what peers would have taken for the same work, in the steps that this one ends."""
        declared = self._works.get(key)
        if declared is None:
            known = None if key not in self._shifts else False
            declared = self._works[key] = DeclaredWork(declared=known)
        amounts = {rank: row[rank][6] for rank in step.own}
        steps = declared.take(step.at_s, step.seconds, step.own, amounts)
        if steps is None:
            self._shifts.pop(key, None)
            for rank in step.own:
                self.suspects.pop(rank, None)
            return []
        if steps:
            self._scales[-1].update(declared.scales)
        return steps

    def _note_suspects(self, row: dict[int, Row], ranks: Iterable[int], shifts: PeerShifts) -> None:
        """Note who is slower than usual as a block has ended, and of the others what they do."""
        for rank in ranks:
            excursion = shifts.excursion(rank)
            if excursion is not None and (excursion.excess or excursion.notable):
                self.suspects[rank] = excursion
                continue
            gone = self.suspects.pop(rank, None)
            if gone is not None and self._home(rank) not in map(self._home, self.suspects):
                self._gains.pop(self._home(rank), None)
            if excursion is None:
                mine = row[rank][:4]
                parts = zip(self._parts.get(rank, mine), mine, strict=True)
                self._parts[rank] = tuple(a + LEARN * (b - a) for a, b in parts)

    def describe_work(self, rank: int) -> dict[str, object]:
        """Return what `rank` has declared, as evidence; empty where nothing is compared by it."""
        declared = self._works.get(self._peers.get(rank, -1))
        return {} if declared is None else declared.describe(rank)

    def compares(self, rank: int) -> bool:
        """Return whether `rank` is compared with any; not for a while where that begins anew."""
        return self._shifts_of(rank).compares(rank)

    def _shifts_of(self, rank: int) -> PeerShifts:
        return self._shifts.get(self._peers.get(rank, -1), self._alone)

    def _note_costs(self, now: float, row: dict[int, Row], whole_s: float) -> None:
        """Note what each suspect's home costs this step, and what communication does."""
        if self._rest.known:
            over_s = max(0.0, self._rest_now[-1] - self._rest.value)
            self._waits.append((now, min(over_s / whole_s, 1.0)))
        suspected = {(self._home(r), self._peers.get(r, -1)) for r in self.suspects}
        if not suspected:
            return
        scales = self._scales[-1]
        # In a pipeline the longest stage bounds the step, so those of other peers count as well.
        mates: dict[int, list[int]] = {home: [] for home, _ in suspected}
        most: dict[int, float] = {}
        for rank, mine in row.items():
            home = self._home(rank)
            most[home] = max(most.get(home, 0.0), mine[4])
            if home in mates:
                mates[home].append(rank)
        longest = nlargest(2, most, key=most.__getitem__)
        for key, members in self._list_peer_groups(row):
            slowest: dict[int, tuple[float, int]] = {}
            for rank in members:
                if rank in row:
                    home, own = self._home(rank), (row[rank][4], rank)
                    slowest[home] = max(slowest.get(home, own), own)
            for home in sorted(h for h in slowest if (h, key) in suspected):
                own_s, rank = slowest[home]
                others_s = [s * scales.get(r, 1.0) for h, (s, r) in slowest.items() if h != home]
                left_s = self._estimate_elsewhere_s(rank, others_s) / scales.get(rank, 1.0)
                gains = self._gains.setdefault(home, deque(maxlen=GAINED_KEPT))
                if gains and gains[-1][0] == now:  # It has ranks among several groups of peers.
                    continue
                bounds = [left_s, *(most[h] for h in longest if h != home)]
                # What else runs there goes with it, and takes there what it usually does.
                others = [r for r in mates[home] if self._peers.get(r, -1) != key]
                bounds += [self._shifts_of(r).usual_s(r) for r in others]
                share = min(max(0.0, own_s - max(bounds)) / whole_s, 1.0)
                gains.append((now, own_s / max(left_s, 1e-6), share))

    def _estimate_elsewhere_s(self, rank: int, others: list[float]) -> float:
        """Return what the work of `rank` would take elsewhere: its own share of what others do.

        What it does more of by design goes with it to another node.
        """
        shifts = self._shifts_of(rank)
        if not others:
            return shifts.usual_s(rank)
        usual_s = sorted(others)[len(others) // 2]
        return usual_s * max(shifts.usual_share(rank) or 1.0, 1.0)

    def _list_peer_groups(self, row: dict[int, Row]) -> list[tuple[int, Sequence[int]]]:
        """Return the groups of peers; ranks of which none is known are one group."""
        if not self._groups:
            return [(-1, list(row))]
        strangers = [r for r in row if r not in self._peers] if len(row) != len(self._peers) else []
        return [*self._groups, *([(-1, strangers)] if strangers else [])]

    def describe(self, rank: int) -> Share:
        """Return in which stage `rank` loses its time, from the last rows.

        Seconds are those that peers would have taken for the usual work, where it is declared.
        """
        recent = list(zip(self._recent, self._scales, strict=True))[-5:]
        rows = [_scale(row, scales) for row, scales in recent if rank in row]
        key = self._peers.get(rank, -1)
        extra, frontier = [0.0] * 4, [0.0] * 4
        known = self._parts.get(rank)
        for row in rows:
            group = [r for r in row if self._peers.get(r, -1) == key]
            group = group if len(group) > 1 else list(row)
            for s in range(4):
                others = sorted(row[r][s] for r in group if r != rank)
                usual_s = others[len(others) // 2] if others else 0.0
                if len(group) < len(row) and known is not None:
                    usual_s = known[s]
                extra[s] += (row[rank][s] - usual_s) / len(rows)
            for s, increment_s in enumerate(compute_frontier({r: row[r] for r in group})):
                frontier[s] += increment_s / len(rows)
        most = max(range(4), key=lambda s: extra[s])
        gained_s = sum(max(e, 0.0) for e in extra)
        stage = NAMES[most] if gained_s > 0 and extra[most] >= 0.7 * gained_s else "compute"
        step_s = sum(row[rank][5] for row in rows) / max(len(rows), 1)
        return Share(
            stage,
            {n: round(e, 5) for n, e in zip(NAMES, extra, strict=True)},
            {n: round(e, 5) for n, e in zip(NAMES, frontier, strict=True)},
            step_s,
        )


def _scale(row: dict[int, Row], scales: Mapping[int, float]) -> dict[int, Sequence[float]]:
    """Return a row with the stages of each rank as they would be for the usual work."""
    if not scales:
        return dict(row)
    return {
        rank: (*(part * scales.get(rank, 1.0) for part in mine[:5]), *mine[5:])
        for rank, mine in row.items()
    }


def make_slowness(ratio: tuple[float, float, float], share: float, share_low: float) -> Slowness:
    """Return the slowness of a `ratio` (low, median, high) that costs `share` of the step."""
    low, mid, high = (round(each, 3) for each in ratio)
    return Slowness(
        ratio=mid,
        ratio_low=low,
        ratio_high=high,
        share=round(share, 4),
        share_low=round(share_low, 4),
    )


def compute_frontier(row: Mapping[int, Sequence[float]]) -> tuple[float, ...]:
    """Return the increments of the frontier by stage; they add up to the largest own time.

    >>> compute_frontier({0: (1.0, 2.0), 1: (0.5, 4.0)})
    (1.0, 3.5)
    """
    reached = {rank: 0.0 for rank in row}
    frontier, increments = 0.0, []
    num_stages = min((len(parts) for parts in row.values()), default=0)
    for s in range(min(num_stages, 4)):
        for rank, parts in row.items():
            reached[rank] += parts[s]
        largest = max(reached.values())
        increments.append(largest - frontier)
        frontier = largest
    return tuple(increments)
