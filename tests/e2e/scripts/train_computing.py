"""Plain DDP that has never heard of perdure and computes all the time, with one thread a rank.

Once the folder it is given has a file `hurry`, it leaves.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
leave = torch.zeros(1)
while not leave.item():
    optimizer.zero_grad()
    model(torch.randn(256, 512)).square().mean().backward()
    optimizer.step()
    leave = torch.tensor([float((Path(sys.argv[1]) / "hurry").exists())])
    dist.all_reduce(leave)
dist.destroy_process_group()
