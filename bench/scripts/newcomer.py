"""A training script as people write it: DDP, a loop over steps, no checkpoint, no perdure.

`bench_first_steps.py` copies it to where a new user would have it. Each rank says its process, and
rank 0 each step with its loss.
"""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} is process {os.getpid()}", flush=True)
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(20_000):
    x = torch.randn(64, 32)
    loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    time.sleep(0.05)  # As if the model were larger.
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.9f}", flush=True)
dist.destroy_process_group()
