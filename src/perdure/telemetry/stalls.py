"""What a re-formation cost one rank: from where it could not go on until it was in the next world.

A rank notes itself since when it waited for the collective that broke, when it had left the old
world, had the order, was connected, and had its state. What lies before it left is a part of its
step by its own account, and what lies after of its overhead: both are taken off there and put
down to the phases, so that nothing is counted twice.
"""

import msgspec

from perdure.model.events import FailureDecided, WorldReformed
from perdure.telemetry.segments import RECONFIGURATION


class Stall(msgspec.Struct, frozen=True):
    """One rank's stamps of one re-formation."""

    epoch: int
    waited_s: float
    began_s: float
    ordered_s: float
    connected_s: float
    formed_s: float


def make_stall(event: WorldReformed) -> Stall:
    """Return the stamps of `event`; one that it lacks is the next one."""
    connected_s = event.connected_s or event.formed_s
    waited_s = event.waited_s or event.began_s
    return Stall(event.epoch, waited_s, event.began_s, event.ordered_s, connected_s, event.formed_s)


def split_stall(
    stall: Stall, failure: FailureDecided | None
) -> tuple[dict[str, float], float, float]:
    """Return (phase account -> seconds, seconds within the step, seconds of overhead).

    `failure` is the incident behind it: a wait for a peer that still lived was no stall. Without
    one, a join or a second try, only what came after the old world was left counts.
    """
    begin_s, moments = stall.began_s, [("abort", stall.ordered_s)]
    if failure is not None:
        begin_s = min(stall.began_s, max(stall.waited_s, failure.failure_s))
        moments = [
            ("detect", failure.detected_s),
            ("decide", failure.at_s or failure.detected_s),
            *moments,
        ]
    moments += [("communicator", stall.connected_s), ("state", stall.formed_s)]
    phases, at_s = dict[str, float](), begin_s
    for name, until_s in moments:
        end_s = min(max(until_s, at_s), stall.formed_s)
        phases[RECONFIGURATION + name] = end_s - at_s
        at_s = end_s
    return phases, stall.began_s - begin_s, max(0.0, stall.formed_s - stall.began_s)


def take_stalls(
    pieces: dict[str, float], stalls: list[tuple[Stall, FailureDecided | None]]
) -> dict[str, float]:
    """Return `pieces` with what `stalls` cost in accounts of its own.

    No more than what a rank has counted as step and overhead is moved.
    """
    moved = dict(pieces)
    for stall, failure in stalls:
        phases, in_step_s, in_overhead_s = split_stall(stall, failure)
        wanted_s = sum(phases.values())
        if wanted_s <= 0:
            continue
        taken_s = 0.0
        for account, seconds in (("useful", in_step_s), ("steady_overhead", in_overhead_s)):
            part_s = min(seconds, moved.get(account, 0.0))
            moved[account] = moved.get(account, 0.0) - part_s
            taken_s += part_s
        for name, seconds in phases.items():
            moved[name] = moved.get(name, 0.0) + seconds * taken_s / wanted_s
    return moved
