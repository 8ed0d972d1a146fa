"""How soon `perdure watch` answers keys, and how long `perdure bundle` reads lines gone mad."""

import asyncio
import tempfile
import time
from pathlib import Path

from bench.gates.gate import Gate, measure_cpu, time_spin
from tests.living import LivingJob
from tests.unit.cli.test_bundle import MAD

from perdure.cli.jobs import find_here
from perdure.cli.looking.redaction import Redactor, read_vocabulary
from perdure.cli.watching.app import WatchApp
from perdure.model.report import RankRow

RANKS = 10_000
KEYS = ("down", "down", "up", "pagedown", "pageup", "G", "g")
MAD_CHARACTERS = 100_000
LIMIT_S = 240.0


async def press_keys(home: Path) -> float:
    """Return the seconds that seven keys take on the table of 10,000 ranks."""
    job = LivingJob(home)
    ranks = tuple(
        RankRow(i, i // 8, 1, "running", "step", 7, 8.0, "", 1.0, 1) for i in range(RANKS)
    )
    job.write(ranks=ranks, world_size=RANKS)
    app = WatchApp(find_here("j", str(home)), 0.1, asks=lambda job, act: "")
    try:
        async with asyncio.timeout(LIMIT_S), app.run_test(size=(80, 24)) as pilot:
            while not any(
                f"{RANKS} ranks" in strip.text for strip in app.screen._compositor.render_strips()
            ):
                await pilot.pause(0.02)
            began_s = time.perf_counter()
            await pilot.press(*KEYS)
            return time.perf_counter() - began_s
    finally:
        job.die()


def measure_keys() -> float:
    """Return the seconds that seven keys take on the table of 10,000 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(press_keys(Path(folder)))


def measure_mad_lines() -> float:
    """Return the CPU seconds of the slowest of the lines of 100,000 characters."""
    read_vocabulary()  # Once in a process.
    return max(
        measure_cpu(lambda unit=unit: Redactor().redact(unit * (MAD_CHARACTERS // len(unit)) + "!"))
        for unit in MAD
    )


GATES = (
    Gate("watch-keys", "s for 7 keys, 10,000 ranks", 10, measure_keys),
    # 2 s on a machine that spins in 0.1 s.
    Gate("bundle-mad-lines", "spins for the slowest line", 20, measure_mad_lines, time_spin),
)
