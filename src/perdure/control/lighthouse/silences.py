"""How long members of a torchft job wait for one another: the distribution, and above all its tail.

A group that validates every hundred steps is late once in a hundred, so a mean or a median says
nothing of it. Kept are the usual interval between quorums, and every wait of a second or so that
ended by itself, for as long as fewer than `KEPT` came after it.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

KEPT = 64
INTERVALS = 15
LONG_S = 0.25
"""A shorter wait teaches nothing that the patience does not allow for anyhow."""
SLACK = 1.5
"""How much longer than ever before a wait may last and still be usual."""


@dataclass(slots=True)
class Silences:
    """Learns how long members of a quorum are silent."""

    long: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Long waits that ended by themselves, oldest first."""
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=INTERVALS))

    def add(self, waited_s: float) -> None:
        """Learn for how long the others had waited when a member came."""
        if waited_s >= LONG_S:
            self.long.append(waited_s)

    def add_interval(self, interval_s: float) -> None:
        """Learn how long it was from one quorum to the next of the same members."""
        self.intervals.append(interval_s)

    @property
    def expected_s(self) -> float:
        """Return the longest wait that would be nothing new; 0 where nothing is known."""
        usual_s = median(self.intervals) if self.intervals else 0.0
        return max(usual_s, SLACK * max(self.long, default=0.0))
