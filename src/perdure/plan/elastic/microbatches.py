"""Which samples a micro-batch has, who computes it, and in which order gradients are added.

All of it is a function of (step, micro-batch) and of who lives: samples are fixed before anyone
knows who will process them, so a loss or a join moves micro-batches between ranks and changes
neither the global batch nor the order of the data. A micro-batch that a survivor has finished
stays where it is; only what is missing is given out again.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import msgspec

from perdure.model.errors import ConfigError

Node = tuple[int, int]
"""(level, index) in the reduction tree: micro-batches index * 2^level up to the next such node."""


class BatchPlan(msgspec.Struct, frozen=True):
    """The global batch of every step, cut into micro-batches."""

    global_batch: int
    micro_batch: int

    @property
    def count(self) -> int:
        """Return how many micro-batches a step has."""
        return self.global_batch // self.micro_batch

    def positions(self, step: int, micro_batch: int) -> range:
        """Return the positions in the endless stream of samples that a micro-batch uses."""
        first = step * self.global_batch + micro_batch * self.micro_batch
        return range(first, first + self.micro_batch)


def plan_batches(global_batch: int, micro_batch: int) -> BatchPlan:
    """Return the plan.

    Raises:
        ConfigError: the global batch is not a whole number of micro-batches.
    """
    if micro_batch < 1 or global_batch < 1 or global_batch % micro_batch:
        raise ConfigError(
            f"global_batch {global_batch} is not a whole number of micro-batches of {micro_batch}",
            hint="all micro-batches have one size, so that each weighs the same in the loss",
        )
    return BatchPlan(global_batch, micro_batch)


def assign(count: int, ranks: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return each rank's micro-batches of an undisturbed step: neighbours together.

    Shares differ by at most one. Neighbours, because a rank then holds few and large nodes of
    the reduction tree.

    >>> assign(8, [0, 1, 3])
    {0: (0, 1), 1: (2, 3, 4), 3: (5, 6, 7)}
    """
    size = len(ranks)
    return {
        rank: tuple(range(i * count // size, (i + 1) * count // size))
        for i, rank in enumerate(ranks)
    }


def reassign(
    count: int, ranks: Sequence[int], kept: Mapping[int, Collection[int]]
) -> dict[int, tuple[int, ...]]:
    """Return what each of `ranks` has still to compute, given what each has finished.

    What nobody has finished goes, in order, to whoever has the least in all; the first of `ranks`
    where several have. With nothing finished this is `assign`.

    >>> reassign(4, [0, 2], {0: [0, 1], 2: [3]})
    {0: (), 2: (2,)}
    """
    if not any(kept.values()):
        return assign(count, ranks)
    load = {rank: len(kept.get(rank, ())) for rank in ranks}
    finished = set(chain.from_iterable(kept.get(rank, ()) for rank in ranks))
    given: dict[int, list[int]] = {rank: [] for rank in ranks}
    for micro_batch in range(count):
        if micro_batch not in finished:
            rank = min(ranks, key=lambda r: load[r])
            load[rank] += 1
            given[rank].append(micro_batch)
    return {rank: tuple(mine) for rank, mine in given.items()}


# --- the reduction tree (exact) -----------------------------------------------------------------


def leaves_of(node: Node, count: int) -> range:
    """Return the micro-batches below a node."""
    level, index = node
    return range(index << level, min((index + 1) << level, count))


def sibling_of(node: Node, count: int) -> Node | None:
    """Return the node that is added to this one; None where it has none (or is the root)."""
    level, index = node
    other = (level, index ^ 1)
    return other if len(leaves_of(other, count)) else None


def parent_of(node: Node) -> Node:
    """Return the node above."""
    return node[0] + 1, node[1] >> 1


def root_of(count: int) -> Node:
    """Return the node above all micro-batches."""
    return (count - 1).bit_length(), 0


def cover(micro_batches: Collection[int], count: int) -> tuple[Node, ...]:
    """Return the largest nodes whose micro-batches are all among these, in their order.

    >>> cover([0, 1, 2, 3, 5], 8)
    ((2, 0), (0, 5))
    """
    held = {(0, index) for index in micro_batches}
    for level in range(root_of(count)[0]):
        for node in sorted(n for n in held if n[0] == level):
            sibling, parent = sibling_of(node, count), parent_of(node)
            if node in held and (sibling is None or sibling in held):
                held -= {node} if sibling is None else {node, sibling}
                held.add(parent)
    return tuple(sorted(held, key=lambda n: leaves_of(n, count).start))
