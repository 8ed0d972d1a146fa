"""A loop of its own that tells how far it is, and may keep a checkpoint of its own."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder, keeps = Path(sys.argv[1]), "--keeps" in sys.argv
own = folder / "own.txt"
dist.init_process_group("gloo")
first = int(own.read_text()) if keeps and own.exists() else 0
print(f"{int(os.environ['WORLD_SIZE'])} ranks, 1.5M parameters", flush=True)
for number in range(first, 2_000_000):
    leave = torch.tensor([float((folder / "hurry").exists())])
    dist.all_reduce(leave)
    if leave.item() and number >= first + 10:
        break
    time.sleep(0.02)
    if number % 10 == 0 and os.environ["RANK"] == "0":
        print(f"iter {number}: loss {4 / (number + 1):.4f}, time 20ms", flush=True)
        own.write_text(str(number))
dist.destroy_process_group()
