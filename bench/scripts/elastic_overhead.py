"""Two measurements in forked processes: the floor of a new gloo group; DDP against elastic."""

import json
import math
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from perdure.worker.elastic import open_trainer
from perdure.worker.elastic.group import Group, make_device, wait_for

STEPS = 20
COUNT = 8


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(384, 384), nn.GELU()]
    return nn.Sequential(*layers)


def measure_floor(rank: int, size: int, rounds: int, store: Any) -> dict[str, Any]:
    device, found = make_device(), []
    prefix: Any = vars(dist)["PrefixStore"]
    for number in range(rounds):
        part = prefix(f"round{number}", store)
        part.set(f"ready/{rank}", b"")
        wait_for(part, [f"ready/{r}" for r in range(size)], lambda: False)
        began = time.perf_counter()
        group = Group(tuple(range(size)), rank, prefix("group", part), device)
        group.all_reduce(torch.zeros(1000))
        group.wait()
        found.append(time.perf_counter() - began)
    return {"new_group_s": found}


def measure_overhead(rank: int, size: int, blocks: int) -> dict[str, Any]:
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
            with ddp.no_sync():
                for batch in share[:-1]:
                    (ddp(batch).square().mean() / len(share)).backward()
            (ddp(share[-1]).square().mean() / len(share)).backward()
            adam.step()
            adam.zero_grad()

    steps = open_trainer(mine, own, compute, micro_batches=COUNT).steps(1 << 40)

    def elastic_steps() -> None:
        for _ in range(STEPS):
            next(steps)

    times: dict[str, list[float]] = {"ddp": [], "elastic": []}
    ddp_steps()
    elastic_steps()
    for block in range(blocks):
        both = [("ddp", ddp_steps), ("elastic", elastic_steps)]
        for name, run in both if block % 2 else both[::-1]:
            dist.barrier()
            began = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - began) / STEPS)
    ratios = [e / d for e, d in zip(times["elastic"], times["ddp"], strict=True)]
    middle = statistics.mean(ratios)
    error = 2.0 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {
        "ddp_ms": 1e3 * statistics.median(times["ddp"]),
        "elastic_ms": 1e3 * statistics.median(times["elastic"]),
        "ratio": middle,
        "ratio_low": middle - error,
        "ratio_high": middle + error,
    }


def main() -> None:
    what, size, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
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
            timeout = timedelta(seconds=60)
            store = make("127.0.0.1", served.port, is_master=False, timeout=timeout)
            if what == "floor":
                found = measure_floor(rank, size, number, store)
            else:
                found = measure_overhead(rank, size, number)
            if rank == 0:
                print(json.dumps(found), flush=True)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
