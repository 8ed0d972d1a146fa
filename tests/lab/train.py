"""A training script for the fault laboratory: real tensors, real collectives, declared pace.

Each rank is a virtual device: what it computes takes a declared time (it sleeps), so that eight
of them on two cores behave like eight devices. Layers sleep in forward and in backward; DDP
reduces the gradients in several buckets; a DataLoader delivers the batches. With `--layout
dpt` eight ranks are 2 data x 2 pipeline x 2 tensor parallel, with a communicator for each.

It tells perdure nothing, but with `--declare` it uses `run.steps()`.
"""

import argparse
import gc
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

PACE = {"scale": 1.0}


class _Paced(torch.autograd.Function):
    """Identity that takes its time, in both directions."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s * PACE["scale"])
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s * PACE["scale"])
        return grads[0], None, None


class Layer(nn.Module):
    """A linear layer on a virtual device; with a tensor group, its result is summed over it."""

    def __init__(self, width: int, step_s: float, group: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_s, self.backward_s = step_s / 3, step_s * 2 / 3
        self.group = group

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = _Paced.apply(value, self.forward_s, self.backward_s)
        value = torch.tanh(self.linear(value))
        if self.group is not None:
            total = value.detach().clone()
            dist.all_reduce(total, group=self.group)
            value = value + (total / self.group.size() - value.detach())
        return value


class Samples(Dataset[torch.Tensor]):
    """Random rows whose loading takes `load_s` a batch of `batch`."""

    def __init__(self, width: int, batch: int, load_s: float) -> None:
        self.width, self.row_s = width, load_s / batch

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.row_s)
        return torch.full((self.width,), (index % 97) / 97)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step-s", type=float, default=0.06, help="compute time of a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--load-s", type=float, default=0.004)
    parser.add_argument("--layout", choices=["data", "dpt"], default="data")
    parser.add_argument("--declare", action="store_true", help="use run.steps()")
    parser.add_argument("--noise", action="store_true", help="what healthy trainings do")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def iterate(args: argparse.Namespace) -> Iterator[int]:
    if args.declare:
        import perdure

        yield from perdure.init().steps(args.steps)
    else:
        yield from range(args.steps)


def make_noise(step: int, args: argparse.Namespace, model: nn.Module, batch: torch.Tensor) -> None:
    """Evaluation, a checkpoint by rank 0, garbage collection, batches of another size."""
    PACE["scale"] = random.Random(args.seed * 1_000_003 + step // 25).choice([0.7, 1.0, 1.0, 1.3])
    if step % 150 == 149:
        with torch.no_grad():
            for _ in range(12):
                model(batch)
    if step % 200 == 100 and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "pad": torch.zeros(8_000_000)}, "/dev/null")
        time.sleep(0.5)
    if step % 170 == 60:
        gc.collect()
    if step % 400 == 399:
        dist.barrier()


def train_data(args: argparse.Namespace) -> None:
    """Data parallel: DDP, about one bucket a layer."""
    layer_s = args.step_s / args.layers
    net = nn.Sequential(*(Layer(args.width, layer_s) for _ in range(args.layers)))
    bucket_mb = args.width * args.width * 4 / 1e6
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = iter(DataLoader(Samples(args.width, 4, args.load_s), batch_size=4))
    for step in iterate(args):
        batch = next(batches)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if args.noise:
            make_noise(step, args, net, batch)


def make_groups(world: int) -> tuple[int, Any, Any, int, int]:
    """Return stage, tensor group, data group, previous and next rank; rank = 4d + 2p + t."""
    rank = dist.get_rank()
    data, stage, tensor = rank // 4, rank // 2 % 2, rank % 2
    tensor_group = data_group = None
    for first in range(0, world, 2):
        group = dist.new_group([first, first + 1])
        tensor_group = group if rank // 2 * 2 == first else tensor_group
    for low in range(4):
        group = dist.new_group(list(range(low, world, 4)))
        data_group = group if rank % 4 == low else data_group
    for d in range(world // 4):
        for t in range(2):
            dist.new_group([4 * d + t, 4 * d + 2 + t])
    return stage, tensor_group, data_group, 4 * data + tensor, 4 * data + 2 + tensor


def train_grid(args: argparse.Namespace) -> None:
    """2 pipeline x 2 tensor x the rest data parallel: waiting passes from group to group."""
    stage, tensor_group, data_group, first, second = make_groups(dist.get_world_size())
    layer_s = args.step_s / args.layers
    layers = (Layer(args.width, layer_s, tensor_group) for _ in range(args.layers))
    net = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    batches = iter(DataLoader(Samples(args.width, 4, args.load_s), batch_size=4))
    for _ in iterate(args):
        optimizer.zero_grad()
        value = next(batches) if stage == 0 else torch.empty(4, args.width)
        value.requires_grad_(True)
        if stage:
            with torch.no_grad():
                dist.recv(value, src=first)
        result = net(value)
        if stage == 0:
            dist.send(result.detach(), dst=second)
            gradient = torch.empty_like(result)
            dist.recv(gradient, src=second)
            result.backward(gradient)
        else:
            result.square().mean().backward()
            dist.send(value.grad, dst=first)
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad, group=data_group)
        optimizer.step()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    train_grid(args) if args.layout == "dpt" else train_data(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
