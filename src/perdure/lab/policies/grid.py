"""Who holds what: nodes in a grid of replicas by stages, and what a change of it has to move.

State moves by slices, from several living peers at once: a node that lacks its slice takes
M / P bytes over its own link, all of them at the same time, so the time is one slice's.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from perdure.lab.policies.throughput import Shape, Throughput


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


def find_move_s(
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
    left = sum(n is None for row in rows for n in row)
    return Grid(tuple(map(tuple, rows))), taken - left


def find_neighbours_lost(grid: Grid, lost: Collection[str]) -> bool:
    """Whether two neighbours of one pipeline, taken as a ring, are both among `lost`.

    Pipelines of one stage have no neighbours: whoever lives holds all of it.
    """
    if grid.stages == 1:
        return grid.without(lost).count_copies() == 0
    for row in grid.rows:
        gone = [node in lost for node in row]
        if any(a and b for a, b in pairwise([*gone, gone[0]])):
            return True
    return False
