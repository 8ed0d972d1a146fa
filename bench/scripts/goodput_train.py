"""One model, one global batch, three ways to train it; micro-batches take 10 ms on virtual devices.

usage: goodput_train.py elastic|torchft|ddp LOG_DIR

Every process writes LOG_DIR/pid-SLOT when it starts, and a line to LOG_DIR/made-SLOT.jsonl for
each committed step that it answers for: time, step, micro-batches.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

MODE, LOG_DIR = sys.argv[1], Path(sys.argv[2])
STEPS, RANKS, COUNT, PACE_S, SAVE_EVERY = 10_000_000, 4, 12, 0.010, 50
SLOT = os.environ["REPLICA_GROUP_ID" if MODE == "torchft" else "RANK"]


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def loss_of(model: nn.Module, step: int, micro_batch: int) -> Tensor:
    time.sleep(PACE_S)
    random = torch.Generator().manual_seed(step * COUNT + micro_batch)
    return model(torch.randn(4, 256, generator=random)).square().mean()


class Made:
    """The steps that this process answers for."""

    def __init__(self) -> None:
        (LOG_DIR / f"pid-{SLOT}").write_text(str(os.getpid()))
        self.out = open(LOG_DIR / f"made-{SLOT}.jsonl", "a", buffering=1)  # noqa: SIM115

    def note(self, step: int, micro_batches: int) -> None:
        row = {"t": time.time(), "step": step, "n": micro_batches}
        self.out.write(json.dumps(row) + "\n")


def train_elastic(made: Made) -> None:
    import perdure.elastic

    model, optimizer = make_model()
    trainer = perdure.elastic.open_trainer(
        model, optimizer, lambda step, m: loss_of(model, step, m), micro_batches=COUNT
    )
    for step in trainer.steps(STEPS):
        if step.first:
            made.note(step.step, COUNT)


def train_torchft(made: Made) -> None:
    import torchft

    if os.environ.get("MEND_HOOK"):
        from perdure.worker.torchft.manager import mend_hook

        mend_hook(torchft)
    model, inner = make_model()
    group, each = int(SLOT), COUNT // RANKS

    def load(state: dict) -> None:  # type: ignore[type-arg]
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    timeout = timedelta(seconds=60)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"goodput_{group}",
        timeout=timeout,
        hostname="127.0.0.1",
    )
    ddp = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    while (step := manager.current_step()) < STEPS:
        optimizer.zero_grad()
        losses = [loss_of(ddp, step, group * each + m) for m in range(each)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        if manager.current_step() > step:
            made.note(step, each)


def train_ddp(made: Made) -> None:
    dist.init_process_group("gloo")
    inner, optimizer = make_model()
    model = nn.parallel.DistributedDataParallel(inner)
    rank, each = dist.get_rank(), COUNT // RANKS
    path, start = LOG_DIR / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        start = state["step"]
    for step in range(start, STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            for m in range(each - 1):
                (loss_of(model, step, rank * each + m) / each).backward()
        (loss_of(model, step, (rank + 1) * each - 1) / each).backward()
        optimizer.step()
        if rank == 0:
            made.note(step, COUNT)
            if (step + 1) % SAVE_EVERY == 0:
                state = {"model": inner.state_dict(), "optim": optimizer.state_dict()}
                torch.save(state | {"step": step + 1}, path.with_suffix(".tmp"))
                path.with_suffix(".tmp").rename(path)


if __name__ == "__main__":
    {"elastic": train_elastic, "torchft": train_torchft, "ddp": train_ddp}[MODE](Made())
