"""Steps at a pace under live configuration; each rank writes down what every step ran with.

A line is written before the step's all-reduce, so that a step that is made again has two.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import perdure

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--pace-s", type=float, default=0.02)
parser.add_argument("--trail", required=True)
parser.add_argument("--refuse-rank", type=int, default=-1, help="this one takes no lr above 1")
args = parser.parse_args()
run = perdure.init()
dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([weight], lr=0.1)


def set_lr(value: float) -> None:
    optimizer.param_groups[0]["lr"] = value


def check_lr(value: float) -> str:
    return "too high for this rank" if rank == args.refuse_rank and value > 1 else ""


run.config.declare(
    "lr", float, default=0.1, min=0, note="Learning rate.", check=check_lr, on_change=set_lr
)
run.config.declare("sync_every", int, default=4, min=1, max=64)
run.config.declare("mode", str, default="fast", choices=("fast", "careful"))
run.config.declare_batch(micro_batch=4, accumulate=2)
run.register(optimizer=optimizer)
with open(Path(args.trail) / f"rank-{rank}.jsonl", "a", buffering=1) as trail:
    for step in run.steps(args.steps):
        row = {
            "rank": rank, "step": step, "generation": int(os.environ["PERDURE_GENERATION"]),
            "lr": run.config.lr, "applied": optimizer.param_groups[0]["lr"],
            "mode": run.config.mode, "epoch": run.config.epoch,
        }  # fmt: skip
        trail.write(json.dumps(row) + "\n")
        time.sleep(args.pace_s)
        weight.grad = torch.full((8,), 1.0)
        dist.all_reduce(weight.grad)
        optimizer.step()
        run.log(lr=run.config.lr)
dist.destroy_process_group()
