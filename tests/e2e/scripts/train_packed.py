"""Packed sequences: each rank has other tokens in each step, and takes as long for them.

`--loop steps` is resumable (`run.steps`), `--loop bare` a loop of its own, and `--loop elastic`
five micro-batches on two members, which are uneven without a word. With `--declare` the script says
how many tokens they are. Once the folder has a file `slow`, rank 1 takes `--factor` times as long
for each token; once it has a file `hurry`, all leave. Rank 0 writes a byte
to `steps` for each step.
"""

import argparse
import itertools
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import perdure

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--loop", choices=["steps", "bare", "elastic"], default="steps")
parser.add_argument("--declare", action="store_true")
parser.add_argument("--times", type=float, default=1.0, help="what rank 1 declares too much")
parser.add_argument("--factor", type=float, default=1.8)
args = parser.parse_args()
rank = int(os.environ["RANK"])
chance = random.Random(rank)
TOKEN_S = 0.06 / 1000


def count_step() -> None:
    if rank == 0:
        with open(args.folder / "steps", "ab") as file:
            file.write(b".")


class Paced(nn.Module):
    """Takes its time for each token, as a large layer would."""

    tokens = 1000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` as it is."""
        slow = rank == 1 and (args.folder / "slow").exists()
        time.sleep(self.tokens * TOKEN_S * (args.factor if slow else 1.0))
        return x


def leaves() -> float:
    return float((args.folder / "hurry").exists())


def train() -> None:
    """Train replicas until one of them leaves."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps: Iterable[int] = itertools.count()
    if args.loop == "steps":
        run = perdure.init()
        run.register(model=model, optimizer=optimizer)
        steps = run.steps(100_000)
    for _ in steps:
        paced.tokens = int(1000 * chance.lognormvariate(0.0, 0.5))
        if args.declare:
            perdure.work(paced.tokens * (args.times if rank == 1 else 1.0))
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        count_step()
        leave = torch.tensor([leaves()])
        dist.all_reduce(leave)
        if leave.item():
            break
    dist.destroy_process_group()


def train_elastic() -> None:
    """Train an elastic job until it is ended."""
    from perdure.elastic import open_trainer

    def compute(step: int, micro_batch: int) -> torch.Tensor:
        loss: torch.Tensor = layers(torch.randn(8, 64)).square().mean()
        return loss

    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    trainer = open_trainer(layers, optimizer, compute, micro_batches=5)
    for _ in trainer.steps(100_000):
        count_step()


torch.set_num_threads(1)
torch.manual_seed(0)
paced = Paced()
layers = nn.Sequential(nn.Linear(64, 64), paced, nn.Linear(64, 8))
if args.loop == "elastic":
    train_elastic()
else:
    train()
