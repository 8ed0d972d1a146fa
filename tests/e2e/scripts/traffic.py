"""Two process groups of the same ranks that move data, until the file in argv[1] is there."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
second = dist.new_group(list(range(dist.get_world_size())))
data = torch.ones(1_000_000)
while True:
    dist.all_reduce(data)
    dist.all_reduce(data[:250_000], group=second)
    stop = torch.tensor([float(os.path.exists(sys.argv[1]))])
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if stop.item():
        break
    time.sleep(0.1)
dist.destroy_process_group()
