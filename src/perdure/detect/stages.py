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

from perdure.detect.persistence import Baseline, Persistence, compute_interval, is_duration
from perdure.model.job import DetectConfig
from perdure.model.signals.progress import StepStages
from perdure.model.verdicts import Slowness

NAMES = ("data", "forward", "backward", "optimizer")
KEPT = 12
"""Finished rows kept for evidence."""
PENDING = 24
LATE_S = 2.0
"""A row that lacks ranks is taken as it is after so long."""
SAMPLED = 101
"""Ranks asked for the length of a step, which is nearly the same for all."""
REST_STEPS = 5
COMPARED = 1024
"""Ranks among which the one that waits least is looked for."""
LEARNED_A_S = 2000
"""Ranks whose usual work is learned at once, in turns, so that 10,000 cost no more."""
BACK_S_MAX = 1.0
"""A slow step began to be slow when it began, and that counts, up to here."""
LEARNED = 12
FOLLOW = 0.3
"""Weight of one look in what a rank's own work is: another batch size is learned in seconds."""
LATELY_S = 2.5
FROM_START = 0.6
"""Weight of an excess over the peers that was there from the first step: it may be by design."""

GAINED_EVERY_S, GAINED_KEPT = 0.1, 1024
"""How often what a suspect costs is noted, and how many of these notes are kept."""

NOISE_ROWS = 300.0
"""Steps over which it is learned how often a rank's work is odd in health."""
NOISE_PRIOR, NOISE_LEAST, NOISE_MOST = 0.3, 0.001, 0.9
"""What is thought of it before the first step, and its bounds."""

Row = tuple[float, float, float, float, float, float]
"""Own seconds by stage, their sum, and the whole step."""


class Share(msgspec.Struct, frozen=True):
    """One rank's part in a slow window."""

    stage: str
    extra_s: dict[str, float]
    """Extra seconds a step by stage."""
    frontier_s: dict[str, float]
    """Exposed seconds a step by stage: the account of the whole group."""
    step_s: float


class _Noise:
    """How often an excess is odd among peers in health: each rank is told by the others.

    Rows count the less the older they are: weights grow instead of all sums being scaled.
    """

    __slots__ = ("_by_rank", "_odd", "_seen", "_weight")

    def __init__(self) -> None:
        """Begin knowing nothing."""
        self._weight = 1.0
        self._seen = self._odd = 0.0
        self._by_rank: dict[int, float] = {}

    def begin_row(self, num: int) -> None:
        """Take a step of `num` ranks; those that are odd in it follow."""
        self._weight *= 1.0 + 1.0 / NOISE_ROWS
        self._seen += self._weight * num
        if self._weight > 1e100:
            self._seen, self._odd = self._seen / self._weight, self._odd / self._weight
            self._by_rank = {r: w / self._weight for r, w in self._by_rank.items()}
            self._weight = 1.0

    def add_odd(self, rank: int) -> None:
        """Take an excess of `rank` that is one."""
        self._odd += self._weight
        self._by_rank[rank] = self._by_rank.get(rank, 0.0) + self._weight

    def compute_usual_share(self, rank: int, num: int) -> float:
        """Return the share of odd samples of the others, of `num` ranks in all."""
        odd = self._odd - self._by_rank.get(rank, 0.0) + NOISE_PRIOR * self._weight
        seen = self._seen * (num - 1) / max(num, 1) + self._weight
        return min(max(odd / seen, NOISE_LEAST), NOISE_MOST)


class StageWatch:
    """Steps of all ranks, matched by their number."""

    def __init__(
        self, config: DetectConfig, home: Callable[[int], int] = lambda rank: rank
    ) -> None:
        """Begin a generation; `home` is what is replaced with a rank: its node."""
        self.config = config
        """What is judged by; it may change while a job runs."""
        self._home = home
        self._rows: dict[int, dict[int, Row]] = {}
        self._since: dict[int, float] = {}
        self._taken = -1
        self.set_peers(())
        self._shares: dict[int, Baseline] = {}
        self._own: dict[int, float] = {}
        self._parts: dict[int, tuple[float, ...]] = {}
        self._recent: deque[dict[int, Row]] = deque(maxlen=KEPT)
        self._learned_s, self._turn = 0.0, 0
        self._step = Baseline()
        self._step_now: deque[float] = deque(maxlen=3)
        self._rest, self._rest_now = Baseline(), deque[float](maxlen=REST_STEPS)
        self._offset_s = 0.0
        self._gains: dict[int, deque[tuple[float, float, float]]] = {}
        """Home of a suspect -> time, ratio of its work, share of the step that it costs."""
        self._waits = deque[tuple[float, float]](maxlen=GAINED_KEPT)
        """Time, and the share of the step that communication costs."""
        self._gained_s = 0.0
        self._noise: dict[int, tuple[_Noise, int]] = {}
        """Lowest rank of a group of peers -> its noise, and how many they are."""
        self._noise_alone = _Noise()
        """The noise of all ranks that have no peers."""
        self.suspects: dict[int, Persistence] = {}

    @property
    def seen(self) -> bool:
        """Whether any rank shows stages."""
        return bool(self._recent) or bool(self._rows)

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
            if s.step <= self._taken or not all(map(is_duration, (*own, whole_s))):
                continue
            self._since.setdefault(s.step, now)
            self._rows.setdefault(s.step, {})[rank] = (*own, sum(own), whole_s)

    def look(self, now: float, num_live: int) -> None:
        """Judge the rows that are complete, or will not be."""
        for step in sorted(self._rows):
            row = self._rows[step]
            late = now - self._since[step] > LATE_S or len(self._rows) > PENDING
            if len(row) < num_live and not late:
                break
            del self._rows[step], self._since[step]
            self._taken = step
            if 2 * len(row) > num_live and len(row) > 1:
                self._judge(now, row)
        for rank in [r for r, p in self.suspects.items() if p.is_over(now, 30.0)]:
            del self.suspects[rank]
            if self._home(rank) not in map(self._home, self.suspects):
                self._gains.pop(self._home(rank), None)

    def _judge(self, now: float, row: dict[int, Row]) -> None:
        self._recent.append(row)
        some = sorted(v[5] for v in islice(row.values(), SAMPLED))
        whole_s = some[len(some) // 2]
        self._step_now.append(whole_s)
        self._step.add(now, whole_s, 1.25)
        # A wait may be next to nothing: a step is added, so that its growth is one of the step.
        self._offset_s = self._offset_s or whole_s
        least_s = min(v[5] - v[4] for v in islice(row.values(), COMPARED))
        self._rest_now.append(max(least_s, 0.0) + self._offset_s)
        self._rest.add(now, self._rest_now[-1], 1.1)
        begun = all(b.known for b in islice(self._shares.values(), 1))
        learn = now - self._learned_s >= 0.5 or len(self._shares) < len(row) or not begun
        turns = 1 + len(row) // LEARNED_A_S if begun and len(self._shares) >= len(row) else 1
        if learn:
            self._learned_s = now
            self._turn += 1
        turn = self._turn % turns
        calm = 1.0 + (self.config.straggler_ratio - 1.0) / 2
        suspected = {self._peers.get(rank, -1) for rank in self.suspects}
        everybody: list[float] = []
        groups = self._list_peer_groups(row)
        num_alone = sum(len(ranks) == 1 for _, ranks in groups)
        self._noise_alone.begin_row(num_alone)
        for key, ranks in groups:
            group = [r for r in ranks if r in row]
            if len(ranks) > 1:
                noise, _ = self._noise.get(key, (self._noise_alone, 0))
                noise = _Noise() if noise is self._noise_alone else noise
                self._noise[key] = (noise, len(ranks))
                noise.begin_row(len(group))
            else:
                self._noise[key] = (self._noise_alone, num_alone)
            if len(group) > 1:
                ordered = sorted([row[r][4] for r in group])
                # Who does little more than its peers needs no closer look: nearly everybody.
                clear_s = calm * ordered[(len(ordered) - 1) // 2]
                if not learn and key not in suspected and ordered[-1] <= clear_s:
                    continue
            else:
                everybody = everybody or sorted(v[4] for v in row.values())
                ordered, clear_s = everybody, 0.0
            for rank in group:
                mine = learn and rank % turns == turn
                if mine or row[rank][4] > clear_s or rank in self.suspects:
                    self._weigh(now, rank, row[rank], ordered, len(group) > 1, mine)
        if now - self._gained_s >= GAINED_EVERY_S:
            self._gained_s = now
            self._note_costs(now, row, max(whole_s, 1e-6))

    def _note_costs(self, now: float, row: dict[int, Row], whole_s: float) -> None:
        """Note what each suspect's home costs this step, and what communication does."""
        if self._rest.known:
            over_s = max(0.0, self._rest_now[-1] - self._rest.value)
            self._waits.append((now, min(over_s / whole_s, 1.0)))
        suspected = {(self._home(r), self._peers.get(r, -1)) for r in self.suspects}
        if not suspected:
            return
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
                left_s = self._estimate_elsewhere_s(
                    rank, [s for h, (s, _) in slowest.items() if h != home]
                )
                gains = self._gains.setdefault(home, deque(maxlen=GAINED_KEPT))
                if gains and gains[-1][0] == now:  # It has ranks among several groups of peers.
                    continue
                bounds = [left_s, *(most[h] for h in longest if h != home)]
                # What else runs there goes with it, and takes there what it usually does.
                others = [r for r in mates[home] if self._peers.get(r, -1) != key]
                bounds += [self._own.get(r, 0.0) for r in others]
                share = min(max(0.0, own_s - max(bounds)) / whole_s, 1.0)
                gains.append((now, own_s / max(left_s, 1e-6), share))

    def _estimate_elsewhere_s(self, rank: int, others: list[float]) -> float:
        """Return what the work of `rank` would take elsewhere: its own share of what others do.

        What it does more of by design goes with it to another node.
        """
        base = self._shares.get(rank)
        if not others:
            return self._own.get(rank, 0.0)
        usual_s = sorted(others)[len(others) // 2]
        return usual_s * max(base.value, 1.0) if base is not None and base.known else usual_s

    def _list_peer_groups(self, row: dict[int, Row]) -> list[tuple[int, Sequence[int]]]:
        """Return the groups of peers; ranks of which none is known are one group."""
        if not self._groups:
            return [(-1, list(row))]
        strangers = [r for r in row if r not in self._peers] if len(row) != len(self._peers) else []
        return [*self._groups, *([(-1, strangers)] if strangers else [])]

    def _weigh(
        self, now: float, rank: int, mine: Row, ordered: list[float], alike: bool, learn: bool
    ) -> None:
        own_s = mine[4]
        usual_s = max(_median_of_others(ordered, own_s), 1e-6)
        share = own_s / usual_s
        base = self._shares.get(rank)
        if base is None:
            base = self._shares[rank] = Baseline(LEARNED)
            self._own[rank] = max(own_s, 1e-6)
        own = self._own[rank]
        excess = 0.0
        if base.known:
            # Twice, because the smaller of two noisy numbers is too small.
            excess = min(share / base.value - 1.0, 2.0 * (own_s / own - 1.0))
        if alike:
            # Whoever does no more than its peers holds nobody up, whatever it did before.
            excess = max(min(excess, share - 1.0), FROM_START * (share - 1.0))
        least = self.config.straggler_ratio - 1.0
        extra_s = excess * usual_s
        if extra_s < self.config.straggler_floor_s or extra_s < (self.config.slow_impact * mine[5]):
            excess = min(excess, 0.0)
        if excess >= least:
            self._noise[self._peers.get(rank, -1)][0].add_odd(rank)
        suspect = self.suspects.get(rank)
        if suspect is None and excess >= least:
            began_s = now - min(mine[5], max(BACK_S_MAX, self.step_s))
            # From the first step on no step is usual yet: this one says how far apart they are.
            every_s = self.step_s or mine[5]
            suspect = Persistence(began_s, self.config.slow_confirm_s, least, every_s)
            self.suspects[rank] = suspect
        if suspect is not None:
            suspect.add(now, excess)
        lately = 0.0 if suspect is None else suspect.recent(now, LATELY_S)
        if learn and lately < least / 2:
            # Judged by the last seconds: with noise, some steps of a slow rank look usual.
            base.add(now, share, 1.0 + least / 2)
            if excess < least / 2:
                self._own[rank] = own + FOLLOW * (max(own_s, 1e-6) - own)
            if suspect is None:
                parts = zip(self._parts.get(rank, mine[:4]), mine[:4], strict=True)
                self._parts[rank] = tuple(a + 0.1 * (b - a) for a, b in parts)

    def confirm(self, now: float, rank: int) -> float:
        """Return the confirmed excess of suspect `rank`; 0 if there is none (yet)."""
        noise, num = self._noise.get(self._peers.get(rank, -1), (_Noise(), 1))
        usual = noise.compute_usual_share(rank, num) if num > 1 else 0.0
        return self.suspects[rank].confirm(now, usual=usual)

    def describe(self, rank: int) -> Share:
        """Return in which stage `rank` loses its time, from the last rows."""
        rows = [row for row in list(self._recent)[-5:] if rank in row]
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


def _median_of_others(ordered: list[float], mine: float) -> float:
    """Return the median of a sorted list without one occurrence of `mine`."""
    n = len(ordered)
    if n < 2:
        return mine
    middle = (n - 1) // 2
    return ordered[middle] if mine > ordered[middle] else ordered[middle + 1]
