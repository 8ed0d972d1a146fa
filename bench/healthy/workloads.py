"""Healthy workloads: what lies in their steps, and what else they do beside them.

A workload is a kind of step (`Ddp`, `Fsdp`, ...), a family of noise, and disturbances, all drawn
from the seed of one run. Nothing is broken in any of them, so that whatever is said of them is
false; what may be said truly (a machine that is busy with others' work, a rank that is silent) is
written down in the world, and `judge` looks there.

Which third is held out until the final run (`HELD_OUT`) follows from the hashes of their names
alone; the rule was fixed before any of them was run.
"""

import hashlib
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from .noise import Autoregressive, Drift, Lognormal, Noise, Pareto, Recorded, Shared
from .training import BACKWARD, DATA, FORWARD, OPTIMIZER, Load, Shape, World

RECORDED = Path(__file__).with_name("step_times.json")
STEPS_S = (0.05, 0.1, 0.3, 1.0, 3.0, 10.0)
COMM_SHARE = 0.15
PARTS = (0.05, 0.3, 0.55, 0.1)
"""Of a rank's own work: data, forward, backward, optimizer."""

StepMaker = Callable[[World], None]
Disturbance = Callable[[World], None]


class Steps(ABC):
    """A workload at work: `run` does one step of all ranks."""

    def __init__(self, world: World, chance: random.Random, noise: Noise) -> None:
        """Make its communicators."""
        self.world, self.chance, self.noise = world, chance, noise
        shape = world.shape
        self.ranks = tuple(range(shape.ranks))
        self.comm_s = shape.step_s * COMM_SHARE
        self.own_s = shape.step_s - self.comm_s
        self.disturbances: list[Disturbance] = []
        self.weights = [1.0] * shape.ranks
        """How much of its own work each rank has in this step: its tokens, over the usual."""
        self.make_groups()

    def make_groups(self) -> None:
        """Make the communicators."""
        shape = self.world.shape
        num_bytes = int(min(max(self.comm_s, 0.002), 0.5) * 1e9 / 4)
        self.main = self.world.add_group("0", range(shape.ranks), num_bytes)

    def run(self, world: World) -> None:
        """Do one step."""
        factors = self.noise.draw(world.top_s)
        for disturb in self.disturbances:
            disturb(world)
        factors = [f * w for f, w in zip(factors, self.weights, strict=True)]
        self.train(world, factors)

    @abstractmethod
    def train(self, world: World, factors: list[float]) -> None:
        """Do the step's work, `factors` times as long as usual on each rank."""


class Ddp(Steps):
    """Replicas whose gradients are reduced in buckets while the backward pass goes on."""

    buckets = 3

    def train(self, world: World, factors: list[float]) -> None:
        """Do one step."""
        world.do_all(DATA, PARTS[DATA] * self.own_s, factors)
        world.do_all(FORWARD, PARTS[FORWARD] * self.own_s, factors)
        works = [PARTS[BACKWARD] * self.own_s * f for f in factors]
        world.run_backward(self.main, works, self.buckets, self.comm_s)
        world.do_all(OPTIMIZER, PARTS[OPTIMIZER] * self.own_s, [1.0] * len(factors))


class Unstaged(Ddp):
    """A script whose stages nobody sees: only its collectives tell of its steps."""

    def make_groups(self) -> None:
        """Make the communicators."""
        super().make_groups()
        self.world.staged = False


class Accumulation(Ddp):
    """Micro-batches in `no_sync`, and the last one with the others' gradients."""

    micro = 6

    def train(self, world: World, factors: list[float]) -> None:
        """Do one step."""
        part_s = self.own_s * (1.0 - PARTS[OPTIMIZER]) / self.micro
        draw = self.chance.gauss
        for i in range(self.micro):
            uneven = [f * math.exp(0.1 * draw(0.0, 1.0)) for f in factors]
            world.do_all(DATA, 0.06 * part_s, uneven)
            world.do_all(FORWARD, 0.34 * part_s, uneven)
            if i < self.micro - 1:
                world.do_all(BACKWARD, 0.6 * part_s, uneven)
            else:
                works = [0.6 * part_s * f for f in uneven]
                world.run_backward(self.main, works, self.buckets, self.comm_s)
        world.do_all(OPTIMIZER, PARTS[OPTIMIZER] * self.own_s, [1.0] * len(factors))


class Fsdp(Steps):
    """Each layer's parameters are gathered before it, and its gradients scattered after it."""

    layers = 6

    def train(self, world: World, factors: list[float]) -> None:
        """Do one step."""
        n, comm_s = self.layers, self.comm_s / (3 * self.layers)
        size = self.main.bytes // n
        world.do_all(DATA, PARTS[DATA] * self.own_s, factors)
        for _ in range(n):
            world.reduce(self.main, "allgather", size, comm_s)
            world.do_all(FORWARD, PARTS[FORWARD] * self.own_s / n, factors)
        for _ in range(n):
            world.reduce(self.main, "allgather", size, comm_s)
            world.do_all(BACKWARD, PARTS[BACKWARD] * self.own_s / n, factors)
            world.reduce(self.main, "reducescatter", size, comm_s)
        world.do_all(OPTIMIZER, PARTS[OPTIMIZER] * self.own_s, [1.0] * len(factors))


class Experts(Steps):
    """A mixture of experts: tokens go to where their expert is, and some experts are in demand.

    Which ones are changes after a while, as what is trained on does.
    """

    layers = 2

    def make_groups(self) -> None:
        """Make the communicators."""
        super().make_groups()
        ranks, size = self.ranks, min(8, len(self.ranks))
        parts = [ranks[i : i + size] for i in range(0, len(ranks), size)]
        self.parts = [
            self.world.add_group(str(1 + i), part, self.main.bytes // 4)
            for i, part in enumerate(parts)
        ]
        self.demand = [1.0] * len(ranks)
        self.until_s = 0.0

    def train(self, world: World, factors: list[float]) -> None:
        """Do one step."""
        top_s, chance = world.top_s, self.chance
        if top_s >= self.until_s:
            self.until_s = top_s + chance.uniform(20.0, 120.0)
            self.demand = [chance.uniform(0.8, 1.1) for _ in self.ranks]
            for part in self.parts:
                self.demand[chance.choice(part.ranks)] = chance.uniform(1.3, 3.0)
        routed = [
            f * d * math.exp(chance.gauss(0.0, 0.1))
            for f, d in zip(factors, self.demand, strict=True)
        ]
        world.work_done = [d * r / f for d, r, f in zip(self.weights, routed, factors, strict=True)]
        world.do_all(DATA, PARTS[DATA] * self.own_s, factors)
        self._pass(world, FORWARD, factors, routed)
        self._pass(world, BACKWARD, factors, routed)
        world.reduce(self.main, "allreduce", self.main.bytes, self.comm_s / 2)
        world.do_all(OPTIMIZER, PARTS[OPTIMIZER] * self.own_s, [1.0] * len(factors))

    def _pass(self, world: World, stage: int, dense: list[float], routed: list[float]) -> None:
        part_s = PARTS[stage] * self.own_s / (2 * self.layers)
        comm_s = self.comm_s / (8 * self.layers)
        for _ in range(self.layers):
            world.do_all(stage, part_s, dense)
            for group in self.parts:
                world.reduce(group, "alltoall", group.bytes, comm_s)
            world.do_all(stage, part_s, routed)
            for group in self.parts:
                world.reduce(group, "alltoall", group.bytes, comm_s)


class Packed(Ddp):
    """Sequences of unlike length, packed: each rank's work is as much as its tokens."""

    spread = 0.35
    stride = 1
    """Steps for which a rank's share stays: a shard of long documents lasts."""

    def run(self, world: World) -> None:
        """Draw tokens, and do one step."""
        if world.step % self.stride == 0:
            draw = self.chance.gauss
            self.weights = [math.exp(self.spread * draw(0.0, 1.0)) for _ in self.ranks]
        world.work_done = list(self.weights)
        super().run(world)


def find_stage_width(ranks: int) -> int:
    """Return how many ranks a pipeline of so many has in each of its stages."""
    depth = 2 if ranks == 2 else 4 if ranks < 64 else 8
    return 1 if ranks % depth else ranks // depth


class Pipeline(Steps):
    """Stages of a pipeline with unlike work, and micro-batches that go through all of them."""

    micro = 4

    def make_groups(self) -> None:
        """Make the communicators: sends and receives, and replicas of each stage."""
        shape, chance = self.world.shape, self.chance
        self.width = find_stage_width(shape.ranks)
        self.depth = shape.ranks // self.width
        num_bytes = int(min(max(self.comm_s, 0.002), 0.5) * 1e9 / 8)
        self.across = self.world.add_group("0", range(shape.ranks), num_bytes, p2p=True)
        self.replicas = [
            self.world.add_group(str(1 + s), range(s * self.width, (s + 1) * self.width), num_bytes)
            for s in range(self.depth)
            if self.width > 1
        ]
        self.share = [chance.uniform(0.6, 1.4) for _ in range(self.depth)]

    def train(self, world: World, factors: list[float]) -> None:
        """Do one step: all micro-batches forward, then all of them back, then the replicas."""
        depth, width = self.depth, self.width
        slots = self.micro + depth - 1
        unit_s = self.own_s * (1.0 - PARTS[OPTIMIZER]) / slots / 3.0
        comm_s = self.comm_s / (4 * slots)
        for rank in range(width):
            world.do(rank, DATA, PARTS[DATA] * self.own_s * factors[rank])
        for stage, length_s, order in ((FORWARD, unit_s, 1), (BACKWARD, 2.0 * unit_s, -1)):
            stages = range(depth)[::order]
            for _ in range(self.micro):
                for s in stages:
                    before = s - order
                    for i in range(width):
                        r = s * width + i
                        if 0 <= before < depth:
                            world.pass_on(self.across, before * width + i, r, comm_s)
                        world.do(r, stage, length_s * self.share[s] * factors[r])
        for group in self.replicas:
            world.reduce(group, "allreduce", group.bytes, self.comm_s / 2)
        world.do_all(OPTIMIZER, PARTS[OPTIMIZER] * self.own_s, [1.0] * len(factors))


# --- disturbances ------------------------------------------------------------------------------


class Now(ABC):
    """Something that happens now and then."""

    def __init__(self, chance: random.Random, every_s: float) -> None:
        """About so often, not like a clock."""
        self.chance, self.every_s = chance, every_s
        self._due_s = -1.0

    def __call__(self, world: World) -> None:
        """Do it, if it is time."""
        top_s = world.top_s
        if top_s == math.inf:
            return
        if self._due_s < 0.0:
            self._due_s = top_s + self.every_s * self.chance.random()
        if top_s >= self._due_s:
            self.happen(world)
            self._due_s = world.top_s + self.every_s * self.chance.uniform(0.5, 1.5)

    @abstractmethod
    def happen(self, world: World) -> None:
        """Do it."""


class Evaluation(Now):
    """Rank 0 evaluates alone, on its device: nothing of it moves."""

    def __init__(self, chance: random.Random, *, declared: bool = False) -> None:
        """Every 5 to 20 minutes, 10 to 600 s, much the same each time."""
        super().__init__(chance, chance.uniform(300.0, 1200.0))
        self.usual_s = 10.0 * 60.0 ** chance.random()
        self.stage = chance.choice((-1, FORWARD))
        self.name = "evaluate" if declared else ""

    def happen(self, world: World) -> None:
        """Evaluate."""
        seconds = min(self.usual_s * self.chance.uniform(0.8, 1.2), 600.0)
        world.be_alone(seconds, 0, "S", stage=self.stage, declared=self.name)


class Save(Now):
    """Rank 0 saves: it writes, or waits for the disk."""

    def __init__(self, chance: random.Random) -> None:
        """Every 2 to 15 minutes, 1 to 120 s."""
        super().__init__(chance, chance.uniform(120.0, 900.0))
        self.usual_s = 120.0 ** chance.random()

    def happen(self, world: World) -> None:
        """Save."""
        seconds = self.usual_s * self.chance.uniform(0.7, 1.6)
        world.be_alone(seconds, 0, self.chance.choice("RDS"))


class Collection(Now):
    """A collection of garbage on some rank."""

    def happen(self, world: World) -> None:
        """Collect."""
        r = self.chance.randrange(world.shape.ranks)
        stage = self.chance.choice((DATA, FORWARD, BACKWARD))
        world.be_alone(self.chance.uniform(0.1, 3.0), r, "R", stage=stage)


class Storage(Now):
    """Some rank waits for its data, in state S or D."""

    def happen(self, world: World) -> None:
        """Wait: mostly a moment, at times as long as a failover takes."""
        r = self.chance.randrange(world.shape.ranks)
        seconds = 0.5 * 120.0 ** self.chance.random()
        world.be_alone(seconds, r, self.chance.choice("SD"), stage=DATA)


class Compilation(Now):
    """A first compile of minutes, and now and then another, of all ranks or of one."""

    def __init__(self, chance: random.Random) -> None:
        """Again every 5 to 20 minutes."""
        super().__init__(chance, chance.uniform(300.0, 1200.0))
        self.first = True

    def __call__(self, world: World) -> None:
        """Compile at the first step, and now and then."""
        if self.first:
            self.first = False
            usual_s = self.chance.uniform(20.0, 120.0)
            for r in range(world.shape.ranks):
                world.be_alone(usual_s * self.chance.uniform(0.7, 1.3), r, "R", stage=FORWARD)
        super().__call__(world)

    def happen(self, world: World) -> None:
        """Compile again."""
        usual_s = self.chance.uniform(5.0, 40.0)
        everybody = self.chance.random() < 0.5
        some = range(world.shape.ranks) if everybody else [self.chance.randrange(world.shape.ranks)]
        for r in some:
            world.be_alone(usual_s * self.chance.uniform(0.7, 1.3), r, "R", stage=FORWARD)


class Pause(Now):
    """All ranks stand still for a while, because the script, or an operator, wants it so."""

    def __init__(self, chance: random.Random, *, steered: bool) -> None:
        """Every 4 to 12 minutes."""
        super().__init__(chance, chance.uniform(240.0, 720.0))
        self.steered = steered

    def happen(self, world: World) -> None:
        """Stand still."""
        world.pause_all(30.0 * 20.0 ** self.chance.random(), steered=self.steered)


class Neighbours(Now):
    """Others' work on some machine, for up to a minute."""

    def happen(self, world: World) -> None:
        """Begin it."""
        shape, top_s = world.shape, world.top_s
        world.loads = [load for load in world.loads if load.end_s > top_s - 60.0]
        node = self.chance.randrange(shape.nodes)
        seconds = self.chance.uniform(3.0, 60.0)
        everywhere = self.chance.random() < 0.2
        factor = self.chance.uniform(1.15, 2.5)
        world.loads.append(Load(node, top_s, top_s + seconds, factor, everywhere))


class OtherBatches(Now):
    """The batches of all ranks become larger or smaller."""

    def __init__(self, chance: random.Random, steps: Steps) -> None:
        """Every few minutes."""
        super().__init__(chance, 240.0)
        self.steps = steps

    def happen(self, world: World) -> None:
        """Change them."""
        size = self.chance.choice((0.5, 0.75, 1.0, 1.5, 2.0))
        self.steps.weights = [size] * world.shape.ranks


# --- the table ---------------------------------------------------------------------------------


def _jitter(chance: random.Random, ranks: int) -> Noise:
    return Lognormal(chance, ranks, chance.uniform(0.02, 0.1))


def _lognormal(chance: random.Random, ranks: int) -> Noise:
    return Lognormal(chance, ranks, chance.choice((0.1, 0.2, 0.25, 0.4, 0.6)))


def _pareto(chance: random.Random, ranks: int) -> Noise:
    return Pareto(chance, ranks, chance.choice((1.5, 2.0, 3.0)))


def _autoregressive(chance: random.Random, ranks: int) -> Noise:
    return Autoregressive(chance, ranks, chance.choice((0.1, 0.2, 0.4)), chance.uniform(0.9, 0.97))


def _drift(chance: random.Random, ranks: int) -> Noise:
    return Drift(chance, ranks, chance.uniform(0.05, 0.2))


def _shared(chance: random.Random, ranks: int) -> Noise:
    return Shared(chance, ranks)


def _recorded(chance: random.Random, ranks: int) -> Noise:
    series = json.loads(RECORDED.read_text())["series"]
    return Recorded(chance, ranks, series, chance.choice((10, 50, 200)))


def _add(*makers: Callable[[random.Random, Steps], Disturbance]) -> Callable[[Steps], None]:
    def add(steps: Steps) -> None:
        steps.disturbances += [maker(steps.chance, steps) for maker in makers]

    return add


def _evaluate(declared: bool) -> Callable[[random.Random, Steps], Disturbance]:
    return lambda chance, _: Evaluation(chance, declared=declared)


def _pause(steered: bool) -> Callable[[random.Random, Steps], Disturbance]:
    return lambda chance, _: Pause(chance, steered=steered)


def _every(
    kind: type[Now], least_s: float, most_s: float
) -> Callable[[random.Random, Steps], Disturbance]:
    return lambda chance, _: kind(chance, chance.uniform(least_s, most_s))


NoiseMaker = Callable[[random.Random, int], Noise]
WORKLOADS: dict[str, tuple[type[Steps], NoiseMaker, Callable[[Steps], None]]] = {
    "DDP": (Ddp, _jitter, _add()),
    "DDP, lognormal": (Ddp, _lognormal, _add()),
    "DDP, Pareto tails": (Ddp, _pareto, _add()),
    "DDP, autocorrelated": (Ddp, _autoregressive, _add()),
    "DDP, drifts": (Ddp, _drift, _add()),
    "DDP, shared load": (Ddp, _shared, _add()),
    "DDP, recorded steps": (Ddp, _recorded, _add()),
    "DDP, stages unseen": (Unstaged, _jitter, _add()),
    "DDP, stages unseen, lognormal": (Unstaged, _lognormal, _add()),
    "accumulation": (Accumulation, _jitter, _add()),
    "accumulation, lognormal": (Accumulation, _lognormal, _add()),
    "FSDP2": (Fsdp, _jitter, _add()),
    "FSDP2, lognormal": (Fsdp, _lognormal, _add()),
    "FSDP2, autocorrelated": (Fsdp, _autoregressive, _add()),
    "hot experts": (Experts, _jitter, _add()),
    "hot experts, lognormal": (Experts, _lognormal, _add()),
    "packed sequences": (Packed, _jitter, _add()),
    "packed sequences, declared": (Packed, _jitter, _add()),
    "evaluation on rank 0": (Ddp, _jitter, _add(_evaluate(False))),
    "evaluation on rank 0, lognormal": (Ddp, _lognormal, _add(_evaluate(False))),
    "evaluation, declared": (Ddp, _jitter, _add(_evaluate(True))),
    "saving by rank 0": (Ddp, _jitter, _add(lambda chance, _: Save(chance))),
    "compiles": (Ddp, _jitter, _add(lambda chance, _: Compilation(chance))),
    "garbage collections": (Ddp, _jitter, _add(_every(Collection, 5.0, 30.0))),
    "slow storage": (Ddp, _jitter, _add(_every(Storage, 20.0, 120.0))),
    "CPU neighbours": (Ddp, _jitter, _add(_every(Neighbours, 30.0, 180.0))),
    "long pauses": (Ddp, _jitter, _add(_pause(False))),
    "long pauses, steered": (Ddp, _jitter, _add(_pause(True))),
    "pipeline": (Pipeline, _jitter, _add()),
    "pipeline, lognormal": (Pipeline, _lognormal, _add()),
    "pipeline, autocorrelated": (Pipeline, _autoregressive, _add()),
    "lost heartbeats": (Ddp, _jitter, _add()),
    "all of it": (
        Ddp,
        _lognormal,
        _add(
            _every(Collection, 20.0, 60.0),
            _every(Storage, 120.0, 400.0),
            _every(Neighbours, 120.0, 400.0),
            lambda chance, _: Save(chance),
            OtherBatches,
        ),
    ),
}
"""Name -> its steps, its noise, and what else it does."""
everybody_declares = False
"""Whether packed sequences and experts in demand declare their tokens, whatever they are called."""
everybody_on_devices = False
"""Whether collectives run on devices, so that the detector has only their times to go by."""
GAPS = "lost heartbeats"
DECLARED = "packed sequences, declared"
HELD_OUT = frozenset(
    sorted(WORKLOADS, key=lambda name: hashlib.sha256(name.encode()).digest())[
        : len(WORKLOADS) // 3
    ]
)
"""The third that is looked at in the final run only: by the hashes of the names."""
TUNED = tuple(name for name in WORKLOADS if name not in HELD_OUT)
WORLDS = (2, 4, 8, 2, 4, 8, 64, 2, 4, 8, 2, 512, 4, 8, 64, 2, 4, 8, 64, 4)
"""Ranks by the number of a run: 5 % at 512, 15 % at 64."""


def draw_shape(name: str, number: int, chance: random.Random) -> Shape:
    """Return how large run `number` of a workload is."""
    ranks = WORLDS[number % len(WORLDS)]
    step_s = chance.choice([s for s in STEPS_S if ranks <= 8 or s >= 0.3])
    nproc = {2: 1, 4: chance.choice((1, 2)), 8: chance.choice((1, 2, 4))}.get(ranks, 8)
    steered = name in ("long pauses, steered", "evaluation, declared")
    return Shape(
        ranks, nproc, step_s,
        declared=steered or chance.random() < 0.5,
        links=chance.random() < 0.5,
        cpu_share=chance.choice((0.2, 0.6, 1.0)),
        cores=chance.choice((max(2, nproc), max(4, 2 * nproc))),
    )  # fmt: skip


def make_steps(name: str, world: World, chance: random.Random) -> Steps:
    """Return the workload called `name`, at work in `world`."""
    kind, make_noise, add = WORKLOADS[name]
    steps = kind(world, chance, make_noise(chance, world.shape.ranks))
    if isinstance(steps, Packed):
        steps.stride = chance.choice((1, 1, 8))
    uneven = isinstance(steps, Packed | Experts)
    world.declares = name == DECLARED or (everybody_declares and uneven)
    world.on_devices = everybody_on_devices
    add(steps)
    return steps
