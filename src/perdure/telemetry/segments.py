"""A piece of one rank's time: what ledgers are sums of."""

import msgspec

RECONFIGURATION = "reconfiguration."
"""What the accounts of a recovery's phases begin with."""


class Segment(msgspec.Struct, frozen=True):
    """A stretch of one rank's time and what it was spent on."""

    rank: int
    generation: int
    begin_s: float
    end_s: float
    seconds: tuple[tuple[str, float], ...]
    """Account -> seconds. Together at most `end_s - begin_s`."""


def fit_pieces(pieces: dict[str, float], room_s: float) -> tuple[tuple[str, float], ...]:
    """Return the pieces that took any time, made smaller where they exceed the room.

    What was counted twice is taken off once more, so that it is shown as unattributed and
    flatters nobody.
    """
    total_s = sum(pieces.values())
    scale = max(0.0, 2 * room_s - total_s) / total_s if total_s > room_s else 1.0
    return tuple((name, s * scale) for name, s in pieces.items() if s * scale > 0)
