"""What a policy does about who is there: the next grid, and what it takes to come to it."""

from collections.abc import Sequence
from typing import NamedTuple

from perdure_lab.policies.policies import Policy
from perdure_lab.policies.throughput import Grid, Shape, Throughput, compute_move_s, fill, place

REPLAN_FACTOR = 1.1
"""A policy that reroutes plans anew where that is so much faster."""


class Target(NamedTuple):
    """A grid to come to."""

    grid: Grid
    shape: Shape
    """What its pace is."""
    move_s: float
    """The time that state takes to get there."""


class Responder:
    """Chooses grids for one policy on one table."""

    def __init__(self, policy: Policy, table: Throughput, bytes_per_s: float) -> None:
        """Choose for `policy`; nodes' links carry `bytes_per_s`."""
        self._policy, self._table, self._bytes_per_s = policy, table, bytes_per_s
        self._stages = 0
        """Fixed at the first start, for groups."""

    def start(self, living: Sequence[str]) -> Target | None:
        """Return the grid to start with on `living`, its whole state to be read."""
        best = self._table.choose_fastest(len(living))
        if self._policy.response == "groups" and self._stages:
            best = self._table.choose_fastest_row(len(living) // self._stages, self._stages)
        if best is None:
            return None
        self._stages = self._stages or best.stages
        grid, _ = place(None, best, living)
        return Target(grid, best, self._compute_move_s(None, best, best.nodes))

    def after_loss(
        self, old: Grid, shape: Shape, living: Sequence[str], dwell_s: float
    ) -> Target | None:
        """Return the grid to go on with; `old` has lost members, which are not in `living`."""
        alive = set(living)
        broken = old.without([node for node in old.members if node not in alive])
        if self._policy.response == "reroute":
            kept = self._table.choose_fastest_row(broken.count_copies(), broken.stages)
            best = self._table.choose_fastest(len(living))
            rates = self._table.rates
            if kept and best and rates[best] <= REPLAN_FACTOR * rates[kept]:
                return Target(broken, kept, 0.0)
        elif self._policy.response == "groups":
            return self._regroup(broken, living)
        return self._choose_shape(broken, shape, living, dwell_s)

    def after_join(
        self, old: Grid, shape: Shape, living: Sequence[str], dwell_s: float
    ) -> Target | None:
        """Return a faster grid, nothing being lost; None where there is none worth it."""
        rates = self._table.rates
        if self._policy.response == "groups":
            target = self._regroup(old, living)
            return target if target and rates[target.shape] > rates[shape] else None
        best = self._table.choose_fastest(len(living))
        if self._policy.response == "reroute":
            filled, fresh = fill(old, living)
            found = self._table.choose_fastest_row(filled.count_copies(), filled.stages)
            factor = REPLAN_FACTOR if any(None in row for row in filled.rows) else 1.0
            if found and best and rates[best] <= factor * rates[found]:
                move_s = self._compute_move_s(shape, found, fresh)
                return Target(filled, found, move_s) if rates[found] > rates[shape] else None
        faster = self._choose_faster(shape, living, dwell_s)
        return self._reach(old, shape, faster, living) if faster else None

    def _choose_shape(
        self, broken: Grid, old: Shape, living: Sequence[str], dwell_s: float
    ) -> Target | None:
        """Return the fastest shape's grid; or, weighed, the one that earns most until the next."""
        if not self._policy.weighs:
            best = self._table.choose_fastest(len(living))
            return self._reach(broken, old, best, living) if best else None
        shrunk = self._table.choose_fastest_row(broken.count_copies(), broken.stages)
        rows = self._table.list_fastest_rows(len(living))
        candidates = sorted({*rows, *([shrunk] if shrunk else [])})
        loss_s = self._policy.loss.total_s

        def earn(target: Target) -> tuple[float, float]:
            left_s = max(0.0, dwell_s - loss_s - target.move_s)
            rate = self._table.rates[target.shape]
            earned = rate * left_s
            if target.move_s == 0.0:  # and then there is time to turn to a better one
                ways = (self._earn_by_turning(target.shape, new, left_s) for new in rows)
                earned = max(earned, *ways)
            return earned, rate

        targets = [self._reach(broken, old, shape, living) for shape in candidates]
        return max(targets, key=earn, default=None)

    def _earn_by_turning(self, old: Shape, new: Shape, left_s: float) -> float:
        """Return the samples of `left_s` in which state moves to `new` beside training in `old`."""
        rates = self._table.rates
        move_s = self._compute_move_s(old, new, max(0, new.nodes - old.nodes))
        aside_s = min(move_s, left_s)
        rest_s = max(0.0, left_s - aside_s - self._policy.join.total_s)
        return rates[old] * aside_s + rates[new] * rest_s

    def _choose_faster(self, old: Shape, living: Sequence[str], dwell_s: float) -> Shape | None:
        """Return the shape to change to of one's own will; None: to stay."""
        rates = self._table.rates
        if not self._policy.weighs:
            best = self._table.choose_fastest(len(living))
            return best if best and rates[best] > rates[old] else None
        rows = self._table.list_fastest_rows(len(living))
        best = max(rows, key=lambda new: self._earn_by_turning(old, new, dwell_s), default=None)
        if best is None or self._earn_by_turning(old, best, dwell_s) <= rates[old] * dwell_s:
            return None
        return best

    def _reach(self, old: Grid, old_shape: Shape, shape: Shape, living: Sequence[str]) -> Target:
        grid, fresh = place(old, shape, living)
        return Target(grid, shape, self._compute_move_s(old_shape, shape, fresh))

    def _regroup(self, broken: Grid, living: Sequence[str]) -> Target | None:
        """Return the whole groups, and as many more as the nodes outside of them fill."""
        whole = [row for row in broken.rows if None not in row]
        inside = {node for row in whole for node in row}
        spare = [node for node in living if node not in inside]
        stages = self._stages
        more = [tuple(spare[at : at + stages]) for at in range(0, len(spare) - stages + 1, stages)]
        shape = self._table.choose_fastest_row(len(whole) + len(more), stages)
        if shape is None:
            return None
        rows = [*whole, *more]
        return Target(
            Grid(tuple(rows)), shape, self._compute_move_s(shape, shape, len(more) * stages)
        )

    def _compute_move_s(self, old: Shape | None, new: Shape, fresh: int) -> float:
        return compute_move_s(self._table, old, new, fresh, self._bytes_per_s)
