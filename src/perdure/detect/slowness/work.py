"""What declared work explains of the times that peers take.

A script may declare how much a rank does in each step (`run.work`): tokens, samples. Who did more
took longer, and is compared for the same amount. Four things are not taken on trust.

*That time scales with it.* Loading, an optimizer's step and what is launched take as long for much
as for little. So of a rank's usual step a share f is fixed, and u times the usual work takes
f + (1 - f) u times as long. f is estimated from how the times of ranks follow their own work from
one step to the next, by least squares on logarithms (recursive, with outliers clipped, all peers
together): no rank's speed enters it, and where times do not follow the work at all, f is 1 and
nothing is divided by. Until steps have differed it is about `FIXED`.

*That a rank did what it declares.* Whoever keeps declaring more than its peers must take more time
than they do, or it could be slow from its first step on, by as much, unseen. Where its times do not
bear out half of it (`DOUBTED`), only how its work varies is believed, and not that it is more.
Whoever declares less is never slower than its time says (`shifts.Block.taken`).

*That all declare it.* A comparison in which a rank declares nothing is one of times alone. Single
steps in which that is so are left out; once they prevail (`CHANGED`), or the opposite does, times
are compared in the other way.

*That it stays the same unit.* Where all ranks at once declare several times as much as usual, or as
little, it is learned anew how long that takes.

Whenever the way changes, ranks are compared anew: what was learned of their times holds no longer.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from perdure.model.signals.progress import WORK_MAX

FIXED, FIRM = 0.1, 0.5
"""Of a usual step, what is taken to be fixed before anything is known, and how firmly: as after
steps whose work has differed by so much (sum of squares of its logarithm)."""
FIRM_MAX = 400.0
"""The firmest: what scales may change, as sequences get longer."""
LEARN_STEPS = 5
"""So many steps are looked at before the first of them is compared."""
CHANGED = 20
"""Steps, more than the others, after which declaring it or not is what is usual."""
UNIT = 1.5
"""Everybody's work is of another unit once it has been further than this (logarithm) from the usual
one for `LEARN_STEPS`."""
LEARN = 1.0 / 32.0
"""Weight of the newest step in what a rank has declared and taken until now."""
SPREAD, SPREAD_LEARN = 0.1, 0.02
"""How far a rank's times depart from one step to the next by what is no work, at first; and how
fast that is learned."""
CLIPPED = 3.0
"""Departures count so many times as much as usual ones at most."""
BORNE_OUT, DOUBTED = 0.35, 0.7
"""A rank's declared work is believed (again) once the others would take longer for it by no more
than this (logarithm), and doubted from this on: it declares twice as much as it takes time for."""
MORE, MORE_STEPS = 0.5, 20
"""Nobody is doubted who declares less than this much (logarithm) more than the others, or did so
in fewer steps."""
ODD_MAX = 3.0
"""Later, no single step counts as if it were further than this (logarithm) from those before."""
SLOPE_MAX = 3.0
SPREAD_LEAST = 0.01
LEAST_S, LEAST_SCALE, MOST_WORK = 1e-6, 1e-3, 20.0
"""Seconds, and times the usual, that nothing is shorter than; and the logarithm of the work over
the usual that no step has more of."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One step of peers, as it is to be compared."""

    at_s: float
    """Job time."""
    seconds: float
    """What the step took, and those before that were not told."""
    own: Mapping[int, float]
    """Rank -> own seconds, as they would be for the usual work."""
    taken: Mapping[int, float] | None = None
    """Rank -> own seconds; None where these are the same."""


@dataclass(slots=True)
class _Claim:
    """What one rank declares."""

    count: int = 0
    more: float = 0.0
    """Mean logarithm of its work over that of the others."""
    off: float = 0.0
    """Mean logarithm of its time over that of the others, for the same work."""
    departure: float | None = None
    """Of its time in the step before, and how that would change with the fixed share."""
    slope: float = 0.0
    believed: bool = True

    def note(self, more: float, off: float) -> bool:
        """Note one step; return whether what it declares is believed no more, or again."""
        self.count += 1
        weight = max(1.0 / self.count, LEARN)
        most = ODD_MAX if self.count > LEARN_STEPS else math.inf
        self.more += weight * max(-most, min(most, more - self.more))
        self.off += weight * max(-most, min(most, off - self.off))
        limit = DOUBTED if self.believed else BORNE_OUT
        before, few = self.believed, self.count < MORE_STEPS
        self.believed = few or self.more < MORE or -self.off < limit
        return self.believed != before


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of all peers: logarithms of their own seconds and of their work."""

    at_s: float
    seconds: float
    own: Mapping[int, float]
    times: dict[int, float]
    works: dict[int, float]


class DeclaredWork:
    """The declared work of ranks that are peers."""

    def __init__(self, *, declared: bool | None = None) -> None:
        """Know nothing yet; where it is not said whether they declare work, the first step says."""
        self._declared = declared
        self.fixed = FIXED
        """Share of a usual step that does not scale with the work."""
        self._firm = FIRM
        self._usual = 0.0
        """Logarithm of the usual work of a rank."""
        self._count = self._against = self._apart = 0
        """Steps; those that were declared unlike the others; the newest ones of another unit."""
        self._spread = SPREAD
        self._claims: dict[int, _Claim] = {}
        self._first: list[_Step] = []
        self.scales: dict[int, float] = {}
        """Rank -> its time for the usual work over that for the work of its newest step."""

    def describe(self, rank: int) -> dict[str, object]:
        """Return what a rank has declared, as evidence; empty where nothing is compared by it."""
        claim = self._claims.get(rank)
        if not self._declared or claim is None:
            return {}
        return {
            "declared_work": round(math.exp(claim.more), 3),
            "work_believed": claim.believed,
            "work_fixed_share": round(self.fixed, 3),
        }

    def forget(self, rank: int) -> None:
        """Forget a rank that has left."""
        self._claims.pop(rank, None)

    def take(
        self, at_s: float, seconds: float, own: Mapping[int, float], work: Mapping[int, float]
    ) -> list[Compared] | None:
        """Return the steps to compare now that one has ended.

        There may be none: a step of which some rank has not declared its work. None: from now on
        ranks are compared in the other way, and what was learned of them holds no longer.
        """
        declared = all(amount > 0.0 for amount in work.values())
        if self._declared is None:
            self._declared = declared
        if declared != self._declared:
            self._against += 1
            if self._against > CHANGED:
                self.__init__(declared=declared)  # type: ignore[misc]
                return None
            return [] if self._declared else [Compared(at_s, seconds, own)]
        self._against = max(self._against - 1, 0)
        if not declared:
            return [Compared(at_s, seconds, own)]
        times = {rank: math.log(max(own_s, LEAST_S)) for rank, own_s in own.items()}
        works = {rank: math.log(max(work[rank], 1.0 / WORK_MAX)) for rank in own}
        if self._count >= LEARN_STEPS and self._is_apart(works.values()):
            self._apart += 1
            if self._apart >= LEARN_STEPS:
                self.__init__(declared=True)  # type: ignore[misc]
                return None
            return []
        self._apart = 0
        step = _Step(at_s, seconds, own, times, works)
        if self._learn(step):
            return None
        self._first.append(step)
        if self._count < LEARN_STEPS:
            return []
        steps, self._first = self._first, []
        return [self._compare(each) for each in steps]

    def _is_apart(self, works: Collection[float]) -> bool:
        """Return whether everybody's work is several times the usual one, or as little of it."""
        return min(works) - self._usual > UNIT or max(works) - self._usual < -UNIT

    def _learn(self, step: _Step) -> bool:
        """Learn from a step how time follows work; return whether other ranks are believed now."""
        ordered_works = sorted(step.works.values())
        self._count += 1
        weight = max(1.0 / self._count, LEARN)
        self._usual += weight * (_find_middle(ordered_works) - self._usual)
        departures: dict[int, float] = {}
        slopes: dict[int, float] = {}
        for rank, work in step.works.items():
            amount, length = self._measure(work)
            departures[rank] = step.times[rank] - math.log(length)
            slopes[rank] = max(-SLOPE_MAX, min(SLOPE_MAX, (1.0 - amount) / length))
        ordered = sorted(departures.values())
        middle, mean_slope = _find_middle(ordered), sum(slopes.values()) / len(slopes)
        most, moved, products, squares, num = CLIPPED * self._spread, 0.0, 0.0, 0.0, 0
        changed = False
        for rank, departure in departures.items():
            claim = self._claims.get(rank)
            if claim is None:
                claim = self._claims[rank] = _Claim()
            off = departure - _find_other(ordered, departure)
            more = step.works[rank] - _find_other(ordered_works, step.works[rank])
            changed = claim.note(more, off) or changed
            departure, slope = departure - middle, slopes[rank] - mean_slope
            if claim.departure is not None:
                change = max(-most, min(most, departure - claim.departure))
                turn = slope - claim.slope
                moved, num = moved + abs(change), num + 1
                products, squares = products + change * turn, squares + turn * turn
            claim.departure, claim.slope = departure, slope
        if num:
            self._spread += SPREAD_LEARN * (max(moved / num, SPREAD_LEAST) - self._spread)
            self._firm = min(self._firm + squares, FIRM_MAX)
            self.fixed = max(0.0, min(1.0, self.fixed + products / self._firm))
        return changed

    def _measure(self, work: float) -> tuple[float, float]:
        """Return how many times the usual work it is, and takes; `work` is its logarithm."""
        amount = math.exp(min(work - self._usual, MOST_WORK))
        return amount, max(self.fixed + (1.0 - self.fixed) * amount, LEAST_SCALE)

    def _compare(self, step: _Step) -> Compared:
        """Return what each rank would have taken for the usual work."""
        own, self.scales = {}, {}
        for rank, work in step.works.items():
            claim = self._claims.get(rank)  # It may have left since.
            believed = work if claim is None or claim.believed else work - claim.more
            scale = self.scales[rank] = 1.0 / self._measure(believed)[1]
            own[rank] = step.own[rank] * scale
        return Compared(step.at_s, step.seconds, own, step.own)


def _find_middle(ordered: Sequence[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _find_other(ordered: Sequence[float], value: float) -> float:
    """Return the middle one of the others; of two, the other one."""
    low = ordered[(len(ordered) - 1) // 2]
    return low if value > low else ordered[min((len(ordered) + 1) // 2, len(ordered) - 1)]
