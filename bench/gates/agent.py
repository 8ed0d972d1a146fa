"""What an agent costs its node, and how soon it reports a crash: 8 ranks, 5 heartbeats a second."""

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.gates.gate import Gate
from tests.e2e.agent_driver import Driver, until

from perdure.adapters.host import ProcStat
from perdure.model.events import RankExited, RanksStarted

RANKS = 8
LOOKS = 50
LOOK_EVERY_S = 0.2


def drive(measure: Callable[[Driver], Awaitable[float]]) -> float:
    """Return what `measure` finds with an agent whose ranks all run."""

    async def run() -> float:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            driver = Driver(Path(folder), nproc=RANKS)
            try:
                await driver.start()
                await driver.form(0)
                await until(lambda: driver.beats and len(driver.beats[-1].ranks) == RANKS)
                await asyncio.sleep(1.0)
                return await measure(driver)
            finally:
                await driver.close()

    return asyncio.run(run())


def time_look() -> float:
    """Return the CPU seconds of reading one `/proc/PID/stat`: the mean of 40 in a row."""
    with open("/proc/self/stat", "rb", buffering=0) as file:
        began_s = time.process_time()
        for _ in range(40):
            words = os.pread(file.fileno(), 2048, 0).rpartition(b")")[2].split()
            assert sum(int(word) for word in words[11:15]) >= 0
        return (time.process_time() - began_s) / 40


async def measure_cpu(driver: Driver) -> float:
    """Return the agent's CPU time per second, in looks at `/proc`.

    A look follows a pause like the agent's own. So the caches are as cold for the yardstick as
    for the agent.
    """
    assert driver.agent is not None
    stat = ProcStat(driver.agent.pid)
    before, began_s, looks = stat.sample(), time.monotonic(), []
    for _ in range(LOOKS):
        await asyncio.sleep(LOOK_EVERY_S)
        looks.append(time_look())
    after, wall_s = stat.sample(), time.monotonic() - began_s
    stat.close()
    return (after.cpu_s - before.cpu_s) / wall_s / statistics.mean(looks)


async def measure_memory(driver: Driver) -> float:
    """Return the agent's resident memory in MB."""
    assert driver.agent is not None
    stat = ProcStat(driver.agent.pid)
    try:
        return stat.sample().rss_bytes / 1e6
    finally:
        stat.close()


async def measure_beats(driver: Driver) -> float:
    """Return the mean seconds between two heartbeats."""
    count, began_s = len(driver.beats), time.monotonic()
    await until(lambda: len(driver.beats) >= count + LOOKS)
    return (time.monotonic() - began_s) / (len(driver.beats) - count)


async def measure_crash(driver: Driver) -> float:
    """Return the seconds from a rank's death by SIGKILL to the event that reports it."""
    started = await driver.wait(RanksStarted)
    began_s = time.monotonic()
    os.kill(started.pids[1], signal.SIGKILL)
    exit_ = await driver.wait(RankExited)
    return driver.received_s[driver.events.index(exit_)] - began_s


GATES = (
    Gate("agent-cpu", "looks at /proc per second", 1_500, lambda: drive(measure_cpu)),
    Gate("agent-memory", "MB", 60, lambda: drive(measure_memory), pairs=3),
    Gate("agent-heartbeat", "s between heartbeats", 1 / 4.5, lambda: drive(measure_beats), pairs=3),
    Gate("agent-crash-report", "s", 0.5, lambda: drive(measure_crash)),
)
