"""What the controller remembers. Everything here follows from the journal alone.

States of a job:

    pending --all nodes registered--> forming --old ranks gone, store up--> starting
    starting --all nodes started--> running --failure--> forming (a new generation)
    any --done, stop, give up--> ending --all nodes empty--> ended
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from perdure.control.elastic.state import ElasticState
from perdure.control.failures import FailureBook
from perdure.control.groups.state import GroupState, QuorumState
from perdure.control.steering.state import SteeringState
from perdure.model.actions import Assignment, ResumeRanks, SendBoundary
from perdure.model.events import ExitRecord, NodeRegistered, StoreReady
from perdure.model.job import JobSpec
from perdure.model.settings import Change
from perdure.model.verdicts import Verdict
from perdure.plan.probe import ProbeSession
from perdure.policy import Failure

JobPhase = Literal["pending", "forming", "starting", "running", "ending", "ended"]


@dataclass(slots=True)
class OpenBoundary:
    """A boundary agreement that is not finished."""

    id: str
    kind: Literal["checkpoint", "stop", "set", "pause", "drain"]
    step: int
    move: Literal["prepare", "commit"]
    tries: int
    deadline_s: float
    reason: str
    command: str = ""
    """Id of the operator's command behind it; empty for the controller's own."""
    change: Change | None = None
    """Of `set`."""
    not_before: int = 0
    """The earliest step that it may be about."""
    at_step: int | None = None
    """The only step that it may be about."""
    every: int = 0
    """It may be about multiples of this step only; 0 for any."""
    ranks: tuple[int, ...] = ()
    """Who is asked; in an elastic world those who come in before the decision, too."""
    yes: set[int] = field(default_factory=set)
    planned: set[int] = field(default_factory=set)
    """Ranks that have heard the decision."""
    reached: set[int] = field(default_factory=set)
    leaves: tuple[int, ...] = ()
    """Of `drain` in an elastic world: who leaves it."""
    shrunk: bool = False
    """A member was lost after the decision: what it had to do alone may not be done."""
    asked_s: float = 0.0
    """When this try began."""


@dataclass(slots=True)
class OpenCommand:
    """An operator's command that is not answered yet."""

    id: str
    kind: str
    args: dict[str, Any]
    who: str
    at_s: float


class Answer(NamedTuple):
    """What a command was answered."""

    ok: bool
    reason: str
    result: dict[str, Any]


@dataclass(slots=True)
class OpenMove:
    """Nodes that are being left (drain, evict): nothing of it is done before all of it is."""

    id: str
    """Of the operator's command, or of a preemption notice."""
    kind: Literal["drain", "evict"]
    nodes: list[int]
    groups: dict[int, int]
    """Those that run ranks -> their group rank."""
    who: str
    why: str
    at_s: float
    deadline_s: float
    force: bool = False
    """Evict where no agreement comes about, or not in time."""
    wait: bool = False
    """For a spare node, should none be ready."""
    guarded: bool = False
    """A checkpoint was agreed upon meanwhile."""
    late_s: float | None = None
    """When to save once more, should nobody stand in until then: just before the end."""
    until_s: float = 0.0
    """In an elastic world: the nodes are of use until then; their members leave at the last step
    that ends before."""
    stage: Literal["waiting", "agreeing", "held", "moved"] = "waiting"
    """For a spare node or a world that trains; for the ranks' agreement; for the checkpoint, which
    held ranks wait for; for the world without these nodes."""
    generation: int = -1
    """Whose ranks agree, and then: the one that was left."""
    boundary: str = ""
    """Id of the agreement, its try included."""
    step: int = -1
    """Agreed upon; its checkpoint is the state that moves."""
    saved: bool = False
    from_step: int = -1
    """Committed when the ranks were ended."""
    to: dict[int, int] = field(default_factory=dict)
    """Node -> the one that stands in, once it was left."""
    moved_s: float = 0.0
    ranks: tuple[int, ...] = ()
    """In an elastic world: the members that leave."""
    restored: bool = False
    """In an elastic world: its nodes were restored after their members had begun to leave."""
    instead: str = ""
    """What was done in place of what was asked for."""


@dataclass(slots=True)
class OpenNotice:
    """A node that the platform takes away, or may take away soon."""

    node: int
    source: str
    id: str
    reason: str
    certain: bool
    at_s: float
    gone_s: float
    """When it goes away; of a mere risk, when it was told."""
    boot_id: str = ""
    """Of the machine that it is about: another one in its place is not."""
    waits: bool = False
    """Whoever takes it waits until it is left."""
    acted: bool = False
    """What to do about it was decided."""

    @property
    def words(self) -> str:
        """Return who has said what, such as `aws: spot terminate`."""
        return f"{self.source}: {self.reason}" if self.reason else self.source


@dataclass(slots=True)
class Invited:
    """An invitation, as far as it is known here: its secret is not."""

    digest: str
    at_s: float
    until_s: float
    uses: int
    who: str = ""
    machines: dict[str, str] = field(default_factory=dict)
    """Machine -> its host, of those that have used it."""
    nodes: set[int] = field(default_factory=set)
    """Of this run, whose logins it gave away: whoever took one may have it still."""
    revoked: bool = False


@dataclass(slots=True)
class StackRequest:
    """Stacks that were asked for in this generation, and what waits for them."""

    due_s: float
    missing: set[int] = field(default_factory=set)
    """Ranks whose stacks have not come."""
    held: Verdict | None = None
    """An actionable verdict that is acted upon once they have, or at `due_s`."""


@dataclass(slots=True)
class Ending:
    """How the job will have ended once every node is empty."""

    status: Literal["done", "failed", "stopped"]
    exit_code: int
    reason: str


@dataclass(slots=True)
class ControllerState:
    """All of it."""

    phase: JobPhase = "pending"
    spec: JobSpec | None = None
    submitted_s: float = 0.0
    nodes: dict[int, NodeRegistered] = field(default_factory=dict)
    generation: int = -1
    assignment: Assignment | None = None
    number: int = 0
    phase_deadline_s: float | None = None
    placement: tuple[int, ...] = ()
    """Nodes by group rank, of the newest world."""
    lost: dict[int, float] = field(default_factory=dict)
    """Nodes that have fallen silent and have not registered since -> when that was noticed."""
    cordoned: dict[int, str] = field(default_factory=dict)
    """Node -> why it runs nothing while another can."""
    barred: set[int] = field(default_factory=set)
    """Nodes cordoned by an operator: they run nothing, whatever is lost."""
    cordons_noted: set[int] = field(default_factory=set)
    """Cordoned nodes whose `NodeCordoned` is in the journal."""
    cordoned_by: dict[int, str] = field(default_factory=dict)
    """Cordoned node -> the operator who asked for it."""
    restoring: dict[int, str] = field(default_factory=dict)
    """Restored node -> by whom, until `NodeRestored` is in the journal."""
    moves: dict[str, OpenMove] = field(default_factory=dict)
    """Nodes that are being left, the oldest first."""
    notices: dict[str, OpenNotice] = field(default_factory=dict)
    """What platforms have announced and not withdrawn, by node, source and id."""
    notices_due_s: float | None = None
    """When those that are not acted upon are."""
    going: set[int] = field(default_factory=set)
    """Nodes that are given nothing to run for a notice, and for nothing else."""
    claims: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Node from elsewhere -> the machine that was given its place, and when."""
    invitations: dict[str, Invited] = field(default_factory=dict)
    """By their ids, the oldest first."""
    hosts: dict[str, int] = field(default_factory=dict)
    """Name of every machine that was ever given a place -> the node that it was."""
    blames: dict[int, int] = field(default_factory=dict)
    """Node -> how often it was blamed for a failure."""
    failed_s: float | None = None
    """When the failure that is being recovered from was decided upon."""
    restarts_s: list[float] = field(default_factory=list)
    """What each recovery took, from the decision until every rank trained again."""
    stopped: dict[int, int] = field(default_factory=dict)
    """Node -> newest generation of which nothing is left there."""
    store: StoreReady | None = None
    started: set[int] = field(default_factory=set)
    """Nodes that have started their ranks of this generation."""
    exits: dict[int, ExitRecord] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    stepping: bool = False
    step: int = -1
    mark: int = 0
    """Best achievement: committed steps, or collectives of a generation."""
    failures: list[Failure] = field(default_factory=list)
    book: FailureBook = field(default_factory=FailureBook)
    first_exit_s: float | None = None
    """When the rank that the newest failure is blamed on ended; None where it was no exit."""
    standing: dict[str, Verdict] = field(default_factory=dict)
    """Slowness that may be acted upon, and was not yet: it is weighed again as things change."""
    withheld: list[str] = field(default_factory=list)
    """Verdicts of this generation, each with a ground on which nothing was done about it; the
    newest of them, oldest first."""
    replaced: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Kind and group rank of a slow node that was left out -> the generation it was left out of,
    and when. In an elastic world: kind and each rank that might take the part of a slow one."""
    stacks: StackRequest | None = None
    probe: ProbeSession | None = None
    """The active probe that is running."""
    probes: int = 0
    """Probes begun so far; numbers their ids."""
    probe_command: str = ""
    """Id of the operator's command behind it; empty for the controller's own."""
    ending: Ending | None = None
    closed: bool = False
    """`JobEnded` is in the journal."""
    boundary: OpenBoundary | None = None
    boundaries: int = 0
    """Agreements begun so far; numbers their ids."""
    aborted: SendBoundary | None = None
    """The newest abort."""
    commands: dict[str, OpenCommand] = field(default_factory=dict)
    injects: dict[str, OpenCommand] = field(default_factory=dict)
    """Injected faults that have not taken place."""
    answered: dict[str, Answer] = field(default_factory=dict)
    """By command's id, so that a repeated command gets the same answer."""
    checkpoint_due_s: float | None = None
    stall_s: float | None = None
    """Measured cost of the newest checkpoint to training."""
    resumed_step: int = -1
    """Step that this generation resumed from."""
    released: ResumeRanks | None = None
    """The newest end of ranks' wait after an agreed checkpoint."""
    saved_step: int = -1
    """Step of the newest checkpoint."""
    saved_s: float | None = None
    """When the newest checkpoint was verified: what came after it is lost by a restart."""
    stepping_s: float | None = None
    """When this generation began to train, or its ranks were started where they tell no steps:
    without a checkpoint a restart loses all since. By the controller's clock, as `saved_s`."""

    steering: SteeringState = field(default_factory=SteeringState)
    elastic: ElasticState = field(default_factory=ElasticState)
    groups: dict[int, GroupState] = field(default_factory=dict)
    """Replica groups of a torchft job, by their number, which is that of their node."""
    quorum: QuorumState = field(default_factory=QuorumState)

    @property
    def of_replicas(self) -> bool:
        """Whether this is a torchft job: `replicas` handles it, and not one world's machine."""
        return self.spec is not None and self.spec.torchft.replicas > 0

    def the_spec(self) -> JobSpec:
        """Return the job's specification, which is there from the first event on."""
        assert self.spec is not None, "JobSubmitted is the first event of every journal"
        return self.spec

    @property
    def world(self) -> tuple[int, ...]:
        """Return all global ranks."""
        return tuple(range(self.the_spec().world_size))

    @property
    def asked(self) -> tuple[int, ...]:
        """Return whom agreements are made with: all ranks; of an elastic world, who is in it."""
        elastic = self.elastic
        if not elastic.members:
            return self.world
        gone = elastic.lost | elastic.left | set(self.exits)
        return tuple(rank for rank in elastic.members if rank not in gone)

    @property
    def leaving(self) -> set[int]:
        """Return the nodes that shall run nothing in the next world."""
        moved = {n for m in self.moves.values() if m.stage != "moved" for n in m.nodes}
        return moved | self.going

    @property
    def spares(self) -> tuple[int, ...]:
        """Return the nodes that stand ready, the least blamed first.

        They are registered, idle, not lost, not cordoned and not being left.
        """
        out = {*self.placement, *self.lost, *self.cordoned, *self.leaving}
        ready = (node for node in self.nodes if node not in out)
        return tuple(sorted(ready, key=lambda node: (self.blames.get(node, 0), node)))

    @property
    def resumable(self) -> bool:
        """Whether every rank of this generation has called `perdure.init`."""
        if self.elastic.members:
            return bool(self.asked)
        return len(self.joined) == self.the_spec().world_size
