"""How long members of a torchft job wait for one another: by the job file, and as they always did.

What is always so is a distribution, of which above all the tail counts: a group that validates
every hundred steps is late once in a hundred, so a mean or a median says nothing of it. Kept are
the usual interval between quorums, and every wait of a second or so that ended by itself, for as
long as fewer than `KEPT` came after it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec

from perdure.model.job import DetectConfig

KEPT = 64
INTERVALS = 15
LONG_S = 0.25
"""A shorter wait teaches nothing that the patience does not allow for anyhow."""
SLACK = 1.5
"""How much longer than ever before a wait may last and still be usual."""


class QuorumConfig(msgspec.Struct, frozen=True):
    """Bounds of patience."""

    min_replicas: int = 1
    hung_s: float = 0.0
    """How long beyond its usual silences a member is waited for; 0: as long as torchft would."""
    silent_s: float = 0.5
    """Silence after which one is left out of whom something else is known as well."""
    heartbeat_s: float = 5.0
    """Silence after which one is left out of whom nothing else is known; torchft's default."""
    timeout_s: float = 60.0
    """How long torchft itself waits: its lighthouse for a member that asks late, and its managers
    in a collective, unless they say otherwise."""
    late_s: float = 1.0
    """Beyond its usual silences a member is told of as late after so long."""
    startup_s: float = 60.0
    """How long the first quorum waits for groups that are starting, and any quorum for a member
    in its first steps."""
    alone_s: float = 300.0
    """How long a newcomer waits for members of which none asks: they may all be evaluating."""
    elsewhere: bool = False
    """Others start the groups: which there are, nobody knows before they ask."""

    def compute_patience_s(
        self, expected_s: float, told: Sequence[float] = (), *, known: bool = True
    ) -> float:
        """Return how long a member is waited for whose silences so far lasted up to `expected_s`.

        In a collective its peers' managers have their say: `told` is how long they wait. One whose
        first steps are not over is not `known`.
        """
        least_s = self.late_s + expected_s
        if self.hung_s:
            patience_s = self.hung_s + expected_s
        else:
            patience_s = max(*told, least_s) if told else max(self.timeout_s, least_s)
        return patience_s if known else max(patience_s, self.startup_s)

    def follow(self, detect: DetectConfig) -> "QuorumConfig":
        """Return these bounds with those that a job has in its `detect`, which may be changed.

        Newcomers wait for members that may come back as long as for one that hangs.
        """
        alone_s = detect.hang_action_s or QuorumConfig().alone_s
        return msgspec.structs.replace(self, startup_s=detect.phase_allowance_s, alone_s=alone_s)


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
