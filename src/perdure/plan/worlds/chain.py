"""What a run of blocks costs as a stage: seconds and bytes, from a cost profile.

Memory of a stage is its state (parameters, gradients, optimizer), and for each micro-batch in
flight what its forward has left behind: with recompute only the inputs of its blocks, and beside
these, while one block's forward is done again, all that this block stores.
"""

from collections.abc import Iterable
from functools import cache
from itertools import accumulate
from typing import TypeVar

import msgspec

from perdure.model.planning.costs import CostProfile

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
    update_s: float

    @property
    def work_s(self) -> float:
        """All of a micro-batch."""
        return self.forward_s + self.backward_s + self.weight_s


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
        self.longest_s = max(cost.forward_s + cost.backward_s for cost in costs)
        """Forward and backward of the block that takes longest: no stage is faster."""
        self._widest = cache(self._find_widest)

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
        return int(
            self.state[stop] - self.state[first] + in_flight * (kept[stop] - kept[first]) + widest
        )

    def work(self, first: int, stop: int, recompute: bool) -> float:
        """Return the seconds of one micro-batch in a stage."""
        total_s = self.forward_s[stop] - self.forward_s[first]
        total_s += self.backward_s[stop] - self.backward_s[first]
        return total_s + (self.recompute_s[stop] - self.recompute_s[first] if recompute else 0.0)

    def find_recompute(
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
        return StageCost(
            forward_s=self.forward_s[stop] - self.forward_s[first],
            backward_s=backward_s + again_s,
            weight_s=weight_s,
            input_bytes=self.costs[first].input_bytes,
            gradient_bytes=int(self.gradients[stop] - self.gradients[first]),
            update_s=self.updates_s[stop] - self.updates_s[first],
        )

    def _find_widest(self, first: int) -> list[int]:
        """Return what the block that stores most stores, of runs from `first` on, by length."""
        return list(accumulate((cost.stored_bytes for cost in self.costs[first:]), max))


def _sum(values: Iterable[T]) -> list[T]:
    """Return the sums of all beginnings of `values`, the empty one first."""
    return list(accumulate(values, initial=0))
