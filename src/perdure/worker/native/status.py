"""Which recorder a rank started now would get, why, and what it costs. Imports no torch."""

import os

import msgspec

from perdure.worker.native.build import explain_missing, find_library

MODES = ("auto", "compiled", "python", "status", "off")

COSTS = {
    "compiled": "about 2 us a collective; begin, end, wait, bytes and peer of every one",
    "python": "30 to 65 us a collective; begin, end and bytes, of send and receive no end",
    "status": "nothing a collective, 3 us ten times a second; sequence numbers to 0.1 s",
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


def read_mode() -> tuple[str, str]:
    """Return what `PERDURE_RECORDER` asks for, and what is wrong with it if anything."""
    mode = os.environ.get("PERDURE_RECORDER", "") or "auto"
    if mode in MODES:
        return mode, ""
    return "auto", f"PERDURE_RECORDER={mode} is none of {', '.join(MODES)}"


def status() -> RecorderStatus:
    """Return which recorder a rank would get that was started in this environment."""
    mode, wrong = read_mode()
    library = find_library()
    path = str(library) if library is not None else ""
    if mode in ("python", "status", "off"):
        return RecorderStatus(mode, f"PERDURE_RECORDER={mode}", COSTS[mode], path)
    if library is not None:
        reason = wrong or "built for the installed torch"
        return RecorderStatus("compiled", reason, COSTS["compiled"], path)
    reason = explain_missing()
    return RecorderStatus("status", reason, COSTS["status"], better=reason.partition(": ")[2])
