"""Who has become slower than its peers, by more than chance: a sequential test of mean shifts.

What is tested are logarithms of shares: a rank's own work in a step over that of its peers. They
are taken in blocks of a few steps, of which the middle ones are averaged, so that one long step (a
garbage collection, an evaluation) is none, however long. A rank whose blocks begin to lie above
its usual share is under way: it has an `Excursion`, from the block at which its cumulative sum
(Page 1954) left zero. What is learned from blocks is learned once an excursion is over, so that a
fault does not hide itself.

An excursion is a slowdown once it cannot be chance. Over w blocks its mean is compared with the
spread that means of w blocks have had in this job, among all peers: whatever makes steps alike for
a while (long sequences, an expert in demand, drift) has made means of many blocks spread as well.
How well that spread is known, counts: a job's first minute knows little of it, and little steps
that resemble one another teach little. The test is Student's, with Satterthwaite's degrees of
freedom (1946), at a level that allows for all ranks, windows and looks: `FALSE_AN_HOUR` in sum.
Rare phases of much more work have no such tail, so that one as slow that ended by itself must be
outlasted, for a quarter of an hour at most.
"""

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import NormalDist

from perdure.detect.slowness.persistence import CLEAR_S, CONFIRM_S, IMPACT

BLOCK_STEPS, BLOCK_S = 5, 1.0
"""A block is at least so many steps, and so many seconds of them."""
PAUSE = 4.0
"""What a step takes beyond so many usual ones of its block, nobody has trained."""
PART_STEPS = 2
"""So many of the next one may confirm what those before have shown."""
NUM_SCALES = 8
"""Windows of 1, 2, 4, ... blocks whose spread is known."""
FALSE_AN_HOUR = 0.01
"""Slowdowns found by chance in an hour of one job, at most."""
TRUE_AN_HOUR = 0.05
"""Slowdowns that a job really has in an hour, before anything was seen: what a probability is
told from."""
DESIGN_SPREAD, DESIGN_FREEDOM = 0.1, 20.0
"""By how much ranks of equal work differ for good (standard deviation of the logarithm), and how
firmly that is believed."""
DESIGN_PARTS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""How much of a shift is put down to this, and the rest to noise: whatever is least likely."""
ALIKE, ALIKE_PAIRS = 0.3, 6.0
"""Correlation of a mean with the next one, and by how many pairs that is believed before any."""
FIRST_FREEDOM, CARRIED_FREEDOM, FREEDOM_MAX = 4.0, 6.0, 60.0
"""How firmly is believed what the steps in a block say of its spread, and what shorter windows say
of longer ones; and the most, because no noise is quite normal."""
CROWD = 6
"""From so many ranks on the middle half of them tells how far they spread."""
QUARTILES_WORTH = 0.37
"""What a sample is worth for an estimate from its middle half, compared with the usual one."""
LEAST_S = 1e-6
"""Seconds that no work is shorter than."""
LEAST_SPREAD = 0.005
"""No steps are more alike than this (standard deviation of the logarithm)."""
DEPENDENT = 2.0
"""Steps of a block resemble one another: its variance is so many times as large."""
STRAGGLER_EXCESS = 0.15
"""A rank is a straggler from this share more own work a step than usual, peers considered."""
STRAGGLER_FLOOR_S = 0.003
"""Seconds of extra work a step below which no rank is a straggler."""
ODD, DRIFT, CLIPPED, HEIGHT = 1.0, 0.5, 4.0, 12.0
"""In standard deviations: the block with which an excursion begins; what the cumulative sum loses
with each block, what a block adds at most, and how high it gets."""
GONE = 2.5
"""An excursion is over once its newest blocks are so many standard deviations below it."""
WEAK = 2.5
"""An excursion of 8, 16, ... blocks that is not slow throughout, and whose mean is within so many
standard deviations, is noise."""
DRIFTING = 1.5
"""What is usual may drift: what is known of it from many blocks is as uncertain as if each had so
many times its own variance more."""
DRIFTED = 4.0
"""Less than so many standard deviations of `DESIGN_SPREAD` is not looked at as a drift."""
REMEMBERED = 64.0
"""Blocks over which a rank's usual share is learned."""
ALONE_BLOCKS = 6
"""So many of its own blocks must be known of a rank without peers; how it drifts is known later."""
LEARNED_MAX = 4000.0
"""Means of one length that count fully in their spread."""
PENDING_MAX = 512
"""An excursion of more blocks that was never more than most noise is what is usual from now on; of
another, the oldest become one."""
MIRRORED = 3
"""Of so many ranks, all others seem faster while one is slow: that is nothing to learn from."""
OUTLASTED, AS_SLOW = 3.0, 0.6
"""A slowdown lasts so many times as long as the longest that ended by itself and was at least such
a share as slow..."""
DOUBTED_S, DOUBTED_STEPS = 900.0, 60
"""... or so long, and so many steps: what is slow for longer is worth telling, whatever it is."""
LASTING, LASTED_S, LASTING_SHIFT, LASTING_SURE = 8.0, 60.0, 0.26, 0.75
"""What could be noise by its size is a slowdown all the same once it has lasted so many times as
long as anything did, or as this (steps, where they are longer than a second), and is as large;
with this probability, as longer phases may be to come."""
NOTABLE = 3.5
"""Standard deviations above which one that has ended is remembered so..."""
FORGOTTEN_S = 6 * 3600.0
"""... for so long."""
STEADY = 3
"""All but one in so many blocks of a slowdown are at least half as slow as it is."""
SHORTEST_S, SHORTEST_EXCESS = (1.0, 2.0), 2.0
"""Nothing shorter is confirmed: of an excess of at least this, and of less."""


_NORMAL = NormalDist()


@dataclass(slots=True)
class Block:
    """Some steps of one rank."""

    began_s: float
    """Job time."""
    seconds: float
    """What its steps took, without pauses: nothing has lasted through them."""
    step_s: float
    """What one of them took."""
    share: float
    """Logarithm of the rank's own work over that of its peers."""
    own: float
    """Logarithm of its own seconds a step."""
    taken: float
    """As `share`, whatever work was declared: who takes no longer than others holds nobody up."""


@dataclass(slots=True)
class Excursion:
    """One rank that is slower than usual, for as long as that lasts."""

    blocks: list[Block]
    usual: float = 0.0
    """Logarithm of the usual share."""
    excess: float = 0.0
    """The confirmed excess; 0 if there is none (yet)."""
    probability: float = 0.0
    """That it is no chance, once it is confirmed."""
    notable: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Blocks (0: all) -> shift and seconds of the newest such window that was more than most noise
    is."""
    length: tuple[float, float] = (0.0, 0.0)
    """Shift and seconds of all of it, once it was slow throughout."""
    slower: bool = True
    """Where it is not, the rank does less than usual: that is only not learned from at once."""
    explained: bool = False
    """Something else was seen to be the cause: nothing is learned from it."""

    def join_oldest(self) -> None:
        """Make one block of the two oldest ones."""
        one, other = self.blocks[:2]
        share, own = (one.share + other.share) / 2, (one.own + other.own) / 2
        seconds, taken = one.seconds + other.seconds, (one.taken + other.taken) / 2
        self.blocks[:2] = [Block(one.began_s, seconds, other.step_s, share, own, taken)]

    @property
    def began_s(self) -> float:
        """When it set in, in job time: where its blocks turn odd for good."""
        half = self.usual + max(self.mean_shift, math.log1p(STRAGGLER_EXCESS)) / 2
        score = best = 0
        onset_s = self.blocks[-1].began_s
        for block in reversed(self.blocks):
            score += 1 if block.share > half else -1
            if score > best:
                onset_s, best = block.began_s, score
        return onset_s

    @property
    def is_remarkable(self) -> bool:
        """Whether it is, or was, more than noise: what it shows will not become usual."""
        return bool(self.excess or self.notable or self.explained)

    @property
    def is_fading(self) -> bool:
        """Whether the newest block is not even half as slow."""
        return self.recent_shift(0.0) < self.mean_shift / 2

    @property
    def mean_shift(self) -> float:
        """The mean shift of the logarithm since it set in."""
        return sum(block.share for block in self.blocks) / len(self.blocks) - self.usual

    def recent_shift(self, seconds: float) -> float:
        """Return that of the last blocks that make up `seconds`, one at least."""
        taken_s, shares = 0.0, []
        for block in reversed(self.blocks):
            shares.append(block.share)
            taken_s += block.seconds
            if taken_s >= seconds:
                break
        return sum(shares) / len(shares) - self.usual

    def recent(self, seconds: float) -> float:
        """Return the mean excess of the last blocks that make up `seconds`, one at least."""
        return math.expm1(self.recent_shift(seconds))


class Passed:
    """Slowdowns that ended by themselves, of all ranks of a job: any of them may come again."""

    def __init__(self) -> None:
        """Begin knowing none."""
        self._known: list[tuple[float, float, float]] = []

    def note(self, now: float, shift: float, seconds: float) -> None:
        """Note that a shift of the logarithm lasted for so long and is over."""
        self._known = [
            (at_s, s, t)
            for at_s, s, t in self._known
            if now - at_s < FORGOTTEN_S and not (s <= shift and t <= seconds)
        ]
        self._known.append((now, shift, seconds))

    def longest_s(
        self, now: float, shift: float, more: Iterable[tuple[float, float]] = ()
    ) -> float:
        """Return how long the longest lasted that was about as slow, or slower.

        `more` are shifts and seconds of others that may be over.
        """
        known = ((s, t) for at_s, s, t in self._known if now - at_s < FORGOTTEN_S)
        return max((t for s, t in chain(known, more) if s >= AS_SLOW * shift), default=0.0)


@dataclass(slots=True)
class _Spread:
    """Of means over windows of one length: sums of squares, and of products of neighbours."""

    count: float = 0.0
    squares: float = 0.0
    pairs: float = 0.0
    products: float = 0.0

    def add(self, deviation: float, num: float = 1.0) -> None:
        self.count += num
        self.squares += num * deviation * deviation
        if self.count > LEARNED_MAX:
            self.count, self.squares = self.count / 2, self.squares / 2
            self.pairs, self.products = self.pairs / 2, self.products / 2

    def add_pair(self, one: float, other: float) -> None:
        self.pairs += (one * one + other * other) / 2
        self.products += one * other

    @property
    def freedom(self) -> float:
        """Degrees of freedom, fewer where neighbours resemble one another."""
        alike = min(max(self.products / self.pairs, 0.0), 0.99) if self.pairs > 0.0 else 0.0
        return self.count * (1.0 - alike * alike) / (1.0 + alike * alike)


@dataclass(slots=True)
class _Rank:
    shares: list[float] = field(default_factory=list)
    owns: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    """As `shares`, where work is declared."""
    usual: float = 0.0
    """Mean logarithm of the share, of `known` blocks."""
    known: float = 0.0
    own: float = 0.0
    """Usual logarithm of its own seconds."""
    sum: float = 0.0
    """Page's cumulative sum, in standard deviations, of the excursion or of what may become one."""
    squares: float = 0.0
    """Of its deviations, and how many."""
    count: float = 0.0
    halves: list[float | None] = field(default_factory=lambda: [None] * NUM_SCALES)
    """Of each length, a mean that waits for its neighbour."""
    excursion: Excursion | None = None


class PeerShifts:
    """Ranks whose work is alike; or all that have no peers, each compared with everybody."""

    def __init__(self, *, alike: bool, passed: Passed) -> None:
        """Begin knowing nothing."""
        self._alike, self._passed = alike, passed
        self._lasted = Passed()
        """The same of any excursion, however little more than noise it was."""
        self._ranks: dict[int, _Rank] = {}
        self._began_s = 0.0
        self._steps: list[float] = []
        """Of the block under way: what each of its steps took."""
        self._spreads = [_Spread() for _ in range(NUM_SCALES)]
        self._among = [_Spread() for _ in range(NUM_SCALES)]
        """The same, of all ranks at a time."""
        self._halves: list[dict[int, float] | None] = [None] * NUM_SCALES
        """Of each length, means that wait for the next ones."""
        self._inside = _Spread()
        """Of the steps in a block: the variance of its mean that follows from them."""
        self._scales: list[tuple[float, float]] = []
        self._notable: list[_Rank] = []
        self._fading: list[Excursion] = []
        """Those that may be over: another rank may be slow in its place."""
        self._design = DESIGN_SPREAD**2
        self._freedom = DESIGN_FREEDOM

    def usual_share(self, rank: int) -> float | None:
        """Return a rank's usual own work over that of its peers; None where unknown."""
        mine = self._ranks.get(rank)
        return None if mine is None or not mine.known else math.exp(mine.usual)

    def usual_s(self, rank: int) -> float:
        """Return a rank's usual own seconds a step; 0 where unknown."""
        mine = self._ranks.get(rank)
        return 0.0 if mine is None or not mine.known else math.exp(mine.own)

    def compares(self, rank: int) -> bool:
        """Return whether a rank is compared: a block of it, or of its peers, has ended."""
        return bool(self._scales) and rank in self._ranks

    def excursion(self, rank: int) -> Excursion | None:
        """Return a rank's excursion that is under way."""
        mine = self._ranks.get(rank)
        return None if mine is None else mine.excursion

    # --- steps to blocks ----------------------------------------------------------------------

    def take(
        self,
        now: float,
        seconds: float,
        own: Mapping[int, float],
        ordered: Sequence[float],
        taken: Mapping[int, float] | None = None,
    ) -> bool:
        """Take the own seconds of one step; return whether a block has ended with it.

        `ordered` are those that each is compared with, itself among them; `seconds` is what the
        step, and those before that were not told, took. Where `own` is for the same work of all,
        `taken` is what they took for what they did.
        """
        if not self._steps:
            self._began_s = now - seconds
        for rank, share in _compute_shares(own, ordered):
            mine = self._ranks.get(rank)
            if mine is None:
                mine = self._ranks[rank] = _Rank()
            mine.shares.append(share)
            mine.owns.append(own[rank])
        if taken is not None:
            for rank, share in _compute_shares(taken, sorted(taken.values())):
                self._ranks[rank].taken.append(share)
        self._steps.append(seconds)
        num = len(self._steps)
        if num >= BLOCK_STEPS and sum(self._steps) >= BLOCK_S:
            self._close(now)
            self._steps = []
            return True
        for mine in self._notable if num >= PART_STEPS else ():
            self._test_part(mine, len(own))
        return False

    def forget(self, rank: int) -> None:
        """Forget a rank that has left."""
        self._ranks.pop(rank, None)
        self._notable = [m for m in self._ranks.values() if m.excursion and m.excursion.notable]

    def _test_part(self, mine: _Rank, num: int) -> None:
        """Look at the steps since the last block as well: a few may settle it."""
        excursion = mine.excursion
        if excursion is None or excursion.excess or len(mine.shares) < PART_STEPS:
            return
        excursion.blocks.append(self._make_block(mine, sorted(mine.shares)))
        self._test(mine, excursion, num)
        excursion.blocks.pop()

    def _make_block(self, mine: _Rank, shares: Sequence[float]) -> Block:
        share = math.log(_average_middle(shares))
        own_s = max(_average_middle(sorted(mine.owns)), LEAST_S)
        taken = math.log(_average_middle(sorted(mine.taken))) if mine.taken else share
        most_s = PAUSE * sorted(self._steps)[(len(self._steps) - 1) // 2]
        seconds = sum(min(each, most_s) for each in self._steps)
        step_s = seconds / len(self._steps)
        return Block(self._began_s, seconds, step_s, share, math.log(own_s), taken)

    def _close(self, now: float) -> None:
        blocks: dict[int, Block] = {}
        for rank, mine in self._ranks.items():
            shares = sorted(mine.shares)
            num = len(shares)
            if num >= BLOCK_STEPS:
                spread = math.log(shares[3 * num // 4] / shares[num // 4])
                self._inside.add(spread * math.sqrt(DEPENDENT / num))
                blocks[rank] = self._make_block(mine, shares)
            mine.shares, mine.owns, mine.taken = [], [], []
        if not blocks:
            return
        self._scales = self._estimate_scales(len(blocks))
        self._estimate_design([block.own for block in blocks.values()])
        if len(blocks) >= CROWD:
            self._compare({rank: block.share for rank, block in blocks.items()})
        for rank, block in blocks.items():
            self._follow(now, self._ranks[rank], block)
        under_way = [m.excursion for m in self._ranks.values() if m.excursion]
        if len(self._ranks) <= MIRRORED and any(e.excess for e in under_way):
            for excursion in under_way:
                excursion.explained = excursion.explained or not excursion.slower
        self._fading = [e for e in under_way if e.length[1] and e.is_fading]
        for rank in blocks:
            mine = self._ranks[rank]
            if mine.excursion is not None and mine.excursion.slower:
                self._test(mine, mine.excursion, len(blocks))
        self._notable = [m for m in self._ranks.values() if m.excursion and m.excursion.notable]

    def _compare(self, shares: dict[int, float]) -> None:
        """Learn how far means spread among all ranks, whoever has an excursion.

        The middle half tells it, which few slow ones do not move.
        """
        means = {r: s - self._estimate_usual(self._ranks[r])[0] for r, s in shares.items()}
        for scale, spread in enumerate(self._among):
            ordered = sorted(means.values())
            num = len(ordered)
            if num < CROWD:
                return
            worth, width = num * QUARTILES_WORTH, _measure_spread(ordered)
            spread.add(width / math.sqrt(1.0 + 0.5 / worth), worth)
            others = self._halves[scale]
            if others is None:
                self._halves[scale] = means
                return
            self._halves[scale] = None
            most = max(CLIPPED * width, LEAST_SPREAD)
            for rank in means.keys() & others.keys():
                one, other = (max(-most, min(most, m[rank])) for m in (others, means))
                spread.add_pair(one, other)
            means = {r: (others[r] + m) / 2 for r, m in means.items() if r in others}

    def _estimate_scales(self, num: int) -> list[tuple[float, float]]:
        """Return the variance of a mean of 1, 2, 4, ... blocks, and its degrees of freedom.

        It is the larger of what was learned once excursions were over and what all ranks show.
        """
        found = self._follow_scales(self._spreads, num)
        if self._among[0].count:
            found = list(map(max, found, self._follow_scales(self._among, num)))
        return [(max(v, LEAST_SPREAD**2), min(freedom, FREEDOM_MAX)) for v, freedom in found]

    def _follow_scales(self, spreads: list[_Spread], num: int) -> list[tuple[float, float]]:
        of_ranks = (num - 1) / num if num > 1 else 1.0
        inside = self._inside
        variance, freedom = inside.squares / max(inside.count, 1.0), FIRST_FREEDOM
        found = []
        for spread in spreads:
            carried, seen = min(freedom, CARRIED_FREEDOM), spread.freedom * of_ranks
            direct = spread.squares / spread.count if spread.count else 0.0
            variance = (carried * variance + seen * direct) / (carried + seen)
            freedom = carried + seen
            found.append((variance, freedom))
            firm = ALIKE_PAIRS * max(variance, LEAST_SPREAD**2)
            alike = (spread.products + ALIKE * firm) / (spread.pairs + firm)
            variance *= (1.0 + max(alike, 0.0)) / 2
        return found

    def _estimate_design(self, owns: list[float]) -> None:
        """Estimate by how much ranks differ for good, from how most of them do now."""
        if not self._alike or len(owns) < 3:
            return
        owns = sorted(owns)
        if len(owns) >= CROWD:
            worth = len(owns) * QUARTILES_WORTH
            seen = worth * _measure_spread(owns) ** 2
        else:
            middle, worth = owns[len(owns) // 2], len(owns) - 2.0
            seen = sum(sorted((own - middle) ** 2 for own in owns)[:-1])
        self._freedom = DESIGN_FREEDOM + worth
        self._design = (DESIGN_FREEDOM * DESIGN_SPREAD**2 + seen) / self._freedom

    # --- blocks to excursions -----------------------------------------------------------------

    def _estimate_usual(self, mine: _Rank) -> tuple[float, float]:
        """Return a rank's usual share (logarithm) and the variance of that.

        Of a rank with peers nothing but that is known before the first block.
        """
        if not self._alike:
            drift = DESIGN_SPREAD**2 * ALONE_BLOCKS / max(mine.known, 1.0)
            return mine.usual, self._scale(max(mine.known, 1.0))[0] + drift
        variance = self._scale(max(mine.known, 1.0))[0] * max(mine.known, 1.0)
        variance += DRIFTING * self._scales[0][0]
        precision = mine.known / variance + 1.0 / self._design
        return mine.usual * (mine.known / variance) / precision, 1.0 / precision

    def _scale(self, num: float) -> tuple[float, float]:
        """Return variance and degrees of freedom of a mean of `num` blocks."""
        index = min(int(math.log2(num)), NUM_SCALES - 1)
        variance, freedom = self._scales[index]
        following = self._scales[min(index + 1, NUM_SCALES - 1)][0]
        part = min(num / 2**index - 1.0, 1.0)
        return variance + part * (following - variance), freedom

    def _follow(self, now: float, mine: _Rank, block: Block) -> None:
        if not self._alike and mine.known < ALONE_BLOCKS:
            self._learn(mine, block)
            return
        usual, unknown = self._estimate_usual(mine)
        spread = math.sqrt(self._scales[0][0] + unknown)
        excursion = mine.excursion
        if excursion is not None:
            deviation = (block.share - excursion.usual) / spread
            deviation = deviation if excursion.slower else -deviation
            mine.sum = min(mine.sum + min(deviation, CLIPPED) - DRIFT, HEIGHT)
            if mine.sum <= 0.0:
                self._end(now, mine, excursion)
                usual, unknown = self._estimate_usual(mine)
        if mine.excursion is None:
            if self._has_drifted(mine):
                mine.usual = mine.known = 0.0
                usual, unknown = self._estimate_usual(mine)
                spread = math.sqrt(self._scales[0][0] + unknown)
            deviation = (block.share - usual) / spread
            if abs(deviation) <= ODD:
                self._learn(mine, block)
                return
            mine.excursion = Excursion([], usual, slower=deviation > 0.0)
            mine.sum = min(abs(deviation), CLIPPED) - DRIFT
        excursion = mine.excursion
        excursion.blocks.append(block)
        if self._is_over(excursion, unknown, CLEAR_S):
            self._end(now, mine, excursion)
        elif len(excursion.blocks) > PENDING_MAX and excursion.is_remarkable:
            excursion.join_oldest()
        elif len(excursion.blocks) > PENDING_MAX:
            self._end(now, mine, excursion)
            mine.usual, mine.own = block.share, block.own

    def _has_drifted(self, mine: _Rank) -> bool:
        """Return whether what is usual of a rank is more than ranks of equal work differ by.

        Who becomes slower within hours is learned from all the while, and found by this: it is
        then as new. Of two nobody can say whose work has changed.
        """
        num = len(self._ranks)
        if not self._alike or num < 3 or mine.usual < DRIFTED * math.sqrt(self._design):
            return False
        variance, freedom = self._scale(max(mine.known, 1.0))
        total = (variance + self._design) ** 2
        total /= variance**2 / freedom + self._design**2 / self._freedom
        chance = compute_tail(mine.usual / math.sqrt(variance + self._design), total)
        return chance * 3600.0 / (REMEMBERED * BLOCK_S) * num * NUM_SCALES <= FALSE_AN_HOUR

    def _is_over(self, excursion: Excursion, unknown: float, clear_s: float) -> bool:
        """Return whether the newest blocks are not even half as slow as the excursion was.

        Neither is chance to end it, nor does it go on that it is no more than noise often is.
        """
        blocks, mean = excursion.blocks, excursion.mean_shift
        num = len(blocks)
        if num >= 8 and not num & (num - 1):
            windows = _list_windows(excursion, alike=self._alike)
            steady = excursion.slower and any(window.num == num for window in windows)
            if not steady and abs(mean) < WEAK * math.sqrt(self._scale(num)[0] + unknown):
                return True
        whole = math.log1p(excursion.excess) if excursion.excess else mean
        total, seconds = 0.0, 0.0
        for count, block in enumerate(reversed(blocks[num // 3 :]), 1):
            total += block.share - excursion.usual
            seconds += block.seconds
            if count < 2 or seconds < clear_s or count & (count - 1):
                continue
            recent = total / count
            gone = abs(recent) < abs(whole) / 2 or recent * whole < 0.0
            if gone and abs(whole - recent) >= GONE * math.sqrt(self._scale(count)[0]):
                return True
        return False

    def _end(self, now: float, mine: _Rank, excursion: Excursion) -> None:
        mine.excursion = None
        if excursion.explained:
            return
        for shift, seconds in excursion.notable.values():
            self._passed.note(now, shift, seconds)
        if excursion.length[1]:
            self._lasted.note(now, *excursion.length)
        for block in excursion.blocks if not excursion.excess else ():
            self._learn(mine, block)

    def _learn(self, mine: _Rank, block: Block) -> None:
        """Learn from a block that nothing is wrong with."""
        usual, unknown = self._estimate_usual(mine)
        variance = self._scales[0][0]
        # Of two blocks the second says how far they spread; the first, mostly where they lie.
        deviation = (block.share - usual) / math.sqrt(1.0 + unknown / variance)
        if not self._alike and not mine.known:
            deviation = 0.0
        mine.squares += deviation * deviation
        mine.count += 1.0
        if mine.count > 4 * REMEMBERED:
            mine.count, mine.squares = mine.count / 2, mine.squares / 2
        for scale, spread in enumerate(self._spreads):
            spread.add(deviation)
            other = mine.halves[scale]
            if other is None:
                mine.halves[scale] = deviation
                break
            spread.add_pair(other, deviation)
            mine.halves[scale] = None
            deviation = (other + deviation) / 2
        mine.known = min(mine.known + 1.0, REMEMBERED)
        mine.usual += (block.share - mine.usual) / mine.known
        # Another batch size is learned in a few blocks.
        mine.own += (block.own - mine.own) * (1.0 if mine.known == 1.0 else 0.25)

    # --- the test -----------------------------------------------------------------------------

    def _test(self, mine: _Rank, excursion: Excursion, num: int) -> None:
        """Confirm an excursion, or not, by any of the windows that end now."""
        newest = excursion.blocks[-1]
        now = newest.began_s + newest.seconds
        whole_s = sum(block.seconds for block in excursion.blocks)
        for window in _list_windows(excursion, alike=self._alike):
            whole = window.num == len(excursion.blocks)
            if whole:
                excursion.length = (window.shift, whole_s)
            deviation, alarms = self._estimate_alarms(mine, window, num)
            if deviation >= NOTABLE:
                excursion.notable[0 if whole else window.num] = (window.shift, window.seconds)
            if not self._is_much(mine, window, num):
                continue
            probability = TRUE_AN_HOUR / (TRUE_AN_HOUR + alarms)
            if alarms <= FALSE_AN_HOUR:
                fading = (w for e in self._fading if e is not excursion for w in e.notable.values())
                most_s = max(DOUBTED_S, DOUBTED_STEPS * window.step_s)
                passed_s = self._passed.longest_s(now, window.shift, fading)
                enough_s = min(OUTLASTED * passed_s, most_s)
            elif whole and window.shift >= LASTING_SHIFT:
                fading = (e.length for e in self._fading if e is not excursion)
                least_s = LASTED_S * max(1.0, window.step_s)
                enough_s = LASTING * max(self._lasted.longest_s(now, window.shift, fading), least_s)
                probability = LASTING_SURE
            else:
                continue
            if whole_s >= enough_s:
                excursion.excess = math.expm1(window.shift)
                excursion.probability = max(excursion.probability, probability)

    def _estimate_alarms(self, mine: _Rank, window: "_Window", num: int) -> tuple[float, float]:
        """Return by how many standard deviations a mean is off, and how often it is by chance.

        That is the expected number an hour, in all ranks and windows.
        """
        unknown = self._estimate_usual(mine)[1]
        common = self._scales[0][0]
        variance, freedom = self._scale(window.num)
        variance *= max(1.0, (10.0 + mine.squares / common) / (10.0 + mine.count))
        of_design = self._freedom if self._alike else FREEDOM_MAX
        total = (variance + unknown) ** 2
        total /= variance**2 / freedom + unknown**2 / of_design
        deviation = window.shift / math.sqrt(variance + unknown)
        looks = 3600.0 / window.seconds * num * NUM_SCALES
        alarms = compute_tail(deviation, total) * looks
        if not self._alike or unknown < self._design / 2:
            return deviation, alarms
        # By how much a rank differs for good is drawn once, and not anew with each look. A sum is
        # as large only where one of its parts is at least its part of it (Boole's inequality).
        for part in DESIGN_PARTS:
            by_design = compute_tail(part * window.shift / math.sqrt(unknown), of_design) * num
            noise = compute_tail((1.0 - part) * window.shift / math.sqrt(variance), freedom)
            alarms = min(alarms, by_design + noise * looks)
        return deviation, alarms

    def _is_much(self, mine: _Rank, window: "_Window", num: int) -> bool:
        """Return whether it costs the job something, and lasts for longer than a burst."""
        # Two cannot outvote each other: who takes no longer than before is not slow.
        alone = mine.known > 0.0 and (not self._alike or num == 2)
        if alone and window.own - mine.own < window.shift / 2:
            return False
        extra_s = math.exp(window.own) * -math.expm1(-window.shift)
        if extra_s < max(STRAGGLER_FLOOR_S, IMPACT * window.step_s):
            return False
        excess = math.expm1(window.shift)
        large = excess >= SHORTEST_EXCESS
        if window.num == 1 and not large:
            return False
        least_s = max(CONFIRM_S / excess**2, SHORTEST_S[0 if large else 1])
        return window.seconds >= least_s * max(1.0, window.step_s)


@dataclass(frozen=True, slots=True)
class _Window:
    """The newest blocks of an excursion."""

    num: int
    seconds: float
    shift: float
    """Mean of the logarithm of the share, over the usual one."""
    own: float
    """Mean logarithm of the rank's own seconds."""
    step_s: float


def _list_windows(excursion: Excursion, *, alike: bool) -> Iterator[_Window]:
    """Yield the windows of 1, 2, 4, ... blocks, and of all, that are slow throughout."""
    shares = list[float]()
    own, taken, seconds = 0.0, 0.0, 0.0
    for num, block in enumerate(reversed(excursion.blocks), 1):
        insort(shares, block.share)
        own += block.own
        taken += block.taken
        seconds += block.seconds
        if num & (num - 1) and num != len(excursion.blocks):
            continue
        mean = sum(shares) / num
        # Whoever does no more than its peers holds nobody up, whatever it did before.
        shift = min(mean - excursion.usual, taken / num) if alike else mean - excursion.usual
        steady = shares[(num - 1) // STEADY] - excursion.usual >= shift / 2
        if shift >= math.log1p(STRAGGLER_EXCESS) and steady:
            yield _Window(num, seconds, shift, own / num, block.step_s)


def compute_tail(deviation: float, freedom: float) -> float:
    """Return how probable it is that Student's t exceeds `deviation`.

    By Wallace's normal approximation (Annals of Mathematical Statistics 30, 1959).

    >>> round(compute_tail(2.228, 10.0), 3), round(compute_tail(0.0, 5.0), 3)
    (0.025, 0.5)
    """
    z = math.sqrt(freedom * math.log1p(deviation * deviation / freedom))
    z *= (8.0 * freedom + 1.0) / (8.0 * freedom + 3.0)
    return 0.5 * math.erfc(math.copysign(z, deviation) / math.sqrt(2.0))


def _compute_shares(
    own: Mapping[int, float], ordered: Sequence[float]
) -> Iterator[tuple[int, float]]:
    """Yield each rank and its seconds over those of the middle one of the others in `ordered`."""
    middle = (len(ordered) - 1) // 2
    low = max(ordered[middle], LEAST_S)
    high = max(ordered[min(middle + 1, len(ordered) - 1)], LEAST_S)
    for rank, own_s in own.items():
        yield rank, max(own_s, LEAST_S) / (low if own_s > low else high)


def _measure_spread(ordered: Sequence[float]) -> float:
    """Return the standard deviation of a normal sample from its middle half.

    A quarter of it may be anywhere. Expected order statistics are Blom's (1958).

    >>> round(_measure_spread([-9.0, -0.85, -0.47, -0.15, 0.15, 0.47, 9.0, 9.0]), 2)
    1.0
    """
    num = len(ordered)
    apart = num - num // 4
    expected = 2.0 * _NORMAL.inv_cdf((apart - 0.375) / (num + 0.25))
    return (ordered[apart - 1] - ordered[num // 4]) / expected


def _average_middle(ordered: Sequence[float]) -> float:
    """Return the mean without the smallest and the largest quarter; of few, the lower median."""
    num = len(ordered)
    if num < BLOCK_STEPS:
        return ordered[(num - 1) // 2]
    middle = ordered[num // 4 : num - num // 4]
    return sum(middle) / len(middle)
