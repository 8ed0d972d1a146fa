"""Plain DDP that has never heard of perdure and saves by itself; every rank leaves a trail.

usage: plain_exact.py --trail FOLDER --steps N [--pace-s S]
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--trail", type=Path, required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pace-s", type=float, default=0.0)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
saved, begin = args.trail / "saved.pt", 0
if saved.exists():
    kept = torch.load(saved)
    begin = kept["step"]
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
with open(args.trail / f"rank-{rank}.jsonl", "a", buffering=1) as trail:
    for step in range(begin, args.steps):
        data = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(4, 16, generator=data)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        time.sleep(args.pace_s)
        optimizer.step()
        row = {"rank": rank, "step": step, "loss": loss.item().hex(), "indices": []}
        trail.write(json.dumps(row | {"generation": os.environ.get("PERDURE_GENERATION")}) + "\n")
        if rank == 0 and step % 10 == 9:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step + 1}, args.trail / "saving.pt")
            os.replace(args.trail / "saving.pt", saved)
dist.destroy_process_group()
