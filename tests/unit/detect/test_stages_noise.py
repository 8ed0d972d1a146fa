"""Stragglers among noisy steps, and among steps that take long."""

import random

import pytest

from perdure.detect.slowness.stages import StageWatch
from perdure.model.signals.progress import StepStages

SLOW = 1
"""The rank that is slow, once it is."""


class Ranks:
    """Ranks in lockstep, of which one needs `factor` times as long from `slow_s` on."""

    def __init__(self, world: int, step_s: float, noise: float, seed: int) -> None:
        self.world, self.step_s, self.noise = world, step_s, noise
        self.chance = random.Random(seed)
        self.watch = StageWatch()
        self.watch.set_peers([list(range(world))])
        self.now, self.step = 0.0, 0
        self.slow = {SLOW}
        self.spread = 0.0
        """Sigma of the lognormal factor of each rank's step: sequences of unequal length."""

    def draw(self, rank: int, factor: float) -> list[float]:
        """Own seconds by stage: normal noise, and now and then a burst of a neighbour."""
        own = [
            part * self.step_s * max(0.5, self.chance.gauss(1.0, self.noise))
            for part in (0.05, 0.5, 0.44, 0.01)
        ]
        if self.chance.random() < self.noise:
            own[1] += self.chance.expovariate(2.0 / self.step_s)
        own[1] += (factor - 1.0) * self.step_s if rank in self.slow else 0.0
        if self.spread:
            length = self.chance.lognormvariate(0.0, self.spread)
            own = [part * length for part in own]
        return own

    def train(self, seconds: float, factor: float = 1.0) -> float | None:
        """Return after how long somebody was found slow: the slow one; None if nobody was."""
        begun_s, look_s = self.now, self.now
        while self.now < begun_s + seconds:
            own = [self.draw(rank, factor) for rank in range(self.world)]
            end_s = self.now + max(map(sum, own)) + 0.1 * self.step_s
            for rank, (data, forward, backward, optimizer) in enumerate(own):
                stages = StepStages(
                    step=self.step, begin_s=self.now, end_s=end_s, data_s=data, forward_s=forward,
                    backward_s=backward, optimizer_s=optimizer, wait_s=0.0, other_s=0.0,
                )  # fmt: skip
                self.watch.take(end_s, rank, [stages])
            self.now, self.step = end_s, self.step + 1
            if self.now < look_s:
                continue
            look_s = self.now + 0.2
            self.watch.look(self.now, self.world)
            found = {r for r, s in self.watch.suspects.items() if s.excess > 0.0}
            if found:
                assert found <= self.slow
                return self.now - begun_s
        return None


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.03, 0.08, 0.15])
def test_a_fifth_more_is_found_within_30_seconds(world: int, noise: float) -> None:
    found = 0
    for seed in range(4):
        ranks = Ranks(world, 0.07, noise, seed)
        assert ranks.train(20.0) is None
        found += ranks.train(30.0, 1.2) is not None
    assert found >= 3


def test_a_quarter_that_is_slow_from_the_first_step_on_hides_nothing() -> None:
    """Neither what peers differ by for good nor how far steps spread is learned from them."""
    ranks = Ranks(32, 0.07, 0.05, 3)
    ranks.slow = set(range(8))
    assert ranks.train(10.0, 1.7) is not None


@pytest.mark.parametrize("noise", [0.05, 0.25])
def test_noise_alone_makes_nobody_a_straggler(noise: float) -> None:
    assert Ranks(2, 0.07, noise, 7).train(300.0) is None


@pytest.mark.parametrize("world", [2, 8])
def test_steps_of_unequal_length_make_nobody_a_straggler_and_a_slow_one_is_found(
    world: int,
) -> None:
    """T7: what is odd of one rank has to be rarer among the others."""
    ranks = Ranks(world, 1.0, 0.05, 3)
    ranks.spread = 0.25
    assert ranks.train(900.0) is None
    assert ranks.train(60.0, 2.0) is not None


@pytest.mark.parametrize("step_s", [0.07, 1.4, 2.0, 5.0, 30.0])
def test_however_long_a_step_twice_the_work_is_found_in_a_few(step_s: float) -> None:
    ranks = Ranks(4, step_s, 0.03, 1)
    assert ranks.train(max(40 * step_s, 20.0)) is None
    after_s = ranks.train(max(12 * step_s * 2, 3.0), 2.0)
    assert after_s is not None


class Pipeline:
    """Stages of a pipeline, each with its own work; the longest bounds the step."""

    def __init__(self, groups: list[list[int]], nodes: dict[int, int] | None = None) -> None:
        self.watch = StageWatch((nodes or {}).get if nodes else lambda rank: rank)
        self.watch.set_peers(groups)
        self.now, self.step = 0.0, 0

    def train(self, seconds: float, own: dict[int, float]) -> None:
        until_s = self.now + seconds
        while self.now < until_s:
            end_s = self.now + max(own.values()) + 0.1
            for rank, work_s in own.items():
                stages = StepStages(
                    step=self.step, begin_s=self.now, end_s=end_s, data_s=0.0, forward_s=work_s,
                    backward_s=0.0, optimizer_s=0.0, wait_s=0.0, other_s=0.0,
                )  # fmt: skip
                self.watch.take(end_s, rank, [stages])
            self.now, self.step = end_s, self.step + 1
            self.watch.look(self.now, len(own))

    def cost(self, rank: int) -> float:
        """Return the share of the step that is certainly won by replacing `rank`."""
        found = self.watch.measure(self.now, rank, 30.0, sure=True)
        assert found is not None
        return found.share_low


@pytest.mark.parametrize("groups", [[[0], [1]], [[0, 1], [2, 3]]])
def test_a_slower_stage_that_does_not_bound_the_step_is_worth_no_replacement(groups) -> None:
    """T6: a stage is not only measured by its own past: the longest stage bounds the step."""
    heavy, light = groups
    pipeline = Pipeline(groups)
    usual = dict.fromkeys(heavy, 0.9) | dict.fromkeys(light, 0.4)
    pipeline.train(60, usual)
    pipeline.train(45, usual | {light[0]: 0.8})
    assert pipeline.cost(light[0]) == 0.0
    pipeline.train(45, usual | {light[0]: 1.6})
    assert pipeline.cost(light[0]) == pytest.approx((1.6 - 0.9) / 1.7, abs=0.02)


def test_a_slower_stage_takes_the_other_stages_of_its_node_along() -> None:
    """T6: what shares its node goes with it, and takes elsewhere what it usually does."""
    pipeline = Pipeline([[0], [1], [2]], {0: 0, 1: 1, 2: 1})
    usual = {0: 0.3, 1: 0.4, 2: 0.9}
    pipeline.train(60, usual)
    pipeline.train(45, usual | {1: 0.8})
    assert pipeline.cost(1) == 0.0


def find_after(*, lost: bool) -> int:
    """Return after how many steps rank 3 is found slow, whose peer is calm, and others are not.

    Where `lost`, a step of one rank of each group is never heard of before.
    """
    chance, watch = random.Random(1), StageWatch()
    watch.set_peers([[0, 1], [2, 3]])
    for step in range(300):
        now = 0.5 * step
        for rank in range(4):
            odd = rank < 2 and chance.random() < 0.5
            own_s = 0.1 if odd or (rank == 3 and step >= 200) else 0.05
            if not (lost and (step, rank) in ((100, 1), (101, 3))):
                watch.take(now, rank, [StepStages(step, now - 0.5, now, forward_s=own_s)])
        watch.look(now, 4)
        if step >= 200 and 3 in watch.suspects and watch.suspects[3].excess > 0.0:
            return step - 200
    raise AssertionError("never")


def test_a_step_that_is_lost_does_not_mix_the_noise_of_groups() -> None:
    # The steps of a block begin one later.
    assert abs(find_after(lost=True) - find_after(lost=False)) <= 1


def test_a_rank_that_ends_its_steps_seconds_after_the_others_is_not_left_out_of_them() -> None:
    """What is slow after the last collective, its optimizer, is told by nothing else."""
    watch = StageWatch()
    watch.set_peers([[0, 1, 2]])
    now = 0.0
    for step in range(60):
        slow_s = 4.0 if step >= 30 else 0.1
        for rank, optimizer_s in ((0, 0.1), (2, 0.1), (1, slow_s)):
            end_s = now + 4.0 + optimizer_s
            stages = StepStages(step, now, end_s, forward_s=4.0, optimizer_s=optimizer_s)
            watch.take(end_s, rank, [stages])
            watch.look(end_s + 3.0 if rank == 2 else end_s, 3)
        now += 4.0 + slow_s
    assert watch.suspects[SLOW].excess > 0.5
