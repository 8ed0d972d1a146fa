"""One of three DDP ranks on one CPU. Rank 1 is slow in its backward pass; the others wait for it.

Started by `tests/contract/test_waiting.py` with the number of steps and the seconds of a step.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from perdure.worker.attach import attach_rank

attachment = attach_rank()
RANK, STEPS, SLOW_S = int(os.environ["RANK"]), int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=RANK, world_size=3)
for task in os.listdir("/proc/self/task"):  # The threads of gloo and autograd as well.
    os.sched_setaffinity(int(task), {min(os.sched_getaffinity(0))})


class Slow(torch.autograd.Function):
    """Spends time where a slow kernel of the backward pass would."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        time.sleep(SLOW_S if RANK == 1 else 0.0)
        return grad


model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(STEPS):
    optimizer.zero_grad()
    Slow.apply(model(torch.ones(4, 64))).square().mean().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
