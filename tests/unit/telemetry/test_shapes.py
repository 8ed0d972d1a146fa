"""Who holds which stage: as the members of the newest epoch have said it."""

from perdure.model.events import WorldReformed
from perdure.model.report import StageRow, WorldShape
from perdure.telemetry.accounting.reforms import ShapeFold


def formed(
    epoch: int, rank: int, shape: str, section: tuple[int, int], *more: tuple[int, int]
) -> WorldReformed:
    return WorldReformed(
        generation=1, epoch=epoch, rank=rank, step=5, began_s=0.0, ordered_s=0.0, formed_s=1.0,
        shape=shape, section=section, more_sections=more, micro_batches=56,
    )  # fmt: skip


def test_stages_are_those_of_the_newest_epoch() -> None:
    fold = ShapeFold()
    for rank, section in ((0, (0, 4)), (1, (0, 4)), (2, (4, 8)), (3, (4, 8))):
        fold.add(formed(0, rank, "2x2", section))
    assert fold.find_shape_of(1) == WorldShape(
        0, "2x2", 56, (StageRow((0, 4), (0, 1)), StageRow((4, 8), (2, 3)))
    )
    for rank, section in ((2, (0, 5)), (0, (0, 5)), (3, (5, 8))):
        fold.add(formed(1, rank, "(2,1)", section))
    fold.add(formed(0, 1, "2x2", (0, 4)))  # Late.
    assert fold.find_shape_of(1) == WorldShape(
        1, "(2,1)", 56, (StageRow((0, 5), (0, 2)), StageRow((5, 8), (3,)))
    )


def test_an_interleaved_rank_has_several_stages() -> None:
    fold = ShapeFold()
    fold.add(formed(0, 0, "1x2 interleaved", (0, 2), (4, 6)))
    fold.add(formed(0, 1, "1x2 interleaved", (2, 4), (6, 8)))
    shape = fold.find_shape_of(1)
    assert shape is not None
    assert [(s.blocks, s.ranks) for s in shape.stages] == [
        ((0, 2), (0,)), ((2, 4), (1,)), ((4, 6), (0,)), ((6, 8), (1,))
    ]  # fmt: skip


def test_a_world_without_stages_has_none_and_neither_has_the_next_generation() -> None:
    fold = ShapeFold()
    fold.add(formed(0, 0, "", (0, 0)))
    assert fold.find_shape_of(1) is None
    fold.add(formed(1, 0, "1x1", (0, 8)))
    assert fold.find_shape_of(1) is not None
    assert fold.find_shape_of(2) is None
