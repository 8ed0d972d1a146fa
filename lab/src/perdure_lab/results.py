"""Kinds of results that the lab's commands keep for `perdure dash`."""

from collections.abc import Sequence

from perdure.dash.svg import fold_stairs
from perdure.plan.worlds.planner import Plan
from perdure.service.results import Kept
from perdure_lab.report import Comparison, DriveResult, ReplayResult
from perdure_lab.traces.figures import Availability

Stairs = tuple[tuple[float, float], ...]
"""(seconds, value from then on)."""


class KeptTrace(Kept, frozen=True, kw_only=True, tag="trace"):
    """`perdure trace show`."""

    figures: Availability
    counts: Stairs


class KeptSimulation(Kept, frozen=True, kw_only=True, tag="simulation"):
    """`perdure trace simulate`."""

    comparison: Comparison
    counts: Stairs
    rates: dict[str, Stairs]
    """By policy, and U1: samples a second."""


class KeptReplay(Kept, frozen=True, kw_only=True, tag="replay"):
    """`perdure trace replay`."""

    result: ReplayResult


class KeptDrive(Kept, frozen=True, kw_only=True, tag="drive"):
    """`perdure trace drive`."""

    result: DriveResult


class KeptPlan(Kept, frozen=True, kw_only=True, tag="plan"):
    """`perdure plan`."""

    profile: str
    """Name of the profile's file."""
    fingerprint: str
    devices: int
    per_node: int
    memory_bytes: int
    """Of a device."""
    global_batch: int
    plan: Plan


def fold_counts(counts: Sequence[tuple[float, float]], end_s: float) -> Stairs:
    """Return what a plot shows of a staircase, which may have very many steps."""
    return tuple(fold_stairs(counts, end_s))
