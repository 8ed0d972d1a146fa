"""What it costs to compare the states of an elastic world, by the steps between two comparisons.

    perdure run -n 2 bench/scripts/compare_cost.py [MB of state] [cycles]

Each cycle has a block of 12 steps for each interval. Rank 0 prints the mean seconds of a step, and
the difference from blocks without a comparison, with a 95 % interval (bootstrap over cycles). A
micro-batch takes 2 ms; the rest of a step is the reduction and the update.
"""

import os
import random
import statistics
import sys
import time

import torch
from torch import Tensor, nn

import perdure.elastic
from perdure.worker.elastic import comparing

BLOCK = 12
NEVER = 1 << 40
INTERVALS = (1, 2, 4, 12, NEVER)
WARM_UP = 8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
state_mb = float(sys.argv[1]) if len(sys.argv) > 1 else 516.0
cycles = int(sys.argv[2]) if len(sys.argv) > 2 else 8
more = []
rest = int(state_mb * 1e6 / 12) - sum(p.numel() for p in model.parameters())
while rest > 0:
    size = min(rest, 1 << 20)
    more.append(nn.Parameter(torch.randn(size)))
    model.register_parameter(f"more{rest}", more[-1])
    rest -= size
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def compute(step: int, micro_batch: int) -> Tensor:
    time.sleep(0.002)
    loss = model(torch.randn(4, 256)).square().mean()
    return loss + 0.0 * sum(parameter[0] for parameter in more)  # A gradient of full size.


def choose(step: int) -> int:
    """Return the interval of a step."""
    cycle, place = divmod((step - WARM_UP) // BLOCK, len(INTERVALS))
    return random.Random(cycle).sample(INTERVALS, len(INTERVALS))[place]


def resample(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean."""
    chance = random.Random(0)
    means = sorted(statistics.mean(chance.choices(values, k=len(values))) for _ in range(2_000))
    return means[50], means[-50]


trainer = perdure.elastic.open_trainer(model, optimizer, compute, micro_batches=4)
took: dict[int, list[list[float]]] = {interval: [] for interval in INTERVALS}
comparing.EVERY = NEVER
last_s = time.monotonic()
steps = WARM_UP + BLOCK * len(INTERVALS) * cycles
for step in trainer.steps(steps):
    now_s = time.monotonic()
    if step.step >= WARM_UP:
        if (step.step - WARM_UP) % BLOCK == 0:
            took[choose(step.step)].append([])
        took[choose(step.step)][-1].append(now_s - last_s)
    comparing.EVERY = choose(max(step.step + 1, WARM_UP))  # BLOCK is a multiple of each.
    last_s = now_s
if os.environ["RANK"] == "0":
    means = {interval: [statistics.mean(block) for block in took[interval]] for interval in took}
    for interval, blocks in means.items():
        less = [one - base for one, base in zip(blocks, means[NEVER], strict=True)]
        low, high = resample(less)
        name = "never" if interval == NEVER else f"each {interval}"
        print(
            f"{name:>8}: {statistics.mean(blocks):.4f} s a step, "
            f"{1e3 * statistics.mean(less):+.1f} ms ({1e3 * low:+.1f} to {1e3 * high:+.1f})"
        )
