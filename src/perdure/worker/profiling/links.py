"""What messages and sums cost between the devices of one machine: real processes, real gloo.

A message is measured as the pipeline's runner sends one, packed and unpacked, with its receive
posted before; a sum as the elastic engine makes it. Every group size has its own processes among
those that there are, while the others wait.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from perdure.model.codec import decode
from perdure.model.errors import MeasureError, PlatformError
from perdure.model.planning.costs import AllReduce, Transfer
from perdure.plan.worlds.measures import fit_line, settle

Found = dict[str, list[tuple[int, list[float]]]]
"""What was timed -> by bytes, the seconds of each repetition."""

_PROGRAM = "perdure.worker.profiling.link_rank"
_WHOLE_S = 300.0

_TCPStore: Any = vars(dist)["TCPStore"]


class LinkFigures(msgspec.Struct, frozen=True):
    """What was found."""

    transfers: tuple[Transfer, ...]
    all_reduces: tuple[AllReduce, ...]
    spread: float
    spread_of: str


def list_groups(ranks: int) -> list[int]:
    """Return the group sizes to measure: powers of two, and all.

    >>> list_groups(6)
    [2, 4, 6]
    """
    found, size = [], 2
    while size < ranks:
        found.append(size)
        size *= 2
    return [*found, ranks] if ranks > 1 else []


def measure_links(ranks: int, say: Callable[[str], object]) -> LinkFigures:
    """Measure with `ranks` processes of this machine.

    Raises:
        PlatformError: they could not be started, or one has failed.
        MeasureError: what they have measured is no cost.
    """
    if ranks < 2:
        return LinkFigures((), (), 0.0, "")
    host = "127.0.0.1"
    store = _TCPStore(host, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    say(f"links: {ranks} processes")
    children = [
        subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, str(rank), str(ranks), host, str(store.port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + _WHOLE_S
    try:
        while not store.check(["done"]):
            if any(child.poll() for child in children) or time.monotonic() > deadline:
                raise PlatformError("links: a measuring process has failed", hint="see its output")
            time.sleep(0.05)
        found: Found = decode(store.get("done"), Found)
    finally:
        for child in children:  # Those that have measured have nothing left to do.
            child.kill()
            child.wait()
    return _fit(found)


def _fit(found: Found) -> LinkFigures:
    worst, worst_of = 0.0, ""
    lines: dict[str, tuple[float, float]] = {}
    for name, sizes in found.items():
        points = []
        for size, samples in sizes:
            figure = settle(samples, f"{name} of {size} bytes")
            points.append((float(size), figure.value))
            if figure.spread > worst:
                worst, worst_of = figure.spread, f"{name} of {size} bytes"
        lines[name] = fit_line(points, name)
    sums = [
        AllReduce("node", int(name.rpartition(" ")[2]), *line)
        for name, line in lines.items()
        if name.startswith("all-reduce")
    ]
    if "message" not in lines:
        raise MeasureError("links: no message was measured")
    return LinkFigures((Transfer("node", *lines["message"]),), tuple(sums), worst, worst_of)
