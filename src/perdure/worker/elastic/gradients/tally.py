"""The numbers that members sum once a step: what each has done, losses, votes, and norms.

They prove that every micro-batch is in the step once. Where everyone has the whole state they ride
with the first bucket of gradients; elsewhere they are reduced last, and then prove as well that
each member has the reduced gradients of its part.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perdure.worker.elastic.group import Group


class Numbers(NamedTuple):
    """What the numbers are; views of one tensor."""

    counts: Tensor
    """How often each part of the model has done each micro-batch: (parts, micro-batches)."""
    losses: Tensor
    """Of each micro-batch."""
    votes: Tensor
    """On what all do after the step: a checkpoint, a snapshot."""
    more: Tensor


class Tally:
    """One member's numbers of the step under way, and the sums of the newest two steps."""

    def __init__(
        self,
        parts: int,
        count: int,
        *,
        votes: int = 0,
        more: int = 0,
        riders: Sequence[Tensor] = (),
    ) -> None:
        """Count `count` micro-batches in each of the model's `parts`.

        `riders` are where the sums of even and of odd steps lie within a bucket of gradients.
        """
        self._parts, self._sizes = parts, [parts * count, count, votes, more]
        self.all = torch.zeros(sum(self._sizes), dtype=torch.float64)
        self.mine = self._view(self.all)
        self.rides = bool(riders)
        self._sums = tuple(riders) or tuple(torch.zeros_like(self.all) for _ in range(2))
        self._read = tuple(self._view(sums) for sums in self._sums)

    def sums(self, step: int) -> Tensor:
        """Return the sums of a step over all members, in one tensor."""
        return self._sums[step % 2]

    def read(self, step: int) -> Numbers:
        """Return the sums of a step over all members."""
        return self._read[step % 2]

    def send(self, step: int, group: Group) -> None:
        """Begin to sum this step's numbers, unless they ride with a bucket."""
        self.sums(step).copy_(self.all)
        if not self.rides:
            group.all_reduce(self.sums(step))

    def clear(self) -> None:
        """Begin a step in which nothing is done."""
        self.all.zero_()

    def _view(self, numbers: Tensor) -> Numbers:
        counts, losses, votes, more = torch.split(numbers, self._sizes)
        return Numbers(counts.view(self._parts, -1), losses, votes, more)
