"""One rank of the worlds that bench_planner_error.py measures; the model that they all run.

A rank of the paced model is a virtual device: tensors, messages and sums are real, and what a
block computes takes a declared time, in which it sleeps. The blocks of the GPT compute, so that a
rank needs a core. All ranks go through all worlds; who has no part in one waits.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from perdure.model.codec import decode, encode
from perdure.model.planning.pipeline import Orders
from perdure.model.planning.world import World
from perdure.worker.elastic import list_blocks
from perdure.worker.elastic.communicators.gloo import connect
from perdure.worker.elastic.group import Group
from perdure.worker.pipeline import Runner, Schedule, StageBlocks

WIDTH = 256
PACE_S = (8e-3, 14e-3, 10e-3, 8e-3, 12e-3, 8e-3, 16e-3, 8e-3)
"""Forward of each block, a sample; the gradients of its input and of its weights take as long."""
FIXED_S = 4e-3
"""Of every forward and every half of a backward, however many samples it has."""


class _Paced(torch.autograd.Function):
    """Identity that takes its time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        if forward_s:
            time.sleep(forward_s)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Paced(nn.Module):
    """A layer whose work takes `each_s` a sample and `FIXED_S` beside it, three times."""

    def __init__(self, each_s: float) -> None:
        super().__init__()
        self.each_s = each_s
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, value: Tensor) -> Tensor:
        took_s = FIXED_S + self.each_s * len(value)
        value = _Paced.apply(value, took_s, took_s)
        return torch.tanh(value @ _Paced.apply(self.weight, 0.0, took_s))


def make_paced() -> list[nn.Module]:
    return [Paced(each_s) for each_s in PACE_S]


def load_paced(step: int, micro_batch: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.full((size, WIDTH), 0.01 * micro_batch), torch.zeros(size, WIDTH)


def lose_paced(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def make_gpt() -> list[nn.Module]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))
    from model import GPT

    return list_blocks(GPT(layers=6, width=256, heads=4, context=CONTEXT))


def load_gpt(step: int, micro_batch: int, size: int) -> tuple[Tensor, Tensor]:
    text = torch.arange(size * CONTEXT).view(size, CONTEXT) % 251
    return text, text.roll(-1, 1)


def lose_gpt(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Model(NamedTuple):
    make: Callable[[], list[nn.Module]]
    load: Callable[[int, int, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


CONTEXT = 128
MODELS = {
    "paced": Model(make_paced, load_paced, lose_paced),
    "gpt": Model(make_gpt, load_gpt, lose_gpt),
}


class Task(msgspec.Struct, frozen=True):
    """One world to measure."""

    world: World
    orders: Orders
    ranks: tuple[int, ...]
    """Cell -> rank."""
    steps: int
    model: str


def run_task(
    task: Task, rank: int, whole: Group, groups: dict[tuple[int, ...], Group]
) -> list[float]:
    """Return the seconds of each step; those of a rank without a part, too."""
    world, model = task.world, MODELS[task.model]
    blocks = model.make()
    schedule = Schedule(task.orders, len(world.stages), task.ranks)
    runner, parts, copies = None, [], {}
    if rank in task.ranks:
        cell = task.ranks.index(rank)
        for number, stage in enumerate(world.stages):
            cells = {schedule.homes[number, m] for m in schedule.micro_batches}
            if cell in cells:
                mine = blocks[stage.first : stage.stop]
                parts.append(StageBlocks(number, mine, stage.first, recompute=stage.recompute))
                copies[number] = tuple(sorted(task.ranks[c] for c in cells))
        runner = Runner(
            schedule, cell, parts, whole, seed=1, loss=model.loss,
            load=lambda step, m: model.load(step, m, world.micro_batch),
        )  # fmt: skip
    params = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.SGD(params, lr=1e-3) if params else None
    took = []
    for step in range(task.steps):
        whole.meet()
        began = time.perf_counter()
        if runner is not None and optimizer is not None:
            runner.run(step)
            for part in parts:
                if len(copies[part.stage]) > 1:
                    reduce(part, groups[copies[part.stage]])
            optimizer.step()
            optimizer.zero_grad()
        whole.meet()
        took.append(time.perf_counter() - began)
    return took


def reduce(part: StageBlocks, group: Group) -> None:
    """Sum a stage's gradients over its copies."""
    grads = [p.grad for p in part.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    group.all_reduce(flat)
    group.wait()
    for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def list_copies(tasks: list[Task]) -> list[tuple[int, ...]]:
    """Return all groups of ranks that some world reduces over."""
    found = set()
    for task in tasks:
        homes: dict[int, set[int]] = {}
        for cell, mine in enumerate(task.orders):
            for action in mine:
                homes.setdefault(action.stage, set()).add(task.ranks[cell])
        found |= {tuple(sorted(ranks)) for ranks in homes.values() if len(ranks) > 1}
    return sorted(found)


def live(rank: int, size: int, host: str, port: int) -> None:
    """Go through all worlds that are in the store."""
    torch.set_num_threads(1)
    store: Any = vars(dist)["TCPStore"](host, port, None, False, timedelta(seconds=120))
    prefixed: Any = vars(dist)["PrefixStore"]
    tasks = decode(store.get("tasks"), list[Task])
    whole = Group(tuple(range(size)), rank, prefixed("whole", store), connect)
    groups = {}
    for members in list_copies(tasks):
        whole.meet()
        if rank in members:
            groups[members] = Group(members, rank, prefixed(f"copies{members}", store), connect)
    for number, task in enumerate(tasks):
        took = run_task(task, rank, whole, groups)
        if rank == 0:
            store.set(f"took/{number}", encode(took))
    whole.meet()
