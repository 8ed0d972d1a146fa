"""Without stages: who arrives late at collectives by more than chance, and who only waits."""

import math
import random

import msgspec
import pytest
from tests.simulator.collectives import Training
from tests.unit.detect.drive import BEGIN_S, FAULT_S, Fault, Layout, Run

from perdure.detect.slowness.lateness import LatenessWatch
from perdure.detect.slowness.shifts import Passed
from perdure.model.events import VerdictReached
from perdure.model.signals.progress import NodeBeat

FOUR_D = Layout(data=2, tensor=2, pipeline=2, context=2, nproc=4)


class Uneven(Training):
    """Each rank's work resembles that of the step before; one expert may be in demand."""

    def __init__(self, *args, sigma=0.25, rho=0.9, hot_s=0.0, **options) -> None:
        self.chance, self.state = random.Random(7), dict[int, float]()
        self.sigma, self.rho, self.hot_s = sigma, rho, hot_s
        super().__init__(*args, **options)

    def _work(self, r, stage: int, seconds: float) -> None:
        new = self.chance.gauss(0.0, self.sigma)
        if stage == 0:
            old = self.state.get(r.rank, new)
            self.state[r.rank] = self.rho * old + math.sqrt(1.0 - self.rho**2) * new
        factor = math.exp(self.state.get(r.rank, 0.0))
        if self.hot_s and int(r.t / self.hot_s) * 7919 % 8 == r.rank:
            factor *= 2.0
        super()._work(r, stage, seconds * factor)


def list_told(seconds: float, lay: Layout, fault: Fault | None = None, **noise) -> list[float]:
    """Return when whom was told of, of a job that records no stages."""
    run = Run(lay, fault, stages=False, step_s=0.3)
    if noise:
        run.training = Uneven(lay, 1, stages=False, step_s=0.3, **noise)
    run.run(seconds)
    assert not [v for v in run.verdicts if v.kind != "Straggler"]
    return [
        (e.verdict.confirmed_s, e.verdict.culprit.rank)
        for _, e in run.said
        if isinstance(e, VerdictReached) and not e.verdict.actionable
    ]


@pytest.mark.parametrize(
    "noise",
    [{"rho": 0.0}, {"rho": 0.95}, {"sigma": 0.4}, {"sigma": 0.05, "hot_s": 10.0}],
)
def test_uneven_work_makes_nobody_late_time_and_again(noise: dict[str, float]) -> None:
    assert len(list_told(240.0, Layout(8), **noise)) <= 1


@pytest.mark.parametrize(("factor", "seconds"), [(1.2, 25.0), (1.6, 5.0), (2.0, 5.0)])
@pytest.mark.parametrize("lay", [Layout(2), Layout(4), Layout(2, tensor=2)])
def test_a_slow_rank_is_late_within_seconds(lay: Layout, factor: float, seconds: float) -> None:
    fault = Fault("slow-forward", FAULT_S, 1, 0, factor)
    ((told_s, rank),) = list_told(FAULT_S - BEGIN_S + seconds, lay, fault)
    assert rank == 1
    assert told_s > FAULT_S


def test_one_rank_that_shows_stages_does_not_hide_who_is_late() -> None:
    """A script may call `run.steps()` only on the rank that logs."""

    def strip(beat: NodeBeat) -> NodeBeat:
        ranks = [r if r.rank == 0 else msgspec.structs.replace(r, stages=()) for r in beat.ranks]
        return msgspec.structs.replace(beat, ranks=tuple(ranks))

    run = Run(Layout(4), Fault("slow-forward", FAULT_S, 1, 0, 2.0), step_s=0.3)
    (told, *_) = run.run(FAULT_S - BEGIN_S + 10.0, strip).verdicts
    assert (told.kind, told.culprit.rank) == ("Straggler", 1)
    assert told.first_seen_s >= FAULT_S


def test_a_time_that_cannot_be_accuses_nobody_for_good() -> None:
    """A rank of which one collective was stamped far ahead seemed to wait for nobody after it."""
    watch = LatenessWatch(Passed())
    for seq in range(400):
        now = 1.0 * seq
        starts = {rank: now - (0.1 if seq % 4 == rank else 0.7) for rank in range(4)}
        durations = {rank: now - start_s for rank, start_s in starts.items()}
        if seq == 100:
            starts[2] = 1e9
        watch.take(now, ("dp", 0), (seq, now, starts, durations), alike=True, step_s=1.0)
    assert not [rank for rank, suspect in watch.suspects.items() if suspect.excess]


def test_communicators_of_a_moment_do_not_pile_up() -> None:
    """Such as a group that a script makes for each evaluation, in which no step ends."""
    watch = LatenessWatch(Passed())
    for num in range(200):
        now = 10.0 * num
        arrived = (0, now, {0: now - 0.1, 1: now - 0.1}, {0: 0.1, 1: 0.1})
        watch.take(now, (f"group {num}", 0), arrived, alike=True, step_s=1.0)
        watch.look(now)
    assert len(watch._comms) < 10


@pytest.mark.parametrize("factor", [1.6, 2.0])
def test_who_waits_for_a_late_rank_elsewhere_is_not_blamed(factor: float) -> None:
    """In a pipeline with tensor and context parallel ranks half of the world is late with one."""
    fault = Fault("slow-forward", FAULT_S, 1, 0, factor)
    assert [rank for _, rank in list_told(40.0, FOUR_D, fault)] == [1]
