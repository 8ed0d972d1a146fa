"""Whether another world is worth the change: what must move, how long that takes, what it gains."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from perdure.model.planning.costs import CostProfile
from perdure.model.planning.world import World
from perdure.plan.worlds.planner import Option

MARGIN = 0.02
"""A gain smaller than this is within what a profile can tell, and changes nothing."""


class Change(msgspec.Struct, frozen=True):
    """A decision about a world that may be better, and why it was made."""

    decision: Literal["stay", "change"]
    gain: float
    """More samples over the dwell time, as a fraction; negative where the change costs."""
    move_s: float
    move_bytes: int
    """Over all devices."""
    reason: str


def compute_missing_bytes(old: World, new: World, profile: CostProfile) -> dict[str, int]:
    """Return the bytes of parameters and optimizer state that each device of `new` lacks."""
    held: dict[str, set[int]] = {}
    for stage in old.stages:
        for device in stage.devices:
            held.setdefault(device, set()).update(range(stage.first, stage.stop))
    missing: dict[str, int] = {}
    for stage in new.stages:
        for device in stage.devices:
            blocks = set(range(stage.first, stage.stop)) - held.get(device, set())
            size = sum(
                profile.blocks[i].parameter_bytes + profile.blocks[i].optimizer_bytes
                for i in sorted(blocks)
            )
            missing[device] = missing.get(device, 0) + size
    return missing


def compute_move_s(missing: Mapping[str, int], bytes_per_s: float, fixed_s: float) -> float:
    """Return how long a change stops training: each device receives what it lacks, all at once.

    `fixed_s` is the rest of it: agreement, communicators, warm-up. Senders are taken to keep up.
    """
    return fixed_s + max(missing.values(), default=0) / bytes_per_s


def decide_change(
    old: World,
    old_samples_per_s: float,
    best: Option,
    *,
    profile: CostProfile,
    bytes_per_s: float,
    fixed_s: float,
    dwell_s: float,
) -> Change:
    """Return whether `best` yields more than staying until the next change is expected.

    `dwell_s` is the expected time until then; while state moves nothing is trained. A world that
    cannot go on (`old_samples_per_s` 0) is left at any price.
    """
    missing = compute_missing_bytes(old, best.world, profile)
    move_s = compute_move_s(missing, bytes_per_s, fixed_s)
    size = sum(missing.values())
    if old_samples_per_s <= 0.0:
        why = f"the {old.shape} world cannot go on"
        return Change("change", float("inf"), move_s, size, why)
    kept_s = max(0.0, dwell_s - move_s)
    gain = best.samples_per_s * kept_s / (old_samples_per_s * dwell_s) - 1.0
    words = (
        f"{best.world.shape} does {best.samples_per_s:.1f} samples/s instead of "
        f"{old_samples_per_s:.1f}; moving takes {move_s:.1f} s of the {dwell_s:.0f} s expected"
    )
    decision: Literal["stay", "change"] = "change" if gain > MARGIN else "stay"
    return Change(decision, gain, move_s, size, f"{words}: {100.0 * gain:+.1f}%")
