"""What screens share: a table, a span of numbers, and the shape of a pipelined elastic world."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Commands that only draw a table import no more than that.
    from perdure.model.report import RankRow, WorldShape


def render_shape(world: "WorldShape", ranks: "Sequence[RankRow]") -> list[str]:
    r"""Return who holds which stage.

    >>> from perdure.model.report import StageRow, WorldShape
    >>> stages = StageRow((0, 5), (0, 2)), StageRow((5, 8), (1,))
    >>> print("\n".join(render_shape(WorldShape(3, "(2,1)", 56, stages), [])))
    world (2,1) of 56 micro-batches a step, epoch 3
      stage 0  blocks 0-4  ranks 0,2
      stage 1  blocks 5-7  ranks 1
    """
    homes = {row.rank: row.node for row in ranks}
    share = f"{world.micro_batches} micro-batches a step"
    lines = [f"world {world.shape} of {share}, epoch {world.epoch}"]
    for number, stage in enumerate(world.stages):
        first, after = stage.blocks
        nodes = sorted({homes[rank] for rank in stage.ranks if rank in homes})
        where = f"  nodes {render_span(nodes)}" if nodes else ""
        blocks, held = render_span(range(first, after)), render_span(stage.ranks)
        lines.append(f"  stage {number}  blocks {blocks}  ranks {held}{where}")
    return lines


def align(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return rows as lines, a column as wide as its widest cell; those in `right` lean there."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def clip(text: str, width: int) -> str:
    """Return `text` as it fits into `width` columns."""
    return text if len(text) <= width else text[: max(1, width - 1)] + "…"


def render_span(numbers: Sequence[int], most: int = 3) -> str:
    """Return ascending numbers as ranges, such as `0-511,513`; of many, the first ones.

    >>> render_span([0, 1, 2, 5])
    '0-2,5'
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    if len(words) > most:
        return f"{','.join(words[:most])},... ({len(numbers)})"
    return ",".join(words)
