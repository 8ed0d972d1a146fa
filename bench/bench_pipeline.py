"""The pipeline's runner beside torch.distributed.pipelining, on the same stages and connections.

    python bench/bench_pipeline.py [--ranks 2 4] [--micro-batches 8] [--steps 15]

In each process both take steps in turn over gloo, with the same blocks, inputs and action lists
(those of torch's own schedules); gradients and losses are compared first. `overhead`: blocks so
small that all is overhead. `paced`: each forward takes 10 ms and each backward 20 ms. The ratio is
the median over pairs of steps; CPU is rank 0's, a step.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from scripts.paced_pipeline import _Paced
from sweep import sweep_after_me
from torch import Tensor, nn
from torch.distributed import pipelining

from perdure.model.planning.pipeline import Action, Orders
from perdure.plan.pipeline.orders import join_replicas, order_1f1b
from perdure.worker.elastic.communicators.gloo import connect
from perdure.worker.elastic.group import Group
from perdure.worker.pipeline import Runner, Schedule, StageBlocks

WIDTH, ROWS = 64, 4
SCHEDULES: dict[str, tuple[Any, int]] = {
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
}


class Block(nn.Module):
    """A layer, which takes `pace_s` forward and as much for each half of its backward."""

    def __init__(self, pace_s: float) -> None:
        super().__init__()
        self.linear, self.pace_s = nn.Linear(WIDTH, WIDTH), pace_s

    def forward(self, value: Tensor) -> Tensor:
        if not self.pace_s:
            return torch.tanh(self.linear(value))
        weight = _Paced.apply(self.linear.weight, 0.0, self.pace_s)
        value = _Paced.apply(value, self.pace_s, self.pace_s)
        return torch.tanh(nn.functional.linear(value, weight, self.linear.bias))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Pair:
    """One schedule, carried out by both."""

    def __init__(self, name: str, pace_s: float, count: int, rank: int, group: Group) -> None:
        kind, chunks = SCHEDULES[name]
        self.rank, self.size, self.count = rank, len(group.members), count
        stages = self.size * chunks
        torch.manual_seed(1)
        blocks = [Block(pace_s / chunks) for _ in range(stages)]
        self.inputs = torch.randn(count * ROWS, WIDTH)
        self.targets = torch.randn(count * ROWS, WIDTH)
        mine = range(rank, stages, self.size)
        self.theirs = [copy.deepcopy(blocks[s]) for s in mine]
        self.ours = [blocks[s] for s in mine]
        cut = [
            pipelining.PipelineStage(block, s, stages, torch.device("cpu"))
            for s, block in zip(mine, self.theirs, strict=True)
        ]
        self.torch = kind(cut if chunks > 1 else cut[0], count, loss_fn=loss, scale_grads=False)
        orders: Orders = join_replicas([order_1f1b(self.size, range(count))])
        if chunks > 1:
            orders = convert(self.torch.pipeline_order)
        parts = [StageBlocks(s, [block], s) for s, block in zip(mine, self.ours, strict=True)]
        self.runner = Runner(
            Schedule(orders, stages, range(self.size)), rank, parts, group,
            load=self.load, loss=loss, seed=1,
        )  # fmt: skip
        self.losses: tuple[list[float], list[float]] = ([], [])

    def load(self, step: int, m: int) -> tuple[Tensor, Tensor]:
        rows = slice(m * ROWS, (m + 1) * ROWS)
        return self.inputs[rows], self.targets[rows]

    def step_torch(self, step: int) -> None:
        losses: list[Tensor] = []
        args = (self.inputs,) if self.rank == 0 else ()
        last = self.rank == self.size - 1
        self.torch.step(*args, target=self.targets if last else None, losses=losses)
        self.losses[0][:] = [value.item() for value in losses]

    def step_own(self, step: int) -> None:
        found = self.runner.run(step)
        self.losses[1][:] = [found[m] for m in sorted(found)]

    def compare(self) -> None:
        torch.testing.assert_close(*self.losses)
        for a, b in zip(self.theirs, self.ours, strict=True):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)

    def clear(self) -> None:
        for p in nn.ModuleList([*self.theirs, *self.ours]).parameters():
            p.grad = None


def convert(order: dict[int, list[Any]]) -> Orders:
    """Return torch's action lists as ours."""
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    return tuple(
        tuple(
            Action(kinds[a.computation_type.name], a.stage_index, a.microbatch_index)  # type: ignore[arg-type]
            for a in order[rank]
            if a is not None
        )
        for rank in sorted(order)
    )


def live(rank: int, size: int, port: int, count: int, steps: int) -> None:
    torch.set_num_threads(1)
    store: Any = vars(dist)["TCPStore"]("127.0.0.1", port, None, False, timedelta(seconds=120))
    prefixed: Any = vars(dist)["PrefixStore"]
    dist.init_process_group("gloo", store=prefixed("torch", store), rank=rank, world_size=size)
    group = Group(tuple(range(size)), rank, prefixed("own", store), connect)
    for setting, pace_s, times in (("overhead", 0.0, 4 * steps), ("paced", 0.010, steps)):
        for name in SCHEDULES:
            pair = Pair(name, pace_s, count, rank, group)
            took: tuple[list[float], list[float]] = ([], [])
            spent: tuple[list[float], list[float]] = ([], [])
            for step in range(2 + times):
                for which, run in enumerate((pair.step_torch, pair.step_own)):
                    group.meet()
                    began, worked = time.perf_counter(), time.process_time()
                    run(step)
                    spent[which].append(time.process_time() - worked)
                    group.meet()
                    took[which].append(time.perf_counter() - began)
                if step == 0:
                    pair.compare()
                pair.clear()
            if rank == 0:
                wall = [1e3 * median(values[2:]) for values in took]
                cpu = [1e3 * median(values[2:]) for values in spent]
                ratio = median(b / a for a, b in zip(took[0][2:], took[1][2:], strict=True))
                row = (size, setting, name, *wall, ratio, *cpu)
                print("| {} | {} | {} | {:.1f} | {:.1f} | {:.2f} | {:.2f} | {:.2f} |".format(*row),
                      flush=True)  # fmt: skip
    group.meet()
    group.give_up()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        live(*args.rank, args.micro_batches, args.steps)  # type: ignore[call-arg]
        return
    print("| ranks | blocks | schedule | torch ms | runner ms | ratio | torch CPU | runner CPU |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for size in args.ranks:
        store: Any = vars(dist)["TCPStore"](
            "127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False
        )
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--rank", f"[{r}, {size}, {store.port}]"]
            )
            for r in range(size)
        ]
        failed = [rank.wait(timeout=900) for rank in ranks]
        assert not any(failed), f"ranks left with {failed}"
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    sweep_after_me()
    main()
