"""A step of a pipeline, event by event: when each cell begins and ends each of its actions.

An action begins when its cell has done what stands before it in its list, and what it needs has
arrived. A message occupies its directed link for bytes / bandwidth, arrives a latency later, and
takes no time from either cell. The gradients of a cell's stages are reduced over its copies once
all of these have done what they do in a step; a part of them leaves while the last backward runs,
where the cell has one stage. Then come those of parameters that stages share, over all who have one
of these, one after another; then the optimizer's step follows.

All is a function of its arguments: what the lists leave open does not exist.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec

from perdure.model.planning.pipeline import Action, CellTimes, Executed, Orders, Timeline
from perdure.plan.worlds.chain import StageCost

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
    overlap: Sequence[float] = ()
    """Stage -> the share of its all-reduce that its last backward can hide; none if empty."""
    ties: Sequence[tuple[tuple[int, ...], float]] = ()
    """Stages that share parameters, and the all-reduce of these over all that have such a stage."""

    def work_s(self, action: Action, cell: int) -> float:
        """Return how long an action takes on a cell."""
        work_s = self.stages[action.stage].spent_s(action.kind)
        return work_s * self.slowdowns[cell] if self.slowdowns else work_s


class DeadlockError(AssertionError):
    """Cells wait for one another for ever: the orders are no schedule."""


def simulate(orders: Orders, pipe: Pipe) -> Timeline:
    """Return the step that `orders` make.

    Raises:
        DeadlockError: Some action waits for one that never comes; names it.
    """
    state = _State(orders, pipe)
    ready = list(range(len(orders) - 1, -1, -1))
    while ready:
        woken = state.advance(ready.pop())
        ready += woken
    for cell, done in enumerate(state.executed):
        if len(done) < len(orders[cell]):
            raise DeadlockError(f"cell {cell} waits for ever to do {orders[cell][len(done)]}")
    return _finish(state.executed, pipe)


_micro_batch = attrgetter("micro_batch")


class _State:
    """What has been done and sent. Places of an array are stage * micro-batches + micro-batch."""

    def __init__(self, orders: Orders, pipe: Pipe) -> None:
        self.orders, self.pipe = orders, pipe
        self.executed: list[list[Executed]] = [[] for _ in orders]
        self.width = 1 + max((max(map(_micro_batch, mine)) for mine in orders if mine), default=0)
        size = len(pipe.stages) * self.width
        self.homes = [-1] * size
        for cell, mine in enumerate(orders):
            for action in mine:
                self.homes[action.stage * self.width + action.micro_batch] = cell
        self.ready: dict[str, list[float]] = {kind: [-1.0] * size for kind in ("F", "B", "W")}
        """When what an action needs has arrived; negative if it has not."""
        self.ready["F"][: self.width] = [0.0] * self.width
        self.waiting: dict[tuple[str, int], int] = {}
        self.links: dict[tuple[int, int], float] = {}
        self.hops: dict[tuple[int, int, int], Hop] = {}
        self.works = {kind: [stage.spent_s(kind) for stage in pipe.stages] for kind in "FBW"}
        """On a cell without a slowdown."""

    def advance(self, cell: int) -> list[int]:
        """Let a cell work until it must wait; return the cells that wait no longer."""
        mine, done, ready, waiting = (
            self.orders[cell],
            self.executed[cell],
            self.ready,
            self.waiting,
        )
        slowdown = self.pipe.slowdowns[cell] if self.pipe.slowdowns else 1.0
        works, width, woken = self.works, self.width, list[int]()
        free_s = done[-1].end_s if done else 0.0
        for number in range(len(done), len(mine)):
            action = mine[number]
            kind, stage = action.kind, action.stage
            at = stage * width + action.micro_batch
            begin_s = ready[kind][at]
            if begin_s < 0.0:
                waiting[kind, at] = cell
                break
            if begin_s < free_s:
                begin_s = free_s
            free_s = begin_s + works[kind][stage] * slowdown
            done.append(Executed(action, begin_s, free_s))
            if kind != "W":
                following = self._deliver(kind, stage, at, free_s, cell)
                if following in waiting:
                    woken.append(waiting.pop(following))
        return woken

    def _deliver(self, kind: str, stage: int, at: int, end_s: float, cell: int) -> tuple[str, int]:
        """Bring what an action has made to where it is needed next; return for what."""
        if kind == "F":
            if at + self.width >= len(self.homes):
                self.ready["B"][at] = end_s
                return "B", at
            stage, at = stage + 1, at + self.width
        else:
            self.ready["W"][at] = 0.0
            if stage == 0:
                return "W", at
            at -= self.width
        target = self.homes[at]
        if target != cell:
            way = stage, cell, target
            hop = self.hops.get(way)
            if hop is None:
                hop = self.hops[way] = self.pipe.hop(*way)
            link = cell, target
            free_s = self.links.get(link, 0.0)
            sent_s = self.links[link] = (free_s if free_s > end_s else end_s) + hop[1]
            end_s = sent_s + hop[0]
        self.ready[kind][at] = end_s
        return kind, at


def _finish(executed: list[list[Executed]], pipe: Pipe) -> Timeline:
    """Add all-reduces and optimizer steps to what the cells have done.

    Of a backward and an all-reduce of n equal parts, each of which leaves as it is made, all but
    one can run side by side: (n-1)/n of the shorter one is hidden.
    """
    last = [Executed(Action("F", stage, -1), 0.0, 0.0) for stage in range(len(pipe.stages))]
    stages = []
    for done in executed:
        ends = {entry.action.stage: entry for entry in done}
        stages.append(sorted(ends))
        for stage, entry in ends.items():
            last[stage] = max(last[stage], entry, key=lambda e: e.end_s)
    reduced, exposed = list[float](), list[float]()
    """By cell: when its stages are reduced, and how long it has only waited for that."""
    for done, mine in zip(executed, stages, strict=True):
        final = max((last[stage] for stage in mine), key=lambda e: e.end_s, default=None)
        if final is None:
            reduced.append(0.0)
            exposed.append(0.0)
            continue
        reduce_s = sum(pipe.reduce_s[stage] for stage in mine)
        share = pipe.overlap[mine[0]] if pipe.overlap and len(mine) == 1 else 0.0
        rest_s = reduce_s - share * min(reduce_s, final.end_s - final.begin_s)
        reduced.append(final.end_s + rest_s if reduce_s else done[-1].end_s)
        exposed.append(rest_s)
    for tied, reduce_s in pipe.ties:
        having = [cell for cell, mine in enumerate(stages) if set(mine) & set(tied)]
        end_s = max((reduced[cell] for cell in having), default=0.0) + reduce_s
        for cell in having:
            reduced[cell] = end_s
            exposed[cell] += reduce_s
    cells = []
    for cell, (done, mine) in enumerate(zip(executed, stages, strict=True)):
        update_s = sum(pipe.stages[stage].update_s for stage in mine)
        busy_s = sum(entry.end_s - entry.begin_s for entry in done)
        end_s = reduced[cell] + update_s
        cells.append(CellTimes(tuple(done), busy_s, exposed[cell], update_s, end_s))
    return Timeline(max((cell.end_s for cell in cells), default=0.0), tuple(cells))
