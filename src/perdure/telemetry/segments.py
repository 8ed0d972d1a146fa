"""Pieces of one rank's time: what ledgers are sums of."""

from dataclasses import dataclass, field

import msgspec

from perdure.model.events import FailureDecided

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


@dataclass(slots=True, kw_only=True)
class Timeline:
    """One slot's time, walked forward: pieces never overlap, and what has no stamps stays out."""

    rank: int
    end_s: float
    cursor: float
    """Up to here the time was dealt with."""
    found: list[Segment] = field(default_factory=list)

    def put(self, generation: int, account: str, begin_s: float, end_s: float) -> None:
        """Attribute what is left of a stretch."""
        begin, end = max(begin_s, self.cursor), min(end_s, self.end_s)
        if end > begin:
            piece = ((account, end - begin),)
            self.found.append(Segment(self.rank, generation, begin, end, piece))
            self.cursor = end

    def take(
        self, generation: int, account: str, begin_s: float | None, end_s: float | None
    ) -> None:
        """Attribute a stretch; without both of its stamps it stays unattributed."""
        if begin_s and end_s:
            self.put(generation, account, begin_s, end_s)

    def spend(
        self, generation: int, pieces: dict[str, float], begin_s: float, end_s: float
    ) -> None:
        """Attribute a stretch of training to what the rank itself has counted in it."""
        seconds = fit_pieces(pieces, end_s - begin_s)
        self.found.append(Segment(self.rank, generation, begin_s, end_s, seconds))
        self.cursor = end_s

    def recover(
        self, generation: int, failure: FailureDecided, since_s: float, stopped_s: float | None
    ) -> None:
        """Attribute what lies between a failure and the end of the last process."""
        self.take(generation, RECONFIGURATION + "detect", since_s, failure.detected_s)
        self.take(generation, RECONFIGURATION + "decide", failure.detected_s, failure.at_s)
        self.take(generation, RECONFIGURATION + "abort", failure.at_s, stopped_s)
