"""Room for checkpoints: budgets in bytes and inodes, and what may go."""

from perdure.model.job import CheckpointConfig
from perdure.plan.checkpoints import (
    RESERVE_BYTES,
    RESERVE_INODES,
    FreeSpace,
    Load,
    Stored,
    plan_budget,
)
from perdure.plan.checkpoints import plan_pruning as prune

GB = 10**9
LOAD = Load(bytes=GB, files=10)
KEEP_3 = CheckpointConfig(keep_last=3)


def room(gb: float, inodes: int = -1) -> FreeSpace:
    return FreeSpace(bytes=int(gb * GB) + RESERVE_BYTES, inodes=inodes)


def test_kept_ones_and_the_one_in_writing_need_room() -> None:
    assert plan_budget(room(4), LOAD, KEEP_3).grade == "ok"
    assert plan_budget(room(3.9), LOAD, KEEP_3).grade == "low"
    assert plan_budget(room(0.9), LOAD, KEEP_3).grade == "short"
    assert plan_budget(room(1), LOAD, KEEP_3, held=3).grade == "ok"


def test_the_best_one_needs_room_as_well() -> None:
    best = CheckpointConfig(keep_last=3, keep_best="loss")
    assert plan_budget(room(4), LOAD, best).grade == "low"


def test_inodes_run_out_before_bytes() -> None:
    found = plan_budget(room(900, RESERVE_INODES + 25), LOAD, KEEP_3)
    assert (found.grade, found.more) == ("low", 2)
    assert "inodes are the limit" in found.reason


def at(step: int, *, best: bool = False, whole: bool = True) -> Stored:
    return Stored(step=step, bytes=GB, files=10, best=best, whole=whole)


def test_damaged_ones_go_first_then_the_oldest() -> None:
    stored = [at(10), at(20), at(30, whole=False), at(40)]
    chosen, lack = prune(stored, 0, 2 * GB)
    assert ([one.step for one in chosen], lack) == ([30, 10], "")


def test_nothing_goes_where_there_is_room() -> None:
    assert prune([at(10), at(20)], 5 * GB, 5 * GB) == ([], "")


def test_the_newest_whole_one_and_the_best_stay_whatever_is_asked() -> None:
    stored = [at(10, best=True), at(20), at(30), at(40, whole=False)]
    chosen, lack = prune(stored, 0, 99 * GB)
    assert [one.step for one in chosen] == [40, 20]
    assert "still missing" in lack
