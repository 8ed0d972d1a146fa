"""Ranks that never speak with each other are told once, and never where they do."""

import msgspec

from perdure.model.report import RankRow, Snapshot
from perdure.telemetry.lonely import LonelyWatch


def picture(at_s: float, collective: str = "", phase: str = "script", ranks: int = 2) -> Snapshot:
    row = RankRow(0, 0, 1, "starting", phase, -1, 0.0, collective, 0.0, 0)
    made = Snapshot(at_s, "j", "forming", 1, 0, 1, ranks, -1, 0.0, 0, "supervised", "")
    return msgspec.structs.replace(made, at_s=at_s, world_size=ranks, ranks=(row,))


def test_it_is_said_once_after_five_minutes() -> None:
    watch = LonelyWatch()
    told = [watch.look(picture(float(second))) for second in range(400)]
    assert [i for i, line in enumerate(told) if line] == [300]
    assert watch.judge_end() == ""


def test_a_job_that_ends_before_is_told_at_its_end() -> None:
    watch = LonelyWatch()
    assert not any(watch.look(picture(float(second))) for second in range(5))
    assert "no collective was seen in a world of 2" in watch.judge_end()


def test_one_collective_is_enough_and_one_rank_is_never_lonely() -> None:
    met, single, starting = LonelyWatch(), LonelyWatch(), LonelyWatch()
    for second in range(400):
        assert not met.look(picture(float(second), "allreduce #1" if second == 30 else ""))
        assert not single.look(picture(float(second), ranks=1))
        assert not starting.look(picture(float(second), phase="import"))
    assert (met.judge_end(), single.judge_end(), starting.judge_end()) == ("", "", "")
