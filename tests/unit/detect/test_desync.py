import pytest

from perdure.detect.cadence import Cadence
from perdure.detect.desync import DesyncWatch
from perdure.detect.watch import RankWatch
from perdure.model.job import DetectConfig
from perdure.model.signals.progress import (
    CollectiveSpan,
    CommProgress,
    RankAccount,
    RankProgress,
)


def make_watch(rank, step, seq, op="allreduce", size=4, recorder="compiled"):
    comms = (CommProgress("pg", 3, seq, seq, op, 1.0, (0, 1, 2), size),)
    account = RankAccount(step=step)
    shown = RankProgress(rank, 1, "step", 1.0, 1.0, account, comms, recorder=recorder)
    watch = RankWatch(rank, 0, Cadence(), DetectConfig(), shown)
    watch.account, watch.comms = account, comms
    return watch


def test_one_more_collective_a_step_is_told_by_counting():
    desync = DesyncWatch()
    for step in range(1, 30):
        for rank in range(3):
            extra = 1 if rank == 2 and step > 10 else 0
            watch = make_watch(rank, step, 4 * step + extra)
            desync.take(watch)  # At the step's begin,
            watch = make_watch(rank, step, 4 * step + 4 + extra)
            desync.take(watch)  # and at its end.
        found = desync.find_disagreement(float(step), {}, thorough=False)
        assert step > 10 or found is None
    assert found.rank == 2
    assert "more collectives" in found.reason


def test_equal_numbers_are_no_desync_whatever_the_order_of_sight():
    desync = DesyncWatch()
    for step in range(1, 50):
        for rank in (step % 3, (step + 1) % 3):
            desync.take(make_watch(rank, step, 4 * step + (rank * 7 + step) % 5))
    assert desync.find_disagreement(1.0, {}, thorough=False) is None


@pytest.mark.parametrize("end_s", [1.1, 0.0])
def test_a_rank_left_in_another_operation_is_told_though_the_others_went_on(end_s):
    """By ending theirs, or by beginning the next one beside it, as DDP does with its buckets."""
    desync = DesyncWatch()
    for rank in (0, 2):
        watch = make_watch(rank, 1, 426)
        watch.comms = (CommProgress("pg", 3, 426, 425, "allreduce", 1.0, (0, 1, 2), 4),)
        spans = tuple(CollectiveSpan(0, seq, "allreduce", 4, 1.0, end_s) for seq in (424, 425))
        desync.take(watch, spans)
    wrong = make_watch(1, 1, 425)
    wrong.comms = (CommProgress("pg", 3, 425, 424, "allgather", 1.0, (0, 1, 2), 4),)
    desync.take(wrong)
    found = desync.find_disagreement(2.0, {1: wrong}, thorough=True)
    assert (found.rank, found.evidence["collective"]) == (1, 425)


def test_a_rank_still_inside_what_others_have_ended_alike_is_not_out_of_step():
    desync = DesyncWatch()
    first = make_watch(0, 1, 426)
    desync.take(first, (CollectiveSpan(0, 425, "allgather", 4, 1.0, 1.1),))
    late = make_watch(1, 1, 425)
    late.comms = (CommProgress("pg", 3, 425, 424, "allgather", 1.0, (0, 1, 2), 4),)
    desync.take(late)
    assert desync.find_disagreement(2.0, {1: late}, thorough=True) is None


def test_a_polled_record_is_not_asked_for_its_operation():
    desync = DesyncWatch()
    watches = {
        0: make_watch(0, 1, 5, "allreduce", recorder="status"),
        1: make_watch(1, 1, 5, "broadcast", recorder="status"),
    }
    for now in (1.0, 2.0, 3.0):
        assert desync.find_disagreement(now, watches, thorough=True) is None


def test_sizes_may_differ_where_the_operation_allows_it():
    desync = DesyncWatch()
    watches = {r: make_watch(r, 1, 5, "all_to_all", size=10 * (r + 1)) for r in range(3)}
    for now in (1.0, 2.0):
        for watch in watches.values():
            desync.take(watch)
        assert desync.find_disagreement(now, watches, thorough=True) is None
