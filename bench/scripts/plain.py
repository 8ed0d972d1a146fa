"""A torchrun-style script that knows nothing of perdure: DDP, its own checkpoint every n steps.

It writes one line a moment to `--trail`: `line`, `step`, each with the rank and CLOCK_MONOTONIC.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIRST_LINE = time.monotonic()  # the first of its own, after its imports

parser = argparse.ArgumentParser()
parser.add_argument("--trail", required=True)
parser.add_argument("--dir", required=True)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--pace-s", type=float, default=0.02)
args = parser.parse_args()

rank = int(os.environ["RANK"])
log = open(args.trail, "a", buffering=1)  # noqa: SIM115
log.write(f"line {rank} {FIRST_LINE:.6f}\n")
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), bucket_cap_mb=1
)
optimizer = torch.optim.AdamW(model.parameters())
path = os.path.join(args.dir, "plain.pt")
start = 0
if os.path.exists(path):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
for step in range(start, args.steps):
    time.sleep(args.pace_s)  # the virtual device's compute time
    loss = model(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.write(f"step {rank} {time.monotonic():.6f} {step}\n")
    if rank == 0 and (step + 1) % args.save_every == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
dist.destroy_process_group()
