"""What the agent's machine hears and what it asks its shell to do.

Inputs are past facts, as they reach one node; requests are imperatives. What crosses the network
is in `model.bus.wire` and `model.events`; `RankExited` comes from the shell as an input, with what
the rank's ring says, and goes on as it is.
"""

import msgspec

from perdure.model.bus.wire import (
    KeeperSpawned,
    KeeperState,
    KeeperStopped,
    KeeperStoreReady,
    KeeperWaits,
    NodeOrder,
    ToKeeper,
    WorkerHello,
    WorkerQuery,
    WorkerSignal,
)
from perdure.model.events import AnyEvent, RankExited, TimerFired
from perdure.model.orders import Assignment, Order


class AgentStarted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The shell runs."""


class KeeperUp(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A keeper is connected and has said what it holds: an old one, or one just started."""

    state: KeeperState
    exits: tuple[RankExited, ...] = ()
    """`state.exits` and the ranks that an earlier keeper took with it, each with its ring."""
    started_s: float = 0.0
    """When the youngest rank of `state` was spawned, from the rings."""
    newest_on_disk: int = -1
    """The newest generation of which this node has a ring: it was started once, by whomever."""
    begun: tuple[tuple[int, int], ...] = ()
    """(generation, rank) of every ring of the newest generation that this machine has, which may
    be other nodes' as well."""


class KeeperGone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The keeper is dead, and so is everything that it had started."""

    at_s: float
    """When it died."""
    exits: tuple[RankExited, ...] = ()
    """Its ranks, each with what its ring says."""
    begun: tuple[tuple[int, int], ...] = ()
    """As in `KeeperUp`, at its death."""


class KeeperSilent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The keeper lives and does not answer; said again and again while that lasts."""

    pid: int
    state: str
    """Its state letter in /proc; T is stopped."""
    silent_s: float
    ended: tuple[int, ...] = ()
    """Ranks of it that have ended and that it has not reaped."""


class KeeperHeard(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The keeper answers again."""


class KeeperSaid(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The keeper answers."""

    message: KeeperSpawned | KeeperWaits | KeeperStoreReady | KeeperStopped
    free_port: int = 0
    """For a store that rank 0 has to serve: a port that is free at this moment."""
    awaited: str = ""
    """Of ranks that were started: what their start had waited for, and for how long."""


class OrderReceived(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The controller says something."""

    order: NodeOrder


class TermHeard(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A controller has put something of ours into the journal, in this term."""

    term: int


class WorkerSaid(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A rank says something that is not an event for the journal."""

    rank: int
    generation: int
    message: WorkerHello | WorkerQuery | WorkerSignal


class StacksCollected(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The stacks that `CollectStacks` asked for."""

    generation: int
    stacks: dict[int, str]
    traces: str = ""
    """Directory of Flight Recorder's traces, where any were written."""


class SupervisorGone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`perdure run` is dead: nobody is left to run for."""


Input = (
    AgentStarted
    | KeeperUp
    | KeeperGone
    | KeeperSaid
    | KeeperSilent
    | KeeperHeard
    | RankExited
    | OrderReceived
    | TermHeard
    | WorkerSaid
    | StacksCollected
    | SupervisorGone
    | TimerFired
)


class StartKeeper(msgspec.Struct, frozen=True, tag=True):
    """Attach to the node's keeper, or start one; answered by `KeeperUp`."""


class TellKeeper(msgspec.Struct, frozen=True, tag=True):
    """Send `message` to the keeper."""

    message: ToKeeper


class EndKeeper(msgspec.Struct, frozen=True, tag=True):
    """Kill the keeper, which does not answer; its end is seen like any other."""

    reason: str


class SpawnRanks(msgspec.Struct, frozen=True, tag=True):
    """Render the environments of the node's ranks and have the keeper start them."""

    assignment: Assignment
    members: tuple[int, ...] = ()
    """Where given, only these."""
    beside: bool = False
    """They come to ranks that live, and no older generation is ended for them."""


class TellWorker(msgspec.Struct, frozen=True, tag=True):
    """Send `message` to a rank; dropped where it is not connected (it will say hello)."""

    rank: int
    message: Order


class CarryOut(msgspec.Struct, frozen=True, tag=True):
    """Do what an order asks of the node itself."""

    order: Order


class CollectStacks(msgspec.Struct, frozen=True, tag=True):
    """Take Python stacks of the pids of these ranks; answered by `StacksCollected`."""

    generation: int
    pids: dict[int, int]


class Report(msgspec.Struct, frozen=True, tag=True):
    """Send `event` to the controller until it is in the journal; then do `after`."""

    event: AnyEvent
    after: "tuple[Request, ...]" = ()


class Leave(msgspec.Struct, frozen=True, tag=True):
    """End the agent, once the keeper that was told to exit is gone."""

    reason: str
    replaced: bool = False
    """Another agent is this node now."""


Request = (
    StartKeeper
    | TellKeeper
    | EndKeeper
    | SpawnRanks
    | TellWorker
    | CarryOut
    | CollectStacks
    | Report
    | Leave
)
