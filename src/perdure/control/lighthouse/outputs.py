"""What the decision about quorums is configured by, and what follows from it."""

from collections.abc import Sequence

import msgspec

from perdure.model.bus.lighthouse import Member
from perdure.model.job import JobSpec


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


def make_quorum_config(spec: JobSpec) -> QuorumConfig:
    """Return the bounds of patience of a job.

    Newcomers wait for members that may come back as long as for one that hangs.
    """
    return QuorumConfig(
        min_replicas=spec.torchft.min_replicas,
        hung_s=spec.torchft.hung_s,
        silent_s=spec.torchft.silent_s,
        startup_s=spec.detect.phase_allowance_s,
        alone_s=spec.detect.hang_action_s or QuorumConfig().alone_s,
    )


class Answered(msgspec.Struct, frozen=True):
    """Hand this quorum to those who hold these tokens."""

    tokens: tuple[int, ...]
    quorum_id: int
    members: tuple[Member, ...]


class Formed(msgspec.Struct, frozen=True):
    """The members have changed, or the id. To be on disk before anyone is answered."""

    quorum_id: int
    step: int
    members: tuple[Member, ...]
    recovering: tuple[str, ...]


class Seen(msgspec.Struct, frozen=True):
    """A replica has asked for the first time, or again after it was left out."""

    replica: str
    group: int
    generation: int = -1
    """The generation of its processes; -1 where its store is not one of ours."""


class Stands(msgspec.Struct, frozen=True):
    """A replica has ended its step, asks for the next one, and is held."""

    replica: str
    group: int
    step: int


class Late(msgspec.Struct, frozen=True):
    """The others wait for a replica for longer than they ever did, or have waited for it."""

    replica: str
    group: int
    reason: str
    waited_s: float
    over: bool = False
    """It has come."""


class LeftOut(msgspec.Struct, frozen=True):
    """A replica is not waited for any more."""

    replica: str
    group: int
    reason: str
    stopped: bool = False


class Fenced(msgspec.Struct, frozen=True):
    """Have the replicas of these groups break their process group of this quorum."""

    quorum_id: int
    groups: tuple[int, ...]
    reason: str


Output = Answered | Formed | Seen | Stands | Late | LeftOut | Fenced
