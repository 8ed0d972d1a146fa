"""What the controller knows of a world that can be formed again in place."""

from dataclasses import dataclass, field

from perdure.model.actions import ReformWorld


@dataclass(slots=True)
class ElasticState:
    """Of one generation; the next one begins with a new one."""

    ready: set[int] = field(default_factory=set)
    """Members that have said that they can be: of the first world, and those that came later."""
    lost: set[int] = field(default_factory=set)
    """Members that are gone with their node or keeper."""
    formed: set[int] = field(default_factory=set)
    """Members that have been in a world, and so have its state."""
    left: set[int] = field(default_factory=set)
    """Members that have left at an agreed step, because their node is drained; or ended early."""
    finished: set[int] = field(default_factory=set)
    """Members that have applied the last step and need no world any more."""
    members: tuple[int, ...] = ()
    """Of the newest epoch; empty before all ranks of the first one are ready."""
    epoch: int = 0
    order: ReformWorld | None = None
    """The newest; open until all its ranks have answered."""
    answered: set[int] = field(default_factory=set)
    deadline_s: float | None = None
    """A re-formation that has not ended by then is given up for a restart."""
    excused: set[int] = field(default_factory=set)
    """Members that were waited for at that time because of their declared busy phase."""
    retry_s: float | None = None
    """A world that broke although nobody is known to be lost is formed again then."""
    broken_s: float | None = None
    """When a member first said that the newest epoch broke."""
    retries: int = 0
    """So often in a row at `step`."""
    step: int = -1
    """Steps applied when the newest epoch was formed."""
    reforms: int = 0
    """Worlds formed in place so far."""
    slowest_s: float = 0.0
    """What connecting, and bringing states together, took a member at most after the first."""
    given_up: str = ""
    """Why this generation is not formed again in place any more."""
    extra: list[int] = field(default_factory=list)
    """Members that nodes were asked to start in spare slots or in place of lost ones, ever."""
    homes: dict[int, int] = field(default_factory=dict)
    """Node of each of them."""
    barren: set[int] = field(default_factory=set)
    """Slots in which a member ended before it could join: nobody is started there any more."""
    stores: dict[int, str] = field(default_factory=dict)
    """Address of the store that each ready member serves."""
    feeds: dict[int, str] = field(default_factory=dict)
    """Address at which each ready member sends its state to those who follow."""
    state_bytes: int = 0
    """About what a replica's state has."""
    following: dict[int, int] = field(default_factory=dict)
    """Rank that was told to follow the world -> epoch that it follows."""
    caught_up: set[int] = field(default_factory=set)
    """Ranks that have followed, or given it up: they can be called in."""
