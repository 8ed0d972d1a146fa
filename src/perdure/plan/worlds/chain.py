"""A chain of blocks: what a run of them costs as a stage, and the best cuts into stages.

Memory of a stage is its state (parameters, gradients, optimizer), and for each micro-batch in
flight what its forward has left behind: with recompute only the inputs of its blocks, and beside
these, while one block's forward is done again, all that this block stores.

The best cut makes the slowest stage as fast as it can be: dynamic programming over (stages left,
first block), from the model's end. Counted from the end, a stage's place says how many
micro-batches 1F1B keeps in flight in it, hence its memory limit, so that one table serves every
number of stages. The principle is that of the classic chains-on-chains problem (S. H. Bokhari, IEEE
Trans. Computers 37(1), 1988); copies that differ between stages are PipeDream's replicated stages
(D. Narayanan et al., SOSP 2019).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import TypeVar

import msgspec

from perdure.model.planning.costs import CostProfile, Shared

T = TypeVar("T", int, float)


class StageCost(msgspec.Struct, frozen=True):
    """One stage on a device without a slowdown; seconds of one micro-batch, bytes."""

    forward_s: float
    backward_s: float
    """With its recompute, and without `weight_s`."""
    weight_s: float
    """The part of the backward that may be done later; 0 where the backward is not split."""
    input_bytes: int
    gradient_bytes: int
    """Without what it shares with blocks of other stages."""
    update_s: float

    def spent_s(self, kind: str) -> float:
        """Return what an action of that kind (F, B or W) takes of a micro-batch."""
        return {"F": self.forward_s, "B": self.backward_s, "W": self.weight_s}[kind]


class Chain:
    """All blocks of a profile with one micro-batch size; sums of any run in constant time."""

    def __init__(self, profile: CostProfile, micro_batch: int) -> None:
        """Sum up `profile`; `micro_batch` must be one of its sizes."""
        costs = [block.costs[micro_batch] for block in profile.blocks]
        self.profile, self.micro_batch, self.costs = profile, micro_batch, costs
        self.forward_s = _sum(cost.forward_s for cost in costs)
        self.backward_s = _sum(cost.backward_s for cost in costs)
        self.recompute_s = _sum(cost.recompute_s for cost in costs)
        self.weight_s = _sum(cost.weight_s or 0.0 for cost in costs)
        self.splits = all(cost.weight_s is not None for cost in costs)
        self.stored = _sum(cost.stored_bytes for cost in costs)
        self.inputs = _sum(cost.input_bytes for cost in costs)
        self.state = _sum(block.state_bytes for block in profile.blocks)
        self.gradients = _sum(block.gradient_bytes for block in profile.blocks)
        self.updates_s = _sum(block.update_s for block in profile.blocks)
        self.shared = profile.shared
        self.longest_s = max(cost.forward_s + cost.backward_s for cost in costs)
        """Forward and backward of the block that takes longest: no stage is faster."""
        self._widest = cache(self._compute_widest)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.costs)

    @property
    def work_s(self) -> float:
        """Forward and backward of the whole model, without recompute."""
        return self.forward_s[-1] + self.backward_s[-1]

    def memory(self, first: int, stop: int, in_flight: int, recompute: bool) -> int:
        """Return the bytes that a stage needs, without the profile's `base_bytes`."""
        kept = self.inputs if recompute else self.stored
        widest = self._widest(first)[stop - first - 1] if recompute else 0
        state = self.state[stop] - self.state[first] - self.count_twice([(first, stop)])
        return int(state + in_flight * (kept[stop] - kept[first]) + widest)

    def count_twice(self, runs: Sequence[tuple[int, int]]) -> int:
        """Return the bytes of state that blocks of `runs`, on one device, count and share."""
        return sum(
            shared.state_bytes * max(0, self._count_sharing(shared, runs) - 1)
            for shared in self.shared
        )

    def _count_sharing(self, shared: Shared, runs: Sequence[tuple[int, int]]) -> int:
        return sum(first <= block < stop for block in shared.blocks for first, stop in runs)

    def work(self, first: int, stop: int, recompute: bool) -> float:
        """Return the seconds of one micro-batch in a stage."""
        total_s = self.forward_s[stop] - self.forward_s[first]
        total_s += self.backward_s[stop] - self.backward_s[first]
        return total_s + (self.recompute_s[stop] - self.recompute_s[first] if recompute else 0.0)

    def decide_recompute(
        self, first: int, stop: int, in_flight: int, memory_bytes: int, allowed: tuple[bool, ...]
    ) -> bool | None:
        """Return whether a stage recomputes: only where it must; None where it does not fit."""
        room = memory_bytes - self.profile.base_bytes
        for way in allowed:
            if self.memory(first, stop, in_flight, way) <= room:
                return way
        return None

    def stage(self, first: int, stop: int, recompute: bool, *, split: bool = False) -> StageCost:
        """Return a stage's cost; with `split`, gradients of weights apart."""
        weight_s = self.weight_s[stop] - self.weight_s[first] if split else 0.0
        backward_s = self.backward_s[stop] - self.backward_s[first] - weight_s
        again_s = self.recompute_s[stop] - self.recompute_s[first] if recompute else 0.0
        gradients = self.gradients[stop] - self.gradients[first]
        update_s = self.updates_s[stop] - self.updates_s[first]
        for shared in self.shared:
            here = self._count_sharing(shared, [(first, stop)])
            whole = here == len(shared.blocks)  # Else it is reduced with those of other stages.
            gradients -= shared.gradient_bytes * (here - whole)
            update_s -= shared.update_s * max(0, here - 1)
        return StageCost(
            forward_s=self.forward_s[stop] - self.forward_s[first],
            backward_s=backward_s + again_s,
            weight_s=weight_s,
            input_bytes=self.costs[first].input_bytes,
            gradient_bytes=int(gradients),
            update_s=max(0.0, update_s),
        )

    def _compute_widest(self, first: int) -> list[int]:
        """Return what the block that stores most stores, of runs from `first` on, by length."""
        return list(accumulate((cost.stored_bytes for cost in self.costs[first:]), max))


def _sum(values: Iterable[T]) -> list[T]:
    """Return the sums of all beginnings of `values`, the empty one first."""
    return list(accumulate(values, initial=0))


Cost = Callable[[int, int, int], float]
"""(first, stop, place) -> seconds a micro-batch of blocks first..stop as the place-th stage from
the end, counted from 1; infinite where it does not fit. Must not fall as `stop` rises."""

Cut = tuple[float, tuple[int, ...], tuple[bool, ...]]
"""(bottleneck, cuts, extras)"""
_Layer = tuple[list[float], list[int]]


class Cutter:
    """Optimal cuts of one chain, for any number of stages; tables are made when asked for."""

    def __init__(self, blocks: int, cost: Cost, loads: tuple[float, float] = (1.0, 1.0)) -> None:
        """Cut `blocks` blocks.

        `loads` are what a stage's cost is multiplied by: of a stage with the common number of
        copies, and of one with an extra copy.
        """
        self._blocks, self._cost, self._loads = blocks, cache(cost), loads
        self._layers: dict[tuple[int, int], _Layer] = {(0, 0): ([math.inf] * blocks + [0.0], [])}
        self._extra: dict[tuple[int, int, int], bool] = {}
        self._search = cache(self._find_cut)

    def cut(self, stages: int, extra: int = 0) -> Cut | None:
        """Return (bottleneck, cuts, extras); None where no cut fits the memory.

        `cuts` are the first blocks of all stages, and at the end the number of blocks. `extras`
        says which stages have an extra copy; `extra` of them do.
        """
        possible = 0 < stages <= self._blocks and 0 <= extra <= stages
        return self._search(stages, extra) if possible else None

    def _find_cut(self, stages: int, extra: int) -> Cut | None:
        for place in range(1, stages + 1):
            for among in range(max(0, extra - (stages - place)), min(extra, place) + 1):
                if (place, among) not in self._layers:
                    self._layers[place, among] = self._fill(place, among)
        worst = self._layers[stages, extra][0][0]
        if math.isinf(worst):
            return None
        cuts, extras, at = [0], [], 0
        for place in range(stages, 0, -1):
            stop = self._layers[place, extra][1][at]
            has = self._extra.get((place, extra, at), False)
            extras.append(has)
            extra -= has
            cuts.append(stop)
            at = stop
        return worst, tuple(cuts), tuple(extras)

    def _fill(self, place: int, extra: int) -> _Layer:
        best = [math.inf] * (self._blocks + 1)
        stops = [self._blocks] * (self._blocks + 1)
        for has in (False, True):
            rest = extra - has
            if 0 <= rest <= place - 1:
                behind = self._layers[place - 1, rest][0]
                self._improve(place, extra, has, behind, best, stops)
        return best, stops

    def _improve(
        self,
        place: int,
        extra: int,
        has: bool,
        behind: Sequence[float],
        best: list[float],
        stops: list[int],
    ) -> None:
        """Take what is better than `best` where this stage has, or has not, an extra copy.

        A stop matters only if less is left behind it than behind every nearer one. From one of
        these to the next the stage's own cost does not fall, and what is left does: the best is
        where they meet, which is mostly near to where they met for the block behind `first`. So a
        layer costs little more than a look at each block.
        """
        load, meet = self._loads[has], 0
        matter: list[int] = []
        """Stops, the nearest at the end; from number `meet` on more is left than is done."""
        for first in range(self._blocks - place, -1, -1):
            while matter and behind[matter[-1]] >= behind[first + 1]:
                matter.pop()
            matter.append(first + 1)
            meet = min(meet, len(matter))
            while meet > 0 and self._is_short(load, first, matter[meet - 1], place, behind):
                meet -= 1
            while meet < len(matter) and not (
                self._is_short(load, first, matter[meet], place, behind)
            ):
                meet += 1
            for stop in reversed(matter[max(0, meet - 1) : meet + 1]):
                worst = max(load * self._cost(first, stop, place), behind[stop])
                if worst < best[first]:
                    best[first], stops[first] = worst, stop
                    self._extra[place, extra, first] = has

    def _is_short(
        self, load: float, first: int, stop: int, place: int, behind: Sequence[float]
    ) -> bool:
        """Return whether a stage costs less than what is left behind it."""
        return load * self._cost(first, stop, place) < behind[stop]
