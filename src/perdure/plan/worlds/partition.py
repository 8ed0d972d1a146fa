"""A chain of blocks cut into stages so that the slowest stage is as fast as it can be.

Dynamic programming over (stages left, first block), from the model's end. Counted from the end, a
stage's place says how many micro-batches 1F1B keeps in flight in it, hence its memory limit, so
that one table serves every number of stages. The principle is that of the classic chains-on-chains
problem (S. H. Bokhari, IEEE Trans. Computers 37(1), 1988); copies that differ between stages are
PipeDream's replicated stages (D. Narayanan et al., SOSP 2019).
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

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
        self._found: dict[tuple[int, int], Cut | None] = {}

    def cut(self, stages: int, extra: int = 0) -> Cut | None:
        """Return (bottleneck, cuts, extras); None where no cut fits the memory.

        `cuts` are the first blocks of all stages, and at the end the number of blocks. `extras`
        says which stages have an extra copy; `extra` of them do.
        """
        if not 0 < stages <= self._blocks or not 0 <= extra <= stages:
            return None
        if (stages, extra) not in self._found:
            self._found[stages, extra] = self._find(stages, extra)
        return self._found[stages, extra]

    def _find(self, stages: int, extra: int) -> Cut | None:
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
