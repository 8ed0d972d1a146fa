"""What a gate is, and the yardsticks that gates are measured against."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gate:
    """A figure with an upper bound.

    `measure` returns one sample in `unit`. The runner calls it in a new process for each pair.
    With a `yardstick`, the figure of a pair is `measure() / yardstick()`, so that it does not
    depend on how fast the machine is.
    """

    name: str
    unit: str
    bound: float
    measure: Callable[[], float]
    yardstick: Callable[[], float] | None = None
    pairs: int = 7


def time_spin() -> float:
    """Return the CPU seconds of a fixed piece of Python, about 0.1 s on a core of 2026."""
    began_s = time.process_time()
    total = 0
    for number in range(2_000_000):
        total += number & 7
    return time.process_time() - began_s


def time_bare_python() -> float:
    """Return the wall seconds of starting a Python that imports nothing."""
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True, timeout=60)
    return time.perf_counter() - began_s


def measure_cpu(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process while it does `work`."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def measure_wall(work: Callable[[], object]) -> float:
    """Return the wall seconds of `work`."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
