"""A small gloo training whose last rank breaks once, by itself, in the way it is told to.

`--nvrx` adds the lines that NVIDIA's resiliency extension needs; perdure and torchrun need none.
"""

import argparse
import datetime
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=("stop", "sleep", "slow", "wrong", "kill"), required=True)
parser.add_argument("--mark", type=Path, required=True, help="written when the fault begins")
parser.add_argument("--at", type=int, default=80, help="step")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--pace-s", type=float, default=0.04)
parser.add_argument("--timeout-s", type=float, default=10.0, help="of gloo; its own default: 1800")
parser.add_argument("--nvrx", action="store_true")
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout_s))
rank, world = dist.get_rank(), dist.get_world_size()
client = None
if args.nvrx:
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
extra_s = 0.0
for step in range(args.steps):
    if client is not None:
        client.send_heartbeat()
    loss = model(torch.randn(16, 64)).square().mean()
    time.sleep(args.pace_s + extra_s)  # Stands for compute.
    if step == args.at and rank == world - 1 and not args.mark.exists():
        args.mark.write_text(repr(time.monotonic()))
        match args.fault:
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep":
                time.sleep(3600)
            case "slow":
                extra_s = args.pace_s / 2
            case "wrong":
                dist.broadcast(torch.ones(3), src=0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
