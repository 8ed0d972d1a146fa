"""A chain of blocks cut into stages so that the slowest stage is as fast as it can be.

Dynamic programming over (stages left, first block), from the model's end. Counted from the end, a
stage's place says how many micro-batches 1F1B keeps in flight in it, hence its memory limit, so
that one table serves every number of stages. The principle is that of the classic chains-on-chains
problem (S. H. Bokhari, IEEE Trans. Computers 37(1), 1988); copies that differ between stages are
PipeDream's replicated stages (D. Narayanan et al., SOSP 2019).
"""

import math
from collections.abc import Callable

Cost = Callable[[int, int, int], float]
"""(first, stop, place) -> seconds a micro-batch of blocks first..stop as the place-th stage from
the end, counted from 1; infinite where it does not fit. Must not fall as `stop` rises."""

_Layer = tuple[list[float], list[int]]


class Cutter:
    """Optimal cuts of one chain, for any number of stages; tables are made when asked for."""

    def __init__(self, blocks: int, cost: Cost, loads: tuple[float, float] = (1.0, 1.0)) -> None:
        """Cut `blocks` blocks.

        `loads` are what a stage's cost is multiplied by: of a stage with the common number of
        copies, and of one with an extra copy.
        """
        self._blocks, self._cost, self._loads = blocks, cost, loads
        self._layers: dict[tuple[int, int], _Layer] = {}
        self._extra: dict[tuple[int, int, int], bool] = {}

    def cut(self, stages: int, extra: int = 0) -> tuple[float, list[int], list[bool]] | None:
        """Return (bottleneck, cuts, extras); None where no cut fits the memory.

        `cuts` are the first blocks of all stages, and at the end the number of blocks. `extras`
        says which stages have an extra copy; `extra` of them do.
        """
        if not 0 < stages <= self._blocks or not 0 <= extra <= stages:
            return None
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
        return worst, cuts, extras

    def _fill(self, place: int, extra: int) -> _Layer:
        best = [math.inf] * (self._blocks + 1)
        stops = [self._blocks] * (self._blocks + 1)
        for has in (False, True):
            rest = extra - has
            if 0 <= rest <= place - 1:
                behind = self._layers[place - 1, rest] if place > 1 else None
                self._improve(place, extra, has, behind, best, stops)
        return best, stops

    def _improve(
        self, place: int, extra: int, has: bool,
        behind: _Layer | None, best: list[float], stops: list[int],
    ) -> None:  # fmt: skip
        """Take what is better than `best` where this stage has, or has not, an extra copy.

        A stage's cost does not fall with its length: once it alone is as bad as the best cut, no
        longer one is looked at. So a layer costs about blocks^2 / place.
        """
        load = self._loads[has]
        for first in range(self._blocks - place + 1):
            stop_max = self._blocks - (place - 1)
            stop_min = first + 1 if behind else stop_max
            for stop in range(stop_min, stop_max + 1):
                own = load * self._cost(first, stop, place)
                if own >= best[first]:
                    break
                worst = max(own, behind[0][stop]) if behind else own
                if worst < best[first]:
                    best[first], stops[first] = worst, stop
                    self._extra[place, extra, first] = has
