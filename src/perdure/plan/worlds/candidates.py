"""The worlds that a planner looks at, each family from its best case downwards.

A *family* is all that stays when the number of devices changes: micro-batch size, ranks of the
pipeline, schedule, placement. Its members are visited from most devices to fewest, and no member
is faster than its `bound`, which rises from one to the next. That is what lets a search stop.
"""

import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from typing import Literal

import msgspec

from perdure.model.planning.world import Device, ScheduleName, Stage, World
from perdure.plan.worlds.chain import Chain

Layout = Literal["replica", "stage"]
"""Neighbours in the order of nodes are of one replica, or of one stage."""


class Family(msgspec.Struct, frozen=True, order=True):
    """Candidates that differ only in how many devices they use."""

    micro_batch: int
    ranks: int
    chunks: int
    schedule: ScheduleName
    layout: Layout

    def __str__(self) -> str:
        """Return it in words."""
        chunks = f" x {self.chunks}" if self.chunks > 1 else ""
        return f"micro-batch {self.micro_batch}, {self.ranks} ranks{chunks}, {self.schedule}"


def list_replicas(count: int, replicas_max: int) -> Iterator[int]:
    """Yield numbers of replicas, falling; of those with equally many micro-batches the least.

    >>> list(list_replicas(16, 7))
    [6, 4, 3, 2, 1]
    """
    replicas = min(count, replicas_max)
    while replicas >= 1:
        share = -(-count // replicas)
        replicas = -(-count // share)
        yield replicas
        replicas -= 1


def list_uneven(ranks: int, devices_max: int) -> Iterator[int]:
    """Yield numbers of devices, falling, that leave stages with unequal copies."""
    for devices in range(devices_max, ranks, -1):
        if devices % ranks:
            yield devices


def find_bound(chain: Chain, family: Family, count: int, devices: int, *, even: bool) -> float:
    """Return seconds that no member with so many devices is faster than.

    Some device has its part of all blocks at least, and some has one whole block. And a rank
    begins only after its first micro-batch has come through the ranks before it, to which the
    gradient of its last goes back: with m micro-batches a replica and w_s of work a stage, a step
    takes at least w_0 + ... + w_(s-1) + m w_s for every s. Were all of these equal to T, the w_s
    would add up to T (1 - (1 - 1/m)^P); so no cut makes T less than the whole work over that.
    An interleaved rank does not wait for all of the ranks before it.

    `even` where all replicas have equally many micro-batches, but for one.
    """
    copies = devices / family.ranks
    share = math.ceil(count / copies) if even else count / copies
    whole = math.ceil(count / math.ceil(copies)) if even else count / math.ceil(copies)
    bound = max(share * chain.work_s / family.ranks, whole * chain.longest_s)
    if family.chunks == 1 and whole > 1.0:
        bound = max(bound, chain.work_s / (1.0 - (1.0 - 1.0 / whole) ** family.ranks))
    return max(bound, chain.work_s)


def share_out(count: int, slowdowns: Sequence[float]) -> tuple[int, ...]:
    """Return how many micro-batches each replica does, so that the last is done early.

    >>> share_out(9, [1.0, 1.0, 2.0])
    (4, 3, 2)
    """
    if len(set(slowdowns)) == 1:
        each, more = divmod(count, len(slowdowns))
        return tuple(each + (replica < more) for replica in range(len(slowdowns)))
    shares = [0] * len(slowdowns)
    heap = [(slow, replica) for replica, slow in enumerate(slowdowns)]
    heapify(heap)
    for _ in range(count):
        _, replica = heap[0]
        shares[replica] += 1
        heapreplace(heap, ((shares[replica] + 1) * slowdowns[replica], replica))
    return tuple(shares)


def place(devices: Sequence[Device], ranks: int, layout: Layout) -> list[list[Device]]:
    """Return the devices of each rank of a uniform world, replica by replica."""
    replicas = len(devices) // ranks
    if layout == "replica":
        return [[devices[r * ranks + rank] for r in range(replicas)] for rank in range(ranks)]
    return [list(devices[rank * replicas : (rank + 1) * replicas]) for rank in range(ranks)]


def make_world(
    family: Family,
    count: int,
    columns: Sequence[Sequence[Device]],
    cuts: Sequence[int],
    recompute: Sequence[bool],
) -> World:
    """Return a member: stages between `cuts`, on the devices of the `columns` of their ranks."""
    even = len({len(column) for column in columns}) == 1
    slow = [max(d.slowdown for d in row) for row in zip(*columns, strict=even)] if even else []
    return World(
        schedule=family.schedule,
        micro_batch=family.micro_batch,
        count=count,
        chunks=family.chunks,
        stages=tuple(
            Stage(first, stop, again, tuple(d.name for d in columns[stage % family.ranks]))
            for stage, (first, stop, again) in enumerate(
                zip(cuts[:-1], cuts[1:], recompute, strict=True)
            )
        ),
        shares=share_out(count, slow) if even else (),
    )
