"""What is done about nodes that are taken away, within the grace that is left.

Whatever can be left at a step that all agree on loses nothing; what cannot be is saved as late as
is safe, or its death is at least known for what it is.
"""

from typing import Literal

import msgspec

from perdure.model.job import PreemptionConfig


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that are noticed together, and what the job could do without them."""

    grace_s: float
    """Of the one that goes first."""
    saves: bool = True
    """The script calls `perdure.init`, so that its state can be saved."""
    handles: bool = False
    """Its ranks handle SIGTERM."""
    certain: bool = True
    spares: int = 0
    """Nodes, or in an elastic world members, that can stand in at once."""
    short: int = 0
    """How many are needed for the world to stay as large as it is."""
    left: int | None = None
    """Members, or replica groups, that would go on; None where the world is formed anew."""


Way = Literal["drain", "evict", "checkpoint", "end", "mark"]
"""Leave at an agreed step, or at once; save, for nobody can stand in; let the script save itself
on SIGTERM; or only note it."""


class HandOver(msgspec.Struct, frozen=True):
    """A decision about nodes that are taken away, and why it was made."""

    way: Way
    reason: str


def decide_hand_over(outlook: Outlook, config: PreemptionConfig) -> HandOver:
    """Return what is done about `outlook`.

    A risk is worth what costs little: no smaller world, and no restart without a spare node.
    """
    ready, risky = outlook.spares >= outlook.short, not outlook.certain
    stand_in, risk = ready and outlook.short > 0, "a higher risk is no notice yet"
    reported = config.rebalance == "report" or not outlook.saves
    left_early = config.rebalance == "drain" and stand_in
    rows: tuple[tuple[bool, Way, str], ...] = (
        (risky and reported, "mark", f"{risk}: it is only reported"),
        (risky and left_early, "drain", f"{risk}, and spares can stand in"),
        (risky, "checkpoint", f"{risk}: saved, should it come to one"),
        (
            not outlook.saves and stand_in,
            "evict",
            "the script cannot be saved; a spare node makes up for it",
        ),
        (
            not outlook.saves and outlook.handles and outlook.grace_s > 0,
            "end",
            "nobody can stand in: its ranks get SIGTERM, so that the script saves itself",
        ),
        (not outlook.saves, "mark", "the script cannot be saved, and nobody can stand in"),
        (outlook.left == 0, "checkpoint", "nobody would be left who has the state"),
        (
            outlook.left is None and not ready,
            "checkpoint",
            "no spare node stands ready: saved now and once more",
        ),
        (outlook.grace_s <= 0, "evict", "left out at once, for there is no grace"),
        (True, "drain", "left at a step that all agree on"),
    )
    return next(HandOver(way, reason) for holds, way, reason in rows if holds)
