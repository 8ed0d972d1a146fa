"""A resumable script that torch compiles for: each rank says what its first step found.

Within a generation rank 1 compiles once rank 0 has done so: what it finds is rank 0's. With
--slow-s both compile at once, for so long, and nothing is found. Rank 1 ends itself once, after the
checkpoint of step 5.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import perdure

parser = argparse.ArgumentParser()
parser.add_argument("--notes", required=True)
parser.add_argument("--slow-s", type=float, default=0.0)
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()
notes = Path(args.notes)


def compile_slowly(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
    """Take a known time, and leave the graph as it is."""
    time.sleep(args.slow_s)
    return graph


run = perdure.init()
dist.init_process_group("gloo")
torch.manual_seed(0)
# Products alone: for them Inductor writes Python, and no C++, which takes a minute to compile.
model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.register(model=model, optimizer=optimizer)
backend = compile_slowly if args.slow_s else "inductor"
compiled = torch.compile(model, backend=backend, dynamic=False)
first = True
for step in run.steps(args.steps):
    if first and run.rank == 1 and not args.slow_s:
        dist.barrier()
    began = time.monotonic()
    compiled(torch.full((4, 16), step / 10)).square().mean().backward()
    took = time.monotonic() - began
    if first and run.rank == 0 and not args.slow_s:
        dist.barrier()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    if first:
        found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
        life = f"g{os.environ['PERDURE_GENERATION']}-r{run.rank}"
        places = {n: os.environ.get(n, "") for n in os.environ if n.endswith(("CACHE_DIR", "PATH"))}
        (notes / f"{life}.json").write_text(json.dumps({**found, "took_s": took, "env": places}))
        first = False
    time.sleep(0.05)
    if step == 8 and run.rank == 1 and not (notes / "killed").exists():
        (notes / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
