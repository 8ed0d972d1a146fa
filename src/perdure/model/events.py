"""Past facts that the controller decides from. All of them are journaled before it does.

Times ending in `_s` are job time (see `progress`). New fields get defaults; none is renamed.
"""

from typing import Any, Literal

import msgspec

from perdure.model.aside import MessagesSetAside
from perdure.model.bus.version import Spoken
from perdure.model.elastic import MemberReady, WorldBroken, WorldReformed
from perdure.model.event import Event
from perdure.model.exits import ExitRecord
from perdure.model.failures import FailureDecided
from perdure.model.invitations import InvitationMade, InvitationRevoked, InvitationUsed
from perdure.model.job import JobSpec
from perdure.model.notices import MachineReported, PreemptionNoticed, PreemptionWithdrawn
from perdure.model.room import RoomNoted
from perdure.model.signals.links import HostProbe, LinkSample, PairProbe, ProbeFinding
from perdure.model.signals.progress import CommProgress, JobHabits, RankAccount
from perdure.model.steering import (
    BoundaryAnswered,
    BoundaryReached,
    JobPaused,
    JobResumed,
    KeysDeclared,
    OperatorNoted,
    Pace,
    SettingsChanged,
    Verb,
)
from perdure.model.verdicts import Verdict


class JobSubmitted(Event, frozen=True, kw_only=True):
    """The first event of every journal."""

    spec: JobSpec
    at_s: float
    """When `perdure run` was started: the ledger's first instant."""


class ControllerStarted(Event, frozen=True, kw_only=True):
    """A controller has replayed the journal up to here and takes over."""

    incarnation: str
    term: int = 0
    """Its fencing token, where several could be controllers: it only grows along the journal."""
    speaks: Spoken = Spoken()
    """What it speaks: a controller that cannot does not go on with this journal."""
    failures: bool = False
    """It journals what it decides about failures (`FailureDecided`); an older perdure did not."""


class NodeRegistered(Event, frozen=True, kw_only=True):
    """An agent says hello, for the first time or after it was replaced."""

    node: int
    incarnation: str
    host: str
    boot_id: str
    slots: int
    generation: int = -1
    """The generation whose ranks its keeper holds now; -1 for none."""
    running: tuple[int, ...] = ()
    """Global ranks alive in the keeper."""
    keeper_pid: int = 0
    device_ids: tuple[str, ...] = ()
    speaks: Spoken = Spoken()
    """What the agent speaks; a controller that cannot talk to it gives it nothing to do."""


class StoreReady(Event, frozen=True, kw_only=True):
    """Node 0 serves the rendezvous store of a generation."""

    generation: int
    host: str
    port: int
    agent_store: bool
    """Whether a process of the keeper serves it; otherwise rank 0 will (cold start)."""


class RanksStarted(Event, frozen=True, kw_only=True):
    """A node has started its ranks of a generation."""

    node: int
    generation: int
    pids: dict[int, int]
    """Global rank -> pid."""
    at_s: float
    warm: bool
    why_cold: str = ""


class RankExited(Event, frozen=True, kw_only=True):
    """A rank ended. Idempotent by (generation, rank)."""

    node: int
    record: ExitRecord
    account: RankAccount
    """Read from its ring after its end, so nothing it stamped is lost."""
    detected_s: float
    """When the agent knew."""
    comms: tuple[CommProgress, ...] = ()
    """Its last collectives, from the same ring: whether others still wait for it."""


class GenerationStopped(Event, frozen=True, kw_only=True):
    """No process of this generation or an older one is left on the node."""

    node: int
    generation: int
    at_s: float


class KeeperLost(Event, frozen=True, kw_only=True):
    """The node's keeper died; its ranks died with it and a new one is up."""

    node: int
    generation: int
    at_s: float
    cause: str = ""
    """Why, where perdure itself ended it."""
    begun: tuple[int, ...] = ()
    """Ranks of the generation that this machine had started until then, other nodes' among them."""


class NodeLost(Event, frozen=True, kw_only=True):
    """The node has been silent for too long."""

    node: int
    at_s: float
    reason: str
    last_seen_s: float = 0.0
    """When it was last heard of."""


class RankJoined(Event, frozen=True, kw_only=True):
    """A rank's script called `perdure.init`: its depth is resumable."""

    generation: int
    rank: int
    start_step: int = 0
    depth: str = "resumable"
    """Or `elastic`: it can be a member of a world that is formed again in place."""
    store: str = ""
    """`host:port` of a store that an elastic rank serves: worlds may meet there while it lives."""
    feed: str = ""  # `host:port` at which it sends its state to ranks that follow.
    state_bytes: int = 0
    """About what its replica has; 0: a state that cannot be followed."""


class ProgressNoted(Event, frozen=True, kw_only=True):
    """A fold of heartbeats: every few seconds, at a generation's first step, and at its end."""

    generation: int
    at_s: float
    step: int
    """Steps committed by every rank; -1 where unknown."""
    accounts: dict[int, RankAccount]
    collectives: int = 0
    """Collectives ended by every rank in this generation: the mark of progress of a script
    that declares no steps."""
    habits: JobHabits = JobHabits()
    """What is usual for the job, over all of its generations."""


class GenerationStepping(Event, frozen=True, kw_only=True):
    """Every rank of the generation makes progress again: recovery is over."""

    generation: int
    at_s: float
    """When the last rank began its first step (or ended its first collective)."""
    step: int = -1
    stamps: dict[str, float] = msgspec.field(default_factory=dict)
    """Latest over the ranks: spawned, script, init, group, restored, first_step."""


class MetricsLogged(Event, frozen=True, kw_only=True):
    """Values of `run.log` of rank 0, a batch of steps at a time."""

    generation: int
    rows: tuple[tuple[int, dict[str, float]], ...]
    """(step, values); a step logged again after a restart replaces the older row."""
    dropped: int = 0
    """Values that are not told: no numbers, or too many, or too large for the way here."""


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """A checkpoint was written, verified by load, and tagged."""

    generation: int
    step: int
    path: str
    bytes: int
    stall_s: float
    save_s: float
    """From the snapshot to the tag."""
    at_s: float
    reason: str = "interval"


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """A checkpoint could not be written, or did not verify. The previous one stays `latest`."""

    generation: int
    step: int
    error: str
    at_s: float


class CheckpointRestored(Event, frozen=True, kw_only=True):
    """A rank resumed from a checkpoint (or from nothing: step 0, empty path)."""

    generation: int
    rank: int
    step: int
    path: str
    skipped: tuple[str, ...] = ()
    """`path: why` for every newer checkpoint that could not be used."""
    exact: bool = True
    why_not_exact: str = ""


class VerdictReached(Event, frozen=True, kw_only=True):
    """The detector is sure, or an earlier verdict became actionable."""

    verdict: Verdict


class VerdictWithdrawn(Event, frozen=True, kw_only=True):
    """The suspect made progress again."""

    verdict: Verdict
    at_s: float
    reason: str


class ActionWithheld(Event, frozen=True, kw_only=True):
    """Nothing was done about something, and why: the policy said so, or the job is only observed.

    It comes once for each verdict and ground, however long both stand.
    """

    at_s: float
    generation: int
    cause: str
    """What it is about: a verdict's kind, or how a rank ended."""
    culprit: str
    reason: str
    would: str = ""
    """What would have been done, had the job not only been observed: `restart the world`."""
    step: int = -1
    first_seen_s: float = 0.0
    """Of the verdict; with generation, kind and culprit it says which."""


class StacksTaken(Event, frozen=True, kw_only=True):
    """Python stacks of suspects and of one waiting rank."""

    generation: int
    at_s: float
    stacks: dict[int, str]
    """Global rank -> text, or the reason why there is none."""
    traces: str = ""
    """Directory of the Flight Recorder traces that living ranks wrote meanwhile."""


class LinksNoted(Event, frozen=True, kw_only=True):
    """A fold of link sweeps worth keeping: every minute, and with each verdict about a link."""

    generation: int
    at_s: float
    window_s: float
    links: tuple[LinkSample, ...]
    note: str = ""
    """What could not be seen, or why there are none."""


class ProbeEnded(Event, frozen=True, kw_only=True):
    """One node's part of a round of an active probe. Idempotent by (id, round, node)."""

    id: str
    node: int
    round: int
    at_s: float
    pairs: tuple[PairProbe, ...] = ()
    hosts: tuple[HostProbe, ...] = ()
    error: str = ""


class ProbeJudged(Event, frozen=True, kw_only=True):
    """What an active probe has found, once all rounds are in (or overdue)."""

    id: str
    at_s: float
    finding: ProbeFinding


class CollectivesInterrupted(Event, frozen=True, kw_only=True):
    """A rank's control thread broke its collective in flight."""

    generation: int
    rank: int
    at_s: float
    sockets: int
    """Connections that were shut down."""
    error: str = ""


class NodeCordoned(Event, frozen=True, kw_only=True):
    """No rank is placed on this node any more, until it is restored."""

    node: int
    at_s: float
    reason: str
    who: str = ""
    """Empty: the policy did it."""


class NodeRestored(Event, frozen=True, kw_only=True):
    """The node may run ranks again."""

    node: int
    at_s: float
    reason: str
    who: str = ""


class NodeDraining(Event, frozen=True, kw_only=True):
    """The node's ranks are about to move elsewhere; or (`over`) they stay after all."""

    node: int
    at_s: float
    reason: str
    who: str = ""
    over: bool = False


class CommandReceived(Event, frozen=True, kw_only=True):
    """An operator (or a signal) asks for something. Idempotent by `id`."""

    id: str
    kind: Verb
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    who: str = ""
    at_s: float = 0.0
    pace: Pace | None = None
    """Of the ranks, where a step is to be agreed upon: what follows is then near."""


class NodeAsked(Event, frozen=True, kw_only=True):
    """An agent asks for something of everybody: no command, which only operators give.

    SIGTERM to a rank asks for a stop, SIGUSR1 and a silent keeper for a checkpoint. A machine from
    elsewhere may not ask for a stop: its own SIGTERM leaves its node.
    """

    id: str
    node: int
    kind: Literal["checkpoint", "stop"]
    who: str
    at_s: float

    def as_command(self) -> CommandReceived:
        """Return what an operator who wants the same would ask for."""
        return CommandReceived(id=self.id, kind=self.kind, who=self.who, at_s=self.at_s)


class QuorumFormed(Event, frozen=True, kw_only=True):
    """The lighthouse has answered a quorum whose members differ from the last (torchft)."""

    quorum_id: int
    step: int
    members: tuple[str, ...]
    """Replica ids, such as `train_0:9f2c...`."""
    recovering: tuple[str, ...] = ()
    at_s: float = 0.0


class QuorumIdsReserved(Event, frozen=True, kw_only=True):
    """The lighthouse may use quorum ids below this one without asking again."""

    until: int
    at_s: float


class ReplicaSeen(Event, frozen=True, kw_only=True):
    """A replica id has come to the lighthouse, or has left it (torchft)."""

    replica: str
    group: int
    """Replica group; -1 where unknown."""
    at_s: float
    gone: bool = False
    """It is left out of the quorum: dead, silent, or the others waited for it in vain."""
    reason: str = ""
    stopped: bool = False
    """With `gone`: its process is in state T, so that it will not come back by itself."""
    held: bool = False
    """It has ended its step and asks to begin `step`, but is held by order number `hold`."""
    hold: int = -1
    step: int = -1
    """With `gone` the last step that the members had committed."""


class ReplicaWaiting(Event, frozen=True, kw_only=True):
    """A replica group has waited for others in a collective of this quorum for too long."""

    generation: int
    rank: int
    """Global rank that waits."""
    quorum_id: int
    step: int
    since_s: float
    timeout_s: float = 0.0
    """How long its manager waits in a collective before it gives it up; 0: unknown."""
    over: bool = False
    """The wait has ended by itself: whoever was missing has come."""


class ReplicaLate(Event, frozen=True, kw_only=True):
    """A replica group lets the others wait for longer than it ever did (torchft).

    It is told at once and proves nothing: the group may validate or save, and is waited for.
    """

    replica: str
    group: int
    at_s: float
    waited_s: float
    """For how long by now, its busy phases left out; with `over`, in all."""
    reason: str = ""
    over: bool = False
    """It has come."""


class DeviceReported(Event, frozen=True, kw_only=True):
    """A device's health has changed, by its own counters or by an outside monitor's word."""

    device: str
    node: int
    at_s: float
    healthy: bool
    reason: str
    """Such as `XID 79: GPU has fallen off the bus`."""
    source: str = "nvml"


class FaultInjected(Event, frozen=True, kw_only=True):
    """An injected fault took place (or could not)."""

    id: str
    rank: int
    kind: str
    at_s: float
    error: str = ""
    note: str = ""
    """By what means, where there is more than one."""


class ControllerLost(Event, frozen=True, kw_only=True):
    """The supervisor saw the controller (or nats-server, or an agent) die and restarted it."""

    part: str
    at_s: float
    pid: int
    cause: str
    restarted_s: float


class TimerFired(Event, frozen=True, kw_only=True):
    """The machine's own deadline passed."""

    pace: Pace | None = None
    """Where all ranks shall do something at one step now."""
    busy: tuple[int, ...] = ()
    """Where an elastic world is overdue: ranks whose declared busy phase is in force."""


class JobEnded(Event, frozen=True, kw_only=True):
    """The last event of a journal that ended in good order."""

    status: Literal["done", "failed", "stopped"]
    exit_code: int
    reason: str
    at_s: float


class Decision(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Journaled beside the events: what was decided, and why. Replay does not need it."""

    action: str
    """Type of the action, such as `AssignNode`."""
    summary: str
    reason: str
    result: dict[str, Any] = {}
    """What an operator was told by an `AnswerCommand`."""


AnyEvent = (
    JobSubmitted
    | ControllerStarted
    | NodeRegistered
    | StoreReady
    | RanksStarted
    | RankExited
    | GenerationStopped
    | KeeperLost
    | NodeLost
    | RankJoined
    | ProgressNoted
    | GenerationStepping
    | MetricsLogged
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointRestored
    | VerdictReached
    | VerdictWithdrawn
    | ActionWithheld
    | FailureDecided
    | StacksTaken
    | LinksNoted
    | ProbeEnded
    | ProbeJudged
    | CollectivesInterrupted
    | WorldBroken
    | WorldReformed
    | MemberReady
    | NodeCordoned
    | NodeRestored
    | NodeDraining
    | CommandReceived
    | NodeAsked
    | BoundaryAnswered
    | BoundaryReached
    | FaultInjected
    | KeysDeclared
    | SettingsChanged
    | OperatorNoted
    | JobPaused
    | JobResumed
    | QuorumFormed
    | QuorumIdsReserved
    | ReplicaSeen
    | ReplicaWaiting
    | ReplicaLate
    | DeviceReported
    | ControllerLost
    | PreemptionNoticed
    | PreemptionWithdrawn
    | MachineReported
    | RoomNoted
    | MessagesSetAside
    | InvitationMade
    | InvitationUsed
    | InvitationRevoked
    | TimerFired
    | JobEnded
)


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the journal. `source`/`source_seq` make a repeated message harmless."""

    seq: int
    at_s: float
    """Job time at which it was appended; the `now` of `Controller.handle`, in replay as well."""
    body: AnyEvent | Decision
    source: str = ""
    """Incarnation of the agent (or id of the client) that sent the event; empty: the controller."""
    source_seq: int = 0
