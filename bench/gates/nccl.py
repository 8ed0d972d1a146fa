"""What NCCL's plugin costs a rank for each event, and its file the agent at each look."""

import ctypes as c
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.gates.gate import Gate, measure_cpu, time_spin
from tests.contract import nccl_driver as driver
from tests.contract import test_nccl_links as links
from tests.contract import test_nccl_times as times

from perdure.adapters.nccl_follow import NcclFollower
from perdure.adapters.network.nccl_links import NcclLinkReader
from perdure.model.paths import JobPaths
from perdure.worker.native.build import build_nccl_plugin

EVENTS = 20_000


def with_gpu(measure: Callable[[times.Gpu], float]) -> float:
    """Return what `measure` finds with a rank whose plugin has seen nothing yet."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(build_nccl_plugin(Path(folder) / "plugin.so"))
        return measure(times.Gpu(built, JobPaths(folder, folder, folder), 0, 2, driver.V5))


def measure_events(gpu: times.Gpu) -> float:
    """Return the CPU seconds of 20,000 changes of a transfer's state, through ctypes."""
    step = gpu.nccl.start(driver.PROXY_STEP, None, step=0)
    record, args = gpu.nccl.table.record, c.byref(driver.Args(bytes=1))

    def tell() -> None:
        for number in range(EVENTS):
            record(step, driver.SEND_NET if number % 2 else driver.SEND_PEER, args)

    return measure_cpu(tell)


def measure_look(gpu: times.Gpu) -> float:
    """Return the CPU seconds of a look at 40 new collectives: the median of 20."""
    follower, costs = NcclFollower(gpu.ring, 0.0), []
    for round_ in range(20):
        times.play_many(gpu, round_)
        costs.append(measure_cpu(lambda: times.read(follower)))
    return statistics.median(costs)


def measure_look_ahead(gpu: times.Gpu) -> float:
    """Return the CPU seconds of a look at 500 collectives under way: the median of 10."""
    times.enqueue_ahead(gpu)
    follower = NcclFollower(gpu.ring, 0.0)
    return statistics.median(measure_cpu(lambda: times.read(follower)) for _ in range(10))


def measure_full(gpu: times.Gpu) -> float:
    """Return the CPU seconds of the first look at a full file of 62 communicators."""
    times.fill(gpu)
    return measure_cpu(lambda: times.read(NcclFollower(gpu.ring, 0.0)))


def measure_links(gpu: times.Gpu) -> float:
    """Return the CPU seconds of a look at 400 links: the median of 10."""
    ring, reader = links.send_to_many(gpu), NcclLinkReader(0.0)
    costs = [
        measure_cpu(lambda at_s=100.0 + second: links.look(reader, gpu, at_s, ring=ring))
        for second in range(10)
    ]
    return statistics.median(costs)


def make(name: str, bound: float, measure: Callable[[times.Gpu], float]) -> Gate:
    """Return a gate whose figure is CPU time in spins of about 0.1 s."""
    return Gate(name, "spins", bound, lambda: with_gpu(measure), time_spin)


GATES = (
    # A spin is about 0.1 s. An event may cost 20 µs, of which ctypes takes the most.
    make("nccl-event", 4.0, measure_events),
    make("nccl-times-look", 0.05, measure_look),
    make("nccl-times-ahead", 0.2, measure_look_ahead),
    make("nccl-times-full", 1.0, measure_full),
    make("nccl-links-look", 0.3, measure_links),
)
