"""Past facts that the controller decides from. All of them are journaled before it does.

Times ending in `_s` are job time (see `progress`). New fields get defaults; none is renamed. An
*epoch* is one membership within a generation of an elastic world: processes stay, the process group
does not.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from perdure.model.bus.version import Spoken
from perdure.model.failures import ExitRecord, Rung, names_lost_peer
from perdure.model.job import JobSpec
from perdure.model.signals.links import HostProbe, LinkSample, PairProbe, ProbeFinding
from perdure.model.signals.progress import CommProgress, JobHabits, RankAccount
from perdure.model.steering import Change, KeySpec, Pace, Value, Verb
from perdure.model.verdicts import Verdict


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Base of all events."""


class NamedEvent(Event, frozen=True, kw_only=True):
    """Base of what is known by an id: of a command, an agreement, an invitation, an incident."""

    id: str


class NodeEvent(Event, frozen=True, kw_only=True):
    """Base of what befalls a node."""

    node: int


class GenerationEvent(Event, frozen=True, kw_only=True):
    """Base of what belongs to one generation."""

    generation: int


class RankEvent(GenerationEvent, frozen=True, kw_only=True):
    """Base of what a rank of a generation does, or what becomes of it."""

    rank: int
    """The global rank."""


class JobSubmitted(Event, frozen=True, kw_only=True):
    """The first event of every journal."""

    spec: JobSpec
    at_s: float
    """When `perdure run` was started: the ledger's first instant."""


class ControllerStarted(Event, frozen=True, kw_only=True):
    """A controller has replayed the journal up to here and takes over."""

    incarnation: str
    term: int = 0
    """Number of this controller: each one begins in the next term. Agents obey no earlier one."""
    speaks: Spoken = Spoken()
    """What it speaks: a controller that cannot does not go on with this journal."""


class NodeRegistered(NodeEvent, frozen=True, kw_only=True):
    """An agent says hello, for the first time or after it was replaced."""

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


class StoreReady(GenerationEvent, frozen=True, kw_only=True):
    """Node 0 serves the rendezvous store of a generation."""

    host: str
    port: int
    agent_store: bool
    """Whether a process of the keeper serves it; otherwise rank 0 will (cold start)."""


class RanksStarted(NodeEvent, frozen=True, kw_only=True):
    """A node has started its ranks of a generation."""

    generation: int
    pids: dict[int, int]
    """Global rank -> pid."""
    at_s: float
    warm: bool
    why_cold: str = ""
    awaited: str = ""
    """What the start had waited for, and for how long: memory of dead ranks on its GPUs."""


class RankExited(NodeEvent, frozen=True, kw_only=True):
    """A rank ended. Idempotent by (generation, rank)."""

    record: ExitRecord
    account: RankAccount
    """Read from its ring after its end, so nothing it stamped is lost."""
    detected_s: float
    """When the agent knew."""
    comms: tuple[CommProgress, ...] = ()
    """Its last collectives, from the same ring: whether others still wait for it."""


class GenerationStopped(NodeEvent, frozen=True, kw_only=True):
    """No process of this generation or an older one is left on the node."""

    generation: int
    at_s: float


class TornFound(NodeEvent, frozen=True, kw_only=True):
    """A checkpoint that the script saved and the job declares is torn; it is moved after this."""

    generation: int
    path: str
    to: str
    why: str
    at_s: float


class OwnChecked(NodeEvent, frozen=True, kw_only=True):
    """A node has checked the script's own checkpoints before a generation's ranks start."""

    generation: int
    at_s: float
    moved: tuple[str, ...] = ()
    """A sentence for each torn checkpoint: what is wrong with it, and where it is now."""
    fetched: tuple[str, ...] = ()
    """A sentence for each pattern without a checkpoint: what was fetched, or why nothing was."""
    newest: str = ""
    """Path of the newest whole one."""
    step: int = -1
    """Its step; -1 if its name has none."""


class KeeperLost(NodeEvent, frozen=True, kw_only=True):
    """The node's keeper died, its ranks died with it, and a new one is started.

    A generation that a dead keeper had begun is not started again either, which is told in the
    same way.
    """

    generation: int
    at_s: float
    """When it died."""
    cause: str = ""
    """Why, where perdure itself ended it."""
    begun: tuple[int, ...] = ()
    """Ranks of the generation that this machine had started until then, other nodes' among them."""


class NodeLost(NodeEvent, frozen=True, kw_only=True):
    """The node has been silent for too long."""

    at_s: float
    reason: str
    last_seen_s: float = 0.0
    """When it was last heard of."""


class RankJoined(RankEvent, frozen=True, kw_only=True):
    """A rank's script called `perdure.init`: its depth is resumable."""

    start_step: int = 0
    depth: str = "resumable"
    """Or `elastic`: it can be a member of a world that is formed again in place."""
    store: str = ""
    """`host:port` of a store that an elastic rank serves: worlds may meet there while it lives."""
    feed: str = ""  # `host:port` at which it sends its state to ranks that follow.
    state_bytes: int = 0
    """About what its replica has; 0: a state that cannot be followed."""


class ProgressNoted(GenerationEvent, frozen=True, kw_only=True):
    """A fold of heartbeats: at a generation's first step, when one fails, and from time to time."""

    at_s: float
    step: int
    """Steps committed by every rank; -1 where unknown."""
    accounts: dict[int, RankAccount]
    """Of all ranks where it is `whole`; else of the first one and of the one that is furthest."""
    collectives: int = 0
    """Collectives ended by every rank in this generation: the mark of progress of a script
    that declares no steps."""
    habits: JobHabits = JobHabits()
    """What is usual for the job, over all of its generations."""
    whole: bool = True


class GenerationStepping(GenerationEvent, frozen=True, kw_only=True):
    """Every rank of the generation makes progress again: recovery is over."""

    at_s: float
    """When the last rank began its first step (or ended its first collective)."""
    step: int = -1
    stamps: dict[str, float] = msgspec.field(default_factory=dict)
    """Latest over the ranks: spawned, script, init, group, restored, first_step."""


class MetricsLogged(GenerationEvent, frozen=True, kw_only=True):
    """Values of `run.log` of rank 0, a batch of steps at a time."""

    rows: tuple[tuple[int, dict[str, float]], ...]
    """(step, values); a step logged again after a restart replaces the older row."""
    dropped: int = 0
    """Values that are not told: no numbers, or too many, or too large for the way here."""


class CheckpointSaved(GenerationEvent, frozen=True, kw_only=True):
    """A checkpoint was written, verified by load, and tagged."""

    step: int
    path: str
    bytes: int
    stall_s: float
    save_s: float
    """From the snapshot to the tag."""
    at_s: float
    reason: str = "interval"
    skipped: int = 0
    """Saves that were not begun while this one, or one that failed, was being written."""


class CheckpointFailed(GenerationEvent, frozen=True, kw_only=True):
    """A checkpoint could not be written, or did not verify. The previous one stays `latest`."""

    step: int
    error: str
    at_s: float
    writing: int = -1
    """The step whose checkpoint takes too long, so that this one was not begun; -1 for none."""


class CheckpointRestored(RankEvent, frozen=True, kw_only=True):
    """A rank resumed from a checkpoint (or from nothing: step 0, empty path)."""

    step: int
    path: str
    skipped: tuple[str, ...] = ()
    """`path: why` for every newer checkpoint that could not be used."""
    why_not_exact: str = ""
    """Why what goes on is not what was, as far as the rank knows."""


class ResumeCompared(GenerationEvent, frozen=True, kw_only=True):
    """A step was made again after a resume, and its loss compared with that of before."""

    step: int
    resumed: int
    """The step of the checkpoint."""
    differs: str = ""
    """How they differ; empty if they are equal to the last bit."""


class VerdictReached(Event, frozen=True, kw_only=True):
    """The detector is sure, or an earlier verdict became actionable."""

    verdict: Verdict


class VerdictWithdrawn(Event, frozen=True, kw_only=True):
    """The suspect made progress again."""

    verdict: Verdict
    at_s: float
    reason: str


class FailureDecided(Event, frozen=True, kw_only=True):
    """The controller has decided what failed and what follows; the newest with an id holds."""

    id: str
    """Of the incident. What comes to light about it later, or follows from it, has the same."""
    world: int
    """The generation that failed."""
    cause: str
    culprit: str
    at_step: int
    """Committed steps; -1: as far as its ranks' accounts say."""
    failure_s: float
    detected_s: float
    at_s: float
    """When it was decided; 0 where nobody has, for the controller died first."""
    rung: Rung
    reason: str
    """What is known of the cause."""
    epoch: int = -1
    """Of an elastic world: the one that the members form instead; -1: the generation ends."""
    group: int = -1
    """Of a torchft job: the replica group."""
    saved: bool = False
    """Of a move: the ranks held for their checkpoint, and nothing was lost."""


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


class SlotLeftEmpty(GenerationEvent, frozen=True, kw_only=True):
    """No process is started any more in a slot of an elastic world, until its node is restored."""

    at_s: float
    slot: int
    node: int
    reason: str


class StacksTaken(GenerationEvent, frozen=True, kw_only=True):
    """Python stacks of suspects and of one waiting rank."""

    at_s: float
    stacks: dict[int, str]
    """Global rank -> text, or the reason why there is none."""
    traces: str = ""
    """Directory of the Flight Recorder traces that living ranks wrote meanwhile."""


class LinksNoted(GenerationEvent, frozen=True, kw_only=True):
    """A fold of link sweeps worth keeping: from time to time, and with each verdict about one."""

    at_s: float
    window_s: float
    links: tuple[LinkSample, ...]
    note: str = ""
    """What could not be seen, or why there are none."""


class ProbeEnded(NamedEvent, frozen=True, kw_only=True):
    """One node's part of a round of an active probe. Idempotent by (id, round, node)."""

    node: int
    round: int
    at_s: float
    pairs: tuple[PairProbe, ...] = ()
    hosts: tuple[HostProbe, ...] = ()
    error: str = ""


class ProbeJudged(NamedEvent, frozen=True, kw_only=True):
    """What an active probe has found, once all rounds are in (or overdue)."""

    at_s: float
    finding: ProbeFinding


class CollectivesInterrupted(RankEvent, frozen=True, kw_only=True):
    """A rank's control thread broke its collective in flight."""

    at_s: float
    sockets: int
    """Connections that were shut down."""
    error: str = ""


_NOBODY_THERE = ("Connection refused", "Connection was likely closed", "Broken pipe")
"""What sockets and stores say where the process at the other end has ended."""


class WorldBroken(GenerationEvent, frozen=True, kw_only=True):
    """A rank has left its epoch because a collective failed, and waits for the next one."""

    epoch: int
    rank: int
    at_s: float
    error: str

    @property
    def lost_peer(self) -> bool:
        """Whether it failed because a connection ended, and not for time alone."""
        return names_lost_peer(self.error) or any(words in self.error for words in _NOBODY_THERE)


class MemberReady(RankEvent, frozen=True, kw_only=True):
    """A rank that follows the world has nothing left to catch up on, or has given it up."""

    at_s: float
    step: int
    """Steps applied; -1: it could not follow, and gets the state within the join."""
    bytes: int = 0
    """What it was sent."""
    took_s: float = 0.0
    """Since it was told to follow."""
    error: str = ""
    """Why it could not."""


class WorldReformed(GenerationEvent, frozen=True, kw_only=True):
    """A rank is a member of an epoch: connected, at the same step as all, with their state."""

    epoch: int
    rank: int
    step: int
    """Steps applied: the one under way."""
    began_s: float
    """When it had left the older epoch."""
    ordered_s: float
    """When it had the order."""
    formed_s: float
    redo: int = 0
    """Micro-batches of a lost rank that it does instead."""
    back: int = 0
    """Steps that were applied and are taken again, because a shard's last copy was lost."""
    waited_s: float = 0.0
    """Since when it waited for the collective that broke; 0 where it did not wait."""
    connected_s: float = 0.0
    """When it was connected; from then on states were brought together."""
    shape: str = ""
    """Copies and stages of a pipelined world."""
    section: tuple[int, int] = (0, 0)
    """Of such a world: the first block of this rank's (first) run, and the one after its last."""
    micro_batches: int = 0
    """Of such a world: of a step."""
    morphed: bool = False
    """The model is cut into stages otherwise than before."""
    moved_bytes: int = 0
    """State that this rank was sent."""
    reason: str = ""
    finished: bool = False
    """It has applied the last step, as everyone has, and needs no world any more."""
    more_sections: tuple[tuple[int, int], ...] = ()
    """Of an interleaved one: the rank's other runs."""


class NodeMoved(NodeEvent, frozen=True, kw_only=True):
    """Base of what takes a node out of the job, or back into it."""

    at_s: float
    reason: str
    who: str = ""
    """Empty: the policy did it."""


class NodeCordoned(NodeMoved, frozen=True, kw_only=True):
    """No rank is placed on this node any more, until it is restored."""


class NodeRestored(NodeMoved, frozen=True, kw_only=True):
    """The node may run ranks again."""


class NodeDraining(NodeMoved, frozen=True, kw_only=True):
    """The node's ranks are about to move elsewhere; or (`over`) they stay after all."""

    over: bool = False


EXPIRES_S = 3600.0
"""For how long an invitation may be used for the first time, where nobody says otherwise."""
KEPT_MAX = 1000
"""Invitations of a job; the oldest that serve nobody any more are forgotten first."""


def digest_secret(secret: str) -> str:
    """Return what the journal holds of an invitation's secret: its SHA-256, in hexadecimal."""
    return hashlib.sha256(secret.encode("utf-8", "backslashreplace")).hexdigest()


class InvitationMade(NamedEvent, frozen=True, kw_only=True):
    """An operator (or a launcher) has invited machines. The secret itself is nowhere but there."""

    digest: str
    """Of the secret, by `digest_secret`."""
    at_s: float
    until_s: float = 0.0
    """When it can be used for the first time no more; 0: never."""
    uses: int = 1
    """Machines that it serves; 0: as many as there are places."""
    who: str = ""
    machines: dict[str, str] = msgspec.field(default_factory=dict)
    """Machine -> its host, of those that have used it in an earlier run of the job."""


class InvitationUsed(NamedEvent, frozen=True, kw_only=True):
    """A machine was given a place for it. It is that machine's from now on."""

    machine: str
    host: str
    node: int
    at_s: float


class InvitationRevoked(NamedEvent, frozen=True, kw_only=True):
    """Nobody comes by it any more, whoever has used it before included."""

    at_s: float
    who: str = ""


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """What a source says of its machine at this moment."""

    id: str
    reason: str
    gone_s: float | None = None
    """When the machine goes away, seconds since 1970; None where the platform does not say."""
    grace_s: float | None = None
    """How long after the first sight of it, where `gone_s` is None; None: as configured."""
    certain: bool = True
    """False: a higher risk, and no more."""
    waits: bool = False
    """The machine goes away sooner where it is left sooner: whoever takes it waits for that."""


class PreemptionNoticed(NodeEvent, frozen=True, kw_only=True):
    """The platform will take the machine away."""

    at_s: float
    grace_s: float
    """From `at_s` on; 0 where it is unknown, or over."""
    source: str
    """Such as `aws`, `file`, or a person's name."""
    id: str = ""
    """Of what was announced: the same one again is no other notice."""
    reason: str = ""
    """In the platform's words, such as `spot terminate`."""
    certain: bool = True
    """False: it is only at a higher risk than others (a rebalance recommendation)."""
    waits: bool = False
    """Whoever takes the machine waits until it is left, so that it is left at once."""
    handled: bool = False
    """All ranks of the node handle SIGTERM: a script that perdure cannot save can save itself."""


class PreemptionWithdrawn(NodeEvent, frozen=True, kw_only=True):
    """What was announced is not any more: the machine stays."""

    at_s: float
    source: str
    id: str = ""
    reason: str = ""


class MachineReported(NodeEvent, frozen=True, kw_only=True):
    """The platform says what has become of a node's machine, such as a pod that was OOMKilled."""

    at_s: float
    reason: str
    """In perdure's words and the platform's, such as `out of memory: OOMKilled`."""
    source: str
    machine: str = ""
    """Its name, such as the pod's: another may be that node by now."""
    ended_s: float = 0.0
    """When it ended, by the platform's clock; 0: it has not, or that is not known."""


Grade = Literal["ok", "low", "short"]
"""`low`: enough for now, not for all that will be kept; `short`: not even for the next one."""


class RoomNoted(Event, frozen=True, kw_only=True):
    """There is less room for checkpoints, or to start ranks, than is needed; or enough again."""

    grade: Grade
    reason: str
    place: str
    at_s: float
    node: int = -1
    """Where ranks of `generation` wait for a disk before they start; -1: room for checkpoints."""
    generation: int = -1


class CommandReceived(NamedEvent, frozen=True, kw_only=True):
    """An operator (or a signal) asks for something. Idempotent by `id`."""

    kind: Verb
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    who: str = ""
    at_s: float = 0.0
    pace: Pace | None = None
    """Of the ranks, where a step is to be agreed upon: what follows is then near."""


class NodeAsked(NamedEvent, frozen=True, kw_only=True):
    """An agent asks for something of everybody: no command, which only operators give.

    SIGTERM to a rank asks for a stop, SIGUSR1 and a silent keeper for a checkpoint. A machine from
    elsewhere may not ask for a stop: its own SIGTERM leaves its node.
    """

    node: int
    kind: Literal["checkpoint", "stop"]
    who: str
    at_s: float

    def as_command(self) -> CommandReceived:
        """Return what an operator who wants the same would ask for."""
        return CommandReceived(id=self.id, kind=self.kind, who=self.who, at_s=self.at_s)


class BoundaryAnswered(NamedEvent, frozen=True, kw_only=True):
    """A rank acknowledged a prepared boundary (`ok`), or vetoed it with a reason."""

    rank: int
    ok: bool
    step: int
    reason: str = ""
    refused: bool = False
    """It cannot be done at any step, so that a later one is not tried."""
    planned: bool = False
    """The decision to do it has arrived: this rank will, with or without its controller."""
    quorum_id: int = -1
    """The quorum that the rank was in when it answered (torchft)."""


class BoundaryReached(NamedEvent, frozen=True, kw_only=True):
    """A rank has carried out the agreed action at the agreed step."""

    rank: int
    step: int
    at_s: float
    error: str = ""
    dropped: bool = False
    """All ranks have dropped it, because no decision had reached any of them for long."""


class RanksAgreed(NamedEvent, frozen=True, kw_only=True):
    """What many ranks have said to one agreement in one moment, in one entry of the journal.

    They have promised it, or, where it is `reached`, carried it out; who vetoes, or fails, has an
    entry of its own. An agreement of a thousand ranks would else be two thousand entries.
    """

    reached: bool
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    times_s: tuple[float, ...]
    """When each has carried it out; empty where they have promised it."""
    sources: tuple[str, ...]
    numbers: tuple[int, ...]
    """Of each rank's event, there."""
    planned: bool = False
    quorum_id: int = -1

    @classmethod
    def join(
        cls, told: Sequence[tuple[str, int, BoundaryAnswered | BoundaryReached]]
    ) -> "RanksAgreed":
        """Return (source, number, event) of several ranks as one; `name_agreement` has to be one.

        >>> events = [BoundaryAnswered(id="b1", rank=rank, ok=True, step=7) for rank in range(2)]
        >>> told = [("g0-r0-p1", 4, events[0]), ("g0-r1-p2", 9, events[1])]
        >>> RanksAgreed.join(told).split() == told
        True
        """
        sources, numbers, events = zip(*told, strict=True)
        first = events[0]
        reached = [event.at_s for event in events if isinstance(event, BoundaryReached)]
        return cls(
            id=first.id,
            reached=bool(reached),
            ranks=tuple(event.rank for event in events),
            steps=tuple(event.step for event in events),
            times_s=tuple(reached),
            sources=sources,
            numbers=numbers,
            planned=isinstance(first, BoundaryAnswered) and first.planned,
            quorum_id=first.quorum_id if isinstance(first, BoundaryAnswered) else -1,
        )

    def split(self) -> list[tuple[str, int, BoundaryAnswered | BoundaryReached]]:
        """Return what each rank has said: source, number there, and event."""
        told: list[tuple[str, int, BoundaryAnswered | BoundaryReached]] = []
        for index, (rank, step) in enumerate(zip(self.ranks, self.steps, strict=True)):
            event: BoundaryAnswered | BoundaryReached
            if self.reached:
                event = BoundaryReached(id=self.id, rank=rank, step=step, at_s=self.times_s[index])
            else:
                event = BoundaryAnswered(
                    id=self.id, rank=rank, ok=True, step=step, planned=self.planned,
                    quorum_id=self.quorum_id,
                )  # fmt: skip
            told.append((self.sources[index], self.numbers[index], event))
        return told


def name_agreement(event: "AnyEvent | Decision") -> tuple[object, ...]:
    """Return what answers that can be one `RanksAgreed` have in common; empty for any other."""
    match event:
        case BoundaryAnswered(ok=True, reason="", refused=False):
            return event.id, False, event.planned, event.quorum_id
        case BoundaryReached(error=""):
            return event.id, True
    return ()


class OperatorNoted(Event, frozen=True, kw_only=True):
    """An operator has made a remark on the job; nothing follows from it."""

    id: str
    """Of the command."""
    text: str
    step: int
    """How far the job was; -1 where that is not known."""
    at_s: float
    who: str = ""


class KeysDeclared(GenerationEvent, frozen=True, kw_only=True):
    """Rank 0's script has declared its keys; those of the newest generation count."""

    keys: tuple[KeySpec, ...]
    epoch: int = 0
    """The change in force when the generation began, from its checkpoint."""
    values: dict[str, Value] = msgspec.field(default_factory=dict)
    """The values in force then."""
    step: int = 0
    """Committed steps then."""
    num_steps: int = 0
    """So many steps the loop is to make, counted over the whole run; 0: it does not say."""


class SettingsChanged(Event, frozen=True, kw_only=True):
    """All ranks have promised `change`: it will be, whoever dies meanwhile."""

    change: Change


class PauseEvent(NamedEvent, frozen=True, kw_only=True):
    """Base of the beginning and the end of the pause `id`."""

    step: int
    at_s: float
    who: str = ""
    reason: str = ""


class JobPaused(PauseEvent, frozen=True, kw_only=True):
    """All ranks have promised to stand still before `step`."""


class JobResumed(PauseEvent, frozen=True, kw_only=True):
    """The pause `id` is over."""


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
    life: int = -1
    """Of a group that others start: which of all lives of such groups this is, from 0 on."""
    manager: str = ""
    """Likewise: where its manager listens."""
    ranks: int = 0
    """Likewise: how many it has."""
    silent: bool = False
    """With `gone`: no heartbeat comes any more, so that it may have ended."""
    heard_s: float = 0.0
    """With `silent`, of a group that others start: when it was heard last."""


class ReplicaWaiting(RankEvent, frozen=True, kw_only=True):
    """A replica group has waited for others in a collective of this quorum for too long."""

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


class RankAttached(RankEvent, frozen=True, kw_only=True):
    """A rank of a group that others have started has opened its line to the lighthouse (torchft).

    It is told again once the rank is known to use a GPU.
    """

    pid: int
    host: str
    devices: tuple[str, ...]
    at_s: float
    place: int = -1
    """The place of its machine, where that is not the lighthouse's: its relay brings its events."""


class RankLeft(RankEvent, frozen=True, kw_only=True):
    """The script of a rank that others have started has ended without an exception (torchft)."""

    at_s: float


class DeviceReported(Event, frozen=True, kw_only=True):
    """A device's health has changed, by its own counters or by an outside monitor's word."""

    device: str
    node: int
    at_s: float
    healthy: bool
    reason: str
    """Such as `XID 79: GPU has fallen off the bus`."""
    source: str = "nvml"


class FaultInjected(NamedEvent, frozen=True, kw_only=True):
    """An injected fault took place (or could not)."""

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


class JournalMended(Event, frozen=True, kw_only=True):
    """A controller found at its start that a copy of the journal was not what it had been."""

    restored: int = 0
    """Entries that the stream had lost, and the mirror had."""
    lost: int = 0
    """Entries that no copy has."""
    aside: str = ""
    """Where the damaged mirror is kept."""
    reason: str


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
    | TornFound
    | OwnChecked
    | KeeperLost
    | NodeLost
    | RankJoined
    | ProgressNoted
    | GenerationStepping
    | MetricsLogged
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointRestored
    | ResumeCompared
    | VerdictReached
    | VerdictWithdrawn
    | ActionWithheld
    | SlotLeftEmpty
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
    | RanksAgreed
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
    | RankAttached
    | RankLeft
    | DeviceReported
    | ControllerLost
    | PreemptionNoticed
    | PreemptionWithdrawn
    | MachineReported
    | RoomNoted
    | JournalMended
    | InvitationMade
    | InvitationUsed
    | InvitationRevoked
    | TimerFired
    | JobEnded
)


OF_EVERY_RANK = (RankJoined, CheckpointRestored)
"""Said by every rank of every generation, so that they are most of a large job's entries: who does
not heed them passes them over first. They tell of no failure."""


class Newest(msgspec.Struct, frozen=True):
    """How it was a moment ago, of what the journal is told seldom (`newest.json`)."""

    progress: ProgressNoted | None = None
    links: LinksNoted | None = None


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the journal. `source`/`source_seq` make a repeated message harmless."""

    seq: int
    at_s: float
    """Job time at which it was appended; the `now` of `Controller.handle`, in replay as well."""
    body: AnyEvent | Decision
    source: str = ""
    """Incarnation of the agent (or id of the client) that sent the event; empty: the controller."""
    source_seq: int = 0
