"""A piece of one rank's time: what ledgers are sums of."""

import msgspec


class Segment(msgspec.Struct, frozen=True):
    """A stretch of one rank's time and what it was spent on."""

    rank: int
    generation: int
    begin_s: float
    end_s: float
    seconds: tuple[tuple[str, float], ...]
    """Account -> seconds. Together at most `end_s - begin_s`."""
