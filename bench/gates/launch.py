"""Gates of launching on boxes: memory while a box floods its answer."""

import contextlib
import resource

from bench.gates.gate import Gate

from perdure.launch.channel import Channel
from perdure.launch.exchange import FloodError
from perdure.model.platforms.profile import LaunchSection

FLOOD = "yes | head -c 10G"


def measure_flood() -> float:
    """Return the MB by which this process grows while it is flooded, in the worst of three ways."""
    here = Channel(LaunchSection())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for ask in (
        lambda: here.run(FLOOD),
        lambda: here.run(f"{FLOOD} >&2"),
        lambda: here.query(FLOOD, dict),
    ):
        with contextlib.suppress(FloodError):
            ask()
            raise RuntimeError("a flood was read to its end")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


GATES = (Gate("flood-memory", "MB", 300, measure_flood, pairs=3),)
