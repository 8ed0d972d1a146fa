"""What follows from the decision about quorums."""

import msgspec

from perdure.model.bus.lighthouse import Member


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
