import random

import pytest

from perdure.detect.cadence import Cadence, Habits


def test_one_evaluation_does_not_blunt_the_learned_step():
    cadence = Cadence()
    for i in range(64):
        cadence.add(60.0 if i == 30 else 0.3)
    assert cadence.usual_s == 0.3
    assert cadence.typical_s == 0.3


def test_a_job_that_became_slower_is_learned():
    cadence = Cadence()
    for _ in range(64):
        cadence.add(0.3)
    for _ in range(5):
        cadence.add(4.0)
    assert cadence.usual_s >= 4.0


def test_one_silence_is_expected_at_multiples_and_nowhere_else():
    habits = Habits()
    habits.end_gap(500, 60.0)
    assert habits.expected_s(1000) == 60.0
    assert habits.expected_s(999) == 0.0


def test_two_silences_set_the_period():
    habits = Habits()
    habits.end_gap(130, 10.0)
    habits.end_gap(230, 20.0)
    assert habits.expected_s(330) == 20.0
    assert habits.expected_s(350) == 0.0


def test_positions_in_collectives_may_be_one_off():
    habits = Habits()
    habits.end_gap(4000, 10.0)
    habits.end_gap(8001, 10.0)
    assert habits.expected_s(12001, tolerance=2) == 10.0
    assert habits.expected_s(12100, tolerance=2) == 0.0


def test_what_predicted_silences_that_did_not_come_predicts_no_more():
    habits = Habits()
    for position in (100, 102, 733, 1900):  # Hangs at random places, seen by two ranks each.
        habits.end_gap(position, 8.0)
    assert habits.expected_s(2600, tolerance=2) == 0.0
    assert habits.expected_s(2533, tolerance=2) == 0.0


def test_a_habit_with_one_short_silence_left_out_is_still_one():
    habits = Habits()
    for position in (500, 1000, 2000, 2500):
        habits.end_gap(position, 9.0)
    assert habits.expected_s(3000) == 9.0


@pytest.mark.parametrize("sigma", [0.1, 0.25, 0.6])
def test_lognormal_steps_hardly_ever_exceed_their_tail(sigma):
    chance = random.Random(4)
    beyond = 0
    for _ in range(200):
        cadence = Cadence()
        for _ in range(64):
            cadence.add(chance.lognormvariate(0.0, sigma))
        beyond += sum(chance.lognormvariate(0.0, sigma) > cadence.tail_s for _ in range(500))
    assert beyond <= 15  # Of 100,000; beyond `usual_s` are 200 to 800.


def test_steady_steps_have_no_tail():
    cadence = Cadence()
    for i in range(64):
        cadence.add(60.0 if i == 30 else 0.3)
    assert cadence.tail_s == pytest.approx(0.3)


def test_what_nothing_predicted_is_a_habit_once_it_came_twice():
    habits = Habits()
    habits.end_unexpected(100.0, 3.0)
    habits.end_unexpected(100.3, 4.0)  # Another rank, which waited for the first.
    assert habits.unexpected_s == 0.0
    habits.end_unexpected(200.0, 2.0)
    assert habits.unexpected_s == 2.0
    habits.end_unexpected(300.0, 3.0)
    assert habits.unexpected_s == 3.0
    habits.end_unexpected(400.0, float("inf"))
    again = Habits()
    again.learn(habits.note())
    assert again.unexpected_s == 3.0


def test_what_nothing_predicted_long_ago_is_forgotten():
    habits = Habits()
    for i in range(2):
        habits.end_unexpected(100.0 * i, 50.0)
    for i in range(Habits.KEPT):
        habits.end_unexpected(1000.0 + 100.0 * i, 2.0)
    assert habits.unexpected_s == 2.0
