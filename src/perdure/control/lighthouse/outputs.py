"""What follows from the decision about quorums."""

import msgspec

from perdure.model.bus.lighthouse import Member


class Answered(msgspec.Struct, frozen=True):
    """Hand this quorum to those who hold these tokens."""

    tokens: tuple[int, ...]
    quorum_id: int
    members: tuple[Member, ...]


class Refused(msgspec.Struct, frozen=True):
    """Answer who holds this token with an error: there is no quorum for it."""

    token: int
    reason: str


class Formed(msgspec.Struct, frozen=True):
    """The members have changed, or the id. To be on disk before anyone is answered."""

    quorum_id: int
    step: int
    members: tuple[Member, ...]
    recovering: tuple[str, ...]


class _OfReplica(msgspec.Struct, frozen=True):
    """What is told of one replica."""

    replica: str
    group: int


class Seen(_OfReplica, frozen=True):
    """A replica has asked for the first time, or again after it was left out."""

    generation: int = -1
    """The generation of its processes; -1 where its store is not one of ours."""
    manager: str = ""
    """Where its manager listens."""
    ranks: int = 0


class Stands(_OfReplica, frozen=True):
    """A replica has ended its step, asks for the next one, and is held."""

    step: int


class Late(_OfReplica, frozen=True):
    """The others wait for a replica for longer than they ever did, or have waited for it."""

    reason: str
    waited_s: float
    over: bool = False
    """It has come."""


class LeftOut(_OfReplica, frozen=True):
    """A replica is not waited for any more."""

    reason: str
    stopped: bool = False
    silent: bool = False
    """No heartbeat of it comes any more."""
    generation: int = -1
    """As in `Seen`."""
    heard_s: float = 0.0
    """Where it is `silent`: when it was heard last."""


class Fenced(msgspec.Struct, frozen=True):
    """Have the replicas of these groups break their process group of this quorum."""

    quorum_id: int
    groups: tuple[int, ...]
    reason: str


Output = Answered | Refused | Formed | Seen | Stands | Late | LeftOut | Fenced
