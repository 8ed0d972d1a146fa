"""The shapes of a pipelined world in the course of a replay, as its journal has them."""

from perdure.model.events import JournalEntry, WorldReformed
from perdure_lab.live.live import read_formed_shapes
from perdure_lab.report import FormedShape


def make(*rows: tuple[int, int, float, str, bool]) -> list[JournalEntry]:
    entries = []
    for seq, (epoch, rank, at_s, shape, morphed) in enumerate(rows, 1):
        body = WorldReformed(
            generation=0, epoch=epoch, rank=rank, step=1, began_s=at_s, ordered_s=at_s,
            formed_s=at_s, shape=shape, morphed=morphed,
        )  # fmt: skip
        entries.append(JournalEntry(seq=seq, at_s=at_s, body=body))
    return entries


def test_each_shape_is_told_once_its_last_member_is_in_it() -> None:
    entries = make(
        (0, 0, 90.0, "1x1", False),
        (1, 0, 95.0, "(2,1)", True), (1, 1, 95.5, "(2,1)", True),
        (2, 0, 110.0, "1x2", False), (2, 1, 110.25, "1x2", False),
        (3, 0, 112.0, "1x2", False),
        (4, 0, 117.0, "1x1", True),
        (5, 0, 140.0, "1x2", True),
    )  # fmt: skip
    assert read_formed_shapes(entries, 100.0, 36.0) == (
        FormedShape(0.0, "(2,1)", False),
        FormedShape(10.25, "1x2", False),
        FormedShape(17.0, "1x1", True),
    )


def test_a_replicated_world_has_none() -> None:
    assert (
        read_formed_shapes(make((0, 0, 90.0, "", False), (1, 0, 105.0, "", False)), 100.0, 36.0)
        == ()
    )
