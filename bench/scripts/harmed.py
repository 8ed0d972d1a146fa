"""A training that harms itself once: the same faults under perdure at each depth and torchrun.

At step `--at` of the first attempt rank 1 (with `--loop torchft`: group 1) does what `--fault`
says, in the middle of a step; a file beside the trail keeps every later attempt from doing it
again. Every rank writes lines of `kind rank monotonic step` to `--trail`; a line is one write, so
that ranks do not mix: `begin` when its imports are done, `fault`, `over` when a fault has ended by
itself, and `step`.

`--loop plain` is a training of all-reduces, `elastic` one on `perdure.elastic`, `torchft` one on
torchft's Manager. Only a plain one calls collectives of its own, so only there may they differ
(`desync`) or wait in a circle.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FOR_EVER_S = 100_000.0
STEP_S = 0.04
_pair: Any = None


def count(total: int, declare: bool) -> Iterator[int]:
    """Yield the steps, declared to perdure or not."""
    if declare:
        import perdure

        yield from perdure.init().steps(total)
    else:
        yield from range(total)


def spin(seconds: float) -> None:
    """Burn CPU."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def harm(fault: str, for_s: float) -> None:
    """Do what `fault` says, in the middle of a step."""
    match fault:
        case "SIGKILL" | "SIGSTOP":
            os.kill(os.getpid(), getattr(signal, fault))
        case "exit":
            os._exit(0)
        case "desync":
            dist.broadcast(torch.ones(1000), src=0)
        case "circle":
            dist.all_reduce(torch.ones(1000), group=_pair)
        case "sleep":
            time.sleep(FOR_EVER_S)
        case "spin":
            spin(FOR_EVER_S)
        case "silent":
            time.sleep(for_s)
        case "evaluate":
            spin(for_s)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", required=True, help="`none`: whoever runs it makes the fault")
    parser.add_argument("--trail", required=True)
    parser.add_argument("--loop", choices=("plain", "elastic", "torchft"), default="plain")
    parser.add_argument("--declare", action="store_true", help="plain: use run.steps()")
    parser.add_argument("--at", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--for-s", type=float, default=20.0)
    parser.add_argument("--timeout-s", type=float, required=True, help="the process group's own")
    return parser.parse_args()


class Trail:
    """What this rank writes, and whether the fault is still to come."""

    def __init__(self, args: argparse.Namespace, rank: int, harmed: bool) -> None:
        """Begin; `harmed` says that this rank is the one to harm itself."""
        self._args, self._rank = args, rank
        self._file = os.open(args.trail, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._marker = f"{args.trail}.harmed"
        self.fresh = not os.path.exists(self._marker)
        """Nobody had harmed itself when this process began."""
        self._pending = harmed and self.fresh and args.fault != "none"
        self.note("begin")

    def note(self, kind: str, step: int = -1) -> None:
        """Write a line."""
        line = f"{kind} {self._rank} {time.monotonic():.6f} {step}\n"
        os.write(self._file, line.encode())

    def harm(self, step: int) -> None:
        """Harm this process if it is its turn and the time has come."""
        if not self._pending or step != self._args.at:
            return
        self._pending = False
        with open(self._marker, "w", encoding="utf-8"):
            pass
        self.note("fault", step)
        harm(self._args.fault, self._args.for_s)
        self.note("over", step)


def train_plain(args: argparse.Namespace) -> None:
    """All-reduce for ever."""
    global _pair
    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=args.timeout_s)
    trail = Trail(args, rank, rank == 1)
    dist.init_process_group("gloo", timeout=timeout)
    _pair = dist.new_group([0, 1], timeout=timeout)
    dist.barrier()
    for step in count(args.steps, args.declare):
        time.sleep(STEP_S)
        trail.harm(step)
        dist.all_reduce(torch.ones(1000))
        if step == args.at and args.fault == "circle" and rank == 0 and trail.fresh:
            dist.all_reduce(torch.ones(1000), group=_pair)
        trail.note("step", step)


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_elastic(args: argparse.Namespace) -> None:
    """Train with two micro-batches a step, one for each of two ranks."""
    import perdure.elastic

    member = int(os.environ.get("PERDURE_MEMBER") or os.environ["RANK"])
    trail = Trail(args, member, member == 1)
    model, optimizer = make_model()

    def compute(step: int, micro_batch: int) -> torch.Tensor:
        time.sleep(STEP_S)
        trail.harm(step)
        return model(torch.ones(4, 64)).square().mean()

    trainer = perdure.elastic.open_trainer(model, optimizer, compute, micro_batches=2)
    for done in trainer.steps(args.steps):
        trail.note("step", done.step)


def train_torchft(args: argparse.Namespace) -> None:
    """Train as one replica group of torchft; the trail's ranks are its groups."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    group, timeout = int(os.environ["REPLICA_GROUP_ID"]), timedelta(seconds=args.timeout_s)
    trail = Trail(args, group, group == 1)
    model, inner = make_model()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        replica_id=f"harmed_{group}",
        timeout=timeout,
        hostname="127.0.0.1",
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while (step := manager.current_step()) < args.steps:
        optimizer.zero_grad()
        time.sleep(STEP_S)
        trail.harm(step)
        ddp(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        if manager.current_step() > step:
            trail.note("step", step)
    manager.shutdown(wait=False)
    os._exit(0)


def main() -> None:
    """Train."""
    args = parse()
    torch.set_num_threads(1)
    match args.loop:
        case "plain":
            train_plain(args)
        case "elastic":
            train_elastic(args)
        case _:
            train_torchft(args)
    sys.exit(0)


if __name__ == "__main__":
    main()
