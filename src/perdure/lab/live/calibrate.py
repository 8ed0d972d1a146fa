"""How fast each number of nodes trains on this machine: measured before anything is replayed.

The same elastic job loses one node after another by drain, and its steps are timed. Two cores do
not scale; virtual devices do, as long as what the machine really computes fits beside them.
"""

import os
import platform
import time
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from statistics import median

from perdure.lab.live.systems import MICRO_BATCHES, Perdure
from perdure.lab.policies.throughput import Throughput, read_throughput
from perdure.model.codec import encode
from perdure.model.errors import SafetyError
from perdure.service.jobfiles import write_atomic

STATE_BYTES = 3.2e6
"""Of the model in `worker.paced`, with its moments."""
_WINDOW_S, _STEPS = 3.0, 6


def find_cache(home: str, count: int, pace_s: float, stages: int) -> Path:
    """Return where the table of this machine and of such a job is kept."""
    machine = (platform.node(), os.cpu_count(), platform.processor())
    words = (*machine, count, pace_s, stages, MICRO_BATCHES)
    return Path(home, "replay", f"tau-{sha256(repr(words).encode()).hexdigest()[:12]}.json")


def load_throughput(path: Path) -> Throughput | None:
    """Return the table that was measured earlier; None if there is none."""
    if not path.exists():
        return None
    return read_throughput(path.read_text(), str(path), None)


def measure_throughput(
    system: Perdure, count: int, path: Path, progress: Callable[[int], None]
) -> Throughput:
    """Return samples a second by number of nodes, from all `count` down to one, and keep it.

    `progress` is told the number that is being measured.
    """
    rates: dict[int, float] = {}
    batch = 0
    for nodes in range(count, 0, -1):
        progress(nodes)
        system.shape(range(nodes), keep=True)
        rates[nodes], batch = _time_steps(system, tuple(range(nodes)))
    configs = [{"D": n, "P": 1, "samples_per_s": rates[n]} for n in sorted(rates)]
    model = {"global_batch": batch, "state_bytes": STATE_BYTES, "configs": configs}
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    source = f"measured on this machine by trace replay, {when}, load {os.getloadavg()[0]:.1f}"
    write_atomic(str(path), encode({"models": {"replay": model}, "source": source}) + b"\n")
    table = load_throughput(path)
    assert table is not None
    return table


def check_rising(table: Throughput) -> None:
    """Refuse a machine on which more nodes are not faster.

    Raises:
        SafetyError: what a replay would show there is the machine, and not the system.
    """
    rates = [rate for _, rate in sorted(table.rates.items())]
    flat = [n for n, (a, b) in enumerate(pairwise(rates), 2) if b <= a]
    if flat:
        shown = ", ".join(f"{n}: {rate:.0f}" for n, rate in enumerate(rates, 1))
        raise SafetyError(
            f"{flat[0]} nodes are no faster here than {flat[0] - 1}: samples/s by nodes {shown}",
            hint="a larger --pace-ms, a smaller --nodes-max, or less beside it; --measure "
            "measures again",
        )


def _time_steps(system: Perdure, places: tuple[int, ...]) -> tuple[float, int]:
    """Return samples a second of a world, and the samples of a step."""
    begun_s = time.monotonic()
    while True:
        time.sleep(0.2)
        system.check()
        rows = [row for row in system.trail.poll() if row.at_s >= begun_s and row.places == places]
        if len(rows) > _STEPS and rows[-1].at_s - rows[0].at_s >= _WINDOW_S:
            step_s = median(b.at_s - a.at_s for a, b in pairwise(rows))
            return rows[-1].samples / step_s, rows[-1].samples
