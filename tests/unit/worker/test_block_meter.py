"""What blocks cost is measured of all micro-batch sizes at once, as far as that can be."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from perdure.worker.profiling import ROUNDS_MIN, BlockMeter


class Noting(nn.Module):
    """Notes the micro-batch size of each forward."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)
        self.sizes = sizes

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(value))
        return self.line(value)


def test_sizes_take_turns_so_that_a_busy_moment_is_none_of_them_s() -> None:
    sizes: list[int] = []
    said: list[str] = []
    meter = BlockMeter([Noting(sizes)], nn.functional.mse_loss, seconds=0.0, say=said.append)
    batches = {size: (torch.ones(size, 4), torch.zeros(size, 1)) for size in (2, 1)}
    figures = meter.measure(batches, lambda params: torch.optim.SGD(params, lr=0.1))
    (block,) = figures.blocks
    assert sorted(block.costs) == [1, 2]
    measured = sizes[2:]  # The first two are those whose bytes are counted.
    assert measured[:8] == [1, 1, 2, 2, 1, 1, 2, 2], "a round runs a block twice"
    assert measured.count(1) == measured.count(2) >= 2 * ROUNDS_MIN
    assert said == [f"micro-batch 1, 2: {ROUNDS_MIN} rounds of 1 blocks"]
