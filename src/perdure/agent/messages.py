"""What an agent hears and what it does: events in, actions out, of one node."""

import msgspec

from perdure.model.actions import Assignment, InjectFault, SendBoundary
from perdure.model.events import AnyEvent, ExitRecord
from perdure.model.wire import FromKeeper, FromWorker, KeeperState, NodeOrder, ToKeeper


class OrderReceived(msgspec.Struct, frozen=True):
    """An order came from the controller; possibly not for the first time."""

    order: NodeOrder


class KeeperConnected(msgspec.Struct, frozen=True):
    """The keeper answered, with what it holds."""

    state: KeeperState


class KeeperSaid(msgspec.Struct, frozen=True):
    """A message of the keeper's."""

    message: FromKeeper


class KeeperDied(msgspec.Struct, frozen=True):
    """The keeper's process is gone, and so are all processes of its ranks."""


class WorkerSaid(msgspec.Struct, frozen=True):
    """A message of a rank's control thread."""

    rank: int
    generation: int
    message: FromWorker


class WorkerConnected(msgspec.Struct, frozen=True):
    """A rank's control thread has connected."""

    rank: int
    generation: int


AgentEvent = (
    OrderReceived | KeeperConnected | KeeperSaid | KeeperDied | WorkerSaid | WorkerConnected
)


class TellKeeper(msgspec.Struct, frozen=True):
    """Send `message` to the keeper."""

    message: ToKeeper


class SpawnRanks(msgspec.Struct, frozen=True):
    """Have the keeper start this node's ranks as `assignment` says."""

    assignment: Assignment


class Report(msgspec.Struct, frozen=True):
    """Bring `event` to the controller's journal; kept until it is there."""

    event: AnyEvent


class ReportExit(msgspec.Struct, frozen=True):
    """Read the rank's ring for the last time and report its end."""

    record: ExitRecord


class ReportStore(msgspec.Struct, frozen=True):
    """Report the generation's store; port 0 means that rank 0 shall serve it on a free port."""

    generation: int
    port: int


class TellWorkers(msgspec.Struct, frozen=True):
    """Send `message` to those of `ranks` that are connected."""

    ranks: tuple[int, ...]
    message: SendBoundary | InjectFault


class TakeStacksOf(msgspec.Struct, frozen=True):
    """Take Python stacks of these processes (global rank -> pid) and report them."""

    generation: int
    pids: dict[int, int]


class StartKeeper(msgspec.Struct, frozen=True):
    """Start a keeper, after nothing of the old one's ranks is left."""


class LeaveNode(msgspec.Struct, frozen=True):
    """Everything here has ended: hand over what is unreported, then leave."""


AgentAction = (
    TellKeeper
    | SpawnRanks
    | Report
    | ReportExit
    | ReportStore
    | TellWorkers
    | TakeStacksOf
    | StartKeeper
    | LeaveNode
)
