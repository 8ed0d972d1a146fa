"""A resumable script whose every step takes the same time, however busy the machine is.

Each step computes and reduces, then sleeps until its deadline. Rank by rank it leaves a trail of
its own of how long each step took, which the ledger is compared with. Once the trail's folder has
a file `hurry`, the steps sleep no more: a test that is through with a job need not await its end.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import perdure

parser = argparse.ArgumentParser()
parser.add_argument("--trail", required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--step-s", type=float, default=0.15)
args = parser.parse_args()
run = perdure.init()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)))
optimizer = torch.optim.AdamW(model.parameters())
run.register(model=model, optimizer=optimizer)
trail = open(Path(args.trail) / f"rank-{run.rank}.txt", "a", buffering=1)  # noqa: SIM115
for step in run.steps(args.steps):
    began = time.monotonic()
    optimizer.zero_grad()
    model(torch.full((4, 32), step / 100)).square().mean().backward()
    optimizer.step()
    if not (Path(args.trail) / "hurry").exists():
        time.sleep(max(0.0, began + args.step_s - time.monotonic()))
    trail.write(f"{step} {time.monotonic() - began:.6f}\n")
dist.destroy_process_group()
