"""Everything that makes exact resume hard, in one small script.

Dropout, shuffled data, loader workers with random augmentation, AdamW with a schedule, gradient
accumulation, several DDP buckets, or FSDP2. Every rank appends one line a step to its trail:
step, loss (exact, as hex) and the samples it used.

`--slow-disk-s` makes every fsync take that long on average, as on a disk that others saturate: a
checkpoint is then under way for most of the time, and takes longer on one rank than on another.
Once the trail's folder has a file `hurry`, the steps wait no more for `--pace-s`. While it has a
file `stuck`, no fsync ends. With a number in a file `until`, step n and later ones wait.
"""

import argparse
import contextlib
import json
import os
import random
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import perdure


class Noisy(Dataset[tuple[int, Tensor]]):
    """A sample is its index and a vector made of it, with random augmentation."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        base = torch.arange(32, dtype=torch.float32).add(index).mul(0.1).sin()
        return index, base + 0.1 * torch.randn(32)


def make_model(width: int) -> nn.Module:
    """Return a perceptron with dropout whose gradients fill several small buckets."""
    return nn.Sequential(
        nn.Linear(32, width), nn.GELU(), nn.Dropout(0.2),
        nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2),
        nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, 32),
    )  # fmt: skip


def reduce_gradients(model: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Reduce the gradients of this micro-batch, or leave them to a later one."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if now else model.no_sync()
    model.set_requires_gradient_sync(now)
    return nullcontext()


def slow_down_disk(mean_s: float, stuck: Path) -> None:
    """Let every fsync of this process take `mean_s` more on average, and wait while `stuck`."""
    sync, chance = os.fsync, random.Random(os.getpid())

    def sync_slowly(fd: int) -> None:
        time.sleep(chance.expovariate(1 / mean_s) if mean_s else 0.0)
        while stuck.exists():
            time.sleep(0.005)
        sync(fd)

    os.fsync = sync_slowly


def wait_turn(trail: Path, step: int) -> None:
    """Wait until `step` may be made."""
    until = trail / "until"
    while until.exists():
        with contextlib.suppress(FileNotFoundError):
            if step < int(until.read_text()):
                return
        time.sleep(0.005)


def main() -> None:
    """Train, leaving a trail."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trail", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--slow-disk-s", type=float, default=0.0)
    parser.add_argument("--device", default="cpu", help="a GPU may be several ranks'")
    args = parser.parse_args()
    slow_down_disk(args.slow_disk_s, Path(args.trail) / "stuck")
    run = perdure.init()
    if args.device != "cpu":  # NCCL takes several of a GPU where each seems to be on its own host.
        os.environ["NCCL_HOSTID"] = f"p{os.getpid()}"
        torch.use_deterministic_algorithms(True)
        torch.cuda.set_device(args.device)
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = make_model(args.width).to(args.device)
    if args.fsdp:
        from torch.distributed.fsdp import fully_shard

        for layer in (model[3], model[6]):
            fully_shard(layer, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    torch.manual_seed(100 + rank)  # dropout differs from rank to rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    run.register(model=model, optimizer=optimizer, scheduler=schedule)
    trail = open(Path(args.trail) / f"rank-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115
    batches = run.batches(
        Noisy(), batch_size=4, steps=args.steps, seed=3,
        num_workers=args.workers, accumulate=args.accumulate,
    )  # fmt: skip
    for step, micro_batches in batches:
        wait_turn(Path(args.trail), step)
        optimizer.zero_grad()
        loss_sum, used = 0.0, []
        if args.accumulate == 1:
            micro_batches = [micro_batches]
        for number, (indices, x) in enumerate(micro_batches):
            with reduce_gradients(model, number == args.accumulate - 1):
                x = x.to(args.device)
                loss = (model(x) - x).square().mean() / args.accumulate
                loss.backward()
            loss_sum += loss.item()
            used += indices.tolist()
        if args.pace_s and not (Path(args.trail) / "hurry").exists():
            time.sleep(args.pace_s)
        optimizer.step()
        schedule.step()
        run.log(loss=loss_sum)
        row = {"rank": rank, "step": step, "loss": loss_sum.hex(), "indices": used}
        trail.write(json.dumps(row | {"generation": os.environ.get("PERDURE_GENERATION")}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
