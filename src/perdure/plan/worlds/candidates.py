"""The worlds that a planner looks at: families, best case first, whose members are cut and placed.

A *family* is all that stays when the number of devices changes: micro-batch size, ranks of the
pipeline, schedule, placement. Its members are visited from most devices to fewest, and no member
is faster than its `bound`, which rises from one to the next. That is what lets a search stop.

A candidate becomes a world as its blocks are cut into stages and its devices placed. Cutting says
already what it cannot be faster than; the world is only made if that is worth a simulation.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import Literal

import msgspec

from perdure.model.planning.costs import Place
from perdure.model.planning.world import Device, ScheduleName, Stage, World
from perdure.plan.pipeline.orders import choose_groups, order_replica
from perdure.plan.worlds.chain import Chain, Cutter
from perdure.plan.worlds.score import Scorer, compute_overlap

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


def compute_bound(chain: Chain, family: Family, count: int, devices: int, *, even: bool) -> float:
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


Recompute = Literal["auto", "never", "always"]
WAYS: dict[Recompute, tuple[bool, ...]] = {
    "auto": (False, True),
    "never": (False,),
    "always": (True,),
}
NO_LIMIT = -1


class Shape(msgspec.Struct, frozen=True):
    """A member of a family, cut into stages."""

    family: Family
    size: int
    """Devices."""
    cuts: tuple[int, ...]
    recompute: tuple[bool, ...]
    extras: tuple[bool, ...]
    """Which ranks have a copy more than the others."""
    bound_s: float
    """It is not faster than this."""


class Shaper:
    """Cuts and places the candidates of one search."""

    def __init__(
        self, scorer: Scorer, devices: Sequence[Device], global_batch: int, recompute: Recompute
    ) -> None:
        """Shape worlds on the first of `devices`, as many as a candidate has."""
        self.scorer, self.global_batch = scorer, global_batch
        self.ways = WAYS[recompute]
        ranked = sorted(
            range(len(devices)), key=lambda i: (devices[i].slowdown, -devices[i].memory_bytes, i)
        )
        self.equal = len({(d.slowdown, d.memory_bytes) for d in devices}) == 1
        self._devices, self._ranked = devices, ranked
        self._memory = list(accumulate((devices[i].memory_bytes for i in ranked), min))
        self._cutters: dict[object, Cutter] = {}
        self._weigh = cache(self._weigh_stages)

    def count(self, family: Family) -> int:
        """Return the micro-batches of a step."""
        return self.global_batch // family.micro_batch

    def memory(self, size: int) -> int:
        """Return the memory of the smallest of the best `size` devices."""
        return self._memory[size - 1]

    def choose(self, size: int) -> Sequence[Device]:
        """Return the best `size` devices, neighbours beside each other.

        Slow ones are left out first, then those with little memory, then the last.
        """
        if self.equal:
            return self._devices[:size]
        return [self._devices[i] for i in sorted(self._ranked[:size])]

    def shape(self, family: Family, size: int) -> Shape | None:
        """Return the best cut; None where none fits the memory, as far as the cut can know.

        Raises:
            MeasureError: A link that it needs was not measured.
            ConfigError: Its schedule cannot have so many micro-batches.
        """
        count, ranks = self.count(family), family.ranks
        copies, extra = divmod(size, ranks)
        share = -(-count // copies)
        if family.schedule == "interleaved":
            for each in {share, count // copies}:
                choose_groups(ranks, each)
        chain = self.scorer.chain(family.micro_batch)
        limited = family.schedule in ("1f1b", "rerouted")
        chosen = self.choose(size)
        loads = (float(share), float(-(-count // (copies + 1)))) if extra else (1.0, 1.0)
        flight = len(chain) if extra else share
        cutter = self._make_cutter(
            chain,
            self.memory(size) if limited else NO_LIMIT,
            flight if flight < ranks else len(chain),
            self._compute_link_s(family, chosen),
            self.ways if limited else self.ways[:1],
            loads,
        )
        found = cutter.cut(ranks * family.chunks, extra)
        if found is None:
            return None
        _, cuts, extras = found
        again, works = self._weigh(
            family.micro_batch, cuts, self.memory(size), min(flight, len(cuts)), limited
        )
        bound_s = self._bound(family, copies, works, extras)
        bound_s += self._compute_reduce_rest_s(family, chosen, cuts, extras[0])
        return Shape(family, size, cuts, again, extras[:ranks], bound_s)

    def build(self, shape: Shape) -> World | None:
        """Return the world; None where it does not fit the memory after all.

        Raises:
            ConfigError: Its schedule cannot have the micro-batches of some replica.
        """
        family, chosen = shape.family, self.choose(shape.size)
        if any(shape.extras):
            rest = iter(chosen)
            copies = shape.size // family.ranks
            columns = [[next(rest) for _ in range(copies + more)] for more in shape.extras]
        else:
            columns = place(chosen, family.ranks, family.layout)
        for way in (shape.recompute, (self.ways[-1],) * len(shape.recompute)):
            world = make_world(family, self.count(family), columns, shape.cuts, way)
            if self._fits(world, self.memory(shape.size)):
                return world
        return None

    def _fits(self, world: World, memory: int) -> bool:
        if world.schedule in ("1f1b", "rerouted"):
            return True  # cut so that it does
        if world.schedule == "interleaved":
            for each in set(world.shares):
                choose_groups(world.ranks, each)
        share = range(max(world.shares))
        lists = order_replica(world.schedule, world.ranks, world.chunks, share)
        return self.scorer.compute_peak_bytes(world, tuple(map(tuple, lists))) <= memory

    def _compute_link_s(self, family: Family, chosen: Sequence[Device]) -> float:
        """Return the seconds a byte occupies the link between neighbours of a pipeline."""
        if family.ranks == 1:
            return 0.0
        copies, uneven = divmod(len(chosen), family.ranks)
        together = family.layout == "replica" and not uneven
        row = chosen[: family.ranks] if together else chosen[::copies]
        where: Place = "node" if len({device.node for device in row}) == 1 else "cluster"
        return 1.0 / self.scorer.profile.estimate_transfer(where).bytes_per_s

    def _compute_reduce_rest_s(
        self, family: Family, chosen: Sequence[Device], cuts: Sequence[int], more: bool
    ) -> float:
        """Return what is left of the first rank's all-reduce, which begins as all else ends."""
        copies, uneven = divmod(len(chosen), family.ranks)
        together = family.layout == "replica" and not uneven
        column = chosen[:: family.ranks] if together else chosen[: copies + more]
        stage = self.scorer.chain(family.micro_batch).stage(cuts[0], cuts[1], False)
        reduce_s = self.scorer.compute_reduce_s(column, stage.gradient_bytes)
        return reduce_s * (1.0 - compute_overlap(family.schedule, stage.gradient_bytes))

    def _make_cutter(
        self,
        chain: Chain,
        memory: int,
        flight: int,
        link_s: float,
        ways: tuple[bool, ...],
        loads: tuple[float, float],
    ) -> Cutter:
        """Return the cutter of a chain, at most `flight` micro-batches being in flight."""
        key = (chain.micro_batch, memory, flight, link_s, loads)
        if key not in self._cutters:

            def cost(first: int, stop: int, at: int) -> float:
                way: bool | None = ways[0]
                if memory != NO_LIMIT:
                    way = chain.decide_recompute(first, stop, min(at, flight), memory, ways)
                if way is None:
                    return math.inf
                sent_s = chain.costs[first].input_bytes * link_s if first else 0.0
                return max(chain.work(first, stop, way), sent_s)

            self._cutters[key] = Cutter(len(chain), cost, loads)
        return self._cutters[key]

    def _weigh_stages(
        self, micro_batch: int, cuts: tuple[int, ...], memory: int, flight: int, limited: bool
    ) -> tuple[tuple[bool, ...], tuple[float, ...]]:
        """Return which stages recompute, and the work of each; many members are cut alike."""
        chain, stages = self.scorer.chain(micro_batch), len(cuts) - 1
        again = (self.ways[0],) * stages
        if limited:
            again = tuple(
                bool(
                    chain.decide_recompute(first, stop, min(stages - at, flight), memory, self.ways)
                )
                for at, (first, stop) in enumerate(pairwise(cuts))
            )
        pairs = zip(pairwise(cuts), again, strict=True)
        return again, tuple(chain.work(first, stop, way) for (first, stop), way in pairs)

    def _bound(
        self, family: Family, copies: int, works: Sequence[float], extras: Sequence[bool]
    ) -> float:
        """Return what a world is not faster than, its stages known (`compute_bound` says why)."""
        shares = [self.count(family) / (copies + more) for more in (False, True)]
        if self.equal:
            shares = [math.ceil(share) for share in shares]
        bound_s = before_s = 0.0
        for rank in range(family.ranks):
            mine_s = works[rank] if family.chunks == 1 else sum(works[rank :: family.ranks])
            bound_s = max(bound_s, before_s + shares[extras[rank]] * mine_s)
            before_s += works[rank]
        return max(bound_s, sum(works))
