"""Who passes which micro-batch through which stage, and in which order.

A stage is a section of the layout. A *task* is a micro-batch's pass through one of a member's
stages: the number of that one among its own, times the step's micro-batches, plus the number of
the micro-batch.

Where all places have equally many copies, replicas work side by side, in 1F1B, interleaved, or a
schedule that puts off gradients of weights. Where they have not, each stage's copies take turns,
and a list scheduler finds the order (`order_greedily`); as it does where what a replica of an
interleaved world has to pass is no whole number of equal groups.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

import msgspec

from perdure.model.errors import ConfigError
from perdure.model.planning.pipeline import Orders, Routes
from perdure.plan.elastic.microbatches import assign
from perdure.plan.elastic.stages import Layout
from perdure.plan.pipeline.orders import (
    join_replicas,
    number_runs,
    order_greedily,
    order_replica,
    route_spread,
    route_straight,
)
from perdure.plan.pipeline.simulate import FREE, Pipe
from perdure.plan.worlds.chain import StageCost

StageSchedule = Literal["1f1b", "zero-bubble", "interleaved"]
"""Of worlds whose places have equally many copies; the last for ranks with several stages."""
SCHEDULES: tuple[StageSchedule, ...] = get_args(StageSchedule)
INTERLEAVED_RUNS = 2
"""Stages of a rank, as the planner has them."""


class Passes(msgspec.Struct, frozen=True):
    """The micro-batches that go through all stages, and by whom."""

    count: int
    """Micro-batches of a whole step."""
    places: int
    """Of the layout."""
    numbers: tuple[int, ...]
    cells: tuple[int, ...]
    """The member of each cell."""
    routes: Routes
    """Stage -> place in `numbers` -> cell."""
    orders: Orders
    """Cell -> its actions; their micro-batches are those of the step."""
    counted: tuple[dict[int, int], ...]
    """Stage -> micro-batch -> the member whose gradients of it are taken."""

    def list_todo(self, member: int, kept: Collection[int] = ()) -> tuple[int, ...]:
        """Return the tasks whose gradients `member` computes, without those it has."""
        tasks = (
            stage // self.places * self.count + m
            for stage, at in enumerate(self.counted)
            for m in self.numbers
            if at[m] == member
        )
        return tuple(task for task in tasks if task not in kept)


def plan_passes(
    layout: Layout,
    count: int,
    kept: Mapping[int, Collection[int]],
    works: Sequence[float] = (),
    schedule: StageSchedule = "1f1b",
) -> Passes:
    """Return what is left of a step of `count` micro-batches, given what each member keeps.

    `works` are the stages' times in any unit; all alike if empty. `schedule` is for stages that
    have equally many copies.
    """
    places = len(layout.copies)
    having = [dict[int, int]() for _ in layout.sections]
    for place, members in enumerate(layout.copies):
        for member in reversed(members):
            for turn, m in (divmod(task, count) for task in kept.get(member, ())):
                having[turn * places + place][m] = member
    numbers = [m for m in range(count) if not all(m in at for at in having)]
    sizes = {len(members) for members in layout.copies}
    if len(sizes) == 1:
        cells, routes, orders = _order_replicas(layout, numbers, sizes.pop(), works, schedule)
    else:
        cells, routes, orders = _order_spread(layout, numbers, works)
    counted = tuple(
        at | {m: cells[routes[stage][i]] for i, m in enumerate(numbers) if m not in at}
        for stage, at in enumerate(having)
    )
    return Passes(count, places, tuple(numbers), cells, routes, orders, counted)


def _order_replicas(
    layout: Layout,
    numbers: Sequence[int],
    replicas: int,
    works: Sequence[float],
    schedule: StageSchedule,
) -> tuple[tuple[int, ...], Routes, Orders]:
    """Cell = replica * places + place."""
    stages, places = len(layout.sections), len(layout.copies)
    cells = tuple(members[r] for r in range(replicas) for members in layout.copies)
    shares = list(assign(len(numbers), range(replicas)).values())
    routes = route_straight(places, shares, stages // places)
    named = [[numbers[i] for i in share] for share in shares]
    if stages > places:
        schedule = "interleaved"
    elif schedule == "interleaved":
        schedule = "1f1b"
    try:
        lists = [order_replica(schedule, places, stages // places, mine) for mine in named]
    except ConfigError:  # These are no whole groups of micro-batches.
        return cells, routes, _order_freely(routes, numbers, len(cells), works)
    return cells, routes, join_replicas(lists)


def _order_spread(
    layout: Layout, numbers: Sequence[int], works: Sequence[float]
) -> tuple[tuple[int, ...], Routes, Orders]:
    """Cells are numbered place by place."""
    cells, columns = layout.members, number_runs([len(members) for members in layout.copies])
    turns = len(layout.sections) // len(columns)
    routes = route_spread(columns * turns, len(numbers))
    return cells, routes, _order_freely(routes, numbers, len(cells), works)


def _order_freely(
    routes: Routes, numbers: Sequence[int], cells: int, works: Sequence[float]
) -> Orders:
    """Return orders for any routes of `numbers`."""
    stages = len(routes)
    costs = [StageCost(w, 2 * w, 0.0, 0, 0, 0.0) for w in works or (1.0,) * stages]
    pipe = Pipe(costs, lambda stage, here, there: FREE, (0.0,) * stages)
    caps = [stages - stage for stage in range(stages)]
    orders = order_greedily(routes, cells, pipe, caps)
    return tuple(
        tuple(msgspec.structs.replace(a, micro_batch=numbers[a.micro_batch]) for a in mine)
        for mine in orders
    )
