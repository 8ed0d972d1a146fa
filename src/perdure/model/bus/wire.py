"""Messages between the parts, and the names of subjects and files.

CLI ── NATS request ──> controller          Command -> CommandReply
agent ── NATS request ──> controller        EventMessage -> EventAck   (kept until acknowledged)
agent ── NATS publish ──> controller        NodeBeat                   (lost without harm)
controller ── NATS publish ──> agent        NodeOrder                  (levels: repeated at will)
agent <── unix socket, JSON lines ──> worker, keeper
"""

from functools import partial
from typing import Any, Literal, get_args

import msgspec

from perdure.model.bus.endpoint import Endpoint
from perdure.model.bus.version import Spoken
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.model.events import AnyEvent
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec
from perdure.model.orders import AnyOrder, Assignment
from perdure.model.steering import Verb


def _name(kind: str, job: str, *node: int | str) -> str:
    """Return the subject of one kind of message of a job, from or to one of its nodes."""
    return ".".join(("perdure", job.replace(".", "_"), kind, *map(str, node)))


subject_events = partial(_name, "events")
"""Requests of one who has events to tell: an `EventMessage`, answered by `EventAck`.

`node` is the number of the agent's node, `lighthouse` or `run`; `*` is anybody.
"""
subject_beats = partial(_name, "beats")
"""Heartbeats of the agent of `node`, `NodeBeat`; `*` is any node's."""
subject_orders = partial(_name, "orders")
"""Orders to the agent of `node`, `NodeOrder`; `all` reaches every agent."""
RUN = "run"
"""Address of `perdure run` among the nodes, where it tells of something."""


subject_commands = partial(_name, "commands")
"""Requests of operators: a `Command`, answered by `CommandReply` when it is finished."""
subject_queries = partial(_name, "queries")
"""Requests of those who may only look: a `Command` of kind ping or status."""
subject_notices = partial(_name, "notices")
"""What a cluster's own monitor knows: a `Notice`, answered by `CommandReply` if asked to."""
subject_joins = partial(_name, "joins")
"""Requests of nodes from elsewhere for a place: a `JoinRequest`, answered by `CommandReply`."""
subject_lines = partial(_name, "lines")
"""Requests of the relay of a place to the lighthouse: `LinesHeld`, answered by `LinesKnown`."""
subject_journal = partial(_name, "journal")
"""The journal's subject inside its JetStream stream."""


def stream_journal(job: str) -> str:
    """The journal's JetStream stream, synced to disk at every append."""
    return f"PERDURE_{job.replace('.', '_')}_JOURNAL"


class EventBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Events of one source, in order; `first_seq` numbers the first of them."""

    source: str
    """A rank's process, or the incarnation of who sends."""
    first_seq: int
    events: tuple[AnyEvent, ...]
    skipped: int = 0
    """So many numbers before `first_seq` nobody will ever fill: the first event takes them too."""


class EventMessage(msgspec.Struct, frozen=True):
    """What a node has to tell, in the order in which it happened there."""

    node: int
    batches: tuple[EventBatch, ...]


class EventAck(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything of these sources up to these numbers is in the journal."""

    seqs: dict[str, int]
    term: int = 0
    """Of the controller that put it there: no order of an earlier one is obeyed any more."""
    refused: str = ""
    """Why the message as a whole could not be read: the same again is refused again."""


class NodeOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a controller says to an agent: what the node shall run, orders, or both.

    All but `orders` is understood by agents of every protocol, so that one of another version can
    be asked who it is, and be told to leave.
    """

    controller: str
    """Incarnation of the sender."""
    term: int = 0
    """Term of the sender; an order of an earlier term is refused."""
    assignment: Assignment | None = None
    register: bool = False
    """Answer with `NodeRegistered`: a controller has just started, or counts the node as lost."""
    agent: str = ""
    """Incarnation of the agent that `assignment` is for; empty: whichever is there."""
    orders: tuple[AnyOrder, ...] = ()


class _OrdersOfAnyVersion(msgspec.Struct, frozen=True):
    """The orders of a `NodeOrder`, whatever they are."""

    orders: tuple[dict[str, Any], ...] = ()


def read_order(data: bytes) -> tuple[NodeOrder, tuple[str, ...]]:
    """Return the message in `data`, and the types of orders that this version does not know.

    Those are left out: what a newer controller adds must not cost the rest of what it says.

    Raises:
        ProtocolError: `data` is no such message.
    """
    try:
        order: NodeOrder = decode(data, NodeOrder)
    except ProtocolError:
        said: _OrdersOfAnyVersion = decode(data, _OrdersOfAnyVersion)
        known = {type_.__name__ for type_ in get_args(AnyOrder)}
        unknown = tuple(str(o.get("type")) for o in said.orders if o.get("type") not in known)
        if not unknown:
            raise
        kept = [o for o in said.orders if o.get("type") in known]
        message: dict[str, Any] = decode(data, dict[str, Any])
        return decode(encode(message | {"orders": kept}), NodeOrder), unknown
    return order, ()


class Command(msgspec.Struct, frozen=True):
    """An operator's request. `id` makes a retry harmless."""

    id: str
    kind: Verb | Literal["status", "ping"]
    args: dict[str, Any] = {}
    who: str = ""


class Notice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An outside monitor's word: by `perdure node notify`, the webhook, or `subject_notices`."""

    kind: Literal["device-failed", "device-ok", "preemption", "preemption-withdrawn", "machine"]
    device: str = ""
    """Of `device-failed`, `device-ok`: an id as `perdure status --devices` shows it; or `node`."""
    node: int = -1
    """Of a preemption; of the others where the device is not known by its id."""
    machine: str = ""
    """Instead of a node: the name of a machine that has joined, such as a pod's."""
    ended_s: float = 0.0
    """Of `machine`: when it ended, in seconds since 1970; 0: it has not, or that is not known."""
    grace_s: float = 0.0
    """Of `preemption`: how long the machine stays."""
    waits: bool = False
    """Of `preemption`: whoever takes it waits until it is left, so that it is left at once."""
    reason: str = ""
    source: str = ""
    """Who says so, such as `dcgm` or a person's name; who withdraws a preemption has said it."""
    id: str = ""
    """Makes a repetition harmless; without one, each is taken."""


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A machine asks for a place. `machine` is the same whenever it asks again."""

    id: str
    """Of this request."""
    machine: str
    host: str = ""
    """Its name, for people."""
    invitation: str = ""
    """Id of the invitation that it has."""
    secret: str = ""
    """That of the invitation; the journal has its digest only."""
    speaks: Spoken = Spoken()
    sealed: bool = False
    """The machine can open an answer that is sealed with its secret."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine that was given a place has to know; it travels in the reply only."""

    node: int
    spec: JobSpec
    endpoint: Endpoint


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What `perdure node invite` prints and `perdure node join` reads. It holds a secret."""

    job: str
    endpoint: Endpoint
    id: str = ""
    secret: str = ""
    until_s: float = 0.0
    """When it can be used for the first time no more, in seconds since 1970; 0: never."""


class CommandReply(msgspec.Struct, frozen=True):
    """How it went: a result, or one line of reason."""

    id: str
    ok: bool
    reason: str = ""
    result: dict[str, Any] = {}


# --- agent <-> worker: unix socket, JSON lines ------------------------------------------------


class WorkerHello(msgspec.Struct, frozen=True, tag=True):
    """First line of a worker's control thread, again after every reconnect."""

    job: str
    rank: int
    generation: int
    pid: int


class WorkerEvent(msgspec.Struct, frozen=True, tag=True):
    """An event for the journal; repeated until acknowledged by `WorkerAck`."""

    seq: int
    event: AnyEvent


class WorkerAck(msgspec.Struct, frozen=True, tag=True):
    """The agent has taken over everything up to `seq`."""

    seq: int


class WorkerSignal(msgspec.Struct, frozen=True, tag=True):
    """The worker got SIGTERM or SIGUSR1 and asks for an agreement on it."""

    signal: int


class WorkerQuery(msgspec.Struct, frozen=True, tag=True):
    """A prepared rank has reached the step and heard no decision: what was it?"""

    id: str


class ReplicaHello(msgspec.Struct, frozen=True, tag=True):
    """A rank of a group that others have started asks who it is; answered by `ReplicaWelcome`."""

    replica: str
    """Its group's replica id."""
    local_rank: int
    ranks: int
    """How many its group has."""
    pid: int


class ReplicaWelcome(msgspec.Struct, frozen=True, kw_only=True):
    """Who it is in the job, whose ranks are numbered through all groups."""

    job: str = ""
    line: str = ""
    """What it names as the job in its hello: only this run of the job knows it."""
    rank: int = -1
    generation: int = -1
    clock_offset_s: float = 0.0
    device: str = ""
    """What it has where it uses no GPU."""
    refusal: str = ""
    """Why it is not taken."""
    place: int = -1
    """Of its machine, where that is not the lighthouse's."""


class LinesHeld(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which ranks on another machine have a line to its relay: said again and again."""

    lines: dict[int, int] = {}
    """Rank -> the life of its group."""
    ended: dict[int, str] = {}
    """Life -> how it is known that a process of it has ended; until it is answered."""
    find: str = ""
    """A replica id, of which group and life are asked."""


class LinesKnown(msgspec.Struct, frozen=True, omit_defaults=True):
    """The lighthouse's answer to the relay of a place."""

    at_s: float
    """Job time of the answer."""
    port: int
    """Where replicas reach the lighthouse."""
    line: str
    """What ranks name as the job in their hello: only this run of the job knows it."""
    group: int = -1
    life: int = -1


FromWorker = WorkerHello | WorkerEvent | WorkerSignal | WorkerQuery | ReplicaHello
ToWorker = WorkerAck | AnyOrder

# --- agent <-> keeper: unix socket, JSON lines ------------------------------------------------


class RankLaunch(msgspec.Struct, frozen=True):
    """One rank to start."""

    rank: int
    env: dict[str, str]
    """The whole environment of the rank."""
    stdout: str
    """Path of the file for its standard output; appended to."""
    stderr: str
    ring: str
    """Path of its ring; made by the keeper before the rank starts."""
    stdin: int = 0
    """Process whose standard input it reads; 0: it reads nothing."""


class OfGeneration(msgspec.Struct, frozen=True, tag=True):
    """Base of what a keeper is told, or tells, of one generation."""

    generation: int


class KeeperSpawn(OfGeneration, frozen=True):
    """Start ranks; answered by `KeeperSpawned`. Idempotent by generation, and beside by rank."""

    ranks: tuple[RankLaunch, ...]
    script: str
    args: tuple[str, ...]
    module: bool
    no_python: bool
    cwd: str
    cold: bool
    beside: bool = False
    """Its ranks join those of the same generation that live."""
    exit_skew_s: float = 0.0
    """Seconds that a rank may take to end once an exception has ended its script; 0: any time."""


class KeeperStore(OfGeneration, frozen=True):
    """Serve a TCPStore for `generation`; answered by `KeeperStoreReady`."""

    world_size: int
    bind: str = "127.0.0.1"


class KeeperKill(OfGeneration, frozen=True):
    """End every process of generations up to `generation` with all descendants.

    Answered by `KeeperStopped` when none is left. `grace_s` lies between SIGTERM and SIGKILL.
    """

    grace_s: float = 0.0
    writer_s: float = 30.0
    """Seconds for a rank that does not handle SIGTERM to finish a file of a checkpoint."""


class KeeperSignal(OfGeneration, frozen=True):
    """Send a signal to one rank."""

    rank: int
    signal: int


class KeeperStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for `KeeperState`."""


class KeeperExit(msgspec.Struct, frozen=True, tag=True):
    """End everything and leave."""


ToKeeper = KeeperSpawn | KeeperStore | KeeperKill | KeeperSignal | KeeperStatus | KeeperExit


class KeeperState(msgspec.Struct, frozen=True, tag=True):
    """What the keeper holds."""

    pid: int
    generation: int
    """The newest generation of which it started a rank; -1 for none."""
    running: dict[int, int]
    """Global rank -> pid, alive, of that generation."""
    exits: tuple[ExitRecord, ...]
    """Of that generation."""
    store_port: int = 0
    store_generation: int = -1
    warm: bool = False
    why_cold: str = ""


class KeeperSpawned(OfGeneration, frozen=True):
    """The ranks run."""

    pids: dict[int, int]
    at_s: float
    warm: bool
    why_cold: str = ""
    beside: bool = False


class KeeperWaits(OfGeneration, frozen=True):
    """The disk is full, so the ranks are not started yet; `KeeperSpawned` follows."""

    why: str
    place: str


class KeeperStoreReady(OfGeneration, frozen=True):
    """The store serves `port`; 0 with `why_not` where a keeper cannot (cold: rank 0 will)."""

    port: int
    why_not: str = ""


class KeeperExited(msgspec.Struct, frozen=True, tag=True):
    """A rank ended; its record is already on disk."""

    record: ExitRecord


class KeeperStopped(OfGeneration, frozen=True):
    """Nothing of generations up to this one is left."""


FromKeeper = (
    KeeperState | KeeperSpawned | KeeperWaits | KeeperStoreReady | KeeperExited | KeeperStopped
)
