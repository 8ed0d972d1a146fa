"""Declared work: what it excuses, what it uncovers, and whom it does not protect."""

import random
from collections.abc import Callable

import pytest

from perdure.detect.slowness.stages import StageWatch
from perdure.detect.slowness.work import CHANGED, DeclaredWork
from perdure.model.signals.progress import StepStages

SLOW = 1
TOKENS = 4096.0


class Packed:
    """Ranks whose steps take as long as their tokens want, and `fixed` of a usual step beside."""

    def __init__(self, world: int, *, spread: float = 0.35, fixed: float = 0.1) -> None:
        self.world, self.spread, self.fixed = world, spread, fixed
        self.step_s, self.noise = 0.3, 0.02
        self.chance = random.Random(7)
        self.watch = StageWatch()
        self.watch.set_peers([list(range(world))])
        self.now, self.step = 0.0, 0
        self.demand = [1.0] * world
        """Of each rank, over that of the others."""
        self.tell: Callable[[int, float], float] = lambda rank, tokens: tokens
        """What a rank declares that has done so much."""

    def train(self, steps: int, factor: float = 1.0) -> int:
        """Return after how many steps somebody was found slow: the slow one; 0 if nobody was."""
        for number in range(1, steps + 1):
            own, tokens = [], []
            for rank in range(self.world):
                tokens.append(self.demand[rank] * self.chance.lognormvariate(0.0, self.spread))
                own_s = self.step_s * (self.fixed + (1.0 - self.fixed) * tokens[-1])
                own_s *= self.chance.lognormvariate(0.0, self.noise)
                own.append(own_s * (factor if rank == SLOW else 1.0))
            end_s = self.now + max(own) + 0.03
            for rank, own_s in enumerate(own):
                stages = StepStages(
                    self.step, self.now, end_s, forward_s=own_s / 3, backward_s=2 * own_s / 3,
                    work=self.tell(rank, TOKENS * tokens[rank]),
                )  # fmt: skip
                self.watch.take(end_s, rank, [stages])
            self.now, self.step = end_s, self.step + 1
            self.watch.look(self.now, self.world)
            found = {r for r, s in self.watch.suspects.items() if s.excess > 0.0}
            if found:
                assert found == {SLOW}
                return number
        return 0


def declare_nothing(rank: int, tokens: float) -> float:
    return 0.0


@pytest.mark.parametrize("world", [2, 8])
def test_slowness_beneath_uneven_work_is_found_sooner_where_it_is_declared(world: int) -> None:
    after = {}
    for declared in (True, False):
        ranks = Packed(world)
        if not declared:
            ranks.tell = declare_nothing
        assert ranks.train(600) == 0
        after[declared] = ranks.train(60, 1.3)
    assert 0 < after[True] <= 20
    assert after[False] == 0 or after[False] > 2 * after[True]


@pytest.mark.parametrize("fixed", [0.0, 0.3, 0.6, 1.0])
def test_how_much_of_a_step_scales_is_found_out(fixed: float) -> None:
    """With 1.0 the times do not follow what is declared: it explains nothing."""
    ranks = Packed(4, fixed=fixed)
    assert ranks.train(600) == 0
    (work,) = ranks.watch._works.values()
    assert abs(work.fixed - fixed) < 0.08
    assert 0 < ranks.train(20, 1.5) <= 20


@pytest.mark.parametrize("declared", [True, False])
def test_three_times_the_work_from_the_first_step_on_is_no_slowness_where_declared(
    declared: bool,
) -> None:
    ranks = Packed(8, spread=0.1)
    ranks.demand[SLOW] = 3.0
    if not declared:
        ranks.tell = declare_nothing
    assert (ranks.train(300) == 0) == declared


@pytest.mark.parametrize("world", [2, 8])
def test_who_declares_ten_times_as_much_is_found_slow_all_the_same(world: int) -> None:
    """From the first step on, and later."""
    ranks = Packed(world)
    ranks.tell = lambda rank, tokens: tokens * (10.0 if rank == SLOW else 1.0)
    assert 0 < ranks.train(80, 3.0) <= 80
    said = ranks.watch.describe_work(SLOW)
    assert said["work_believed"] is False
    assert said["declared_work"] == pytest.approx(10.0, rel=0.4)

    later = Packed(world)
    later.tell = ranks.tell
    assert later.train(300) == 0
    assert 0 < later.train(30, 1.5) <= 30


@pytest.mark.parametrize("world", [2, 8])
def test_who_begins_to_declare_too_much_is_not_hidden_by_it(world: int) -> None:
    ranks = Packed(world)
    assert ranks.train(200) == 0
    ranks.tell = lambda rank, tokens: tokens * (10.0 if rank == SLOW else 1.0)
    assert 0 < ranks.train(80, 3.0) <= 80


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("part", [0.001, 0.3])
def test_who_declares_too_little_is_not_slow(world: int, part: float) -> None:
    ranks = Packed(world)
    ranks.tell = lambda rank, tokens: tokens * (part if rank == SLOW else 1.0)
    assert ranks.train(400) == 0


@pytest.mark.parametrize("world", [2, 8])
def test_where_one_declares_nothing_times_alone_are_compared(world: int) -> None:
    ranks = Packed(world)
    ranks.tell = lambda rank, tokens: 0.0 if rank == SLOW else tokens
    assert ranks.train(400) == 0
    assert ranks.watch.describe_work(SLOW) == {}
    assert ranks.train(100, 4.0) > 0


def test_steps_in_which_one_does_not_declare_are_left_out() -> None:
    ranks = Packed(4)
    ranks.tell = lambda rank, tokens: 0.0 if rank == 2 and ranks.step % 7 == 0 else tokens
    assert ranks.train(300) == 0
    assert ranks.watch.describe_work(0)
    assert 0 < ranks.train(20, 1.5) <= 20


def test_who_stops_to_declare_or_begins_to_alarms_nobody() -> None:
    """Times alone spread far more than what they were compared by until then."""
    ranks = Packed(4)
    ranks.tell = declare_nothing
    assert ranks.train(300) == 0
    for declares in (True, False, True):
        ranks.tell = (lambda rank, tokens: tokens) if declares else declare_nothing
        assert ranks.train(300) == 0
        assert bool(ranks.watch.describe_work(0)) == declares
    assert 0 < ranks.train(20, 1.5) <= 20


@pytest.mark.parametrize("work", [float("nan"), float("inf"), -5.0, 1e-300, 1e300])
def test_a_peer_that_lies_wildly_breaks_nothing(work: float) -> None:
    ranks = Packed(3)
    ranks.tell = lambda rank, tokens: work if rank == 0 else tokens
    assert ranks.train(100) == 0
    ranks.tell = lambda rank, tokens: tokens
    ranks.train(100)


@pytest.mark.parametrize(("few", "much"), [(5e-324, 1e30), (1e30, 5e-324), (1e30, 1e30)])
def test_work_of_any_size_is_compared(few: float, much: float) -> None:
    """Floating-point operations are many, shares of a batch are few."""
    ranks = Packed(3)
    ranks.tell = lambda rank, tokens: few if rank else much
    assert ranks.train(100) == 0
    assert ranks.watch.describe_work(0)
    ranks.tell = lambda rank, tokens: tokens * 1e-20
    ranks.train(100)


def test_a_wild_amount_now_and_then_blinds_nobody() -> None:
    ranks = Packed(4)
    ranks.tell = lambda rank, tokens: tokens * (1e20 if rank + ranks.step % 25 == 0 else 1.0)
    assert ranks.train(300) == 0
    assert ranks.watch.describe_work(0)["work_believed"]
    assert 0 < ranks.train(24, 1.5) <= 24


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("unit", [0.001, 0.1, 1000.0])
def test_another_unit_in_the_midst_of_a_run_accuses_nobody_and_hides_nobody(
    world: int, unit: float
) -> None:
    """Where tokens become batches all work looked like next to none, and as long for whatever."""
    for seed in range(4):
        ranks = Packed(world)
        ranks.chance.seed(seed)
        assert ranks.train(300) == 0
        ranks.tell = lambda rank, tokens: tokens * unit
        assert ranks.train(600) == 0
    assert 0 < ranks.train(30, 1.5) <= 30


def test_who_is_compared_in_another_way_has_not_recovered() -> None:
    ranks = Packed(4)
    assert ranks.train(300) == 0
    assert ranks.train(30, 2.0) > 0
    assert ranks.watch.compares(SLOW)
    ranks.tell = declare_nothing
    for _ in range(CHANGED):
        ranks.watch.suspects.clear()
        assert ranks.train(1, 2.0) == 0
        assert ranks.watch.compares(SLOW)
    assert ranks.train(1, 2.0) == 0
    assert not ranks.watch.compares(SLOW)
    ranks.train(30, 2.0)
    assert ranks.watch.compares(SLOW)


def test_a_rank_may_leave_at_any_step() -> None:
    for at in (1, 3, 5, 30):
        ranks = Packed(3)
        ranks.train(at)
        ranks.watch.forget(2)
        ranks.world = 2
        assert ranks.train(100) == 0
        assert ranks.train(20, 2.0) > 0


def test_what_is_claimed_at_random_teaches_that_time_follows_no_work() -> None:
    declared = DeclaredWork()
    chance = random.Random(3)
    for step in range(400):
        own = {r: chance.lognormvariate(0.0, 0.02) for r in range(4)}
        work = {r: chance.lognormvariate(0.0, 1.0) for r in range(4)}
        declared.take(float(step), 1.0, own, work)
    assert declared.fixed > 0.9
