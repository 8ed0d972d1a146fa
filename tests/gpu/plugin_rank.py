"""One of G10's ranks: sums over NCCL, plainly and by a graph, and says what that took.

usage: python -m tests.gpu.plugin_rank DEVICE SUMS

It prints a line of JSON: seconds of a sum, and how much the plugin's file had of them before and
after a graph was replayed. On the CPU it calls the plugin itself, as NCCL calls it.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.nccl_files import read_nccl

BYTES = 1 << 20
BATCH = 10
REPLAYS = 20
SETTLE_S = 0.5
"""NCCL's proxy tells of kernels a little later."""


def main(device: str, count: int) -> None:
    sum_once, replay, close = play() if device == "cpu" else connect(device)
    sum_once()
    taken = []
    for _ in range(count // BATCH):
        began_s = time.perf_counter()
        for _ in range(BATCH):
            sum_once()
        taken.append((time.perf_counter() - began_s) / BATCH)
    before = look()
    error = ""
    try:
        replay()
    except RuntimeError as failure:  # It is noted: of the plugin's own records it says nothing.
        error = str(failure)[:300]
    said = {"sum_s": statistics.median(taken), "before": before, "after": look(), "error": error}
    close()
    print(json.dumps(said), flush=True)


def look() -> dict[str, int]:
    """Return how much there is in the plugin's file of this rank; nothing where there is none."""
    reading = read_nccl(os.environ["PERDURE_RING"], 0.0)
    if reading is None:
        return {}
    last = max((op.number for op in reading.ops), default=0)
    kernels = max((kernel.number for kernel in reading.kernels), default=0)
    return {"ops": last, "kernels": kernels}


Parts = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]


def connect(device: str) -> Parts:
    """Return what sums, what replays a graph of sums, and what disconnects."""
    import torch
    import torch.distributed as dist

    os.environ["NCCL_HOSTID"] = f"p{os.getpid()}"
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device(device))
    tensor = torch.ones(BYTES // 4, device=device)

    def sum_once() -> None:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()

    def replay() -> None:
        graph: Any = torch.cuda.CUDAGraph()
        # Else a look of torch's own watchdog at an event would end the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            dist.all_reduce(tensor)
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        graph.reset()
        time.sleep(SETTLE_S)

    return sum_once, replay, dist.destroy_process_group


def play() -> Parts:
    """Return the same without NCCL: a driver calls the plugin, unless there is none."""
    from tests.contract import nccl_driver as driver

    plugin = os.environ["NCCL_PROFILER_PLUGIN"]
    if plugin == "none":
        return lambda: None, lambda: None, lambda: None
    nccl = driver.Nccl(plugin, driver.V6, rank=int(os.environ["RANK"]))
    numbers = iter(range(1, 1 << 30))

    def sum_once() -> None:
        seq = next(numbers)
        coll = nccl.coll(seq)
        nccl.stop(coll)
        if nccl.mask.value & driver.KERNEL_CH:
            kernel = nccl.kernel(coll, 0, 1000 * seq)
            nccl.record(kernel, driver.KERNEL_STOP, gpu_ns=1000 * seq + 500)
            nccl.stop(kernel)

    return sum_once, sum_once, nccl.finalize


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
