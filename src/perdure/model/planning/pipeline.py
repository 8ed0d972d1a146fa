"""A step of a pipeline as data: who does what in which order, and when that was, or would be.

A *cell* is one device's place in the pipeline, by its number. Stages are numbered along the
model; with an interleaved schedule a cell has several. What a cell does is a list of actions, so
that a simulator and an executor read the same thing. There are very many actions, and none refers
to anything that could refer to it: the garbage collector need not look at them.
"""

from typing import Literal

import msgspec

Kind = Literal["F", "B", "W"]
"""Forward; backward (with W beside it: gradients of the input only); gradients of the weights."""


class Action(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """One piece of work of a cell: a micro-batch through one stage, in one direction."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Return it as `F2.0`: forward, stage 2, micro-batch 0."""
        return f"{self.kind}{self.stage}.{self.micro_batch}"


Orders = tuple[tuple[Action, ...], ...]
"""Cell -> its actions, in order."""

Routes = tuple[tuple[int, ...], ...]
"""Stage -> micro-batch -> the cell that does both its forward and its backward there."""


class Executed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An action, and when it was done; seconds from the step's beginning."""

    action: Action
    begin_s: float
    end_s: float


class CellTimes(msgspec.Struct, frozen=True):
    """What one cell did in a step."""

    executed: tuple[Executed, ...]
    busy_s: float
    """In actions."""
    reduce_s: float
    """In all-reduces that nothing hides."""
    update_s: float
    """In the optimizer's step."""
    end_s: float
    """When its own part was over."""


class Timeline(msgspec.Struct, frozen=True):
    """A step, seen by every cell."""

    step_s: float
    """Until the last cell is done."""
    cells: tuple[CellTimes, ...]

    @property
    def bubble(self) -> float:
        """The share of the cells' time in which they wait, for work or for one another."""
        total_s = self.step_s * len(self.cells)
        spent_s = sum(cell.busy_s + cell.reduce_s + cell.update_s for cell in self.cells)
        return 1.0 - spent_s / total_s if total_s > 0 else 0.0
