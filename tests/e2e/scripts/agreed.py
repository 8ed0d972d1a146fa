"""A situation in which members of an elastic world came to differ; writes losses and hashes.

With `--plain` a plain loop of PyTorch makes the same steps. Otherwise each process writes a file of
its own, a line a step, until the job is stopped.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import perdure.elastic
from perdure.plan.elastic.microbatches import plan_batches
from perdure.worker.data import MicroBatches, derive_seed, seed_all

parser = argparse.ArgumentParser()
parser.add_argument("--trail", type=Path, required=True)
parser.add_argument("--situation", default="")
parser.add_argument("--plain", action="store_true")
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--exact", action="store_true")
parser.add_argument("--shard", type=int)
parser.add_argument("--pipeline", type=int)
parser.add_argument("--width", type=int, default=8)
"""With 1200 a rank that joins follows the others first."""
args = parser.parse_args()
situation = args.situation
torch.manual_seed(0)
RANK_1_AT_FIRST = (os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")) == (
    "1",
    "0",
)


class Layer(nn.Module):
    """A layer, and beside it one that no pass uses, or a buffer that passes alter."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out)
        self.heat, self.noted, self.calls = 1.0, None, 0
        edited = situation == "edited" and "PERDURE_MEMBER" in os.environ
        self.slope = 0.5 if edited else 1.0
        if situation == "unused":
            self.beside = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(out), persistent=situation != "scratch")

    def use(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        made = self.use(x) * self.heat * self.slope
        if situation == "counts":
            self.calls += 1
        if situation == "cools":
            self.heat *= 0.999
        if situation == "flags" and not self.training:
            made = 1.5 * made
        if situation == "heat":
            self.noted = made.detach()
        if situation == "twice" and made.shape == x.shape:
            for _ in range(2):
                made = checkpoint(self.use, made, use_reentrant=True)
        mean = made.detach().mean(0)
        match situation:
            case "data":
                self.mean.data.mul_(0.9).add_(mean)
            case "assign":
                self.mean = 0.9 * self.mean + mean
            case "scratch":
                self.mean = mean
        return made + self.mean if situation in ("data", "assign") else made


class Momentum(torch.optim.Optimizer):
    """Momentum in float32, whatever parameters are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("m", torch.zeros(p.shape, dtype=torch.float32))
                moment.mul_(0.9).add_(p.grad.float())
                p.copy_(p.float() - group["lr"] * moment)


class Data:
    def __len__(self) -> int:
        return 640

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        dtype = torch.bfloat16 if situation == "moments" else torch.float32
        return torch.randn(8, generator=generator, dtype=dtype), torch.ones(4, dtype=dtype)


blocks = [Layer(8, args.width), Layer(args.width, args.width), Layer(args.width, 4)]
if situation == "moments":
    for block in blocks:
        block.bfloat16()
if situation == "unfreeze":
    blocks[0].requires_grad_(False)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    if situation == "moments":
        return Momentum(parameters)
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, eps=1e-3)


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.02, 0.02)


def turn(step: int) -> None:
    """Unfreeze the first layer after step 9, freeze the last after step 12, and so on."""
    if situation == "heat":
        blocks[1].heat *= 0.99
    if situation == "flags" and step == 9:
        blocks[1].eval()
    if situation == "unfreeze" and step in (9, 12, 15):
        part = blocks[2] if step > 9 else blocks[0]
        part.requires_grad_(not part.linear.weight.requires_grad)


model = nn.Sequential(*blocks)
after_update = clip if situation == "clip" else None
if args.plain:
    optimizer = make_optimizer(model.parameters())
    data = MicroBatches(Data(), plan_batches(32, 4), seed=0, shuffle=True)
    with open(args.trail / "plain", "w") as out:
        for step in range(args.steps):
            optimizer.zero_grad()
            total = 0.0
            for number in range(8):
                seed_all(derive_seed(0, "micro-batch", step, number))
                inputs, targets = data.load(step, number)
                loss = nn.functional.mse_loss(model(inputs), targets)
                total += loss.item() / 8
                (loss / 8).backward()
            optimizer.step()
            if after_update is not None:
                with torch.no_grad():
                    clip(model)
            turn(step)
            print(json.dumps({"step": step, "loss": total}), file=out)
else:
    out = open(args.trail / f"rank-{os.getpid()}", "w", buffering=1)  # noqa: SIM115

    def note(step: perdure.elastic.Step) -> None:
        time.sleep(0.1)
        if situation == "writes":
            with torch.no_grad():
                clip(model)
        if situation == "flip" and step.step == 22 and RANK_1_AT_FIRST:
            blocks[1].linear.weight.data[0, 0] += 1e-3
        tensors = list(model.state_dict().values())
        whole = not (args.shard or args.pipeline)
        row = {"step": step.step, "loss": step.loss, "world": step.world}
        row["hash"] = perdure.elastic.hash_tensors(tensors) if whole else ""
        out.write(json.dumps(row) + "\n")
        turn(step.step)

    perdure.elastic.train(
        blocks=blocks if args.pipeline or args.shard else model, optimizer=make_optimizer,
        dataset=Data(), loss=nn.functional.mse_loss, global_batch=32, micro_batch=4,
        steps=args.steps, exact=args.exact, shard=args.shard, pipeline=args.pipeline,
        on_step=note, after_update=after_update,
    )  # fmt: skip
