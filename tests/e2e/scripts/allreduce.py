"""Unmodified torchrun-style script: all-reduces for ever so many steps, at a pace."""

import argparse
import os
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--pace-s", type=float, default=0.02)
parser.add_argument("--hurry", default="", help="once this file is there, the steps wait no more")
parser.add_argument("--end", default="", help="the steps end once this file is there")
parser.add_argument("--leave-early", action="store_true", help="rank 1 ends while 0 waits")
parser.add_argument("--evaluate-s", type=float, default=0.0, help="rank 0 evaluates meanwhile")
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(args.steps):
    if args.leave_early and step == 50 and rank == 1:
        os._exit(0)
    if args.evaluate_s and step == 50 and rank == 0:
        end = time.monotonic() + args.evaluate_s
        while time.monotonic() < end:
            torch.randn(64, 64) @ torch.randn(64, 64)
    if not os.path.exists(args.hurry):
        time.sleep(args.pace_s)
    over = torch.full((8,), float(os.path.exists(args.end)))
    dist.all_reduce(over)
    if over[0]:
        break
if rank == 0:
    print(f"finished {step + 1} steps")
dist.destroy_process_group()
