"""A member of an elastic world that ends with exit code 0 while the others train on."""

import msgspec
import pytest

from perdure.detect.detector import Detector
from perdure.model.events import RankExited, VerdictWithdrawn, WorldReformed
from perdure.model.failures import ExitRecord
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import EXIT_SKEW_S, HANGS


def leave(world, rank: int, *, finished_s: float = 0.0) -> None:
    account = world.progress(world.ranks[rank]).account
    account = msgspec.structs.replace(account, finished_s=finished_s)
    record = ExitRecord(rank, 0, 100 + rank, world.now, code=0)
    world.take(RankExited(node=0, record=record, account=account, detected_s=world.now))


def form(world, epoch: int, *ranks: int, finished: bool = False) -> None:
    for rank in ranks:
        world.take(
            WorldReformed(
                generation=0, epoch=epoch, rank=rank, step=world.ranks[rank].step,
                began_s=world.now, ordered_s=world.now, formed_s=world.now, finished=finished,
            )
        )  # fmt: skip


@pytest.fixture
def world(make_world):
    world = make_world(size=3)
    form(world, 0, 0, 1, 2)
    world.run(10.0)
    return world


def test_who_ends_before_the_others_is_named_at_once_and_replaced_once_they_have_trained_on(world):
    leave(world, 1)
    left_s = world.now
    form(world, 1, 0, 2)
    (said,) = world.verdicts
    assert (said.kind, said.culprit.rank, said.ground) == ("EarlyExit", 1, "ended")
    assert not said.actionable
    world.run(4.5)
    assert not world.actionable
    world.run(20.0)
    (acted,) = world.actionable
    assert acted.acts_s == left_s + EXIT_SKEW_S


def test_a_world_whose_members_all_leave_the_loop_at_one_step_replaces_nobody(world):
    leave(world, 1)
    form(world, 1, 0, 2)
    world.run(60.0, hold=lambda rank: True)  # Rank 0 evaluates.
    assert not world.actionable


def test_who_has_applied_the_last_step_has_not_ended_early(world):
    leave(world, 1, finished_s=world.now)
    form(world, 1, 0, finished=True)
    leave(world, 0)
    form(world, 2, 2)
    world.run(20.0)
    assert not world.verdicts


def test_the_word_that_it_had_finished_may_come_last(world):
    leave(world, 1)
    form(world, 1, 0, 2)
    form(world, 0, 1, finished=True)
    world.run(20.0)
    assert not world.actionable


def test_a_spare_that_ends_has_left_no_world(world):
    leave(world, 1)
    record = ExitRecord(5, 0, 105, world.now, code=0)
    account = RankAccount()
    world.take(RankExited(node=0, record=record, account=account, detected_s=world.now))
    form(world, 1, 0, 2)
    assert [v.culprit.rank for v in world.verdicts] == [1]


def test_a_hang_is_found_after_a_member_ended_early(world):
    leave(world, 1)
    form(world, 1, 0, 2)
    world.run(20.0)
    world.run(10.0, hold=lambda rank: rank == 2)
    assert [(v.kind, v.culprit.rank) for v in world.verdicts[2:]] == [("ComputeHang", 2)]


def test_the_next_controller_acts_upon_what_the_journal_says(world):
    leave(world, 1)
    form(world, 1, 0, 2)
    world.detector = Detector(world.spec)
    for at_s, event in list(world.events):
        world.detector.note(at_s, event)
    world.run(20.0)
    assert [v.culprit.rank for v in world.actionable] == [1]


def test_a_hang_that_ends_as_the_world_is_formed_again_is_said_to_be_over(world):
    """The others wait for one that is gone, and who was named of them trains on with the rest."""
    world.run(3.0, hold=lambda rank: True)
    (said,) = world.verdicts
    assert said.kind in HANGS
    assert not said.actionable
    form(world, 1, 0, 1)
    (over,) = world.of(VerdictWithdrawn)
    assert over.verdict.culprit == said.culprit
    assert over.reason == "the world was formed again, in epoch 1"
    world.run(20.0)
    assert [v for v in world.verdicts if v.actionable] == []
