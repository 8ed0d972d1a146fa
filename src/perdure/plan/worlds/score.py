"""What a world does in a step: its action lists, its step time, and what it holds in memory.

Equal replicas do the same at the same time, so that one of each kind is simulated, with the
all-reduces that join them. Of very many micro-batches only the first and the last are: between
them a pipeline repeats itself, and the time of one repetition is taken for the rest.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from perdure.model.planning.costs import CostProfile, Place
from perdure.model.planning.pipeline import Orders, Timeline
from perdure.model.planning.world import Device, ScheduleName, World
from perdure.plan.pipeline.orders import (
    join_replicas,
    number_runs,
    order_greedily,
    order_replica,
    route_spread,
)
from perdure.plan.pipeline.simulate import Hop, Pipe, simulate
from perdure.plan.worlds.chain import Chain

BUCKET_BYTES = 8 << 20
"""Gradients that leave together, about."""
WINDOW_MIN = 128
"""Micro-batches, at least, from which a pipeline's repetition is taken; up to twice as many are
simulated in full."""
REPEATS_MIN = 4
"""Such a window is at least so many lengths of the pipeline."""


class Score(msgspec.Struct, frozen=True):
    """The score of a world: its step time, and what it holds in memory."""

    step_s: float
    bubble: float
    """Share of the working devices' time in which they wait."""
    memory_bytes: int
    """The bytes of the device that needs most."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Replicas that are alike."""

    row: tuple[str, ...]
    """Devices of the one with most micro-batches."""
    share: int
    """Its micro-batches."""
    alike: int
    """How many replicas."""
    count: int
    """Micro-batches of all of them."""


def plan_orders(world: World) -> tuple[Orders, tuple[str, ...]]:
    """Return what each device of a uniform world does in a step, and the devices.

    A world whose stages differ in their copies is ordered by its costs: `Scorer.lay_out`.
    """
    cells = tuple(
        stage.devices[replica]
        for replica in range(len(world.shares))
        for stage in world.stages[: world.ranks]
    )
    return _order(world, world.shares), cells


class Scorer:
    """Scores worlds from one profile over one set of devices."""

    def __init__(self, profile: CostProfile, devices: Sequence[Device]) -> None:
        """Score on `devices`."""
        self.profile = profile
        self.devices: Mapping[str, Device] = {device.name: device for device in devices}
        self.actions = 0
        """Simulated so far: what scoring has cost."""
        self._chains: dict[int, Chain] = {}

    def chain(self, micro_batch: int) -> Chain:
        """Return the profile's blocks with this micro-batch."""
        if micro_batch not in self._chains:
            self._chains[micro_batch] = Chain(self.profile, micro_batch)
        return self._chains[micro_batch]

    def score(self, world: World) -> Score:
        """Return what `world` would do.

        Raises:
            MeasureError: It needs a link that was not measured.
            ConfigError: Its schedule cannot have so many micro-batches.
        """
        return self._score_replicas(world) if world.shares else self._score_spread(world)

    def lay_out(self, world: World, count: int | None = None) -> tuple[Orders, Pipe, list[str]]:
        """Return the whole world as orders, what they cost, and the device of each cell.

        With `count`, as if a step had so many micro-batches; only of a world without shares.
        """
        if world.shares:
            orders, devices = plan_orders(world)
            return orders, self._make_pipe(world, devices), list(devices)
        names = [name for stage in world.stages for name in stage.devices]
        cells = number_runs([len(stage.devices) for stage in world.stages])
        pipe = self._make_pipe(world, names)
        caps = [len(world.stages) - stage for stage in range(len(world.stages))]
        routes = route_spread(cells, world.count if count is None else count)
        return order_greedily(routes, len(names), pipe, caps), pipe, names

    def compute_peak_bytes(self, world: World, orders: Orders) -> int:
        """Return the bytes of the cell that holds most at any time of `orders`."""
        chain, stages = self.chain(world.micro_batch), world.stages
        fixed = [chain.memory(s.first, s.stop, 0, s.recompute) for s in stages]
        kept = [
            chain.memory(s.first, s.stop, 1, s.recompute) - base
            for s, base in zip(stages, fixed, strict=True)
        ]
        releases = "W" if world.schedule == "zero-bubble" else "B"
        most = 0
        for mine in orders:
            held = self._sum_state(world, fixed, {action.stage for action in mine})
            most = max(most, held)
            for action in mine:
                if action.kind == "F":
                    held += kept[action.stage]
                    most = max(most, held)
                elif action.kind == releases:
                    held -= kept[action.stage]
        return most + self.profile.base_bytes

    # --- within ---------------------------------------------------------------------------------

    def _sum_state(self, world: World, fixed: Sequence[int], stages: Collection[int]) -> int:
        """Return the bytes of `stages` on one device, `fixed` each; what they share once."""
        chain, runs = self.chain(world.micro_batch), [world.stages[s] for s in sorted(stages)]
        spans = [(run.first, run.stop) for run in runs]
        apart = sum(chain.count_twice([span]) for span in spans)
        return sum(fixed[s] for s in stages) - chain.count_twice(spans) + apart

    def _score_replicas(self, world: World) -> Score:
        kinds = self._group_kinds(world)
        share, group = max(world.shares), world.ranks
        window, cut = _choose_window(share, group, group)
        if share - min(world.shares) > 1 or (world.chunks > 1 and share % group):
            cut = 0
        orders, line = self._simulate_kinds(world, kinds, cut)
        step_s = line.step_s
        if cut:
            _, shorter = self._simulate_kinds(world, kinds, cut + window)
            step_s += (line.step_s - shorter.step_s) * cut / window
        spent_s = cells = 0.0
        for index, kind in enumerate(kinds):
            times = line.cells[index * world.ranks : (index + 1) * world.ranks]
            spent_s += kind.alike * sum(cell.reduce_s + cell.update_s for cell in times)
            spent_s += kind.count * self._sum_work(world, kind.row)
            cells += kind.alike * world.ranks
        return Score(
            step_s, _compute_bubble(spent_s, step_s, cells), self.compute_peak_bytes(world, orders)
        )

    def _score_spread(self, world: World) -> Score:
        copies = sorted({len(stage.devices) for stage in world.stages})
        group = copies[0] * copies[-1]
        window, cut = _choose_window(world.count, group, group * len(world.stages))
        orders, pipe, _ = self.lay_out(world, world.count - cut)
        line = simulate(orders, pipe)
        self.actions += 4 * sum(map(len, orders))
        step_s = line.step_s
        if cut:
            fewer, _, _ = self.lay_out(world, world.count - cut - window)
            step_s += (step_s - simulate(fewer, pipe).step_s) * cut / window
        spent_s = sum(cell.reduce_s + cell.update_s for cell in line.cells)
        spent_s += sum(cell.busy_s for cell in line.cells) * world.count / (world.count - cut)
        return Score(
            step_s,
            _compute_bubble(spent_s, step_s, len(orders)),
            self.compute_peak_bytes(world, orders),
        )

    def _sum_work(self, world: World, row: Sequence[str]) -> float:
        """Return the seconds that a replica's devices work on one micro-batch, in all."""
        chain = self.chain(world.micro_batch)
        return sum(
            chain.work(part.first, part.stop, part.recompute)
            * self.devices[row[stage % world.ranks]].slowdown
            for stage, part in enumerate(world.stages)
        )

    def _group_kinds(self, world: World) -> list[_Kind]:
        """Return the kinds of replicas: alike in what their links and devices cost.

        Of a kind only the one with most micro-batches is simulated, for the others wait for it.
        """
        found: dict[object, list[tuple[int, tuple[str, ...]]]] = {}
        columns = [stage.devices for stage in world.stages[: world.ranks]]
        for row, share in zip(zip(*columns, strict=True), world.shares, strict=True):
            there = [self.devices[name] for name in row]
            near = tuple(
                a.node == b.node for a, b in zip(there, there[1:] + there[:1], strict=True)
            )
            slow = tuple(device.slowdown for device in there)
            found.setdefault((near, slow), []).append((share, row))
        return [
            _Kind(max(rows)[1], max(rows)[0], len(rows), sum(share for share, _ in rows))
            for rows in found.values()
        ]

    def _simulate_kinds(
        self, world: World, kinds: Sequence[_Kind], cut: int
    ) -> tuple[Orders, Timeline]:
        orders = _order(world, [max(0, kind.share - cut) for kind in kinds])
        devices = [name for kind in kinds for name in kind.row]
        self.actions += sum(map(len, orders))
        return orders, simulate(orders, self._make_pipe(world, devices))

    def _make_pipe(self, world: World, cells: Sequence[str]) -> Pipe:
        """Return the costs of `world` where cell i is device `cells[i]`."""
        chain, split = self.chain(world.micro_batch), world.schedule == "zero-bubble"
        stages = [chain.stage(s.first, s.stop, s.recompute, split=split) for s in world.stages]
        there = [self.devices[name] for name in cells]
        hops: dict[tuple[int, bool], Hop] = {}

        def hop(stage: int, here: int, target: int) -> Hop:
            near = there[here].node == there[target].node
            if (stage, near) not in hops:
                cost = self.profile.estimate_transfer("node" if near else "cluster")
                occupied_s = stages[stage].input_bytes / cost.bytes_per_s
                hops[stage, near] = cost.latency_s, occupied_s
            return hops[stage, near]

        return Pipe(
            stages=stages,
            hop=hop,
            reduce_s=[
                self.compute_reduce_s([self.devices[n] for n in part.devices], cost.gradient_bytes)
                for part, cost in zip(world.stages, stages, strict=True)
            ],
            slowdowns=[device.slowdown for device in there],
            overlap=[compute_overlap(world.schedule, cost.gradient_bytes) for cost in stages],
            ties=self._list_ties(world),
        )

    def _list_ties(self, world: World) -> list[tuple[tuple[int, ...], float]]:
        """Return the stages that share parameters, and what it takes to sum their gradients."""
        ties = []
        for shared in self.profile.shared:
            tied = tuple(
                number
                for number, stage in enumerate(world.stages)
                if any(stage.first <= block < stage.stop for block in shared.blocks)
            )
            if len(tied) > 1:
                names = dict.fromkeys(name for s in tied for name in world.stages[s].devices)
                there = [self.devices[name] for name in names]
                ties.append((tied, self.compute_reduce_s(there, shared.gradient_bytes)))
        return ties

    def compute_reduce_s(self, there: Sequence[Device], size: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes over these devices."""
        if len(there) == 1:
            return 0.0
        near = all(device.node == there[0].node for device in there)
        place: Place = "node" if near else "cluster"
        cost = self.profile.estimate_all_reduce(place, len(there))
        return cost.latency_s + size / cost.bytes_per_s


def compute_overlap(schedule: ScheduleName, gradient_bytes: int) -> float:
    """Return the share of a stage's all-reduce that its last backward can hide.

    Gradients leave bucket by bucket as that backward makes them; the last bucket leaves when it
    has ended. None leave earlier where the backward is in two parts, or where a rank has two
    stages: the first bucket is then of the other one, whose gradients were there before.
    """
    if schedule in ("zero-bubble", "interleaved") or gradient_bytes <= BUCKET_BYTES:
        return 0.0
    return 1.0 - BUCKET_BYTES / gradient_bytes


def _order(world: World, shares: Sequence[int]) -> Orders:
    """Return the orders of replicas with so many micro-batches each, numbered from 0 on."""
    return join_replicas(
        [
            order_replica(world.schedule, world.ranks, world.chunks, mine)
            for mine in number_runs(shares)
        ]
    )


def _choose_window(count: int, group: int, length: int) -> tuple[int, int]:
    """Return the micro-batches of a window, and how many need no simulation; whole groups both."""
    window = -(-max(WINDOW_MIN, REPEATS_MIN * length) // group) * group
    return window, max(0, (count - 2 * window) // group * group)


def _compute_bubble(spent_s: float, step_s: float, cells: float) -> float:
    return max(0.0, 1.0 - spent_s / (step_s * cells))
