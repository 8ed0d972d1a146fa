"""What is done about a verdict: a rung, and whether its node is left out from now on.

Plain data decides (`[policy]` of job.toml). Whatever the policy asks, two things bound it: a node
can be left out only where a spare one stands ready, and a slow one is worth a restart only where
the restart is soon repaid.
"""

import math
from typing import Literal

import msgspec

from perdure.model.job import PolicyConfig, Response
from perdure.model.verdicts import Verdict, VerdictKind

_FIELDS: dict[VerdictKind, str] = {
    "CommHang": "comm_hang",
    "ComputeHang": "compute_hang",
    "EarlyExit": "compute_hang",
    "CommSlow": "comm_slow",
    "Straggler": "straggler",
    "HostBusy": "straggler",
    "Desync": "desync",
    "UnhealthyDevice": "unhealthy_device",
}
_SLOW: frozenset[VerdictKind] = frozenset({"CommSlow", "Straggler", "HostBusy"})
_SURE = 0.7
"""Confidence from which a slow node is replaced: the wrong one would cost a restart for nothing."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller knows beside the verdict."""

    node: int | None
    """The node to blame; None where it cannot be told."""
    spares: tuple[int, ...] = ()
    """Nodes that stand ready and run nothing."""
    blames: int = 0
    """How often that node was blamed before."""
    restart_s: float = 0.0
    """What the last restarts cost, without the work that they lost."""
    lost_s: float = 0.0
    """How much work a restart would lose now: what came after the newest checkpoint."""
    replaced: bool = False
    """Another node has taken over the blamed one's ranks before, for the same kind of verdict."""
    replaced_s: float = math.inf
    """How long ago any node was replaced for slowness."""


class Reaction(msgspec.Struct, frozen=True):
    """A decision about a verdict, and why it was made."""

    rung: Literal["none", "restart", "stop"]
    reason: str
    ground: str = ""
    """Of `none`: why in a word, which stays the same while figures in the reason change."""
    leave_out: bool = False
    """Form the next world without the blamed node."""
    cordon: bool = False
    """And never again with it, until an operator restores it."""


def react(verdict: Verdict, config: PolicyConfig, situation: Situation) -> Reaction:
    """Return what `config` makes of an actionable verdict."""
    wanted: Response = (
        getattr(config, _FIELDS[verdict.kind]) if verdict.kind in _FIELDS else ("report")
    )
    if wanted == "report":
        why = f"policy.{_FIELDS.get(verdict.kind, verdict.kind)} = report"
        return Reaction("none", why, "report")
    if verdict.kind in _SLOW and verdict.slowness is None:
        return Reaction("none", "what it costs could not be measured", "unmeasured")
    if wanted == "stop":
        return Reaction("stop", f"{verdict.kind}: {verdict.reason}")
    if verdict.kind in _SLOW:
        return _weigh(verdict, config, situation)
    if verdict.kind == "UnhealthyDevice" and wanted == "evict" and not situation.spares:
        why = "no spare node: its ranks go on for as long as they can"
        return Reaction("none", why, "spare")
    return _restart(verdict, config, situation, leave_out=wanted == "evict")


_DEVICE_ERRORS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "no CUDA-capable device",
    "devices are busy or unavailable",
    "GPU is lost",
    "fallen off the bus",
    "CUDA error: hardware",
)
"""What CUDA and NVML say where the device itself has failed. An illegal memory access or a launch
failure is not among them: that is more often the script."""


def find_device_error(text: str) -> str:
    """Return the words by which an exception blames its device; empty where it does not."""
    return next((words for words in _DEVICE_ERRORS if words in text), "")


def estimate_restart_cost_s(totals: tuple[float, ...], default_s: float = 10.0) -> float:
    """Return what a restart costs: the median of `totals`, seconds; `default_s` without any."""
    return sorted(totals)[len(totals) // 2] if totals else default_s


def _restart(
    verdict: Verdict, config: PolicyConfig, situation: Situation, *, leave_out: bool
) -> Reaction:
    node, blames = situation.node, situation.blames + 1
    if node is None:
        return Reaction("restart", "nobody in particular to leave out")
    # A device that has failed fails again; of a hang, once may be chance.
    sure = verdict.kind == "UnhealthyDevice" or blames >= config.cordon_after
    cordon = bool(config.cordon_after) and sure
    times = "once" if blames == 1 else f"{blames} times"
    if not (leave_out or cordon):
        return Reaction("restart", f"node {node} was blamed {times}")
    if not situation.spares:
        return Reaction("restart", f"node {node} was blamed {times}, but there is no spare node")
    why = f"node {node} was blamed {times}; node {situation.spares[0]} stands in for node {node}"
    return Reaction("restart", why, leave_out=True, cordon=cordon)


def _weigh(verdict: Verdict, config: PolicyConfig, situation: Situation) -> Reaction:
    """Compare what a slow node costs from now on with what replacing it costs once.

    What counts is the whole step, and of what was measured the end that promises least.
    """
    slow = verdict.slowness
    assert slow is not None, "what could not be measured is not weighed"
    factor = slow.step_ratio_low
    worth = f"{factor:.2f}x of the step would be worth a replacement, but"
    against = (
        (
            factor < config.evict_factor,
            "factor",
            f"{factor:.2f}x of the step is below policy.evict_factor = {config.evict_factor:g}",
        ),
        (
            verdict.confidence < _SURE,
            "confidence",
            f"{worth} who it is is {verdict.confidence:.0%} sure, and {_SURE:.0%} is wanted",
        ),
        (situation.node is None, "culprit", f"{worth} nobody is to blame for certain"),
        (not situation.spares, "spare", f"{worth} there is no spare node"),
        (
            situation.replaced,
            "work",
            f"{worth} its ranks were as slow on another node: it is their work",
        ),
        (
            situation.replaced_s < config.payback_s,
            "moved",
            f"{worth} another was replaced {situation.replaced_s:.0f} s ago: slowness that moves "
            f"about is the job's work, so policy.payback_s = {config.payback_s:g} must pass first",
        ),
    )
    for holds, ground, why in against:
        if holds:
            return Reaction("none", why, ground)
    repaid_s = (situation.restart_s + situation.lost_s) / slow.share_low
    lost = f" and {situation.lost_s:.0f} s of work that is in no checkpoint"
    lost = lost if situation.lost_s else ""
    estimate = (
        f"a restart costs about {situation.restart_s:.1f} s{lost}, and saves {slow.share_low:.0%} "
        f"of every step: repaid after {repaid_s:.0f} s"
    )
    if repaid_s > config.payback_s:
        why = f"{estimate}, later than policy.payback_s = {config.payback_s:g}"
        return Reaction("none", why, "payback")
    return Reaction(
        "restart",
        f"{estimate}; node {situation.spares[0]} stands in for node {situation.node}",
        leave_out=True,
        cordon=bool(config.cordon_after) and situation.blames + 1 >= config.cordon_after,
    )
