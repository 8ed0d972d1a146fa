"""Steady cost of the elastic loop: plain DDP, the elastic loop and plain DDP again take turns.

usage: elastic_overhead.py RANKS PAIRS

Forked ranks; a turn is a few steps of the same model and the same micro-batches, and begins at a
barrier. Prints a JSON document, of wall time and of the CPU time of the process with its threads:
medians, and ratios of neighbouring turns (elastic to DDP, DDP to DDP) as bounds of the median and
the median between them, by bootstrap.
"""

import json
import os
import random
import statistics
import sys
import time
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from perdure.worker.elastic import open_trainer

STEPS = 4
COUNT = 8


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(384, 384), nn.GELU()]
    return nn.Sequential(*layers)


def measure(rank: int, size: int, pairs: int) -> dict[str, Any]:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    plain, mine = make_model(), make_model()
    data = [torch.randn(16, 384) for _ in range(COUNT)]
    ddp = DistributedDataParallel(plain, bucket_cap_mb=8)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    own = torch.optim.AdamW(mine.parameters(), lr=1e-4)
    share = data[rank * COUNT // size : (rank + 1) * COUNT // size]

    def compute(step: int, micro_batch: int) -> Tensor:
        return mine(data[micro_batch]).square().mean()

    def ddp_steps() -> None:
        for _ in range(STEPS):
            losses = 0.0
            with ddp.no_sync():
                for batch in share[:-1]:
                    loss = ddp(batch).square().mean() / len(share)
                    loss.backward()
                    losses += loss.detach().item()
            loss = ddp(share[-1]).square().mean() / len(share)
            loss.backward()
            losses += loss.detach().item()
            adam.step()
            adam.zero_grad()

    steps = open_trainer(mine, own, compute, micro_batches=COUNT).steps(1 << 40)

    def elastic_steps() -> None:
        for _ in range(STEPS):
            next(steps)

    def time_of(run: Any) -> tuple[float, float]:
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        run()
        return (time.perf_counter() - began) / STEPS, (time.process_time() - used) / STEPS

    for _ in range(5):
        ddp_steps()
        elastic_steps()
    turns = [[time_of(run) for run in (ddp_steps, elastic_steps, ddp_steps)] for _ in range(pairs)]
    found = {}
    for kind, name in enumerate(("wall", "cpu")):
        rows = [[times[kind] for times in turn] for turn in turns]
        found[name] = {
            "ddp_ms": 1e3 * statistics.median(a for a, _, _ in rows),
            "elastic_ms": 1e3 * statistics.median(b for _, b, _ in rows),
            "ratio": bounds([2.0 * b / (a + c) for a, b, c in rows]),
            "same": bounds([c / a for a, _, c in rows]),
        }
    return found


def bounds(ratios: list[float]) -> tuple[float, float, float]:
    """Return the 95 % bounds of the median, and it between them."""
    chance = random.Random(0)
    drawn = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(1000))
    return drawn[25], statistics.median(ratios), drawn[975]


def main() -> None:
    size, pairs = int(sys.argv[1]), int(sys.argv[2])
    make: Any = vars(dist)["TCPStore"]
    served = make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served.port), "WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            os.environ["RANK"] = str(rank)
            found = measure(rank, size, pairs)
            if rank == 0:
                print(json.dumps(found), flush=True)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
