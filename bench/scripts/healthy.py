"""A healthy training of one of many kinds, for the real hours of the benchmark of harm.

Each rank is a virtual device: part of what it computes is real, and the rest takes its time by
sleeping, so that two ranks on two cores leave each other be. It runs until `--seconds` have passed,
by rank 0's clock, and ends in good order. Nothing in it fails; it tells perdure nothing.
"""

import argparse
import gc
import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, LAYERS = 256, 4
EVALUATED = 400
"""Steps between two evaluations."""
ALONE_S = 0.5
"""What a rank does beside its steps for longer than this is noted in the trail."""


class Batches(Dataset[torch.Tensor]):
    """Random batches, of unlike length where sequences are packed."""

    def __init__(self, packed: bool) -> None:
        self.packed = packed

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> torch.Tensor:
        rows = random.choice((16, 32, 64, 96)) if self.packed else 32
        return torch.randn(rows, WIDTH)


class Paced(torch.autograd.Function):
    """Identity that takes its time, in both directions."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return grads[0], None


class Layer(nn.Module):
    """A linear layer of the virtual device; its work is as much as its rows."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds, self.demand = nn.Linear(WIDTH, WIDTH), seconds, 1.0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        seconds = self.seconds * self.demand * value.shape[0] / 32
        return torch.tanh(self.linear(Paced.apply(value, seconds)))


def exchange(value: torch.Tensor) -> None:
    """Send rows to their experts and back; which rows does not matter here."""
    out = torch.empty_like(value)
    dist.all_to_all_single(out, value.detach().contiguous())


def wrap(kind: str, model: nn.Sequential) -> nn.Module:
    """Return the model as this kind of training has it."""
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    return DistributedDataParallel(model)


def disturb(kind: str, step: int, rank: int, chance: random.Random) -> None:
    """Do what this kind of training does beside its steps."""
    if kind == "evaluate" and rank == 0 and step % EVALUATED == EVALUATED - 1:
        time.sleep(chance.uniform(10.0, 60.0))
    elif kind == "save" and rank == 0 and step % 300 == 299:
        path = f"saved-{os.getpid()}.pt"
        torch.save(torch.zeros(40_000_000), path)
        os.remove(path)
    elif kind == "collect" and chance.random() < 0.01:
        litter = [[i] for i in range(400_000)]
        for one in litter:
            one.append(one)  # type: ignore[arg-type]
        del litter
        gc.collect()
    elif kind == "storage" and chance.random() < 0.01:
        time.sleep(chance.choice((0.5, 1.0, 3.0, 20.0)))
    elif kind == "pause" and step % 300 == 299:
        time.sleep(45.0)


def pass_along(model: nn.Module, rank: int, size: int, rows: int = 32) -> None:
    """Do a step of a pipeline of as many stages as ranks, with two micro-batches."""
    for _ in range(2):
        value = torch.randn(rows, WIDTH)
        if rank > 0:
            dist.recv(value, rank - 1)
        value.requires_grad_()
        out = model(value)
        if rank < size - 1:
            dist.send(out.detach(), rank + 1)
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
            out.backward(grad)
        else:
            out.sum().backward()
        if rank > 0 and value.grad is not None:
            dist.send(value.grad, rank - 1)


def main() -> None:
    """Train for a while."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trail", default="", help="file for when a rank was alone: rank, from, to"
    )
    args = parser.parse_args()
    kind = args.kind
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    chance = random.Random(args.seed * 1000 + rank)
    random.seed(args.seed * 1000 + rank)
    layers = [Layer(args.step_s / LAYERS * (1.0 + 0.5 * rank * (kind == "pipeline")))]
    layers += [Layer(args.step_s / LAYERS) for _ in range(LAYERS - 1)]
    plain = nn.Sequential(*layers)
    model = plain if kind == "pipeline" else wrap(kind, plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = iter(DataLoader(Batches(kind == "packed"), batch_size=None))
    mix = torch.compile(nn.functional.gelu, dynamic=False) if kind == "compile" else None
    began, step, on = time.monotonic(), 0, torch.ones(1)
    while on.item():
        alone_s = time.time()
        disturb(kind, step, rank, chance)
        if args.trail and time.time() - alone_s > ALONE_S:
            with open(args.trail, "a") as trail:
                trail.write(f"{rank} {alone_s:.3f} {time.time():.3f}\n")
        if kind == "experts" and step % 100 == 0:
            layers[0].demand = 2.5 if random.Random(step).randrange(size) == rank else 1.0
        for micro in range(4 if kind == "accumulate" else 1):
            if kind == "pipeline":
                pass_along(model, rank, size)
                continue
            batch = next(loader)
            if kind == "compile" and step % 200 == 199:
                batch = torch.randn(33 + step // 200, WIDTH)
            if kind == "accumulate" and micro < 3:
                with model.no_sync():  # type: ignore[operator]
                    model(batch).sum().backward()
            else:
                out = model(batch) if mix is None else mix(model(batch))
                if kind == "experts":
                    exchange(out)
                out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            on[0] = float(time.monotonic() - began < args.seconds)
            dist.broadcast(on, 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
