"""A step of a pipeline, event by event: when each cell begins and ends each of its actions.

An action begins when its cell has done what stands before it in its list, and what it needs has
arrived. A message occupies its directed link for bytes / bandwidth, arrives a latency later, and
takes no time from either cell. The gradients of a stage are reduced over its copies once all of
them have finished it, beside the other stages of the cells; then the optimizer's step follows.

All is a function of its arguments: what the lists leave open does not exist.
"""

from collections.abc import Callable, Sequence

import msgspec

from perdure.model.pipeline import Action, CellTimes, Executed, Orders, Timeline
from perdure.plan.chain import StageCost

Hop = tuple[float, float]
"""Latency, and seconds that a message occupies its link."""
FREE: Hop = (0.0, 0.0)


class Pipe(msgspec.Struct, frozen=True):
    """What the simulation knows of stages and cells."""

    stages: Sequence[StageCost]
    hop: Callable[[int, int, int], Hop]
    """(stage, from cell, to cell) -> what its input, or the gradient of it, costs to send."""
    reduce_s: Sequence[float]
    """Stage -> its all-reduce; 0 where it has one copy."""
    slowdowns: Sequence[float] = ()
    """Cell -> factor on its work; all 1 if empty."""
    overlap: float = 0.0
    """The share of an all-reduce that the last backward of its stage can hide."""

    def work_s(self, action: Action, cell: int) -> float:
        """Return how long an action takes on a cell."""
        stage = self.stages[action.stage]
        match action.kind:
            case "F":
                work_s = stage.forward_s
            case "B":
                work_s = stage.backward_s
            case "W":
                work_s = stage.weight_s
        return work_s * self.slowdowns[cell] if self.slowdowns else work_s


class DeadlockError(AssertionError):
    """Cells wait for one another for ever: the orders are no schedule."""


def simulate(orders: Orders, pipe: Pipe) -> Timeline:
    """Return the step that `orders` make.

    Raises:
        DeadlockError: Some action waits for one that never comes; names it.
    """
    homes = _find_homes(orders)
    arrived: dict[Action, float] = {}
    links: dict[tuple[int, int], float] = {}
    waiting: dict[Action, int] = {}
    executed: list[list[Executed]] = [[] for _ in orders]
    last = len(pipe.stages) - 1
    ready = list(range(len(orders) - 1, -1, -1))
    while ready:
        cell = ready.pop()
        mine, done = orders[cell], executed[cell]
        free_s = done[-1].end_s if done else 0.0
        for action in mine[len(done) :]:
            needs = _find_need(action, last)
            if needs is not None:
                if needs not in arrived:
                    waiting[needs] = cell
                    break
                free_s = max(free_s, arrived[needs])
            end_s = free_s + pipe.work_s(action, cell)
            done.append(Executed(action, free_s, end_s))
            free_s = end_s
            arrived[action] = _deliver(action, end_s, cell, homes, pipe, links)
            woken = waiting.pop(action, None)
            if woken is not None:
                ready.append(woken)
    for cell, done in enumerate(executed):
        if len(done) < len(orders[cell]):
            raise DeadlockError(f"cell {cell} waits for ever to do {orders[cell][len(done)]}")
    return _finish(executed, pipe)


def _find_homes(orders: Orders) -> dict[tuple[int, int], int]:
    """Return (stage, micro-batch) -> the cell that has it."""
    return {(a.stage, a.micro_batch): cell for cell, mine in enumerate(orders) for a in mine}


def _find_need(action: Action, last: int) -> Action | None:
    """Return the action that must be done, and have arrived, before this one."""
    match action.kind:
        case "F":
            return Action("F", action.stage - 1, action.micro_batch) if action.stage else None
        case "B":
            if action.stage == last:
                return Action("F", last, action.micro_batch)
            return Action("B", action.stage + 1, action.micro_batch)
        case "W":
            return Action("B", action.stage, action.micro_batch)


def _deliver(
    action: Action, end_s: float, cell: int, homes: dict[tuple[int, int], int],
    pipe: Pipe, links: dict[tuple[int, int], float],
) -> float:  # fmt: skip
    """Return when what an action made is where it is needed next."""
    step = {"F": 1, "B": -1, "W": 0}[action.kind]
    target = homes.get((action.stage + step, action.micro_batch), cell)
    if target == cell:
        return end_s
    latency_s, occupied_s = pipe.hop(max(action.stage, action.stage + step), cell, target)
    sent_s = max(end_s, links.get((cell, target), 0.0)) + occupied_s
    links[cell, target] = sent_s
    return sent_s + latency_s


def _finish(executed: list[list[Executed]], pipe: Pipe) -> Timeline:
    """Add all-reduces and optimizer steps to what the cells have done.

    A cell's stages are reduced one after another, in the order in which they are finished.
    """
    last = [Executed(Action("F", stage, -1), 0.0, 0.0) for stage in range(len(pipe.stages))]
    stages = []
    for done in executed:
        ends = {entry.action.stage: entry for entry in done}
        stages.append(sorted(ends))
        for stage, entry in ends.items():
            last[stage] = max(last[stage], entry, key=lambda e: e.end_s)
    cells = []
    for done, mine in zip(executed, stages, strict=True):
        computed_s = done[-1].end_s if done else 0.0
        reduced_s = exposed_s = 0.0
        for stage in sorted(mine, key=lambda s: last[s].end_s):
            reduce_s, final = pipe.reduce_s[stage], last[stage]
            hidden_s = min(pipe.overlap * reduce_s, final.end_s - final.begin_s)
            begin_s = max(reduced_s, final.end_s - hidden_s)
            reduced_s = begin_s + reduce_s
            exposed_s += max(0.0, reduced_s - max(begin_s, computed_s)) if reduce_s else 0.0
        update_s = sum(pipe.stages[stage].update_s for stage in mine)
        busy_s = sum(entry.end_s - entry.begin_s for entry in done)
        end_s = max(computed_s, reduced_s) + update_s
        cells.append(CellTimes(tuple(done), busy_s, exposed_s, update_s, end_s))
    return Timeline(max((cell.end_s for cell in cells), default=0.0), tuple(cells))
