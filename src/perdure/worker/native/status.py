"""Which recorder a rank started now would get, why, and what it costs. Imports no torch."""

import os

import msgspec

from perdure.worker.native.build import (
    build_command,
    explain_missing,
    find_compiler,
    find_library,
    find_torch,
)
from perdure.worker.native.measure import load_cost, measure_cost

MODES = ("auto", "compiled", "python", "status", "off")

COSTS = {
    "compiled": "about 2 µs a collective",
    "python": "30 to 65 µs a collective",
    "status": "nothing a collective, 3 µs ten times a second",
    "off": "nothing",
}
"""Measured by `bench/bench_recorder.py`."""


class RecorderStatus(msgspec.Struct, frozen=True):
    """The answer for `perdure doctor`."""

    kind: str
    """`compiled`, `python`, `status` or `off`."""
    reason: str
    cost: str
    library: str = ""
    """Path of the compiled recorder, where it is built."""
    better: str = ""
    """What would get a better one; empty where nothing would."""
    broken: bool = False
    """It is there and does not work."""


def read_mode() -> tuple[str, str]:
    """Return what `PERDURE_RECORDER` asks for, and what is wrong with it if anything."""
    mode = os.environ.get("PERDURE_RECORDER", "") or "auto"
    if mode in MODES:
        return mode, ""
    return "auto", f"PERDURE_RECORDER={mode} is none of {', '.join(MODES)}"


def status() -> RecorderStatus:
    """Return which recorder a rank would get that was started in this environment.

    Where the compiled one came without a figure of this machine (in a wheel), it is tried and
    measured now: a few seconds.
    """
    mode, wrong = read_mode()
    library = find_library()
    path = str(library) if library is not None else ""
    if mode in ("python", "status", "off"):
        return RecorderStatus(mode, f"PERDURE_RECORDER={mode}", COSTS[mode], path)
    if library is None:
        return RecorderStatus("status", explain_missing(), COSTS["status"], better=_find_better())
    cost = load_cost(library) or measure_cost(library)
    if isinstance(cost, str):
        reason = f"the compiled one is built but does not work: {cost}"
        return RecorderStatus("status", reason, COSTS["status"], path, broken=True)
    return RecorderStatus("compiled", wrong or "built for the installed torch", str(cost), path)


def _find_better() -> str:
    """Return what would have the compiled recorder built here."""
    if find_torch() is None:
        return ""
    return build_command() if find_compiler() else f"install g++, then: {build_command()}"
