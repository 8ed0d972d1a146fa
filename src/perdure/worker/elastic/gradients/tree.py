"""exact=True: gradients added in one order, whatever the world was.

Each micro-batch's gradient is a leaf of a binary tree over the micro-batches' numbers; two
siblings are added as soon as one rank has both, which gives the same sum wherever that is. What
no single rank could add is sent to all, who add it alike. The cost: gradients of micro-batches
are kept apart (at most one set for each level and gap), every member's nodes are sent to every
other (W sets of gradients instead of two), and nothing of it overlaps with backward.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perdure.plan.elastic.microbatches import (
    Node,
    cover,
    find_parent,
    find_root,
    find_sibling,
    leaves_of,
)

Sum = list[Tensor]
"""One tensor a bucket."""


class GradientTree:
    """What one rank holds of a step's gradients."""

    def __init__(self, count: int) -> None:
        """Hold nothing of `count` micro-batches."""
        self._count = count
        self._sums: dict[Node, Sum] = {}

    def add(self, node: Node, value: Sum) -> None:
        """Take a node's sum, which is this tree's to alter, and add it up as far as it goes."""
        root = find_root(self._count)
        while node != root:
            sibling = find_sibling(node, self._count)
            if sibling is not None:
                other = self._sums.pop(sibling, None)
                if other is None:
                    break
                for mine, its in zip(value, other, strict=True):
                    mine.add_(its)
            node = find_parent(node)
        self._sums[node] = value

    def reduce(self, group: Any, owner: Mapping[int, int], me: int, out: Sequence[Tensor]) -> None:
        """Sum the gradients of all members into `out`; `owner` says who holds a micro-batch.

        What this rank holds stays as it is, so that a broken attempt can be made again.

        Raises:
            Broken: a member was lost.
        """
        total = GradientTree(self._count)
        for node, rank in plan_sends(owner, self._count):
            value = [
                t.clone() if rank == me else torch.empty_like(t) for t in self._find(node, out)
            ]
            for tensor in value:
                group.broadcast(tensor, rank)
            group.wait()
            total.add(node, value)
        for tensor, result in zip(out, total._sums[find_root(self._count)], strict=True):
            tensor.copy_(result)

    def clear(self) -> None:
        """Hold nothing any more."""
        self._sums.clear()

    def _find(self, node: Node, like: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._sums.get(node, like)


def plan_sends(owner: Mapping[int, int], count: int) -> list[tuple[Node, int]]:
    """Return (node, who sends it) for the whole step, in the order of their micro-batches."""
    found = []
    for rank in sorted(set(owner.values())):
        mine = [m for m, r in owner.items() if r == rank]
        found += [(node, rank) for node in cover(mine, count)]
    return sorted(found, key=lambda pair: leaves_of(pair[0], count).start)
