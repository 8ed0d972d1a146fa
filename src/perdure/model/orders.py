"""Imperatives: what is said to nodes, to ranks and to the lighthouse; and the shell's own actions.

Orders are one tagged union, `AnyOrder`; what the controller hands to its own shell is `AnyAction`.
Each says why, and describes itself for the journal.

An order is a *level*, not an edge: it says how things shall be from now on, a newer one of the same
`level` takes its place, and it may be repeated or lost at will. Whoever passes orders on (the order
book, the bus, the agents) looks only at what `Order` and `RankOrder` say of all of them. So a new
order is its class here, with its name in `AnyOrder`; who decides it; and who carries it out.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from perdure.model.events import (
    ActionWithheld,
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CollectivesInterrupted,
    DeviceReported,
    Event,
    FaultInjected,
    InvitationMade,
    InvitationRevoked,
    InvitationUsed,
    JobPaused,
    JobResumed,
    MachineReported,
    MemberReady,
    OperatorNoted,
    OwnChecked,
    PreemptionNoticed,
    PreemptionWithdrawn,
    ProbeEnded,
    RankExited,
    ReplicaSeen,
    SettingsChanged,
    SlotLeftEmpty,
    StacksTaken,
    VerdictReached,
    WorldReformed,
)
from perdure.model.signals.links import ProbeFinding
from perdure.model.steering import RESUMED, Change, Steering

LIGHTHOUSE = "lighthouse"
"""Its address among the nodes."""
_FOR_EVER = 2**62
_KILLS = 60
"""How often it is worth saying that a replica is to be ended."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node shall run. A newer `number` replaces an older one."""

    number: int
    """Grows with every assignment of the job; one number is for all nodes."""
    generation: int
    """No process of an older generation may live once this arrived."""
    phase: Literal["stop", "store", "run", "end"]
    """stop: end older ranks; store: the same, and node 0 serves the generation's store;
    run: start the ranks; end: end everything, keeper included, then leave."""
    grace_s: float = 0.0
    """Between SIGTERM and SIGKILL for older ranks; 0 kills at once."""
    writer_s: float = 30.0
    """Seconds in which an older rank that does not handle SIGTERM may finish a file of a
    checkpoint."""
    master_addr: str = ""
    master_port: int = 0
    agent_store: bool = False
    restart_count: int = 0
    """TORCHELASTIC_RESTART_COUNT."""
    placement: tuple[int, ...] = ()
    """Nodes by group rank; empty: every node has its own number. A node that is not among them
    runs nothing and stands ready."""
    replica: int = -1
    """With torchft: the replica group that the node runs, a world of its own with its own
    `generation` and store; `placement` is then that group's nodes. -1: one world for all."""
    extra: tuple[int, ...] = ()
    """Members that an elastic world has been given beside its first ranks, ever. Each lives in
    the slot of its number modulo the job's slots; one that has ended is not started again."""
    homes: dict[int, int] = {}
    """Node of each of `extra`: of its slot, where that is one of the world's, else a spare one."""
    gone: tuple[int, ...] = ()
    """Ranks of an elastic generation's first world that are lost: a machine that takes the place of
    theirs has not seen them, and does not start them."""
    steering: Steering = Steering()
    """Changes and a pause that the ranks have to know of before their first step."""
    reason: str = ""
    exit_code: int | None = None
    """The job's, with `end`; None where it is not the job that ends."""

    def slots_of(self, node: int) -> int:
        """Return whose ranks `node` runs: a group rank, or its replica group; -1 for nobody's."""
        return self.replica if self.replica >= 0 else self.group_of(node)

    def group_of(self, node: int) -> int:
        """Return the group rank of `node`; -1 where it runs nothing."""
        if not self.placement:
            return node
        return self.placement.index(node) if node in self.placement else -1

    def extra_of(self, node: int) -> tuple[int, ...]:
        """Return those of `extra` that live on `node`, the oldest first."""
        return tuple(member for member in self.extra if self.homes.get(member) == node)


class Order(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Base of all orders: whom each is for, what it replaces, and what answers it."""

    for_all_nodes: ClassVar[bool] = False
    """Each node hears it the first time, whoever the recipients are; they hear it again."""
    about: ClassVar[str] = ""
    """Its level, with its own fields to fill in; empty: its type, of which only one is in force."""
    says: ClassVar[str] = ""
    """What the journal keeps of it, likewise."""
    worth: ClassVar[int] = 600
    """How often it is worth saying, where nothing else says so."""

    reason: str

    @property
    def recipients(self) -> tuple[int | str, ...]:
        """Return whom it is for: nodes, or `LIGHTHOUSE`; of a `RankOrder`, ranks."""
        return ()

    @property
    def level(self) -> str:
        """Return what it is about: a newer order of the same level takes its place."""
        return self.about.format(self) or type(self).__name__

    @property
    def sent_max(self) -> int:
        """Return how often it is sent until all have answered; 1: once, and nobody answers."""
        return self.worth

    def list_answered(self, event: AnyEvent) -> tuple[int | str, ...]:
        """Return which of the recipients have nothing to answer any more, by `event`."""
        return ()

    def is_for(self, generation: int, rank: int) -> bool:
        """Return whether an agent passes it on to this rank of its node."""
        return False

    def describe(self) -> str:
        """Return the line that the journal keeps of it."""
        return self.says.format(self) or ", ".join(map(str, self.recipients))


class RankOrder(Order, frozen=True, kw_only=True):
    """Base of orders to ranks of one generation, by way of their agents."""

    says: ClassVar[str] = "generation {0.generation}, ranks {0.ranks}"
    is_retold: ClassVar[bool] = False
    """A rank hears the newest of this kind when it says hello, and if it asks."""
    done_by: ClassVar[Mapping[type[Event], tuple[str, ...]]] = {}
    """What a rank tells once it has done it -> the fields in which that is equal to the order."""

    generation: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return those who are to obey it."""
        return ()

    @property
    def recipients(self) -> tuple[int | str, ...]:
        """Return the ranks."""
        return self.ranks

    @property
    def version(self) -> int:
        """Return what grows from one order of a level to the next, where one may be overtaken."""
        return 0

    def list_answered(self, event: AnyEvent) -> tuple[int | str, ...]:
        """Return the rank that has ended, or has done what it was told."""
        if isinstance(event, RankExited) and event.record.generation == self.generation:
            return (event.record.rank,)
        return self.list_done(event)

    def list_done(self, event: AnyEvent) -> tuple[int, ...]:
        """Return the ranks that have done what they were told, by `event`."""
        told: Any = event
        fields = self.done_by.get(type(event))
        if fields is None or any(getattr(told, name) != getattr(self, name) for name in fields):
            return ()
        return (told.rank,)

    def is_for(self, generation: int, rank: int) -> bool:
        """Return whether `rank` of `generation` is one of its ranks."""
        return generation == self.generation and rank in self.ranks


class SendBoundary(RankOrder, frozen=True, kw_only=True):
    """One step of a boundary agreement, to `ranks`."""

    about: ClassVar[str] = "boundary {0.id}"
    """A decision takes the place of what was asked before."""

    id: str
    move: Literal["prepare", "commit", "abort"]
    kind: Literal["checkpoint", "stop", "set", "pause", "drain"]
    """drain: a checkpoint, and no step after it until `ResumeRanks` or the rank's end."""
    step: int
    ranks: tuple[int, ...]
    number: int = 0
    """Grows with every try. One is open at a time, so a newer one says that older ones are over."""
    change: Change | None = None
    """Of `set`: what changes at `step`."""
    leaves: tuple[int, ...] = ()
    """Of `drain` in an elastic world: who leaves it at `step`; the others go on without a
    checkpoint."""
    epoch: int = 0
    """In an elastic world: a rank takes this once it has the order of that epoch."""

    @property
    def sent_max(self) -> int:
        """Return how often it is worth saying: ranks drop it after 30 s without a word."""
        return 30 if self.move == "abort" else 600

    def list_done(self, event: AnyEvent) -> tuple[int, ...]:
        """Return who has carried it out, or surely will."""
        match event:
            case BoundaryReached(id=id_, rank=rank) if id_ in (self.id, self.id + RESUMED):
                return (rank,)
            case BoundaryAnswered(id=self.id, rank=rank, planned=True):
                return (rank,)
        return ()

    def describe(self) -> str:
        """Return what is agreed upon, and for which step."""
        what = f"{self.kind} {self.id}"
        if self.change is not None:
            values = " ".join(f"{name}={value}" for name, value in self.change.values.items())
            what = f"{what} (epoch {self.change.epoch}: {values})"
        return f"{self.move} {what} at step {self.step}"


class ResumeRanks(RankOrder, frozen=True, kw_only=True):
    """End the pause that `ranks` are in. Harmless where there is none."""

    is_retold: ClassVar[bool] = True
    """A rank asks what became of the agreement that it stands in."""
    about: ClassVar[str] = "resume {0.id}"

    ranks: tuple[int, ...]
    id: str = ""
    """Of the pause: a rank that has not come to it skips it."""

    def list_done(self, event: AnyEvent) -> tuple[int, ...]:
        """Return who goes on."""
        if isinstance(event, BoundaryReached) and event.id == self.id + RESUMED:
            return (event.rank,)
        return ()


class TakeStacks(RankOrder, frozen=True, kw_only=True):
    """Take Python stacks of `ranks`, and have every rank write its Flight Recorder trace.

    The agents take the stacks, which `StacksTaken` has. A trace goes to the job's
    `traces/gN/BACKEND/rank_R`, and says most where all ranks have written theirs.
    """

    says: ClassVar[str] = "stacks of ranks {0.ranks}"
    for_all_nodes: ClassVar[bool] = True
    """Ranks elsewhere write their traces."""
    about: ClassVar[str] = "stacks {0.generation}"
    worth: ClassVar[int] = 5

    ranks: tuple[int, ...]

    def list_done(self, event: AnyEvent) -> tuple[int, ...]:
        """Return whose stacks were taken."""
        if isinstance(event, StacksTaken) and event.generation == self.generation:
            return tuple(event.stacks)
        return ()

    def is_for(self, generation: int, rank: int) -> bool:
        """Return whether `rank` is of the generation: each writes its trace."""
        return generation == self.generation


class InjectFault(RankOrder, frozen=True, kw_only=True):
    """Do harm on purpose, to `rank`, now or when it begins `at_step`."""

    about: ClassVar[str] = "inject {0.id}"
    done_by: ClassVar[Mapping[type[Event], tuple[str, ...]]] = {FaultInjected: ("id",)}
    """The end also of an injection that cannot do harm."""

    id: str
    rank: int
    kind: str
    at_step: int = -1
    args: dict[str, Any] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return its one rank."""
        return (self.rank,)

    def describe(self) -> str:
        """Return what is done to whom."""
        when = f"at step {self.at_step}" if self.at_step >= 0 else "now"
        return f"{self.kind} on rank {self.rank} {when}"


class InterruptCollectives(RankOrder, frozen=True, kw_only=True):
    """Have the control threads of `ranks` break the collective in flight (their own sockets)."""

    about: ClassVar[str] = "interrupt {0.generation}"
    """A newer interruption is of what hangs now."""
    worth: ClassVar[int] = 3
    """What hangs is soon ended otherwise."""
    done_by: ClassVar[Mapping[type[Event], tuple[str, ...]]] = {
        CollectivesInterrupted: ("generation",)
    }
    """The end also of an interruption that could not break out."""

    ranks: tuple[int, ...]
    id: str = ""
    """A rank carries out each id once a generation, however often it is repeated."""


class ReformWorld(RankOrder, frozen=True, kw_only=True):
    """Have `ranks` leave the world that they are in and form the next one, in place.

    A level: a newer epoch replaces an older one. Answered by `WorldReformed` of each rank.
    """

    says: ClassVar[str] = "epoch {0.epoch} of generation {0.generation}, ranks {0.ranks}"
    is_retold: ClassVar[bool] = True
    """Nobody but the controller tells a rank who its peers are."""
    about: ClassVar[str] = "reform {0.generation}"
    done_by: ClassVar[Mapping[type[Event], tuple[str, ...]]] = {
        WorldReformed: ("generation", "epoch")
    }

    epoch: int
    ranks: tuple[int, ...]
    urgent: bool = True
    """Break the collective in flight; else each leaves when it is between two micro-batches."""
    store: str = ""
    """`host:port` of the member's store at which they meet; empty: the generation's own."""
    steering: Steering = Steering()
    """Changes and a pause that a rank has to know of which was asked about none of them."""

    @property
    def version(self) -> int:
        """Return its epoch."""
        return self.epoch


class FollowWorld(RankOrder, frozen=True, kw_only=True):
    """Have `rank`, which is no member yet, take the members' state and keep up with them.

    The donors hear it as well. They listen for `rank` while the order is repeated, until `rank`
    is ready, a member, or gone. A newer epoch replaces an older one.
    """

    about: ClassVar[str] = "follow {0.generation} {0.rank}"
    """Each rank follows by itself."""
    worth: ClassVar[int] = _FOR_EVER
    done_by: ClassVar[Mapping[type[Event], tuple[str, ...]]] = {
        MemberReady: ("generation",),
        WorldReformed: ("generation",),
    }
    """The rank is ready, or a member."""

    epoch: int
    rank: int
    donors: dict[int, str]
    """Member -> address at which it sends its state."""
    ahead: tuple[int, ...] = ()
    """Others that follow, and were told so before it: of parts of a state they choose first."""
    key: str = ""
    """Certificate and private key (PEM) that `rank` and its donors show one another. The controller
    makes it when it sends the order. It is kept nowhere else."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the rank that follows, and its donors."""
        return (self.rank, *sorted(self.donors))

    def list_answered(self, event: AnyEvent) -> tuple[int | str, ...]:
        """Return all once the rank that follows is ready or gone; donors do not answer."""
        answered = super().list_answered(event)
        return self.ranks if self.rank in answered else ()

    def describe(self) -> str:
        """Return who takes the state of whom."""
        return f"rank {self.rank} follows ranks {sorted(self.donors)}"


class WatchClosely(Order, frozen=True, kw_only=True):
    """Have `nodes` sweep sockets and rings at the suspicious rate until job time `until_s`."""

    says: ClassVar[str] = "nodes {0.nodes} until {0.until_s:.1f}"
    worth: ClassVar[int] = 1
    """It is said again while the suspicion lasts."""

    nodes: tuple[int, ...]
    until_s: float

    @property
    def recipients(self) -> tuple[int | str, ...]:
        """Return the nodes."""
        return self.nodes


class RunProbe(Order, frozen=True, kw_only=True):
    """Have agents of `pairs` transfer data, and those of `hosts` compute; see `ProbeEnded`.

    Bounded by `deadline_s` seconds; each pair is (source node, destination node), and no node is
    in two pairs of one round.
    """

    says: ClassVar[str] = "{0.id} round {0.round}: pairs {0.pairs}, hosts {0.hosts}"
    about: ClassVar[str] = "probe {0.id} {0.round}"
    worth: ClassVar[int] = 5
    """The round has a deadline."""

    id: str
    round: int
    pairs: tuple[tuple[int, int], ...]
    hosts: tuple[int, ...] = ()
    bytes: int = 8_000_000
    deadline_s: float = 2.0

    @property
    def recipients(self) -> tuple[int | str, ...]:
        """Return the nodes of the pairs, and the hosts."""
        return tuple(sorted({node for pair in self.pairs for node in pair} | set(self.hosts)))

    def list_answered(self, event: AnyEvent) -> tuple[int | str, ...]:
        """Return the node that has told of its part."""
        match event:
            case ProbeEnded(id=self.id, round=self.round, node=node):
                return (node,)
        return ()


FETCH_S = 600.0
"""Seconds that a copy of a script's own checkpoint may take to arrive before a start."""


class CheckOwn(Order, frozen=True, kw_only=True):
    """Have `nodes` check the script's own checkpoints and move a torn newest one: `OwnChecked`.

    Nothing of the job runs on any node from this order until the last answer.
    """

    says: ClassVar[str] = "generation {0.generation}, nodes {0.nodes}"

    generation: int
    nodes: tuple[int, ...]
    move: bool = True
    """False while a lost node may still write: a node only fetches what it does not have."""

    @property
    def recipients(self) -> tuple[int | str, ...]:
        """Return the nodes."""
        return self.nodes

    def list_answered(self, event: AnyEvent) -> tuple[int | str, ...]:
        """Return the node that has told what it found."""
        if isinstance(event, OwnChecked) and event.generation == self.generation:
            return (event.node,)
        return ()


class FenceAbort(Order, frozen=True, kw_only=True):
    """Have `ranks` of replica group `group` break their process group of quorum `quorum_id`.

    Fenced: a rank whose group belongs to another quorum by then ignores it.
    """

    says: ClassVar[str] = "quorum {0.quorum_id}, groups {0.groups}"
    worth: ClassVar[int] = 1
    """A rank that does not hear it is freed by its own time-out."""

    quorum_id: int
    groups: tuple[int, ...]
    """Replica groups that survive and may hang on the dead one."""

    @property
    def recipients(self) -> tuple[int | str, ...]:
        """Return the groups: each is the node of its number."""
        return self.groups

    def is_for(self, generation: int, rank: int) -> bool:
        """Return true: a rank looks at the quorum that it is in."""
        return True


class ReplicaGroup(msgspec.Struct, frozen=True):
    """One replica group, as the lighthouse has to know it."""

    group: int
    generation: int
    store: str
    """Address of its own store, which is how a request tells its group; empty where its name does,
    for others have started it."""
    held: bool = False
    spare: bool = False
    """Held, but to stand in at once for a member that is lost."""


class LighthouseOrder(Order, frozen=True, kw_only=True):
    """Base of orders to the lighthouse (torchft)."""

    @property
    def recipients(self) -> tuple[int | str, ...]:
        """Return the lighthouse."""
        return (LIGHTHOUSE,)


class HoldReplicas(LighthouseOrder, frozen=True, kw_only=True):
    """Have the lighthouse answer no quorum of these replica ids (torchft) until released.

    A level: a newer list replaces an older one.
    """

    worth: ClassVar[int] = _FOR_EVER
    """The lighthouse answers nothing."""

    replicas: tuple[str, ...]
    number: int
    groups: tuple[ReplicaGroup, ...] = ()
    """All groups that run or are about to."""
    startup_s: float | None = None
    """Its patience with groups that start, as set by now; None: as the job file has it."""
    alone_s: float | None = None
    """Likewise, of a newcomer with members of which none asks."""

    def describe(self) -> str:
        """Return who is held."""
        return f"#{self.number}: {', '.join(self.replicas) or 'none'}"


class EvictReplica(LighthouseOrder, frozen=True, kw_only=True):
    """Have the lighthouse forget a replica id at once and for ever (torchft)."""

    about: ClassVar[str] = "evict {0.replica}"
    says: ClassVar[str] = "replica {0.replica}"
    worth: ClassVar[int] = 1
    """Should the order be lost, the next list of the groups says who is gone."""

    replica: str
    generation: int = -1
    """Of its processes; enough where the replica id is not known."""
    group: int = -1
    kill: bool = False
    """End it as well, by way of its manager: no agent could, for others have started it."""

    @property
    def sent_max(self) -> int:
        """Return how often it is sent: until it is told that the replica is gone."""
        return _KILLS if self.kill else self.worth

    def list_answered(self, event: AnyEvent) -> tuple[int | str, ...]:
        """Return the lighthouse, once it has told that this replica is gone."""
        gone = isinstance(event, ReplicaSeen) and event.gone and event.replica == self.replica
        return self.recipients if gone else ()


AnyOrder = (
    SendBoundary
    | ResumeRanks
    | TakeStacks
    | InjectFault
    | InterruptCollectives
    | ReformWorld
    | FollowWorld
    | WatchClosely
    | RunProbe
    | CheckOwn
    | FenceAbort
    | HoldReplicas
    | EvictReplica
)


class Action(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Base of all actions that are no orders."""

    says: ClassVar[str] = ""
    """What the journal keeps of it, with its own fields to fill in."""

    reason: str

    def describe(self) -> str:
        """Return the line that the journal keeps of it."""
        return self.says.format(self)


class AssignNodes(Action, frozen=True, kw_only=True):
    """Send `assignment` to `nodes`, and again to each that registers later."""

    nodes: tuple[int, ...]
    assignment: Assignment

    def describe(self) -> str:
        """Return what runs where."""
        a = self.assignment
        where = f", store {a.master_addr}:{a.master_port}" if a.phase == "run" else ""
        return f"#{a.number} {a.phase} generation {a.generation}{where}, nodes {self.nodes}"


class NodeAction(Action, frozen=True, kw_only=True):
    """Base of what takes a node out of the job, or back into it."""

    says: ClassVar[str] = "node {0.node}"

    node: int
    who: str = ""
    """Empty: the policy did it."""


class RestoreNode(NodeAction, frozen=True, kw_only=True):
    """Journal `NodeRestored`: `node` may run ranks again."""


class NoteDraining(NodeAction, frozen=True, kw_only=True):
    """Journal `NodeDraining`: `node` is about to be left, or (`over`) stays after all."""

    over: bool = False

    def describe(self) -> str:
        """Return which node, and whether it stays."""
        return f"node {self.node}{' stays' if self.over else ''}"


class NoteFinding(Action, frozen=True, kw_only=True):
    """Journal `ProbeJudged`: what an active probe has found."""

    says: ClassVar[str] = "{0.id}: {0.finding.kind}"

    id: str
    finding: ProbeFinding


class CordonNode(NodeAction, frozen=True, kw_only=True):
    """Journal `NodeCordoned`: `node` runs nothing any more while another can."""


class AnswerCommand(Action, frozen=True, kw_only=True):
    """Tell the operator how it went."""

    id: str
    ok: bool
    result: dict[str, Any] = {}

    def describe(self) -> str:
        """Return whose command it was, and whether it was obeyed."""
        return f"{self.id}: {'ok' if self.ok else 'refused'}"


Recorded = (
    DeviceReported
    | MachineReported
    | PreemptionNoticed
    | PreemptionWithdrawn
    | VerdictReached
    | ActionWithheld
    | SlotLeftEmpty
    | SettingsChanged
    | JobPaused
    | OperatorNoted
    | JobResumed
    | InvitationMade
    | InvitationUsed
    | InvitationRevoked
)


class RecordEvent(Action, frozen=True, kw_only=True):
    """Journal `event`: what a notice has said, what was agreed upon, or that nothing is done."""

    event: Recorded

    def describe(self) -> str:
        """Return what kind of event."""
        return type(self.event).__name__


class EndJob(Action, frozen=True, kw_only=True):
    """Everything is down: journal `JobEnded` and leave."""

    says: ClassVar[str] = "{0.status}, exit code {0.exit_code}"

    status: Literal["done", "failed", "stopped"]
    exit_code: int


AnyAction = (
    AnyOrder
    | AssignNodes
    | NoteFinding
    | CordonNode
    | RestoreNode
    | NoteDraining
    | AnswerCommand
    | RecordEvent
    | EndJob
)
