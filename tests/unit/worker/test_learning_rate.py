"""A learning rate that is set while it runs scales the schedule and keeps its shape."""

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from perdure.model.steering import Change
from perdure.worker.steering.config import Config
from perdure.worker.steering.learning_rate import declare_rate, refuse_zero

pytestmark = pytest.mark.torch


class Scheduled:
    """Two groups of different rates, a schedule, and the rate as a setting."""

    def __init__(self, kind: str) -> None:
        one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        self.optimizer = torch.optim.SGD([{"params": [one], "lr": 0.1}, {"params": [two], "lr": 1}])
        opt = self.optimizer
        self.scheduler: Any = {
            "lambda": lambda: lr_scheduler.LambdaLR(opt, lambda step: min(1, (step + 1) / 4)),
            "step": lambda: lr_scheduler.StepLR(opt, 3),
            "cosine": lambda: lr_scheduler.CosineAnnealingLR(opt, 20),
            "cycle": lambda: lr_scheduler.OneCycleLR(opt, [0.1, 1.0], total_steps=20),
            "sequence": lambda: lr_scheduler.SequentialLR(
                opt, [lr_scheduler.LinearLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], [6]
            ),
        }[kind]()
        self.config = Config()
        declare_rate(self.config, [opt], lambda: ([opt], [self.scheduler]), refuse_zero)

    def run(self, steps: int) -> list[list[float]]:
        rates = []
        for _ in range(steps):
            rates.append([group["lr"] for group in self.optimizer.param_groups])
            self.optimizer.step()
            self.scheduler.step()
        return rates

    def set(self, value: float) -> None:
        change = Change(epoch=1, step=4, values={"lr": value})
        assert self.config.find_veto(change) == ""
        self.config.apply(change)


@pytest.mark.parametrize("kind", ["lambda", "step", "cosine", "cycle", "sequence"])
def test_from_the_change_on_all_rates_are_in_proportion(kind: str) -> None:
    plain, steered = Scheduled(kind), Scheduled(kind)
    want = plain.run(12)
    got = steered.run(4)
    steered.set(3 * steered.config.lr)
    got += steered.run(8)
    assert got[:4] == want[:4]
    for row, before in zip(got[4:], want[4:], strict=True):
        assert row == pytest.approx([3 * rate for rate in before])


def test_a_restored_rate_is_not_scaled_twice() -> None:
    one, two = Scheduled("lambda"), Scheduled("lambda")
    one.run(4)
    one.set(0.4)
    two.optimizer.load_state_dict(one.optimizer.state_dict())
    two.scheduler.load_state_dict(one.scheduler.state_dict())
    two.config.restore(one.config.state())
    assert two.run(5) == one.run(5)


def test_a_rate_of_zero_is_refused() -> None:
    veto = Scheduled("step").config.find_veto(Change(epoch=1, step=4, values={"lr": 0.0}))
    assert "above 0" in veto
