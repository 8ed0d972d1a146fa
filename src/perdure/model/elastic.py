"""Events of the elastic depth: a world that is formed again without ending its processes.

An *epoch* is one membership within a generation: processes stay, the process group does not.
"""

from perdure.model.event import Event
from perdure.model.exits import names_lost_peer

_NOBODY_THERE = ("Connection refused", "Connection was likely closed", "Broken pipe")
"""What sockets and stores say where the process at the other end has ended."""


class WorldBroken(Event, frozen=True, kw_only=True):
    """A rank has left its epoch because a collective failed, and waits for the next one."""

    generation: int
    epoch: int
    rank: int
    at_s: float
    error: str

    @property
    def lost_peer(self) -> bool:
        """Whether it failed because a connection ended, and not for time alone."""
        return names_lost_peer(self.error) or any(words in self.error for words in _NOBODY_THERE)


class MemberReady(Event, frozen=True, kw_only=True):
    """A rank that follows the world has nothing left to catch up on, or has given it up."""

    generation: int
    rank: int
    at_s: float
    step: int
    """Steps applied; -1: it could not follow, and gets the state within the join."""
    bytes: int = 0
    """What it was sent."""
    took_s: float = 0.0
    """Since it was told to follow."""
    error: str = ""
    """Why it could not."""


class WorldReformed(Event, frozen=True, kw_only=True):
    """A rank is a member of an epoch: connected, at the same step as all, with their state."""

    generation: int
    epoch: int
    rank: int
    step: int
    """Steps applied: the one under way."""
    began_s: float
    """When it had left the older epoch."""
    ordered_s: float
    """When it had the order."""
    formed_s: float
    redo: int = 0
    """Micro-batches of a lost rank that it does instead."""
    back: int = 0
    """Steps that were applied and are taken again, because a shard's last copy was lost."""
    waited_s: float = 0.0
    """Since when it waited for the collective that broke; 0 where it did not wait."""
    connected_s: float = 0.0
    """When it was connected; from then on states were brought together."""
    shape: str = ""
    """Copies and stages of a pipelined world."""
    section: tuple[int, int] = (0, 0)
    """Of such a world: the first block of this rank's (first) run, and the one after its last."""
    micro_batches: int = 0
    """Of such a world: of a step."""
    morphed: bool = False
    """The model is cut into stages otherwise than before."""
    moved_bytes: int = 0
    """State that this rank was sent."""
    reason: str = ""
    finished: bool = False
    """It has applied the last step, as everyone has, and needs no world any more."""
    more_sections: tuple[tuple[int, int], ...] = ()
    """Of an interleaved one: the rank's other runs."""
