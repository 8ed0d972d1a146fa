"""Imperatives that the controller hands to its shell. Each says why.

Commands to nodes are *levels*, not edges: an `Assignment` says what a node shall run from now
on, is numbered, and may be repeated or lost at will; the agent reconciles towards the newest.
"""

from typing import Any, Literal

import msgspec

from perdure.model.events import (
    ActionWithheld,
    DeviceReported,
    JobPaused,
    JobResumed,
    MachineReported,
    PreemptionNoticed,
    PreemptionWithdrawn,
    SettingsChanged,
    VerdictReached,
)
from perdure.model.invitations import InvitationMade, InvitationRevoked, InvitationUsed
from perdure.model.settings import Change, Steering
from perdure.model.signals.links import ProbeFinding


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


class Action(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Base of all actions."""

    reason: str


class AssignNodes(Action, frozen=True, kw_only=True):
    """Send `assignment` to `nodes`, and again to each that registers later."""

    nodes: tuple[int, ...]
    assignment: Assignment


class SendBoundary(Action, frozen=True, kw_only=True):
    """One step of a boundary agreement, to `ranks`."""

    id: str
    move: Literal["prepare", "commit", "abort"]
    kind: Literal["checkpoint", "stop", "set", "pause", "drain"]
    """drain: a checkpoint, and no step after it until `ResumeRanks` or the rank's end."""
    step: int
    ranks: tuple[int, ...]
    generation: int
    number: int = 0
    """Grows with every try. One is open at a time, so a newer one says that older ones are over."""
    change: Change | None = None
    """Of `set`: what changes at `step`."""
    leaves: tuple[int, ...] = ()
    """Of `drain` in an elastic world: who leaves it at `step`; the others go on without a
    checkpoint."""
    epoch: int = 0
    """In an elastic world: a rank takes this once it has the order of that epoch."""


class ResumeRanks(Action, frozen=True, kw_only=True):
    """End the pause that `ranks` are in. Harmless where there is none."""

    generation: int
    ranks: tuple[int, ...]
    id: str = ""
    """Of the pause: a rank that has not come to it skips it."""


class RestoreNode(Action, frozen=True, kw_only=True):
    """Journal `NodeRestored`: `node` may run ranks again."""

    node: int
    who: str = ""


class NoteDraining(Action, frozen=True, kw_only=True):
    """Journal `NodeDraining`: `node` is about to be left, or (`over`) stays after all."""

    node: int
    who: str = ""
    over: bool = False


class ReplicaGroup(msgspec.Struct, frozen=True):
    """One replica group, as the lighthouse has to know it."""

    group: int
    generation: int
    store: str
    """Address of its own store, which is how a request tells its group."""
    held: bool = False
    spare: bool = False
    """Held, but to stand in at once for a member that is lost."""


class HoldReplicas(Action, frozen=True, kw_only=True):
    """Have the lighthouse answer no quorum of these replica ids (torchft) until released.

    A level: a newer list replaces an older one.
    """

    replicas: tuple[str, ...]
    number: int
    groups: tuple[ReplicaGroup, ...] = ()
    """All groups that run or are about to."""
    startup_s: float | None = None
    """Its patience with groups that start, as set by now; None: as the job file has it."""
    alone_s: float | None = None
    """Likewise, of a newcomer with members of which none asks."""


class EvictReplica(Action, frozen=True, kw_only=True):
    """Have the lighthouse forget a replica id at once and for ever (torchft)."""

    replica: str
    generation: int = -1
    """Of its processes; enough where the replica id is not known."""


class FenceAbort(Action, frozen=True, kw_only=True):
    """Have `ranks` of replica group `group` break their process group of quorum `quorum_id`.

    Fenced: a rank whose group belongs to another quorum by then ignores it.
    """

    quorum_id: int
    groups: tuple[int, ...]
    """Replica groups that survive and may hang on the dead one."""


class TakeStacks(Action, frozen=True, kw_only=True):
    """Take Python stacks of `ranks`; answers with `StacksTaken`."""

    generation: int
    ranks: tuple[int, ...]


class WatchClosely(Action, frozen=True, kw_only=True):
    """Have `nodes` sweep sockets and rings at the suspicious rate until job time `until_s`."""

    nodes: tuple[int, ...]
    until_s: float


class RunProbe(Action, frozen=True, kw_only=True):
    """Have agents of `pairs` transfer data, and those of `hosts` compute; see `ProbeEnded`.

    Bounded by `deadline_s` seconds; each pair is (source node, destination node), and no node is
    in two pairs of one round.
    """

    id: str
    round: int
    pairs: tuple[tuple[int, int], ...]
    hosts: tuple[int, ...] = ()
    bytes: int = 8_000_000
    deadline_s: float = 2.0


class NoteFinding(Action, frozen=True, kw_only=True):
    """Journal `ProbeJudged`: what an active probe has found."""

    id: str
    finding: ProbeFinding


class CordonNode(Action, frozen=True, kw_only=True):
    """Journal `NodeCordoned`: `node` runs nothing any more while another can."""

    node: int
    who: str = ""
    """Empty: the policy did it."""


class InterruptCollectives(Action, frozen=True, kw_only=True):
    """Have the control threads of `ranks` break the collective in flight (their own sockets)."""

    generation: int
    ranks: tuple[int, ...]
    id: str = ""
    """A rank carries out each id once a generation, however often it is repeated."""


class ReformWorld(Action, frozen=True, kw_only=True):
    """Have `ranks` leave the world that they are in and form the next one, in place.

    A level: a newer epoch replaces an older one. Answered by `WorldReformed` of each rank.
    """

    generation: int
    epoch: int
    ranks: tuple[int, ...]
    urgent: bool = True
    """Break the collective in flight; else each leaves when it is between two micro-batches."""
    store: str = ""
    """`host:port` of the member's store at which they meet; empty: the generation's own."""
    steering: Steering = Steering()
    """Changes and a pause that a rank has to know of which was asked about none of them."""


class FollowWorld(Action, frozen=True, kw_only=True):
    """Have `rank`, which is no member yet, take the members' state and keep up with them.

    A level: a newer epoch replaces an older one. Answered by `MemberReady`.
    """

    generation: int
    epoch: int
    rank: int
    donors: dict[int, str]
    """Member -> address at which it sends its state."""
    ahead: tuple[int, ...] = ()
    """Others that follow, and were told so before it: of parts of a state they choose first."""


class InjectFault(Action, frozen=True, kw_only=True):
    """Do harm on purpose, to `rank`, now or when it begins `at_step`."""

    id: str
    generation: int
    rank: int
    kind: str
    at_step: int = -1
    args: dict[str, Any] = {}


class AnswerCommand(Action, frozen=True, kw_only=True):
    """Tell the operator how it went."""

    id: str
    ok: bool
    result: dict[str, Any] = {}


class RecordEvent(Action, frozen=True, kw_only=True):
    """Journal `event`: what a notice has said, what was agreed upon, or that nothing is done."""

    event: (
        DeviceReported
        | MachineReported
        | PreemptionNoticed
        | PreemptionWithdrawn
        | VerdictReached
        | ActionWithheld
        | SettingsChanged
        | JobPaused
        | JobResumed
        | InvitationMade
        | InvitationUsed
        | InvitationRevoked
    )


class EndJob(Action, frozen=True, kw_only=True):
    """Everything is down: journal `JobEnded` and leave."""

    status: Literal["done", "failed", "stopped"]
    exit_code: int


AnyAction = (
    AssignNodes
    | SendBoundary
    | TakeStacks
    | WatchClosely
    | RunProbe
    | NoteFinding
    | CordonNode
    | InterruptCollectives
    | ReformWorld
    | FollowWorld
    | InjectFault
    | ResumeRanks
    | RestoreNode
    | NoteDraining
    | HoldReplicas
    | EvictReplica
    | FenceAbort
    | AnswerCommand
    | RecordEvent
    | EndJob
)
