"""Steps at a pace, and once something that takes very long and is no failure.

evaluate: rank 0 computes now and then while the others wait for it; compile: rank 0 holds its
interpreter's lock while it waits for a compiler; recompile: torch compiles on rank 0, which reads
torch's compiler from a disk that is slow; read: rank 1 waits for a file system that answers late.
With --declare the script calls perdure.init(), otherwise
it knows nothing of perdure.
"""

import argparse
import ctypes
import importlib.abc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist


def evaluate(duration_s: float) -> None:
    """Compute for a fifth of the time."""
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        pause = time.monotonic() + 0.02
        while time.monotonic() < pause:
            torch.randn(64, 64) @ torch.randn(64, 64)
        time.sleep(0.08)


def compile_long(duration_s: float) -> None:
    """Be in one C call that lets no other thread run, while a compiler of its own works."""
    code = (
        "import sys, time\nend = time.monotonic() + float(sys.argv[1])\n"
        "while time.monotonic() < end:\n    sum(range(1_000_000))\n    time.sleep(0.1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(duration_s)]):
        ctypes.PyDLL(None).sleep(int(duration_s))


class SlowDisk(importlib.abc.MetaPathFinder):
    """Finds no module, and takes its time for some of those that a compiler imports late."""

    def __init__(self, waits_s: dict[str, float]) -> None:
        self.waits_s = waits_s

    def find_spec(self, name: str, *_: object) -> None:
        time.sleep(self.waits_s.pop(name, 0.0))


def recompile(duration_s: float) -> None:
    """Have torch compile for so long, half of it in imports, and run what it has made."""

    def compile_graph(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        time.sleep(duration_s / 2)
        return graph

    late = ["torch._inductor.codecache", "torch._functorch.compilers"]
    disk = SlowDisk({name: duration_s / 4 for name in late})
    sys.meta_path.insert(0, disk)
    torch.compile(lambda x: 2 * x, backend=compile_graph)(torch.ones(8))
    assert not disk.waits_s, f"this torch imports no {disk.waits_s}"


def read_late(duration_s: float) -> None:
    """Block in one read."""
    read, write = os.pipe()
    threading.Timer(duration_s, os.write, (write, b"x")).start()
    os.read(read, 1)


def count(total: int, declare: bool) -> Iterator[int]:
    """Yield the steps, declared to perdure or not."""
    if declare:
        import perdure

        yield from perdure.init().steps(total)
    else:
        yield from range(total)


parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["evaluate", "compile", "recompile", "read"])
parser.add_argument("--for-s", type=float, required=True)
parser.add_argument("--declare", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in count(150, args.declare):
    if step == 125:
        began = time.monotonic()
        if args.what == "evaluate" and rank == 0:
            evaluate(args.for_s)
        elif args.what == "compile" and rank == 0:
            compile_long(args.for_s)
        elif args.what == "recompile" and rank == 0:
            recompile(args.for_s)
        elif args.what == "read" and rank == 1:
            read_late(args.for_s)
        print(f"stalled for {time.monotonic() - began:.1f} s", flush=True)
    time.sleep(0.02)
    dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
