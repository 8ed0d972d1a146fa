"""How long a job still takes: a range that holds, or nothing."""

import math
import random

import msgspec
import pytest

from perdure.dash.live import describe_left, render_status
from perdure.model.events import KeysDeclared
from perdure.model.report import Snapshot
from perdure.telemetry.live.steering import SteeringFold
from perdure.telemetry.live.timeleft import SAMPLES_MAX, StepPace


def train(pace: StepPace, begin_s: float, seconds: float, step: float, step_s: float) -> float:
    """Make steps for so long, sampled as heartbeats come; return the steps made by then."""
    for tick in range(int(seconds)):
        if pace.is_due(begin_s + tick):
            pace.take(begin_s + tick, int(step + tick / step_s))
    return step + seconds / step_s


@pytest.mark.parametrize("step_s", [0.01, 0.5, 3.0])
def test_the_range_of_a_steady_pace_holds_and_is_narrow(step_s: float) -> None:
    pace = StepPace()
    step = train(pace, 1000.0, 300.0, 40.0, step_s)
    told = pace.estimate(1300.0, 100_000)
    assert told is not None
    true_s = (100_000 - step) * step_s
    assert told[0] <= true_s <= told[1]
    assert told[1] / told[0] < 1.3


def test_noise_widens_it_and_the_truth_is_within() -> None:
    draw, pace, now, step = random.Random(7), StepPace(), 0.0, 0
    while now < 240.0:
        now += draw.uniform(0.1, 0.3)
        step += 1
        if pace.is_due(now):
            pace.take(now, step)
    told = pace.estimate(now, 10_000)
    assert told is not None
    assert told[0] < (10_000 - step) * 0.2 < told[1]


def test_nothing_is_said_before_it_is_known_and_once_it_is_unsteady() -> None:
    pace = StepPace()
    assert pace.estimate(0.0, 100) is None
    step = train(pace, 0.0, 25.0, 0.0, 0.1)
    assert pace.estimate(25.0, 1000) is None  # Too soon.
    step = train(pace, 25.0, 75.0, step, 0.1)
    assert pace.estimate(100.0, 10_000) is not None
    assert pace.estimate(100.0, 0) is None  # How many there are was not said.
    assert pace.estimate(100.0, int(step) - 50) is None  # They are made.
    assert pace.estimate(120.0, 10_000) is None  # Nobody was heard.
    train(pace, 100.0, 40.0, step, 1e9)
    assert pace.estimate(140.0, 10_000) is None  # It stands.
    train(pace, 140.0, 40.0, step, 0.5)
    assert pace.estimate(180.0, 10_000) is None  # Five times as slow as it was.
    pace.begin()
    train(pace, 180.0, 60.0, step, 0.5)
    assert pace.estimate(240.0, 10_000) is not None


@pytest.mark.parametrize("seed", range(20))
def test_a_pace_that_changes_is_no_lie_for_long(seed: int) -> None:
    """Paces that are each kept for minutes: what is said is true of the one that is in force.

    But for `late_s` after a change, in which nobody can have seen it.
    """
    draw, pace, now, made, told = random.Random(seed), StepPace(), 0.0, 0.0, 0
    num_steps = 10_000_000
    for _ in range(6):
        step_s = 10 ** draw.uniform(-2, 0.5)
        late_s = 35.0 if pace.samples else 0.0
        begun_s, noise = now, draw.choice([0.0, 0.1, 0.3])
        while now < begun_s + 420.0:
            now += 1.0
            made += max(0.0, draw.gauss(1.0, noise)) / step_s
            if pace.is_due(now):
                pace.take(now, int(made))
            left = pace.estimate(now, num_steps)
            if left is None or now < begun_s + late_s:
                continue
            told += 1
            true_s = (num_steps - made) * step_s
            assert 0.85 * left[0] <= true_s <= 1.15 * left[1], (now - begun_s, step_s, left, true_s)
    assert told > 300, "and something is said"


def test_a_slower_pace_is_seen_within_seconds_and_not_at_the_end_of_a_minute() -> None:
    pace = StepPace()
    step = train(pace, 0.0, 300.0, 0.0, 0.1)
    train(pace, 300.0, 21.0, step, 0.5)
    assert pace.estimate(321.0, 100_000) is None


def test_it_is_bounded() -> None:
    pace = StepPace()
    train(pace, 0.0, 100_000.0, 0.0, 1.0)
    assert len(pace.samples) == SAMPLES_MAX


def make_snapshot(left_s: tuple[float, float] | None, state: str = "running") -> Snapshot:
    return Snapshot(
        1, "job", state, 1.0, 0.0, 0, 0, 57, 2.0, 2, "resumable", "", num_steps=100, left_s=left_s
    )


@pytest.mark.parametrize(
    ("left_s", "said"),
    [
        ((20.2, 30.9), "20 to 31 s left"),
        ((239.0, 301.0), "3 to 6 min left"),
        ((3600.0, 3600.0), "60 min left"),
        ((9000.0, 12_000.0), "2 to 4 h left"),
        ((86_400.0 * 3, 86_400.0 * 4), "3 to 4 days left"),
        (None, ""),
        ((math.nan, math.nan), ""),
        ((1.0, math.inf), ""),
        ((-1.0, 5.0), ""),
    ],
)
def test_it_is_said_in_round_numbers(left_s: tuple[float, float] | None, said: str) -> None:
    snapshot = make_snapshot(left_s)
    assert describe_left(snapshot) == said
    assert said in render_status(snapshot)
    assert describe_left(msgspec.structs.replace(snapshot, state="lost")) == ""


def test_the_newest_loop_says_how_many_steps_there_are() -> None:
    fold = SteeringFold()
    fold.add(KeysDeclared(generation=0, keys=(), num_steps=100))
    fold.add(KeysDeclared(generation=1, keys=(), num_steps=200))
    fold.add(KeysDeclared(generation=0, keys=(), num_steps=100))
    assert fold.num_steps == 200
