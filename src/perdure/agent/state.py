"""What the agent's machine remembers. None of it survives the agent: the keeper has the rest."""

from dataclasses import dataclass, field

import msgspec

from perdure.model.bus.version import PROTOCOL, PROTOCOL_MIN, Spoken
from perdure.model.orders import Assignment, InjectFault, RankOrder, SendBoundary
from perdure.model.verdicts import Verdict


class NodeIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says of itself when it registers."""

    node: int
    incarnation: str
    host: str = "127.0.0.1"
    """Where other nodes reach this one."""
    boot_id: str = ""
    device_ids: tuple[str, ...] = ()
    speaks: Spoken = Spoken(PROTOCOL, PROTOCOL_MIN)


@dataclass(slots=True)
class KeeperView:
    """The keeper that is connected now, and what it was told."""

    pid: int
    generation: int = -1
    """The newest generation of which it started a rank."""
    running: dict[int, int] = field(default_factory=dict)
    """Global rank -> pid, of that generation."""
    started_s: float = 0.0
    warm: bool = False
    why_cold: str = ""
    store_generation: int = -1
    store_port: int = 0
    kill_asked: int = -1
    stopped: int = -1
    """Nothing of generations up to this one is left."""
    store_asked: int = -1
    spawn_asked: int = -1
    lost_reported: int = -1
    members_asked: set[int] = field(default_factory=set)
    """Members that it was asked to start beside the ranks of `generation`."""


@dataclass(slots=True)
class Silence:
    """A keeper that does not answer."""

    verdict: Verdict
    ended: bool = False
    """It was killed for that."""


@dataclass(slots=True)
class AgentState:
    """What the agent's machine remembers."""

    assignment: Assignment | None = None
    keeper: KeeperView | None = None
    exited: set[tuple[int, int]] = field(default_factory=set)
    """(generation, rank) whose end was reported."""
    lost_generation: int = -1
    """The one that ran, of a keeper whose death was reported, until the next keeper is up.

    Where a store alone was lost, the controller may not have known that anything ran on it: it is
    told again if it still assigns that.
    """
    lost_cause: str = ""
    """Why, where this agent ended it."""
    silence: Silence | None = None
    newest_spawned: int = -1
    """No generation up to this one is ever started (again) on this node."""
    begun: set[tuple[int, int]] = field(default_factory=set)
    """(generation, rank) that some keeper of this machine has started, by what lies on disk."""
    spawned_by: int = 0
    """Pid of the keeper that was asked for it; asking that one again does no harm."""
    term: int = 0
    """The newest that is known: an order of an earlier one comes from a controller deposed.

    Where several could be controllers, an agent that has just begun obeys none before something
    of its own is in the journal: until then it cannot know.
    """
    registered_with: str = ""
    """Incarnation of the controller that was last answered with a registration."""
    addressed: bool = False
    """An order was for this very agent: if another is spoken to later, it has taken the place."""
    registered_s: float = float("-inf")
    """When that was, whoever had asked; -inf: never."""
    reported_stopped: int = -1
    reported_started: int = -1
    reported_store: tuple[int, int] = (-1, 0)
    """(generation, port)"""
    boundaries: dict[str, SendBoundary] = field(default_factory=dict)
    """The newest that is known of each agreement."""
    newest: dict[type[RankOrder], RankOrder] = field(default_factory=dict)
    """The newest order of each kind that ranks are told again."""
    faults: dict[str, InjectFault] = field(default_factory=dict)
    """Faults of this generation, by id, that were taken on."""
    checkpoint_asked_s: float = float("-inf")
    """When a SIGUSR1 was last made a command."""
    signals: int = 0
    end_deadline_s: float | None = None
    orphaned: bool = False
    """`perdure run` is dead: nothing is started any more."""
    leaving: bool = False
