"""How fast each shape of a job trains, who holds what in it, and what a change has to move.

Rates are measured or modelled samples per second, by D and P. What is not in the table cannot run:
shapes that do not fit into memory are left out of it, and nothing is interpolated.

`tabulate` makes a table of what the planner predicts: a `World` says also who has which blocks, in
which micro-batches, and of all worlds of a shape the table has the fastest. Worlds whose stages
differ in their number of copies have no shape, and are left out.

State moves by slices, from several living peers at once: a node that lacks its slice takes
M / P bytes over its own link, all of them at the same time, so the time is one slice's.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec

from perdure.model.errors import ConfigError
from perdure.model.input.source import Source
from perdure.model.planning.costs import CostProfile
from perdure.model.planning.world import World, make_devices
from perdure.plan.worlds.planner import Request, plan_worlds

BYTES_A_PARAMETER = 16
"""Weights and gradients of two bytes, and 12 of Adam in mixed precision."""

PARAMETERS = {
    "bert": 0.34e9,
    "gpt-1.5b": 1.5e9,
    "gpt-6.7b": 6.7e9,
    "resnet152": 0.06e9,
    "vgg19": 0.14e9,
}
"""Published sizes of the models in tables that do not say theirs."""


class Shape(NamedTuple):
    """A grid of data-parallel replicas by pipeline stages, one node a place."""

    replicas: int
    stages: int

    @property
    def nodes(self) -> int:
        """Nodes that it uses."""
        return self.replicas * self.stages


class Throughput:
    """Samples a second by shape, for one model on one kind of node."""

    def __init__(
        self,
        name: str,
        rates: Mapping[Shape, float],
        *,
        global_batch: float,
        state_bytes: float,
        source: str,
    ) -> None:
        """Keep what was measured; `state_bytes` is all of the model's and the optimizer's state."""
        self.name, self.source = name, source
        self.global_batch, self.state_bytes = global_batch, state_bytes
        self.rates = dict(sorted(rates.items()))
        self.nodes_max = max(shape.nodes for shape in self.rates)
        order = sorted(self.rates, key=lambda s: (-self.rates[s], s.nodes, s.stages))
        counts = range(self.nodes_max + 1)
        self._best = [next((s for s in order if s.nodes <= count), None) for count in counts]
        stages = dict.fromkeys(shape.stages for shape in self.rates)
        self._rows = {count: [s for s in self.rates if s.stages == count] for count in stages}

    def choose_fastest(self, nodes: int) -> Shape | None:
        """Return the fastest shape on so many nodes, of equals the smallest; None if none fits."""
        return self._best[min(nodes, self.nodes_max)]

    def choose_fastest_row(self, replicas: int, stages: int) -> Shape | None:
        """Return the fastest shape of `stages` with so many replicas at the most."""
        fitting = [s for s in self._rows.get(stages, ()) if s.replicas <= replicas]
        return max(fitting, key=lambda s: (self.rates[s], -s.replicas), default=None)

    def list_fitting_shapes(self, nodes: int) -> list[Shape]:
        """Return every shape that so many nodes can hold."""
        return [shape for shape in self.rates if shape.nodes <= nodes]

    def list_fastest_rows(self, nodes: int) -> list[Shape]:
        """Return for each number of stages the fastest shape that so many nodes can hold."""
        found = (self.choose_fastest_row(nodes // stages, stages) for stages in self._rows)
        return [shape for shape in found if shape is not None]

    def compute_step_s(self, shape: Shape) -> float:
        """Return how long a global batch takes."""
        return self.global_batch / self.rates[shape]


def make_linear(nodes_max: int) -> Throughput:
    """Return a job of replicas of one node, one sample a second each: every node is worth as much.

    Two seconds a step on 32 nodes, the state of 0.34 thousand million parameters.
    """
    return Throughput(
        "linear",
        {Shape(count, 1): float(count) for count in range(1, max(1, nodes_max) + 1)},
        global_batch=64.0,
        state_bytes=0.34e9 * BYTES_A_PARAMETER,
        source="1 sample/s a node",
    )


def make_pipeline(nodes_max: int) -> Throughput:
    """Return a job whose model needs four nodes at least, by a formula.

    128 micro-batches a step; D x P nodes lose the bubble (P - 1) / (micro-batches a replica)
    (GPipe, Huang et al. 2019), a hundredth of a step's time a further replica (all-reduce) and
    two a further stage (transfers, stages of unequal cost): these two are assumed. The state of
    1.5 thousand million parameters.
    """
    rates = {}
    for stages in (4, 6, 8, 12, 16):
        for replicas in range(1, max(4, nodes_max) // stages + 1):
            bubble = (stages - 1) * replicas / 128
            rates[Shape(replicas, stages)] = (
                replicas
                * stages
                / (1 + bubble)
                / (1 + 0.01 * (replicas - 1))
                / (1 + 0.02 * (stages - 1))
            )
    return Throughput(
        "pipeline",
        rates,
        global_batch=128.0,
        state_bytes=1.5e9 * BYTES_A_PARAMETER,
        source="formula: bubble, all-reduce, transfers",
    )


MODELS = {"linear": make_linear, "pipeline": make_pipeline}

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Config(msgspec.Struct):
    D: _Count
    P: _Count
    samples_per_s: _Positive


class _Model(msgspec.Struct):
    configs: tuple[_Config, ...]
    global_batch: _Positive
    parameters: _Positive | None = None
    state_bytes: _Positive | None = None


class _File(msgspec.Struct):
    models: dict[str, _Model]
    source: str = ""


def read_throughput(
    text: str, name: str, model: str | None, *, state_bytes: float | None = None
) -> Throughput:
    """Return a model's table out of `{"models": {name: {"global_batch", "configs"}}}`.

    Args:
        text: All of the file.
        name: What it is called, in errors.
        model: Which of its models; None if it has one only.
        state_bytes: Size of the state, instead of the file's `state_bytes`, of 16 bytes for each
            of its `parameters`, or of the published size of a model of that name.

    Raises:
        ConfigError: It is malformed, has no such model, or does not say how large the state is.
    """
    file: _File = Source(name, text).decode(_File)
    if model is None and len(file.models) == 1:
        model = next(iter(file.models))
    if model is None or model not in file.models:
        what = f"no model `{model}`" if model else "it has several models"
        raise ConfigError(f"{name}: {what}", hint=f"--tau {name}:{'|'.join(file.models)}")
    found = file.models[model]
    if not found.configs:
        raise ConfigError(f"{name}: {model} has no configs", hint="docs/traces.md")
    parameters = found.parameters or PARAMETERS.get(model)
    size = state_bytes or found.state_bytes or (parameters and parameters * BYTES_A_PARAMETER)
    if not size:
        raise ConfigError(f"{name}: {model} does not say `parameters`", hint="--state-gb SIZE")
    return Throughput(
        model,
        {Shape(c.D, c.P): c.samples_per_s for c in found.configs},
        global_batch=found.global_batch,
        state_bytes=size,
        source=file.source or name,
    )


class Grid(NamedTuple):
    """Nodes by replica and stage; None where one is missing."""

    rows: tuple[tuple[str | None, ...], ...]

    @property
    def stages(self) -> int:
        """P."""
        return len(self.rows[0])

    @property
    def members(self) -> list[str]:
        """All nodes in it."""
        return [node for row in self.rows for node in row if node is not None]

    def without(self, lost: Collection[str]) -> "Grid":
        """Return it with the places of `lost` empty."""
        return Grid(tuple(tuple(None if n in lost else n for n in row) for row in self.rows))

    def count_copies(self) -> int:
        """Return how many nodes hold the stage that the fewest hold."""
        return min(sum(n is not None for n in column) for column in zip(*self.rows, strict=True))


def compute_move_s(
    table: Throughput, old: Shape | None, new: Shape, fresh: int, bytes_per_s: float
) -> float:
    """Return the least time that the state needs to get where `new` needs it, seconds.

    A node that holds nothing of it (`fresh` of them) takes a whole slice; if there is none, those
    that hold a slice of the old cut lack at least the difference of the two; a mere loss of
    replicas moves nothing.
    """
    if old is None or fresh > 0:
        return table.state_bytes / new.stages / bytes_per_s
    more = 1.0 / new.stages - 1.0 / old.stages
    return max(0.0, table.state_bytes * more) / bytes_per_s


def place(old: Grid | None, shape: Shape, living: Sequence[str]) -> tuple[Grid, int]:
    """Return who goes where on `living` (the oldest first), and how many lack their slice.

    Where the number of stages stays, who holds a stage keeps it while there is room; else who
    holds any of the state comes before who holds nothing. Free places are filled pipeline by
    pipeline, as ranks are numbered.
    """
    alive = set(living)
    if old is not None and old.stages == shape.stages:
        columns = [
            [row[stage] for row in old.rows if row[stage] in alive][: shape.replicas]
            for stage in range(shape.stages)
        ]
    else:
        columns = [[] for _ in range(shape.stages)]
    placed = {node for column in columns for node in column}
    holders = [n for n in (old.members if old else []) if n in alive and n not in placed]
    known = set(holders)
    others = [n for n in living if n not in placed and n not in known]
    free = iter([*holders, *others])
    missing = shape.nodes - len(placed)
    for replica in range(shape.replicas):
        for column in columns:
            if len(column) <= replica:
                column.append(next(free))
    rows = tuple(zip(*columns, strict=True))
    same_cut = old is not None and old.stages == shape.stages
    fresh = missing if same_cut else max(0, missing - len(holders))
    return Grid(rows), fresh


def fill(old: Grid, living: Sequence[str]) -> tuple[Grid, int]:
    """Return `old` with nodes that are not in it in its empty places, and how many took one."""
    spare = iter([node for node in living if node not in set(old.members)])
    rows = [[next(spare, None) if n is None else n for n in row] for row in old.rows]
    taken = sum(n is None for row in old.rows for n in row)
    return Grid(tuple(map(tuple, rows))), taken - sum(n is None for row in rows for n in row)


def has_lost_neighbours(grid: Grid, lost: Collection[str]) -> bool:
    """Return whether two neighbours of one pipeline, taken as a ring, are both among `lost`.

    Pipelines of one stage have no neighbours: whoever lives holds all of it.
    """
    if grid.stages == 1:
        return grid.without(lost).count_copies() == 0
    rings = ([*row, row[0]] for row in grid.rows)
    return any(a in lost and b in lost for ring in rings for a, b in pairwise(ring))


def shape_of(world: World) -> Shape | None:
    """Return the shape of `world`; None where its stages differ in their number of copies."""
    even = len({len(stage.devices) for stage in world.stages}) == 1
    return Shape(world.replicas, world.ranks) if even else None


def tabulate(
    profile: CostProfile, nodes_max: int, memory_bytes: int, global_batch: int
) -> Throughput:
    """Return what each shape on up to `nodes_max` nodes of one device would do.

    Raises:
        ConfigError: None fits.
        MeasureError: The profile lacks a measure.
    """
    rates: dict[Shape, float] = {}
    for stages in range(1, min(nodes_max, len(profile.blocks)) + 1):
        for replicas in range(1, nodes_max // stages + 1):
            request = Request(
                global_batch, ranks=(stages,), schedules=("1f1b", "interleaved"), options=1
            )
            devices = make_devices(replicas * stages, 1, memory_bytes)
            for option in plan_worlds(profile, devices, request).options:
                shape = shape_of(option.world)
                if shape is not None:
                    rates[shape] = max(option.samples_per_s, rates.get(shape, 0.0))
    if not rates:
        raise ConfigError(
            f"no world fits up to {nodes_max} nodes of {memory_bytes / 1e9:g} GB",
            hint="perdure plan says why",
        )
    return Throughput(
        "planned",
        rates,
        global_batch=global_batch,
        state_bytes=sum(block.state_bytes for block in profile.blocks),
        source=f"planner, profile {profile.fingerprint}",
    )
