"""The world for the devices that there are: the fastest that fits, and why not the others.

A best-first search. Each family of candidates (`candidates`) waits with a time that no member can
beat; the most promising is cut into stages, bounded again, and simulated. What the best few times
that were simulated already beat is never looked at, so the answer is that of a search of all;
where that would take too long, a note says how much faster the others could be at most. Nothing is
drawn at random and nothing is timed: the same arguments give the same plan.

Whether another world is worth the change says `decide_change`: what must move, how long that takes,
and what it gains.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Literal

import msgspec

from perdure.model.errors import ConfigError, MeasureError
from perdure.model.planning.costs import CostProfile, Place
from perdure.model.planning.world import Device, ScheduleName, World
from perdure.plan.worlds.candidates import (
    Family,
    Recompute,
    Shape,
    Shaper,
    compute_bound,
    list_replicas,
    list_uneven,
)
from perdure.plan.worlds.score import Scorer

EFFORT_MAX = 400_000
"""Actions simulated and devices placed, about a second's worth: then the search is given up."""
UNEVEN_DEVICES_MAX = 64
"""Beyond it a remainder is too small a share of the devices to be worth its search."""
MARGIN = 0.02
"""A gain smaller than this is within what a profile can tell, and changes nothing."""


class Request(msgspec.Struct, frozen=True):
    """What is asked for; empty: whatever is fastest."""

    global_batch: int
    micro_batches: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    recompute: Recompute = "auto"
    schedules: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "rerouted")
    options: int = 5
    """How many of the best are wanted, of different families."""


class Option(msgspec.Struct, frozen=True):
    """A world, and what it would do."""

    world: World
    step_s: float
    samples_per_s: float
    bubble: float
    memory_bytes: int
    idle: int
    """Devices without work."""


class Excluded(msgspec.Struct, frozen=True):
    """Candidates that cannot be, and why."""

    kind: Literal["batch", "measure", "memory", "schedule"]
    what: str
    ranks: tuple[int, ...]
    """Of the pipeline; none where it is about all."""
    reason: str


class Plan(msgspec.Struct, frozen=True):
    """The best worlds, fastest first, and what became of the others."""

    options: tuple[Option, ...]
    excluded: tuple[Excluded, ...]
    notes: tuple[str, ...]
    simulated: int
    slower: int
    """Families that were never simulated: no member of theirs is among the best."""


def plan_worlds(profile: CostProfile, devices: Sequence[Device], request: Request) -> Plan:
    """Return the fastest worlds on `devices`; none where nothing fits.

    Raises:
        ConfigError: The request cannot be, whatever the devices: a micro-batch size that was not
            measured, or no size that divides the global batch.
    """
    return _Search(profile, devices, request).run()


_Entry = tuple[float, int, Family, int, Iterator[int], Shape | None]
"""Bound, serial number, the member, the smaller ones, and its cut once it has one."""


class _Search:
    def __init__(self, profile: CostProfile, devices: Sequence[Device], request: Request) -> None:
        self.profile, self.devices, self.request = profile, devices, request
        self.scorer = Scorer(profile, devices)
        self.shaper = Shaper(self.scorer, devices, request.global_batch, request.recompute)
        self.best: dict[Family, Option] = {}
        self.seen: set[World] = set()
        self.refused: dict[tuple[str, str, str], list[int]] = {}
        self.simulated = self.serial = self.effort = 0
        self.spent = False
        self.waiting: list[_Entry] = []

    def run(self) -> Plan:
        """Search until nothing that waits can be among the best."""
        for family in self._list_families():
            self._wait(family, self._list_sizes(family))
        while self.waiting:
            entry = heappop(self.waiting)
            bound, _, family, size, rest, shape = entry
            self.spent = self.effort > EFFORT_MAX and bool(self.best)
            if self.spent or bound >= self._compute_limit_s():
                self.waiting.append(entry)
                break
            if shape is None:
                self._shape(family, size, rest)
            else:
                self._simulate(shape)
        left = len({entry[2] for entry in self.waiting} - self.best.keys())
        options = sorted(self.best.values(), key=_rank)[: self.request.options]
        return Plan(
            options=tuple(options),
            excluded=tuple(
                Excluded(kind, what, tuple(sorted(set(ranks) - {0})), reason)  # type: ignore[arg-type]
                for (kind, what, reason), ranks in sorted(self.refused.items())
            ),
            notes=tuple(self._list_notes(options)),
            simulated=self.simulated,
            slower=left,
        )

    # --- candidates -----------------------------------------------------------------------------

    def _list_families(self) -> Iterator[Family]:
        several = len({device.node for device in self.devices}) < len(self.devices)
        for micro_batch in self._list_micro_batches():
            blocks = len(self.profile.blocks)
            for ranks in self.request.ranks or range(1, min(blocks, len(self.devices)) + 1):
                for schedule in self.request.schedules:
                    if ranks == 1 and schedule != "1f1b":
                        continue
                    if ranks > blocks or ranks > len(self.devices):
                        what = f"{ranks} ranks"
                        why = f"there are {blocks} blocks and {len(self.devices)} devices"
                        self._refuse("schedule", what, why, ranks)
                        continue
                    chunks = 2 if schedule == "interleaved" else 1
                    if ranks * chunks > blocks:
                        continue
                    if schedule == "zero-bubble" and not self.scorer.chain(micro_batch).splits:
                        self._refuse("measure", schedule, "a block has no weight_s", 0)
                        continue
                    uniform = schedule != "rerouted"
                    for layout in ("replica", "stage")[: 2 if several and uniform else 1]:
                        yield Family(micro_batch, ranks, chunks, schedule, layout)  # type: ignore[arg-type]

    def _list_micro_batches(self) -> list[int]:
        measured = self.profile.micro_batches
        for size in self.request.micro_batches:
            if size not in measured:
                have = ", ".join(map(str, measured))
                raise MeasureError(
                    f"micro-batches of {size} were not measured",
                    hint=f"the cost profile has {have}",
                )
        wanted = self.request.micro_batches or measured
        good = [size for size in wanted if self.request.global_batch % size == 0]
        for size in sorted(set(wanted) - set(good)):
            why = f"{self.request.global_batch} samples are no whole number of them"
            self._refuse("batch", f"micro-batch {size}", why, 0)
        if not good:
            raise ConfigError(
                f"global batch {self.request.global_batch} is not a whole number of micro-batches"
                f" of {' or '.join(map(str, wanted))}",
                hint="all micro-batches have one size, so that each weighs the same in the loss",
            )
        return good

    def _list_sizes(self, family: Family) -> Iterator[int]:
        """Return how many devices its members use, from most on."""
        if family.schedule == "rerouted":
            return list_uneven(family.ranks, min(len(self.devices), UNEVEN_DEVICES_MAX))
        count = self.shaper.count(family)
        replicas = len(self.devices) // family.ranks
        numbers = list_replicas(count, replicas) if self.shaper.equal else range(replicas, 0, -1)
        return (number * family.ranks for number in numbers)

    def _wait(self, family: Family, sizes: Iterator[int]) -> None:
        """Let the next member of a family wait for its turn."""
        for size in sizes:
            even = family.schedule != "rerouted" and self.shaper.equal
            chain = self.scorer.chain(family.micro_batch)
            bound = compute_bound(chain, family, self.shaper.count(family), size, even=even)
            self._push(bound, family, size, sizes, None)
            return

    def _push(
        self, bound: float, family: Family, size: int, rest: Iterator[int], shape: Shape | None
    ) -> None:
        self.serial += 1
        heappush(self.waiting, (bound, self.serial, family, size, rest, shape))

    def _compute_limit_s(self) -> float:
        """Return the time that a world must be below to be among the best."""
        times = sorted(option.step_s for option in self.best.values())
        wanted = self.request.options
        return times[wanted - 1] if len(times) >= wanted else math.inf

    # --- one candidate --------------------------------------------------------------------------

    def _shape(self, family: Family, size: int, rest: Iterator[int]) -> None:
        """Cut a member into stages; let it wait again with what that says of its time."""
        try:
            shape = self.shaper.shape(family, size)
        except ConfigError as error:
            self._refuse_error(family, error)
            self._wait(family, rest)
            return
        if shape is None:
            self._refuse_memory(family, size)
            if self.shaper.equal:
                return  # with fewer devices each holds as much, or more
        self._wait(family, rest)
        if shape is not None:
            self._push(shape.bound_s, family, size, rest, shape)

    def _simulate(self, shape: Shape) -> None:
        family = shape.family
        try:
            world = self.shaper.build(shape)
            if world is None:
                self._refuse_memory(family, shape.size)
                return
            if world in self.seen:
                return  # both layouts of one replica are the same
            self.seen.add(world)
            score = self.scorer.score(world)
        except ConfigError as error:
            self._refuse_error(family, error)
            return
        self.simulated += 1
        self.effort = self.scorer.actions + 4 * self.simulated * len(self.devices)
        memory = self.shaper.memory(shape.size)
        assert score.memory_bytes <= memory, "a cut keeps within the memory it was given"
        option = Option(
            world=world,
            step_s=score.step_s,
            samples_per_s=self.request.global_batch / score.step_s,
            bubble=score.bubble,
            memory_bytes=score.memory_bytes,
            idle=len(self.devices) - shape.size,
        )
        known = self.best.get(family)
        if known is None or _rank(option) < _rank(known):
            self.best[family] = option

    # --- words ----------------------------------------------------------------------------------

    def _refuse(self, kind: str, what: str, why: str, ranks: int) -> None:
        self.refused.setdefault((kind, what, why), []).append(ranks)

    def _refuse_error(self, family: Family, error: ConfigError) -> None:
        kind = "measure" if isinstance(error, MeasureError) else "schedule"
        self._refuse(kind, family.schedule, error.message, family.ranks)

    def _refuse_memory(self, family: Family, size: int) -> None:
        """Note that no cut of a family fits, and what its fullest block needs at least."""
        memory, base = self.shaper.memory(size), self.profile.base_bytes
        chain, way = self.scorer.chain(family.micro_batch), self.shaper.ways[-1]
        need, worst = max(
            (chain.memory(i, i + 1, 1, way) + base, block.name)
            for i, block in enumerate(self.profile.blocks)
        )
        why = f"no cut keeps every stage within {memory:,} bytes"
        if need > memory:
            why = f"block {worst} alone takes {need:,} bytes of {memory:,}"
        what = f"micro-batch {family.micro_batch}, {family.schedule}"
        self._refuse("memory", what, why, family.ranks)

    def _list_notes(self, options: Sequence[Option]) -> Iterator[str]:
        for world in {option.world.shape: option.world for option in options}.values():
            names = max((stage.devices for stage in world.stages), key=len)
            nodes = {self.scorer.devices[name].node for name in names}
            where: Place = "node" if len(nodes) == 1 else "cluster"
            if len(names) > 1 and self.profile.is_extrapolated(where, len(names)):
                yield (
                    f"{world.shape}: no all-reduce over {len(names)} devices was measured; a "
                    "ring's is assumed from the largest that was"
                )
        for shared in self.profile.shared if options else ():
            numbers = ", ".join(map(str, shared.blocks))
            size = f"{shared.gradient_bytes / 1e6:.1f} MB"
            yield (
                f"blocks {numbers} share parameters: {size} of gradients are summed over the stages"
                " that have one of them, after all others"
            )
        if self.spent and options:
            least_s = min(options[0].step_s, min(entry[0] for entry in self.waiting))
            gain = 100.0 * (1.0 - least_s / options[0].step_s)
            if gain < 0.05:
                yield "the search was ended early: the first is the fastest, others may be missing"
            else:
                yield f"the search was ended early: none is more than {gain:.1f}% faster"
        if not self.shaper.equal:
            yield "devices differ: those that are slow or small are left idle first"


def _rank(option: Option) -> tuple[float, int, int, int]:
    """Return what makes one option better than another: time, then fewer devices and ranks."""
    world = option.world
    return option.step_s, len(world.devices), world.ranks, -world.micro_batch


class Change(msgspec.Struct, frozen=True):
    """A decision about a world that may be better, and why it was made."""

    decision: Literal["stay", "change"]
    gain: float
    """More samples over the dwell time, as a fraction; negative where the change costs."""
    move_s: float
    reason: str


def compute_missing_bytes(old: World, new: World, profile: CostProfile) -> dict[str, int]:
    """Return the bytes of parameters and optimizer state that each device of `new` lacks."""
    held: dict[str, set[int]] = {}
    for stage in old.stages:
        for device in stage.devices:
            held.setdefault(device, set()).update(range(stage.first, stage.stop))
    missing: dict[str, int] = {}
    for stage in new.stages:
        for device in stage.devices:
            blocks = set(range(stage.first, stage.stop)) - held.get(device, set())
            size = sum(
                profile.blocks[i].parameter_bytes + profile.blocks[i].optimizer_bytes
                for i in sorted(blocks)
            )
            missing[device] = missing.get(device, 0) + size
    return missing


def compute_move_s(missing: Mapping[str, int], bytes_per_s: float, fixed_s: float) -> float:
    """Return how long a change stops training: each device receives what it lacks, all at once.

    `fixed_s` is the rest of it: agreement, communicators, warm-up. Senders are taken to keep up.
    """
    return fixed_s + max(missing.values(), default=0) / bytes_per_s


def decide_change(
    old: World,
    old_samples_per_s: float,
    best: Option,
    *,
    profile: CostProfile,
    bytes_per_s: float,
    fixed_s: float,
    dwell_s: float,
) -> Change:
    """Return whether `best` yields more than staying until the next change is expected.

    `dwell_s` is the expected time until then; while state moves nothing is trained. A world that
    cannot go on (`old_samples_per_s` 0) is left at any price.
    """
    move_s = compute_move_s(compute_missing_bytes(old, best.world, profile), bytes_per_s, fixed_s)
    if old_samples_per_s <= 0.0:
        why = f"the {old.shape} world cannot go on"
        return Change("change", float("inf"), move_s, why)
    kept_s = max(0.0, dwell_s - move_s)
    gain = best.samples_per_s * kept_s / (old_samples_per_s * dwell_s) - 1.0
    words = (
        f"{best.world.shape} does {best.samples_per_s:.1f} samples/s instead of "
        f"{old_samples_per_s:.1f}; moving takes {move_s:.1f} s of the {dwell_s:.0f} s expected"
    )
    decision: Literal["stay", "change"] = "change" if gain > MARGIN else "stay"
    return Change(decision, gain, move_s, f"{words}: {100.0 * gain:+.1f}%")
