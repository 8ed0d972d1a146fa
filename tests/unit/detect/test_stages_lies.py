"""Ranks that lie, leave, pause or are not looked at for a while; others are found all the same."""

import math

import pytest
from msgspec.structs import replace
from tests.unit.detect.drive import FAULT_S, Layout, Run, inject

from perdure.detect.detector import Detector
from perdure.detect.slowness import collectives
from perdure.detect.slowness.collectives import CROWD
from perdure.detect.slowness.stages import PENDING, StageWatch
from perdure.model.events import (
    RankExited,
    RanksStarted,
    VerdictReached,
    VerdictWithdrawn,
    WorldReformed,
)
from perdure.model.failures import ExitRecord
from perdure.model.signals.progress import RankAccount, StepStages
from perdure.model.verdicts import Culprit, Verdict

SLOW, LIAR = 1, 2


class Steps:
    """Four ranks in lockstep, whose steps `change` may alter before they are told."""

    def __init__(self) -> None:
        self.watch = StageWatch()
        self.watch.set_peers([range(4)])
        self.now, self.step = 0.0, 0

    def train(self, steps, factor=1.0, *, slow=SLOW, pause_s=0.0, change=lambda rank, s: s):
        """Take so many steps; all ranks pause in the middle of them."""
        for index in range(steps):
            own = [1.0 + 0.01 * ((3 * self.step + rank) % 5) for rank in range(4)]
            own[slow] *= factor
            end_s = self.now + max(own) + (pause_s if index == steps // 2 else 0.0)
            for rank, own_s in enumerate(own):
                said = StepStages(self.step, self.now, end_s, forward_s=own_s)
                self.watch.take(end_s, rank, [change(rank, said)])
            self.now, self.step = end_s, self.step + 1
            self.watch.look(self.now, len(own))
        return self

    @property
    def slow(self) -> set[int]:
        return {rank for rank, suspect in self.watch.suspects.items() if suspect.excess > 0.0}


def by_liar(**said):
    return lambda rank, stages: replace(stages, **said) if rank == LIAR else stages


@pytest.mark.parametrize("number", [200, 2**60, -(2**60)])
def test_the_number_of_a_step_that_one_rank_tells_hides_nobody(number: int) -> None:
    steps = Steps().train(30).train(1, change=by_liar(step=number))
    assert steps.train(30, 2.0).slow == {SLOW}


@pytest.mark.parametrize("back", [0, 100, 390])
def test_steps_that_are_counted_anew_hide_nobody(back: int) -> None:
    """A script went back to a checkpoint by itself, or began its second loop."""
    steps = Steps().train(400)
    steps.step = back
    assert steps.train(60, 2.0).slow == {SLOW}


def test_one_rank_alone_goes_back_and_nobody_is_accused_or_hidden() -> None:
    steps = Steps().train(400)
    for number in range(100):
        steps.train(1, change=by_liar(step=number))
    assert not steps.slow
    assert steps.train(60, 2.0).slow == {SLOW}


@pytest.mark.parametrize("said", [{"forward_s": 1e6}, {"backward_s": 4.0}, {"other_s": 2.0}])
def test_a_step_whose_parts_are_longer_than_itself_accuses_nobody_and_hides_nobody(said) -> None:
    """What it lasted as a slowness would have to be outlasted by every other one."""
    steps = Steps().train(30)
    for _ in range(20):
        steps.train(1, change=by_liar(**said)).train(1)
        assert not steps.slow
    assert steps.train(40, 2.0).slow == {SLOW}


@pytest.mark.parametrize("pause_s", [60.0, 8 * 3600.0])
def test_a_pause_of_all_is_no_part_of_how_long_a_slowness_lasted(pause_s: float) -> None:
    steps = Steps().train(60).train(20, 2.0, pause_s=pause_s).train(60)
    assert steps.watch.passed.longest_s(steps.now, 0.5) < 90.0
    assert steps.train(120, 2.0, slow=3).slow == {3}


def test_steps_that_are_not_looked_at_do_not_pile_up() -> None:
    """While ranks disagree, or one has ended early, slowness is not judged, perhaps for days."""
    run = Run(Layout(4)).run(10.0)
    disagree = Verdict(
        kind="Desync", culprit=Culprit(rank=1), generation=0,
        first_seen_s=1.0, confirmed_s=1.0, confidence=0.9, reason="of other bytes",
    )  # fmt: skip
    run.take(run.training.now, VerdictReached(verdict=disagree))
    run.detector.note(run.training.now, VerdictReached(verdict=disagree))
    run.run(120.0)
    slow = run.detector._slow
    assert len(slow.stages._rows) <= 2 * PENDING
    assert len(slow.collectives._ready) <= 2 * CROWD
    assert all(len(comm.rows) <= 2 * collectives.PENDING for comm in slow.collectives.comms())


def reform(run: Run, epoch: int, rank: int) -> None:
    now = run.training.now
    times = {"began_s": now, "ordered_s": now, "formed_s": now}
    run.take(now, WorldReformed(generation=0, epoch=epoch, rank=rank, step=100, **times))


def test_nothing_more_is_said_of_a_slow_rank_that_the_world_goes_on_without() -> None:
    """Its slowness has not ended by itself, so that nobody's must last longer for it."""
    lay = Layout(4, nproc=2)
    run = inject(lay, "slow-forward", SLOW, 20.0, factor=2.0)
    assert run.standing is not None
    assert run.detector.suspects() == {0}
    for rank in range(4):
        reform(run, 0, rank)
    now = run.training.now
    record = ExitRecord(SLOW, 0, 101, now, code=0)
    run.take(now, RankExited(node=0, record=record, account=RankAccount(), detected_s=now))
    for rank in (0, 2, 3):
        reform(run, 1, rank)
    run.run(60.0, lambda beat: replace(beat, ranks=[r for r in beat.ranks if r.rank != SLOW]))
    withdrawn = [e for _, e in run.said if isinstance(e, VerdictWithdrawn)]
    assert [e.verdict.culprit.rank for e in withdrawn] == [SLOW]
    assert "no longer in the world" in withdrawn[0].reason
    assert not run.acted
    assert run.detector.suspects() == set()
    assert not run.detector._slow._passing.longest_s(run.training.now, 0.0)


def test_how_long_slowness_lasted_that_passed_is_known_after_a_restart_and_to_who_takes_over():
    run = inject(Layout(4), "slow-backward", 2, 60.0, factor=2.0, until_s=FAULT_S + 30.0)
    withdrawn_s = run.training.now
    assert isinstance(run.said[-1][1], VerdictWithdrawn)
    known = run.detector._slow
    heard = Detector(run.spec)  # A controller that takes over hears of verdicts alone.
    heard.note(0.0, RanksStarted(node=0, generation=0, pids={}, at_s=0.0, warm=True))
    for at_s, event in run.said:
        heard.note(at_s, event)
    for detector in (run.detector, heard):
        detector.note(
            withdrawn_s,
            RanksStarted(node=0, generation=1, pids={}, at_s=withdrawn_s, warm=True),
        )
        slow = detector._slow
        assert slow is not known
        assert slow.stages.passed.longest_s(withdrawn_s, math.log(2.0)) == pytest.approx(33, abs=8)
        assert slow._passing.longest_s(withdrawn_s, 0.0) == pytest.approx(30, abs=6)
