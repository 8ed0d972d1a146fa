"""Slower than its peers by more than chance: noise of many kinds, and what is no noise."""

import math
import random
from collections.abc import Callable

import pytest

from perdure.detect.slowness.shifts import Passed, PeerShifts, compute_tail

SLOW = 1


class Peers:
    """Ranks whose own seconds `draw` gives, of which one may be slow."""

    def __init__(self, num: int, draw: Callable[[int, int], float], step_s: float = 1.0) -> None:
        self.num, self.draw, self.step_s = num, draw, step_s
        self.shifts = PeerShifts(alike=True, passed=Passed())
        self.now, self.step = 0.0, 0
        self.found: dict[int, float] = {}
        """Rank -> when it was first confirmed."""

    def train(self, steps: int, factor: float = 1.0) -> "Peers":
        for _ in range(steps):
            own = {r: self.step_s * math.exp(self.draw(r, self.step)) for r in range(self.num)}
            own[SLOW] *= factor
            seconds = max(own.values()) + 0.1 * self.step_s
            self.now, self.step = self.now + seconds, self.step + 1
            self.shifts.take(self.now, seconds, own, sorted(own.values()))
            for rank in own:
                excursion = self.shifts.excursion(rank)
                if excursion is not None and excursion.excess:
                    self.found.setdefault(rank, self.now)
        return self


def white(sigma: float, seed: int = 1) -> Callable[[int, int], float]:
    """Each step takes another time."""
    chance = random.Random(seed)
    return lambda rank, step: chance.gauss(0.0, sigma)


def alike(sigma: float, rho: float, seed: int = 1) -> Callable[[int, int], float]:
    """Each step resembles the one before."""
    chance, state = random.Random(seed), dict[int, float]()

    def draw(rank: int, step: int) -> float:
        new = chance.gauss(0.0, sigma)
        old = state.get(rank, new)
        state[rank] = rho * old + math.sqrt(1.0 - rho * rho) * new
        return state[rank]

    return draw


def hot(steps: int, seed: int = 1) -> Callable[[int, int], float]:
    """One rank of eight has twice the work, for some time, and then another."""
    chance, noise = random.Random(seed), white(0.03)
    ranks = [chance.randrange(8) for _ in range(1000)]
    return lambda rank, step: noise(rank, step) + math.log(2.0) * (ranks[step // steps] == rank)


@pytest.mark.parametrize("num", [2, 3, 8, 32])
@pytest.mark.parametrize("sigma", [0.1, 0.4])
def test_noise_alone_makes_nobody_slow(num: int, sigma: float) -> None:
    assert not Peers(num, white(sigma)).train(2000).found


@pytest.mark.parametrize(("sigma", "rho"), [(0.1, 0.9), (0.25, 0.97), (0.4, 0.9)])
def test_steps_that_resemble_one_another_make_nobody_slow(sigma: float, rho: float) -> None:
    assert not Peers(8, alike(sigma, rho)).train(3000).found


def test_an_expert_in_demand_is_told_of_once() -> None:
    """It cannot be told from a slow node at first; what has ended by itself may come again."""
    assert len(Peers(8, hot(40)).train(2000).found) <= 1


@pytest.mark.parametrize("sigma", [0.03, 0.25])
@pytest.mark.parametrize("num", [2, 8, 32])
def test_twice_the_work_is_found_and_the_right_one_named(num: int, sigma: float) -> None:
    peers = Peers(num, white(sigma)).train(120)
    begun_s = peers.now
    peers.train(60, 2.0)
    assert list(peers.found) == [SLOW]
    steps = (peers.found[SLOW] - begun_s) / (2.1 * math.exp(2 * sigma))
    assert steps <= 20 if sigma < 0.1 else 60
    excursion = peers.shifts.excursion(SLOW)
    assert excursion is not None
    assert excursion.excess == pytest.approx(1.0, abs=0.4)
    assert abs(excursion.began_s - begun_s) <= 30.0
    assert 0.8 <= excursion.probability <= 1.0


def test_a_slow_rank_does_not_hide_itself() -> None:
    """What is learned of an excursion is learned once it is over."""
    peers = Peers(2, white(0.05)).train(100)
    peers.train(400, 1.5)
    excursion = peers.shifts.excursion(SLOW)
    assert excursion is not None
    assert excursion.recent(10.0) == pytest.approx(0.5, abs=0.1)
    peers.train(20)
    assert peers.shifts.excursion(SLOW) is None or not peers.shifts.excursion(SLOW).excess


def test_who_becomes_slower_within_hours_is_found_though_learned_from_all_the_while() -> None:
    peers = Peers(4, white(0.1)).train(300)
    for step in range(15_000):
        peers.train(1, 1.0 + 1.2 * step / 15_000)
    excursion = peers.shifts.excursion(SLOW)
    assert list(peers.found) == [SLOW]
    assert excursion is not None
    assert excursion.excess == pytest.approx(1.1, abs=0.2)


def test_two_cannot_outvote_each_other() -> None:
    """Where the other one does less than before, nobody has become slow."""
    peers = Peers(2, white(0.03)).train(100)
    peers.train(100, 0.5)
    assert not peers.found


def test_what_ended_by_itself_has_to_be_outlasted() -> None:
    passed = Passed()
    passed.note(0.0, 0.7, 60.0)
    assert passed.longest_s(0.0, 0.7) == passed.longest_s(0.0, 1.0) == 60.0
    assert passed.longest_s(0.0, 1.2) == 0.0, "nothing was nearly as slow"
    passed.note(1.0, 0.8, 90.0)
    assert passed.longest_s(1.0, 0.1) == 90.0
    assert passed.longest_s(8 * 3600.0, 0.1) == 0.0, "after hours it is forgotten"
    passed.note(8 * 3600.0, 0.1, 5.0)
    assert passed.longest_s(8 * 3600.0, 0.1) == 5.0


@pytest.mark.parametrize("num", [2, 3, 8])
@pytest.mark.parametrize("step_s", [0.3, 1.0])
def test_who_is_slow_again_after_a_long_slowness_is_told_within_a_quarter_of_an_hour(
    num: int, step_s: float
) -> None:
    """Neither is it taken for what is usual, nor are the means that it moved taken for noise."""
    peers = Peers(num, white(0.05), step_s).train(int(600 / step_s))
    for _ in range(2):
        peers.train(int(600 / step_s), 2.0).train(int(300 / step_s))
        peers.found, again_s = {}, peers.now
        peers.train(int(500 / step_s), 2.0)
        assert peers.found.keys() == {SLOW}
        assert peers.found[SLOW] - again_s < 950.0


@pytest.mark.parametrize(
    ("deviation", "freedom", "known"),
    [(3.0, 1.0, 0.102), (4.0, 10.0, 0.00126), (5.0, 60.0, 2.6e-6)],
)
def test_the_tail_is_students(deviation: float, freedom: float, known: float) -> None:
    assert compute_tail(deviation, freedom) == pytest.approx(known, rel=0.4)
    assert compute_tail(-deviation, freedom) == pytest.approx(1.0 - known, rel=0.1)
