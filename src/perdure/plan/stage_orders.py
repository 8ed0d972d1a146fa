"""Who passes which micro-batch through which stage, and in which order.

Where all stages have the same copies, replicas work side by side, in 1F1B or a schedule that puts
off gradients of weights. Where they have not, or a loss has left micro-batches to be passed again,
each stage's copies take turns, and a list scheduler finds the order (`pipeline.greedy`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

import msgspec

from perdure.model.pipeline import Orders, Routes
from perdure.plan.chain import StageCost
from perdure.plan.microbatches import assign
from perdure.plan.pipeline.greedy import order_greedily, route_spread
from perdure.plan.pipeline.orders import join_replicas, order_1f1b, order_zero_bubble
from perdure.plan.pipeline.simulate import FREE, Pipe
from perdure.plan.stages import Layout

StageSchedule = Literal["1f1b", "zero-bubble"]
"""Of replicas in which each rank has one stage."""
SCHEDULES: tuple[StageSchedule, ...] = get_args(StageSchedule)
_ORDERS = {"1f1b": order_1f1b, "zero-bubble": order_zero_bubble}


class Passes(msgspec.Struct, frozen=True):
    """The micro-batches that go through all stages, and by whom."""

    numbers: tuple[int, ...]
    cells: tuple[int, ...]
    """The member of each cell."""
    routes: Routes
    """Stage -> place in `numbers` -> cell."""
    orders: Orders
    """Cell -> its actions; their micro-batches are those of the step."""
    counted: tuple[dict[int, int], ...]
    """Stage -> micro-batch -> the member whose gradients of it are taken."""

    def find_todo(self, member: int, kept: Collection[int] = ()) -> tuple[int, ...]:
        """Return the micro-batches whose gradients `member` computes, without those it has."""
        counted = {m for at in self.counted for m, who in at.items() if who == member}
        return tuple(m for m in self.numbers if m in counted and m not in kept)


def plan_passes(
    layout: Layout, count: int, kept: Mapping[int, Collection[int]],
    works: Sequence[float] = (), schedule: StageSchedule = "1f1b",
) -> Passes:  # fmt: skip
    """Return what is left of a step of `count` micro-batches, given what each member keeps.

    `works` are the stages' times in any unit; all alike if empty. `schedule` is for stages that
    have equally many copies.
    """
    having = [
        {m: member for member in reversed(members) for m in kept.get(member, ())}
        for members in layout.copies
    ]
    numbers = [m for m in range(count) if not all(m in at for at in having)]
    sizes = {len(members) for members in layout.copies}
    if len(sizes) == 1:
        cells, routes, orders = _order_replicas(layout, numbers, sizes.pop(), schedule)
    else:
        cells, routes, orders = _order_spread(layout, numbers, works)
    counted = tuple(
        at | {m: cells[routes[stage][i]] for i, m in enumerate(numbers) if m not in at}
        for stage, at in enumerate(having)
    )
    return Passes(tuple(numbers), cells, routes, orders, counted)


def _order_replicas(
    layout: Layout, numbers: Sequence[int], replicas: int, schedule: StageSchedule
) -> tuple[tuple[int, ...], Routes, Orders]:
    """Cell = replica * stages + stage."""
    stages = len(layout.sections)
    cells = tuple(members[r] for r in range(replicas) for members in layout.copies)
    shares = assign(len(numbers), range(replicas))
    home = {i: replica for replica, mine in shares.items() for i in mine}
    routes = tuple(
        tuple(home[i] * stages + stage for i in range(len(numbers))) for stage in range(stages)
    )
    lists = [_ORDERS[schedule](stages, [numbers[i] for i in shares[r]]) for r in range(replicas)]
    return cells, routes, join_replicas(lists)


def _order_spread(
    layout: Layout, numbers: Sequence[int], works: Sequence[float]
) -> tuple[tuple[int, ...], Routes, Orders]:
    """Cells are numbered stage by stage."""
    cells, columns = layout.members, list[range]()
    for members in layout.copies:
        start = columns[-1].stop if columns else 0
        columns.append(range(start, start + len(members)))
    routes = route_spread(columns, len(numbers))
    stages = len(columns)
    costs = [StageCost(w, 2 * w, 0.0, 0, 0, 0.0) for w in works or (1.0,) * stages]
    pipe = Pipe(costs, lambda stage, here, there: FREE, (0.0,) * stages)
    caps = [stages - stage for stage in range(stages)]
    orders = order_greedily(routes, len(cells), pipe, caps)
    named = tuple(
        tuple(msgspec.structs.replace(a, micro_batch=numbers[a.micro_batch]) for a in mine)
        for mine in orders
    )
    return cells, routes, named
