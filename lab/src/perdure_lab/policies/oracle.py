"""What a trace would have let anyone have: the area, and the best plans in hindsight.

    U1   the area: the fastest shape at every moment, at no cost
    U2   clairvoyant: the best sequence of shapes, each change at its least physical cost
    U2'  the same sequence search, each change at what a given system was measured to take

For every change of who is there, V_k(c) = max over c' of V_{k-1}(c') + what c earns until the
next change, coming from c'. The search is exact: what it forgets cannot win. Each bound errs
upwards, so that no policy may exceed it: who leaves is taken not to be active wherever the shape
leaves room for that, and while state moves those that have it train in their fastest shape.
"""

from collections.abc import Callable, Sequence

import msgspec

from perdure_lab.policies.throughput import Shape, Throughput, compute_move_s
from perdure_lab.traces import Interval


class ChangeCosts(msgspec.Struct, frozen=True):
    """The costs of a change beside the time that state takes to move: seconds of no training."""

    loss_s: float
    """After an active node left without a word; for the oracle, the least time to know of it."""
    announced_s: float = 0.0
    """After one left that was announced. Moving state begins with the notice."""
    voluntary_s: float = 0.0
    """Where nothing is lost. State moves while the old shape trains."""
    bytes_per_s: float = 1.25e9
    """Of a node's link."""


NEVER, STOPPED = "never", "stopped"
State = Shape | str
"""A shape; or nothing yet, whose first start is free; or nothing any more."""


def compute_area(intervals: Sequence[Interval], table: Throughput) -> float:
    """Return U1, samples."""
    best = ((table.choose_fastest(len(i.living)), i.length_s) for i in intervals)
    return sum((table.rates[shape] * length_s for shape, length_s in best if shape), 0.0)


def score_best_plan(
    intervals: Sequence[Interval],
    table: Throughput,
    costs: ChangeCosts,
    progress: Callable[[float], None] = lambda _: None,
) -> float:
    """Return the samples of the best sequence of shapes, known from the end (U2, U2').

    Args:
        intervals: Of the trace.
        table: Which shapes there are.
        costs: Of changes.
        progress: Called with the share that is done.
    """
    values: dict[State, float] = {NEVER: 0.0}
    before = 0
    # Whatever plan is behind by more than any change costs can be overtaken by changing to it.
    widest = max(compute_move_s(table, None, s, 1, costs.bytes_per_s) for s in table.rates)
    dearest_s = widest + max(costs.loss_s, costs.announced_s, costs.voluntary_s)
    fastest = max(table.rates.values())
    bound = 2 * dearest_s * fastest
    for number, interval in enumerate(intervals):
        floor = max(values.values()) - bound
        values = {c: v for c, v in values.items() if v >= floor}
        step = Step(table, costs, interval, before)
        best: dict[State, float] = {}
        fitting, top = table.list_fitting_shapes(len(interval.living)), 0.0
        fitting.sort(key=lambda shape: -table.rates[shape])
        for old, value in values.items():
            idle = old if old == NEVER else STOPPED
            best[idle] = max(best.get(idle, 0.0), value)
            for new in fitting:
                limit = value + table.rates[new] * interval.length_s + widest * fastest
                if limit < top - bound:
                    continue
                earned = value + step.earn(old, new)
                top = max(top, earned)
                if earned > best.get(new, -1.0):
                    best[new] = earned
        values, before = best, len(interval.living)
        progress((number + 1) / len(intervals))
    return max(values.values())


class Step:
    """The change that an interval begins with, `before` nodes being there, and its time."""

    def __init__(
        self, table: Throughput, costs: ChangeCosts, interval: Interval, before: int
    ) -> None:
        """Look at what `interval` begins with."""
        self._table, self._costs, self._length_s = table, costs, interval.length_s
        notices = [departure.notice_s for departure in interval.change.left]
        self.survivors, self.left = before - len(notices), len(notices)
        self.announced = sum(notice > 0 for notice in notices)
        self._notice_s = max(notices, default=0.0)

    def earn(self, old: State, new: Shape, lost: int | None = None) -> float:
        """Return the samples of `new` until the next change, coming from `old`.

        `lost` of its nodes have left; None: as few as can be.
        """
        costs, rates, length_s = self._costs, self._table.rates, self._length_s
        if old == NEVER:
            return rates[new] * length_s
        if isinstance(old, str):
            pause_s = costs.voluntary_s + self._move_s(None, new, new.nodes)
            return rates[new] * max(0.0, length_s - pause_s)
        if lost is None:
            lost = max(0, old.nodes - self.survivors)
        if lost == 0 and old == new:
            return rates[new] * length_s
        move_s = self._move_s(old, new, max(0, new.nodes - (old.nodes - lost)))
        if lost == 0:
            return self._turn(old, new, length_s, move_s)
        pause_s = costs.loss_s
        if lost <= self.announced:
            pause_s, move_s = costs.announced_s, max(0.0, move_s - self._notice_s)
        rest_s = max(0.0, length_s - pause_s)
        at_once = rates[new] * max(0.0, rest_s - move_s)
        survivors = self._table.choose_fastest(old.nodes - lost)
        return max(at_once, self._turn(survivors, new, rest_s, move_s))

    def _turn(self, old: Shape | None, new: Shape, length_s: float, move_s: float) -> float:
        """Return the samples of `length_s` in which state moves beside training in `old`.

        At no more than the pace of `new`: nobody turns to a slower shape of its own will, and a
        longer move must not pay. Nor may a shorter one cost: who has no time left to turn trains
        on to the end, and is taken to have turned then.
        """
        rates = self._table.rates
        aside_s = min(move_s, length_s)
        rest_s = max(0.0, length_s - aside_s - self._costs.voluntary_s)
        beside = min(rates[old], rates[new]) if old else 0.0
        return max(beside * aside_s + rates[new] * rest_s, beside * length_s)

    def _move_s(self, old: Shape | None, new: Shape, fresh: int) -> float:
        return compute_move_s(self._table, old, new, fresh, self._costs.bytes_per_s)
