"""G6: how fast snapshots leave the GPU: into pinned, pageable and registered memory.

Passes where the bytes arrive, the largest pinned copy reaches 40 GB/s, and a step beside which it
runs in chunks is at most 3 % slower. What it costs to pin and to register is noted. On the CPU
there is nothing to pin: the same copies are made between ordinary buffers.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from perdure.worker.checkpoint.device_copies import DeviceCopies
from perdure.worker.elastic.mapped import MappedFile
from tests.gpu.kit import Trial

FASTEST_MIN = 40e9
SLOWER_MAX = 0.03
ROUNDS = 5
ENOUGH_S = 2.0


def run(trial: Trial) -> None:
    sizes = trial.choose([1 << 30, 4 << 30, 16 << 30], [1 << 20, 4 << 20])
    source = fill(sizes[-1], trial.device)
    fastest = 0.0
    for size in sizes:
        for name, make in (("pageable", pageable), ("registered", registered), ("pinned", pinned)):
            with make(trial, size) as (host, prepared_s):
                rate = copy_and_compare(trial, source[:size], host)
                figures = {"bytes_a_second": round(rate), "prepared_s": round(prepared_s, 4)}
                trial.note(**{f"{name}_{size >> 20}_mb": figures})
                if name == "pinned":
                    fastest = rate
    trial.check(fastest >= trial.choose(FASTEST_MIN, 0.0), f"pinned: {fastest / 1e9:.1f} GB/s")
    with pinned(trial, sizes[-1]) as (host, _):
        slower = compare_steps(trial, source, host)
    trial.note(slower=round(slower, 4))
    trial.check(slower <= trial.choose(SLOWER_MAX, 1e9), f"a step is {slower:.1%} slower")


def fill(size: int, device: str) -> Tensor:
    """Return bytes of which neighbouring ones differ."""
    words = torch.arange(size // 8, dtype=torch.int64, device=device).mul_(0x9E3779B97F4A7C15 >> 1)
    return words.view(torch.uint8)


@contextlib.contextmanager
def pageable(trial: Trial, size: int) -> Iterator[tuple[Tensor, float]]:
    began_s = time.monotonic()
    host = torch.zeros(size, dtype=torch.uint8)
    yield host, time.monotonic() - began_s


@contextlib.contextmanager
def pinned(trial: Trial, size: int) -> Iterator[tuple[Tensor, float]]:
    began_s = time.monotonic()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not trial.dry)
    yield host, time.monotonic() - began_s


@contextlib.contextmanager
def registered(trial: Trial, size: int) -> Iterator[tuple[Tensor, float]]:
    """Yield shared memory, such as neighbours' snapshots are in, and how long to register it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shared = MappedFile(Path(folder) / "registered", size)
        host = shared.view()
        host.zero_()  # Its pages are there: only their registration is timed.
        began_s = time.monotonic()
        if not trial.dry:
            shared.register(torch.device(trial.device))
            assert host.is_pinned(), "it could not be registered"
        try:
            yield host, time.monotonic() - began_s
        finally:
            shared.close()


def copy_and_compare(trial: Trial, source: Tensor, host: Tensor) -> float:
    """Return bytes a second, the median of up to three copies; all of them have to arrive."""
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < ENOUGH_S:
        sample(host).zero_()
        synchronize(trial)
        began_s = time.perf_counter()
        host.copy_(source, non_blocking=True)
        synchronize(trial)
        taken.append(time.perf_counter() - began_s)
        same = torch.equal(sample(host), sample(source).cpu())
        trial.check(same, "other bytes have arrived")
    return host.numel() / statistics.median(taken)


def sample(data: Tensor) -> Tensor:
    """Return some of its words, from its beginning to its end."""
    return data.view(torch.int64)[3::4097]


def compare_steps(trial: Trial, source: Tensor, host: Tensor) -> float:
    """Return by how much longer a step takes while chunks are copied on a stream of their own."""
    width, steps = trial.choose((8192, 40), (64, 3))
    matrix = torch.randn(width, width, device=trial.device, dtype=torch.bfloat16)
    copies = DeviceCopies()

    def copy() -> None:
        if trial.dry:
            host.copy_(source)
        else:
            copies.copy_late([(host, source)], copies.mark([source]))

    def measure(beside: Callable[[], object]) -> float:
        synchronize(trial)
        beside()  # Begun beforehand: to begin hundreds of copies takes the CPU milliseconds.
        began_s = time.perf_counter()
        for _ in range(steps):
            matrix @ matrix
        if not trial.dry:
            torch.cuda.current_stream().synchronize()  # The copy may go on: the step is over.
        return time.perf_counter() - began_s

    measure(lambda: None)
    rounds = [(measure(lambda: None), measure(copy)) for _ in range(ROUNDS)]
    synchronize(trial)
    return statistics.median(beside / alone for alone, beside in rounds) - 1.0


def synchronize(trial: Trial) -> None:
    if not trial.dry:
        torch.cuda.synchronize()
