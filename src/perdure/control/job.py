"""What the controller remembers of a job: its nodes, its commands, its end, and its worlds.

Everything here follows from the journal alone. What dies with a generation is its world's
(`world.py`); `PHASES` is all that can become of a job; `docs/phases.md` draws it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from perdure.control.failures import FailureBook
from perdure.control.promises import OpenBoundary, SteeringState
from perdure.control.world import WorldState
from perdure.model.events import AnyEvent, InvitationMade, NodeRegistered
from perdure.model.failures import StickyError
from perdure.model.job import JobSpec
from perdure.model.orders import (
    AnswerCommand,
    AnyAction,
    Assignment,
    EndJob,
    Recorded,
    RecordEvent,
    RestoreNode,
    ResumeRanks,
    SendBoundary,
)
from perdure.plan.probe import ProbeSession
from perdure.policy import Failure, FailureLog

JobPhase = Literal["pending", "running", "ending", "ended"]
JobStep = Literal["enough nodes are there", "it is done, stopped or given up", "all is empty"]

PHASES: dict[tuple[JobPhase, JobStep], JobPhase] = {
    ("pending", "enough nodes are there"): "running",
    ("pending", "it is done, stopped or given up"): "ending",
    ("running", "it is done, stopped or given up"): "ending",
    ("ending", "all is empty"): "ended",
}
"""(from, on what) -> to. Nothing else ever happens to a job."""


@dataclass(slots=True)
class OpenCommand:
    """An operator's command that is not answered yet."""

    id: str
    kind: str
    args: dict[str, Any]
    who: str
    at_s: float
    settled: dict[str, int] = field(default_factory=dict)
    """What its agreement has: `at_step`, and of replica groups the `generation` that saves."""


class Answer(NamedTuple):
    """The answer to a command, kept for its repetition."""

    ok: bool
    reason: str
    result: dict[str, Any]


ANSWERS_MAX = 4096
"""Answers that are kept: a client asks again for minutes, and a job has commands for months."""
RESTARTS_MAX = 100
"""Recoveries by which the cost of the next is estimated, the newest."""
LEFT = ("moved", "ending")
"""Stages of a move whose nodes are left already."""


@dataclass(slots=True)
class OpenMove:
    """Nodes that are being left (drain, evict): nothing of it is done before all of it is."""

    id: str
    """Of the operator's command, or of a preemption notice."""
    kind: Literal["drain", "evict"]
    nodes: list[int]
    """The nodes of which all are left, or none; of a torchft job each is a replica group."""
    who: str
    why: str
    at_s: float
    deadline_s: float
    groups: dict[int, int] = field(default_factory=dict)
    """Nodes that run ranks -> their group rank, in a world that is formed anew without them."""
    force: bool = False
    """Evict where no agreement comes about, or not in time."""
    wait: bool = False
    """Whether it waits for a spare node if none is ready, for a spare group if too few are left."""
    guarded: bool = False
    """A checkpoint was agreed upon meanwhile."""
    late_s: float | None = None
    """When to save once more, should nobody stand in until then: just before the end."""
    until_s: float = 0.0
    """In an elastic world: the nodes are of use until then; their members leave at the last step
    that ends before."""
    stage: Literal["waiting", "agreeing", "held", "moved", "leaving", "ending"] = "waiting"
    """For a spare node or a world that trains; for the ranks' agreement; for the checkpoint, which
    held ranks wait for; for the world without these nodes. Of replica groups: for the quorum
    without these; for the end of their processes."""
    generation: int = -1
    """Whose ranks agree, and then: the one that was left."""
    boundary: str = ""
    """Id of the agreement, its try included."""
    step: int = -1
    """The step agreed upon, whose checkpoint is what moves. Of replica groups: committed then."""
    saved: bool = False
    from_step: int = -1
    """Committed when the ranks were ended."""
    to: dict[int, int] = field(default_factory=dict)
    """Node -> the one that stands in, once it was left."""
    ranks: tuple[int, ...] = ()
    """In an elastic world: the members that leave."""
    restored: bool = False
    """In an elastic world: its nodes were restored after their members had begun to leave."""
    instead: str = ""
    """What was done in place of what was asked for."""
    actives: list[int] = field(default_factory=list)
    """The replica groups among them that were no spares."""
    stand_ins: list[int] = field(default_factory=list)
    """Spare groups that were released in their place."""

    def took_s(self, now: float) -> float:
        """Return how long it has taken by `now`."""
        return round(now - self.at_s, 3)


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
    handled: bool = False
    """The ranks there handle SIGTERM."""

    @property
    def words(self) -> str:
        """Return who has said what, such as `aws: spot terminate`."""
        return f"{self.source}: {self.reason}" if self.reason else self.source


@dataclass(slots=True)
class Invited:
    """An invitation, as far as it is known here: its secret is not."""

    made: InvitationMade
    machines: dict[str, str] = field(default_factory=dict)
    """Machine -> its host, of those that have used it."""
    nodes: set[int] = field(default_factory=set)
    """Of this run, whose logins it gave away: whoever took one may have it still."""
    revoked: bool = False


@dataclass(slots=True)
class QuorumState:
    """The newest quorum, as the lighthouse has told of it, and what it was ordered."""

    quorum_id: int = -1
    members: tuple[str, ...] = ()
    holds: int = 0
    """Numbers the orders to it."""
    asked: dict[int, int] = field(default_factory=dict)
    """Group -> generation, of those whom the newest agreement is with."""
    asked_quorum: int = -1
    """The quorum that was known then."""
    needed: int = -1
    """A quorum that was formed, and that has to be known before anybody is asked again."""
    save_since_s: float | None = None
    """Since when no checkpoint of the job's own was begun."""
    outages: int = 0
    """How often the last group that had the state was lost."""


@dataclass(slots=True)
class JobState:
    """What the controller remembers: the job's own, and its worlds."""

    phase: JobPhase = "pending"
    spec: JobSpec | None = None
    submitted_s: float = 0.0
    deadline_s: float | None = None
    """By when enough nodes shall be there, or, in the end, all of them empty."""
    generation: int = -1
    """The newest of any world."""
    number: int = 0
    """The number of the newest assignment."""
    farewell: Assignment | None = None
    """The last assignment, which ends all there is on every node."""
    worlds: dict[int, WorldState] = field(default_factory=lambda: {0: WorldState()})
    """The job's only world under 0; of a torchft job its replica groups, by their number."""
    ending: EndJob | None = None
    """How it will have ended once every node is empty."""
    closed: bool = False
    """`JobEnded` is in the journal."""

    nodes: dict[int, NodeRegistered] = field(default_factory=dict)
    stopped: dict[int, int] = field(default_factory=dict)
    """Node -> newest generation of which nothing is left there."""
    lost: dict[int, float] = field(default_factory=dict)
    """Nodes that have fallen silent and have not registered since -> when that was noticed."""
    blames: dict[int, int] = field(default_factory=dict)
    """Node -> how often it was blamed for a failure."""
    sticky_errors: list[StickyError] = field(default_factory=list)
    """The newest CUDA errors that no process survives, within an hour, oldest first."""
    replaced: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Kind and group rank of a slow node that was left out -> the generation it was left out of,
    and when. In an elastic world: kind and each rank that might take the part of a slow one."""
    cordoned: dict[int, str] = field(default_factory=dict)
    """Node -> why it runs nothing while another can."""
    cordons_noted: set[int] = field(default_factory=set)
    """Cordoned nodes whose `NodeCordoned` is in the journal."""
    cordoned_by: dict[int, str] = field(default_factory=dict)
    """Node that runs nothing, whatever is lost -> the operator who asked for it."""
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

    step: int = -1
    progress_max: int = 0
    """Best achievement: committed steps, or collectives of a generation."""
    stall_s: float | None = None
    """Measured cost of the newest checkpoint to training."""
    saved_step: int = -1
    """Step of the newest checkpoint."""
    saves_end: bool = False
    """The job file has an interval or a place for checkpoints: its end is saved."""
    unsaved: str = ""
    """Why the newest save failed, if none has succeeded."""
    saved_s: float | None = None
    """When the newest checkpoint was verified: what came after it is lost by a restart."""
    failures: FailureLog = field(default_factory=FailureLog)
    """The failures of all worlds."""
    book: FailureBook = field(default_factory=FailureBook)
    restarts_s: list[float] = field(default_factory=list)
    """What each recovery took, from the decision until every rank trained again."""
    probe: ProbeSession | None = None
    """The active probe that is running."""
    probes: int = 0
    """Probes begun so far; numbers their ids."""

    commands: dict[str, OpenCommand] = field(default_factory=dict)
    injects: dict[str, OpenCommand] = field(default_factory=dict)
    """Injected faults that have not taken place."""
    answered: dict[str, Answer] = field(default_factory=dict)
    """By command's id, the oldest first, so that a repeated command gets the same answer."""
    boundary: OpenBoundary | None = None
    boundaries: int = 0
    """Agreements begun so far; numbers their ids."""
    aborted: list[SendBoundary] = field(default_factory=list)
    """The newest abort, to each replica group where there are any."""
    unwritten: list[Recorded] = field(default_factory=list)
    """What decisions have asked to journal and is not there yet, the oldest first."""
    released: ResumeRanks | None = None
    """The newest end of ranks' wait after an agreed checkpoint."""
    steering: SteeringState = field(default_factory=SteeringState)
    quorum: QuorumState = field(default_factory=QuorumState)

    def note_unwritten(self, actions: Iterable[AnyAction]) -> None:
        """Remember what `actions` ask to journal, until it is there: the shell may die before."""
        records = (a for a in actions if isinstance(a, RecordEvent))
        self.unwritten += [record.event for record in records]

    def record_again(self, reason: str) -> list[AnyAction]:
        """Return the records that did not reach the journal."""
        lost, self.unwritten = self.unwritten, []
        return [RecordEvent(event=event, reason=reason) for event in lost]

    def note_written(self, event: AnyEvent) -> None:
        """Know that `event` is in the journal; its texts may have been shortened for it."""
        alike = [one for one in self.unwritten if type(one) is type(event)]
        if alike:
            self.unwritten.remove(event if event in alike else alike[0])

    def answer(self, id_: str, ok: bool, reason: str, result: dict[str, Any]) -> list[AnyAction]:
        """Close a command with its answer, which is kept for a client that asks again."""
        self.commands.pop(id_, None)
        self.answered.pop(id_, None)
        self.answered[id_] = Answer(ok, reason, result)
        if len(self.answered) > ANSWERS_MAX:
            del self.answered[next(iter(self.answered))]
        return self.answer_again(id_)

    def answer_again(self, id_: str) -> list[AnyAction]:
        """Return the answer that a command has got, for a client that asks once more."""
        ok, reason, result = self.answered[id_]
        return [AnswerCommand(id=id_, ok=ok, result=result, reason=reason)]

    def answer_open(
        self, id_: str, ok: bool, reason: str, result: dict[str, Any]
    ) -> list[AnyAction]:
        """Close a command if it is still open; otherwise do nothing."""
        return self.answer(id_, ok, reason, result) if id_ in self.commands else []

    def answer_all(
        self, kind: str, ok: bool, reason: str, result: dict[str, Any]
    ) -> list[AnyAction]:
        """Answer all open commands of a kind alike."""
        open_ = sorted(command.id for command in self.commands.values() if command.kind == kind)
        return [done for id_ in open_ for done in self.answer(id_, ok, reason, dict(result))]

    def enter(self, on: JobStep) -> None:
        """Take the one step of `PHASES` that `on` leads to from here."""
        self.phase = PHASES[self.phase, on]

    @property
    def over(self) -> bool:
        """Whether nothing is left but to end what runs."""
        return self.phase in ("ending", "ended")

    @property
    def world(self) -> WorldState:
        """Return the only world of a job that is none of torchft's."""
        return self.worlds[0]

    def find_world(self, generation: int) -> WorldState | None:
        """Return the world that is in `generation`; None where none is."""
        return next((w for w in self.worlds.values() if w.generation == generation), None)

    def list_members(self) -> list[WorldState]:
        """Return the replica groups of the quorum in force that are not known to be gone."""
        worlds = [world for _, world in sorted(self.worlds.items())]
        there = [w for w in worlds if w.alive and w.replica.name and not w.replica.absent]
        return [world for world in there if world.replica.name in self.quorum.members]

    def the_spec(self) -> JobSpec:
        """Return the job's specification, which is there from the first event on."""
        assert self.spec is not None, "JobSubmitted is the first event of every journal"
        return self.spec

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all global ranks."""
        return tuple(range(self.the_spec().world_size))

    @property
    def assignment(self) -> Assignment | None:
        """Return what all nodes of a job with one world were told last."""
        return self.farewell or self.world.assignment

    def release(self, node: int, who: str, reason: str) -> list[AnyAction]:
        """Let `node` run ranks again."""
        self.forget_cordon(node)
        self.restoring[node] = who
        return [RestoreNode(node=node, who=who, reason=reason)]

    def forget_cordon(self, node: int) -> None:
        """Hold nothing against a node any more."""
        self.cordoned.pop(node, None)
        self.cordoned_by.pop(node, None)
        self.cordons_noted.discard(node)
        self.going.discard(node)
        self.blames.pop(node, None)

    def note_failure(self, world: WorldState, failure: Failure) -> None:
        """Remember why `world` could not go on."""
        config = self.the_spec().restart
        self.failures.add(failure, config)
        world.failures.add(failure, config)

    @property
    def barred(self) -> set[int]:
        """Return the nodes that an operator has cordoned: they run nothing, whatever is lost."""
        return set(self.cordoned_by)

    @property
    def leaving(self) -> set[int]:
        """Return the nodes that shall run nothing in the next world."""
        moved = {n for m in self.moves.values() if m.stage not in LEFT for n in m.nodes}
        return moved | self.going

    @property
    def spares(self) -> tuple[int, ...]:
        """Return the nodes that stand ready, the least blamed first.

        They are registered, idle, not lost, not cordoned and not being left.
        """
        out = {*self.world.placement, *self.lost, *self.cordoned, *self.leaving}
        ready = (node for node in self.nodes if node not in out)
        return tuple(sorted(ready, key=lambda node: (self.blames.get(node, 0), node)))
