"""Slow stages: the time is spent in the right one, once a step, and everything is put back."""

import itertools

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.data import dataloader as loading  # noqa: E402

from perdure.worker.steering import harm  # noqa: E402
from perdure.worker.steering.harm import Slowdown, arm_forward  # noqa: E402

pytestmark = pytest.mark.torch
EXTRA_S = 0.05


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


class Timed:
    """A small training that times its stages."""

    def __init__(self, clock):
        self.clock = clock
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = iter(DataLoader([torch.ones(4)] * 1000, batch_size=1))

    def step(self):
        marks = [self.clock.monotonic()]
        batch = next(self.batches)
        marks.append(self.clock.monotonic())
        loss = self.model(batch).sum()
        marks.append(self.clock.monotonic())
        loss.backward()
        marks.append(self.clock.monotonic())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            name: after - before
            for name, before, after in zip(
                ("data", "forward", "backward"), marks, marks[1:], strict=False
            )
        }


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(harm, "time", clock)
    return clock


@pytest.fixture
def training(clock):
    training = Timed(clock)
    for _ in range(3):
        training.step()
    return training


@pytest.mark.parametrize("stage", ["data", "forward", "backward"])
def test_the_time_is_spent_in_that_stage_once_a_step_and_no_more_afterwards(training, stage):
    original = loading._SingleProcessDataLoaderIter._next_data
    engine = torch.autograd._engine_run_backward
    slowdown = Slowdown(stage, extra_s=EXTRA_S)
    slowdown.begin()
    spent = [training.step() for _ in range(4)][1:]
    slowdown.end()
    slow = {name: EXTRA_S if name == stage else 0.0 for name in spent[0]}
    assert spent == [pytest.approx(slow)] * 3
    assert training.step() == dict.fromkeys(slow, 0.0)
    assert loading._SingleProcessDataLoaderIter._next_data is original
    assert torch.autograd._engine_run_backward is engine


def test_a_factor_is_of_the_step_without_the_fault(training, clock):
    slowdown = Slowdown("forward", factor=2.5)
    slowdown.begin()
    ends = []
    for _ in range(6):
        clock.sleep(0.02)
        training.step()
        ends.append(clock.now_s)
    slowdown.end()
    steps = [after - before for before, after in itertools.pairwise(ends)]
    assert steps == pytest.approx([0.02] + [0.05] * 4)  # The first is the one it is taken from.


def test_a_fault_of_the_training_thread_strikes_in_its_next_forward_pass_once(training):
    struck = []
    assert arm_forward(lambda: struck.append(1))
    training.step()
    training.step()
    assert struck == [1]
