"""A world: which device has which blocks of which replica, and who does which micro-batches."""

from collections.abc import Sequence
from typing import Literal

import msgspec

ScheduleName = Literal["1f1b", "interleaved", "zero-bubble", "rerouted"]
"""`rerouted`: stages differ in their number of copies, so micro-batches change columns."""


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device that there is."""

    name: str
    node: str
    memory_bytes: int
    slowdown: float = 1.0
    """How many times as long as profiled its work takes: a straggler's is above 1."""


class Stage(msgspec.Struct, frozen=True):
    """A run of blocks, and the devices that hold a copy of it."""

    first: int
    stop: int
    """Blocks `first` up to `stop`, which is not among them."""
    recompute: bool
    """Activations are not stored: the forward is done again before the backward."""
    devices: tuple[str, ...]
    """One a copy; in a uniform world copy r is replica r's."""


class World(msgspec.Struct, frozen=True):
    """D replicas of a pipeline of P ranks (more stages than that where interleaved)."""

    schedule: ScheduleName
    micro_batch: int
    """Samples."""
    count: int
    """Micro-batches of a step, over all replicas: micro_batch * count is the global batch."""
    chunks: int
    """Stages of a rank: 1, but for interleaved schedules."""
    stages: tuple[Stage, ...]
    shares: tuple[int, ...] = ()
    """Micro-batches of each replica; none where stages differ in their number of copies."""

    @property
    def ranks(self) -> int:
        """P: how many devices a replica is spread over."""
        return len(self.stages) // self.chunks

    @property
    def replicas(self) -> int:
        """D: copies of the stage that has fewest."""
        return min(len(stage.devices) for stage in self.stages)

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices that work, rank by rank."""
        return tuple(d for stage in self.stages[: self.ranks] for d in stage.devices)

    @property
    def shape(self) -> str:
        """`4x3` is D=4, P=3; `(3,2,2)` the copies of each stage where they differ."""
        copies = [len(stage.devices) for stage in self.stages[: self.ranks]]
        if len(set(copies)) == 1:
            return f"{copies[0]}x{self.ranks}"
        return f"({','.join(map(str, copies))})"


def make_devices(
    nodes: int, per_node: int, memory_bytes: int, *, slow: Sequence[tuple[str, float]] = ()
) -> tuple[Device, ...]:
    """Return `nodes` equal nodes' devices, named `n0/0`, `n0/1`, ...; `slow` gives slowdowns."""
    factors = dict(slow)
    names = [(f"n{node}", f"n{node}/{index}") for node in range(nodes) for index in range(per_node)]
    return tuple(Device(d, node, memory_bytes, factors.get(d, 1.0)) for node, d in names)
