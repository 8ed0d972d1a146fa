"""From measurements to a cost profile's figures: outliers, lines, and what a live run adds.

Whatever else a machine does makes a measure longer, now and then by much, and never shorter: the
first quartile of many is taken, which three disturbed ones of four do not move far, and how far
the middle half of them lies apart is told.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_low, quantiles

import msgspec
from msgspec.structs import replace

from perdure.model.errors import MeasureError
from perdure.model.planning.costs import Block, BlockCost, CostProfile
from perdure.model.planning.pipeline import Executed

SAMPLES_MIN = 5
"""Fewer measurements of a live stage say nothing."""


class Figure(msgspec.Struct, frozen=True):
    """A measure, from several."""

    value: float
    spread: float
    """Distance of the first and the third quartile, as a share of it."""


def settle(samples: Sequence[float], what: str) -> Figure:
    """Return the first quartile of `samples`, and how sure it is.

    Raises:
        MeasureError: there are fewer than two, or they say that it took no time.
    """
    if len(samples) < 2:
        raise MeasureError(f"{what} was not measured twice", hint="give it more seconds")
    low, _, high = quantiles(samples, n=4, method="inclusive")
    if low <= 0.0:
        raise MeasureError(f"{what} took no time", hint="larger micro-batches are measured better")
    return Figure(low, (high - low) / low)


def fit_line(points: Sequence[tuple[float, float]], what: str) -> tuple[float, float]:
    """Return (latency_s, bytes_per_s) of messages given as (bytes, seconds).

    Least squares of the relative error, so that small messages count as much as large ones.

    Raises:
        MeasureError: there are fewer than two sizes, or larger messages did not take longer.
    """
    if len({size for size, _ in points}) < 2:
        raise MeasureError(f"{what}: fewer than two sizes were measured")
    weights = [1.0 / seconds**2 for _, seconds in points]
    total = sum(weights)
    size = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    seconds = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    among = [(w, x - size, y - seconds) for w, (x, y) in zip(weights, points, strict=True)]
    slope = sum(w * x * y for w, x, y in among) / sum(w * x * x for w, x, _ in among)
    latency_s = seconds - slope * size
    if latency_s < 0.0:
        latency_s = 0.0
        products = [(w, x, y) for w, (x, y) in zip(weights, points, strict=True)]
        slope = sum(w * x * y for w, x, y in products) / sum(w * x * x for w, x, _ in products)
    if slope <= 0.0:
        raise MeasureError(f"{what}: larger messages took no longer", hint="the machine is busy")
    return latency_s, 1.0 / slope


class StageTimes(msgspec.Struct, frozen=True):
    """What a live run has measured of one stage on one device."""

    device: str
    first: int
    stop: int
    """Blocks `first` up to `stop`."""
    recompute: bool
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """With its recompute; without what `weight_s` measures, where a backward is split."""
    weight_s: tuple[float, ...] = ()


def collect_times(
    device: str, stages: Mapping[int, tuple[int, int, bool]], executed: Iterable[Executed]
) -> list[StageTimes]:
    """Return what one cell's timeline says of its stages: number -> (first, stop, recompute)."""
    spent: dict[tuple[int, str], list[float]] = {}
    for entry in executed:
        key = entry.action.stage, entry.action.kind
        spent.setdefault(key, []).append(entry.end_s - entry.begin_s)
    return [
        StageTimes(device, *cut, *(tuple(spent.get((stage, kind), ())) for kind in ("F", "B", "W")))
        for stage, cut in stages.items()
    ]


class Refreshed(msgspec.Struct, frozen=True):
    """A profile with what a live run has shown."""

    profile: CostProfile
    slowdowns: dict[str, float]
    """Device -> how many times as long as another copy of its stage it takes."""
    unseen: tuple[str, ...]
    """Blocks whose costs are those of before."""


def refresh(
    profile: CostProfile, micro_batch: int, observed: Sequence[StageTimes], *, weight: float = 0.5
) -> Refreshed:
    """Fold what stages have taken into the costs of their blocks.

    A stage's time is known and those of its blocks are not: all are changed in proportion, and
    with all micro-batch sizes, for what made this one slower or faster makes the others so. Of
    several copies the faster half counts, so that a straggler's time is taken for its own
    slowdown and not for its blocks' cost. `weight` is what the new says against the old.
    """
    blocks = list(profile.blocks)
    unseen = {block.name for block in blocks}
    slowdowns: dict[str, float] = {}
    runs = sorted({(o.first, o.stop, o.recompute) for o in observed})
    for first, stop, recompute in runs:
        copies = [
            (o.device, (median(o.forward_s), median(o.backward_s), median(o.weight_s or [0.0])))
            for o in observed
            if (o.first, o.stop, o.recompute) == (first, stop, recompute)
            and min(len(o.forward_s), len(o.backward_s)) >= SAMPLES_MIN
        ]
        if not copies:
            continue
        whole_s = median_low([sum(times) for _, times in copies])
        for device, times in copies:
            slowdowns[device] = max(slowdowns.get(device, 1.0), sum(times) / whole_s)
        forward_s, backward_s, weight_s = (
            median_low(values) for values in zip(*(times for _, times in copies), strict=True)
        )
        costs = [block.costs[micro_batch] for block in blocks[first:stop]]
        split = weight_s > 0.0 and all(cost.weight_s is not None for cost in costs)
        expected_s = [_expect_backward(cost, recompute, split) for cost in costs]
        factors = (
            _blend(forward_s, sum(cost.forward_s for cost in costs), weight),
            _blend(backward_s, sum(expected_s), weight),
            _blend(weight_s, sum(cost.weight_s or 0.0 for cost in costs), weight) if split else 0.0,
        )
        for at in range(first, stop):
            blocks[at] = _scale(blocks[at], *factors)
            unseen.discard(blocks[at].name)
    left = tuple(block.name for block in blocks if block.name in unseen)
    return Refreshed(replace(profile, blocks=tuple(blocks)), slowdowns, left)


def _expect_backward(cost: BlockCost, recompute: bool, split: bool) -> float:
    again_s = cost.recompute_s if recompute else 0.0
    return cost.backward_s + again_s - ((cost.weight_s or 0.0) if split else 0.0)


def _blend(measured_s: float, expected_s: float, weight: float) -> float:
    return 1.0 - weight + weight * measured_s / expected_s if expected_s > 0.0 else 1.0


def _scale(block: Block, forward: float, backward: float, weight: float) -> Block:
    """Return a block with its costs multiplied; `weight` 0: the backward was not split."""
    costs = {}
    for size, cost in block.costs.items():
        late_s = cost.weight_s or 0.0
        late = weight or backward
        costs[size] = replace(
            cost,
            forward_s=cost.forward_s * forward,
            backward_s=(cost.backward_s - late_s) * backward + late_s * late,
            recompute_s=cost.recompute_s * backward,
            weight_s=None if cost.weight_s is None else late_s * late,
        )
    return replace(block, costs=costs)
