"""Plain DDP that has never heard of perdure: 40 ms of work a step, most of it in the forward pass.

Once the folder it is given has a file `hurry`, it leaves. A GPU that it is given may be several
ranks', which NCCL takes where each seems to be on a host of its own.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Paced(nn.Module):
    """Takes its time, as a large layer would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` as it is."""
        time.sleep(0.04)
        return x


torch.set_num_threads(1)
device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
if device != "cpu":
    os.environ["NCCL_HOSTID"] = f"p{os.getpid()}"
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device == "cpu" else "nccl")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(64, 64), Paced(), nn.Linear(64, 8)).to(device)
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
leave = torch.zeros(1, device=device)
while not leave.item():
    optimizer.zero_grad()
    model(torch.randn(8, 64, device=device)).square().mean().backward()
    optimizer.step()
    leave = torch.tensor([float((Path(sys.argv[1]) / "hurry").exists())], device=device)
    dist.all_reduce(leave)
dist.destroy_process_group()
