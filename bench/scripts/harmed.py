"""A training of all-reduces that harms itself once: the same script under perdure and torchrun.

At step `--at` of the first attempt rank 1 does what `--fault` says. Every rank writes lines of
`kind rank monotonic step` to `--trail`; a line is one write, so that ranks do not mix.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

FOR_EVER_S = 100_000.0


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
            dist.all_reduce(torch.ones(1000), group=pair)
        case "sleep":
            time.sleep(FOR_EVER_S)
        case "spin":
            spin(FOR_EVER_S)
        case "silent":
            time.sleep(for_s)
        case "evaluate":
            spin(for_s)


parser = argparse.ArgumentParser()
parser.add_argument("--fault", required=True)
parser.add_argument("--trail", required=True)
parser.add_argument("--declare", action="store_true")
parser.add_argument("--at", type=int, default=150)
parser.add_argument("--steps", type=int, default=250)
parser.add_argument("--for-s", type=float, default=40.0)
parser.add_argument("--timeout-s", type=float, default=0.0)
args = parser.parse_args()
rank = int(os.environ["RANK"])
descriptor = os.open(args.trail, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def note(kind: str, step: int = -1) -> None:
    """Write a line."""
    os.write(descriptor, f"{kind} {rank} {time.monotonic():.6f} {step}\n".encode())


note("begin")
options = {"timeout": timedelta(seconds=args.timeout_s)} if args.timeout_s else {}
dist.init_process_group("gloo", **options)
marker = f"{args.trail}.harmed"
harmed = os.path.exists(marker)
pair = dist.new_group([0, 1], **options)
dist.barrier()
for step in count(args.steps, args.declare):
    time.sleep(0.04)
    if step == args.at and rank == 1 and not harmed:
        with open(marker, "w", encoding="utf-8"):
            pass
        note("fault", step)
        harm(args.fault, args.for_s)
    dist.all_reduce(torch.ones(1000))
    if step == args.at and args.fault == "circle" and rank == 0 and not harmed:
        dist.all_reduce(torch.ones(1000), group=pair)
    note("step", step)
note("end")
sys.exit(0)
