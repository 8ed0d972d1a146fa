"""G16: thirty epochs, every other one broken amid a sum, leave nothing behind.

Passes where memory grows by less than 50 MB, the process's and the device's, and no thread and no
descriptor is left over, counted from the fourth epoch on.
"""

import gc
import os
import time
from pathlib import Path

import torch

from tests.contract.communicator_ranks import Rank, raises_broken
from tests.gpu.kit import Trial
from tests.gpu.ranks import fork_ranks

GROWTH = 50 << 20
WARM = 4
SETTLE_S = 8.0


def run(trial: Trial) -> None:
    epochs = trial.choose(30, 8)

    def live(rank: Rank) -> None:
        before = dict[str, int]()
        for epoch in range(epochs):
            began_s = time.monotonic()
            group = rank.group(f"epoch {epoch}")
            if rank.number == 0:
                trial.took(time.monotonic() - began_s)
            tensor = torch.ones(1 << 18, device=rank.device)
            group.all_reduce(tensor)
            group.wait()
            rank.meet(f"summed {epoch}")
            if epoch % 2:
                if rank.number == 0:
                    group.all_reduce(tensor)
                group.break_()
                with raises_broken():
                    group.wait()
            group.give_up()
            assert group.comm.drained(5.0), "something is under way"
            rank.meet(f"left {epoch}")
            del group
            if epoch == WARM - 1:
                before = count(rank.device, {})
        rank.answer({"before": before, "after": count(rank.device, before)})

    for number, seen in fork_ranks(trial, live, limit_s=46.0).items():
        before, after = seen["before"], seen["after"]
        grown = {name: after[name] - before[name] for name in after}
        trial.note(**{f"rank_{number}": after | {f"{name}_grown": n for name, n in grown.items()}})
        for name in ("memory_bytes", "device_bytes"):
            trial.check(grown[name] < GROWTH, f"{name} has grown by {grown[name]}")
        for name in ("threads", "descriptors"):
            trial.check(grown[name] <= 0, f"{grown[name]} {name} are left")


def count(device: str, before: dict[str, int]) -> dict[str, int]:
    """Return what this process holds; threads that end by themselves are given time to."""
    until_s = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        free, total = (0, 0) if device == "cpu" else torch.cuda.mem_get_info()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found = {
            "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "device_bytes": total - free,
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }
        more = any(found[name] > before[name] for name in ("threads", "descriptors") if before)
        if not more or time.monotonic() > until_s:
            return found
        time.sleep(0.05)
