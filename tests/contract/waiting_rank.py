"""One of three DDP ranks on one CPU. Rank 1 is slow in its backward pass; the others wait for it.

It goes on only after both others are in the step's collective, however late the CPU comes to them.
Started by `tests/contract/test_waiting.py` with the number of steps, and the seconds for which the
others wait in each.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from perdure.adapters.rings import read_ring
from perdure.worker.attach import attach_rank

attachment = attach_rank()
RANK, STEPS, SLOW_S = int(os.environ["RANK"]), int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=RANK, world_size=3)
for task in os.listdir("/proc/self/task"):  # The threads of gloo and autograd as well.
    os.sched_setaffinity(int(task), {min(os.sched_getaffinity(0))})


def count_begun(rank):
    """Return how many collectives of the world a rank has begun."""
    ring = os.environ["PERDURE_RING"].replace(f"{RANK}.ring", f"{rank}.ring")
    return sum(comm.started_seq for comm in read_ring(ring, 0.0).comms)


def keep_waiting():
    """Wait until the others have begun one more collective than this rank; then let them wait."""
    while min(count_begun(0), count_begun(2)) <= count_begun(1):
        time.sleep(0.001)
    time.sleep(SLOW_S)


class Slow(torch.autograd.Function):
    """Spends time where a slow kernel of the backward pass would."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        if RANK == 1:
            keep_waiting()
        return grad


model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(STEPS):
    optimizer.zero_grad()
    Slow.apply(model(torch.ones(4, 64))).square().mean().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
