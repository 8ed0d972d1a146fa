"""A world: ranks that share a store and a life. What the controller remembers of one generation.

A job is worlds. Supervised, resumable and elastic jobs have one, of all their ranks; each replica
group of a torchft job is one of its own, on the node of its number. `PHASES` is all that can become
of a world; `docs/phases.md` draws it.
"""

from dataclasses import dataclass, field
from typing import Literal

from perdure.model.events import RankJoined, StoreReady
from perdure.model.failures import ExitRecord
from perdure.model.orders import Assignment, CheckOwn, ReformWorld
from perdure.model.verdicts import Verdict
from perdure.policy import FailureLog, SlotEnd

_SIGINT = 2

WorldPhase = Literal[
    "pending", "forming", "starting", "running", "done", "failed", "parked", "ended"
]
WorldStep = Literal[
    "a generation is begun",
    "its store is served, and nothing older lives",
    "all its nodes have started its ranks",
    "all its ranks ended with 0",
    "it is given up",
    "it is left, or lost while cordoned",
    "the job ends",
]

PHASES: dict[tuple[WorldPhase, WorldStep], WorldPhase] = {
    ("pending", "a generation is begun"): "forming",
    ("forming", "its store is served, and nothing older lives"): "starting",
    ("starting", "all its nodes have started its ranks"): "running",
    ("forming", "a generation is begun"): "forming",
    ("starting", "a generation is begun"): "forming",
    ("running", "a generation is begun"): "forming",
    ("starting", "all its ranks ended with 0"): "done",
    ("running", "all its ranks ended with 0"): "done",
    ("forming", "it is given up"): "failed",
    ("starting", "it is given up"): "failed",
    ("running", "it is given up"): "failed",
    ("forming", "it is left, or lost while cordoned"): "parked",
    ("starting", "it is left, or lost while cordoned"): "parked",
    ("running", "it is left, or lost while cordoned"): "parked",
    ("failed", "it is left, or lost while cordoned"): "parked",
    ("failed", "a generation is begun"): "forming",
    ("parked", "a generation is begun"): "forming",
    ("pending", "the job ends"): "ended",
    ("forming", "the job ends"): "ended",
    ("starting", "the job ends"): "ended",
    ("running", "the job ends"): "ended",
}
"""(from, on what) -> to. Nothing else ever happens to a world."""


@dataclass(slots=True)
class StackRequest:
    """Stacks that were asked for in this generation, and what waits for them."""

    due_s: float
    missing: set[int] = field(default_factory=set)
    """Ranks whose stacks have not come."""
    held: Verdict | None = None
    """An actionable verdict that is acted upon once they have, or at `due_s`."""


@dataclass(slots=True)
class ElasticState:
    """What is remembered of an elastic world, for one generation; the next begins anew."""

    ready: dict[int, RankJoined] = field(default_factory=dict)
    """What members have said that can be: of the first world, and those that came later."""
    lost: set[int] = field(default_factory=set)
    """Members that are gone with their node or keeper."""
    formed: set[int] = field(default_factory=set)
    """Members that have been in a world, and so have its state."""
    left: set[int] = field(default_factory=set)
    """Members that have left at an agreed step, because their node is drained; or ended early."""
    leaving: set[int] = field(default_factory=set)
    """Members that leave at an agreed step although nobody is left: their end is no job's end."""
    finished: set[int] = field(default_factory=set)
    """Members that have applied the last step and need no world any more."""
    members: tuple[int, ...] = ()
    """Of the newest epoch; empty before all ranks of the first one are ready."""
    order: ReformWorld | None = None
    """The newest; open until all its ranks have answered."""
    answered: set[int] = field(default_factory=set)
    deadline_s: float | None = None
    """A re-formation that has not ended by then is given up for a restart."""
    excused: set[int] = field(default_factory=set)
    """Members that were waited for at that time because of their declared busy phase."""
    retry_s: float | None = None
    """A world that broke although nobody is known to be lost is formed again then."""
    broken_s: float | None = None
    """When a member first said that the newest epoch broke."""
    retries: int = 0
    """The number of tries in a row at `step`."""
    step: int = -1
    """Steps applied when the newest epoch was formed."""
    slowest_s: float = 0.0
    """What connecting, and bringing states together, took a member at most after the first."""
    given_up: str = ""
    """Why this generation is not formed again in place any more."""
    homes: dict[int, int] = field(default_factory=dict)
    """Member that a node was asked to start in a spare slot or in place of a lost one -> node."""
    trained: set[int] = field(default_factory=set)
    """Members that had committed a step when they ended."""
    ends: dict[int, list[SlotEnd]] = field(default_factory=dict)
    """Slot -> how its newest processes ended."""
    resting: dict[int, float] = field(default_factory=dict)
    """Slot whose processes ended before they trained -> when the next one is started."""
    empty_slots: dict[int, str] = field(default_factory=dict)
    """Slot that stays empty until its node is restored -> why."""
    following: dict[int, int] = field(default_factory=dict)
    """Rank that was told to follow the world -> epoch that it follows."""
    caught_up: set[int] = field(default_factory=set)
    """Ranks that have followed, or given it up: they can be called in."""
    doomed: dict[int, str] = field(default_factory=dict)
    """Rank whose process was ordered to be ended -> why."""


@dataclass(slots=True)
class ReplicaState:
    """What is remembered of a world that is a replica group; of the past, whether it is a spare."""

    active: bool = True
    """It trains, or shall; otherwise it is a spare replica group, held at the lighthouse."""
    name: str = ""
    """Its replica id, once it has asked the lighthouse for a quorum."""
    trained: bool = False
    """It was in a quorum since it was started."""
    absent: str = ""
    """Why it was left out of the quorum, while it lives."""
    absent_s: float = 0.0
    """The time since when it is left out."""
    leaving: str = ""
    """Why it is about to be left: it gets no quorum any more."""
    unended: str = ""
    """Why its process could not be ended, where others have started it."""
    stands: int | None = None
    """The step that it asks to begin, where it is held at the lighthouse; else None."""
    places: dict[int, int] = field(default_factory=dict)
    """Rank -> place of the machine whose relay brings its events; -1: the lighthouse does."""


@dataclass(slots=True)
class WorldState:
    """One world, in its newest generation."""

    number: int = 0
    """The number of a replica group, and of its node; 0 for a job's only world."""
    phase: WorldPhase = "pending"
    generation: int = -1
    """Drawn from the job's one counter, so that no two worlds share one."""
    epoch: int = 0
    """The newest membership within the generation."""
    assignment: Assignment | None = None
    placement: tuple[int, ...] = ()
    """Nodes by group rank."""
    deadline_s: float | None = None
    """By when it shall have been formed, or have come back."""
    held_s: float = 0.0
    """Until then its ranks are not started: a machine of theirs goes away."""
    store: StoreReady | None = None
    started: set[int] = field(default_factory=set)
    """Nodes that have started its ranks."""
    checking: CheckOwn | None = None
    """What asks for the script's own checkpoints, before its ranks start."""
    checked: set[int] = field(default_factory=set)
    """Nodes that have answered it."""
    exits: dict[int, ExitRecord] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    stepping: bool = False
    stepping_s: float | None = None
    """When it began to train, or its ranks were started where they tell no steps: without a
    checkpoint a restart loses all since. By the controller's clock, as the job's `saved_s`."""
    resumed_step: int = -1
    """Step that it resumed from."""
    checkpoint_due_s: float | None = None
    """When a checkpoint of the controller's own is due."""
    pending_verdicts: dict[str, Verdict] = field(default_factory=dict)
    """Slowness that may be acted upon, and was not yet: it is weighed again as things change."""
    withheld: list[str] = field(default_factory=list)
    """Verdicts of this generation, each with a ground on which nothing was done about it; the
    newest of them, oldest first."""
    stacks: StackRequest | None = None
    elastic: ElasticState = field(default_factory=ElasticState)
    replica: ReplicaState = field(default_factory=ReplicaState)

    failures: FailureLog = field(default_factory=FailureLog)
    """The failures of all its generations, or of those since an operator restored it."""
    failed_s: float | None = None
    """When the failure that is being recovered from was decided upon."""
    first_exit_s: float | None = None
    """When the rank that the newest failure is blamed on ended; None where it was no exit."""

    @property
    def alive(self) -> bool:
        """Whether it runs, or is about to."""
        return self.phase in ("pending", "forming", "starting", "running")

    @property
    def has_ranks(self) -> bool:
        """Whether its ranks were ordered to start, and it is not known to be over."""
        return self.phase in ("starting", "running")

    def read_signal(self, record: ExitRecord, ranks: int) -> int:
        """Return the signal by which a rank ended, as far as a decision may depend on it.

        Ctrl-C reaches no rank: each leads a session of its own. SIGINT in one rank is therefore
        its own fault. Only if all `ranks` have ended so is it somebody's wish.
        """
        interrupted = sum(end.signal == _SIGINT for end in self.exits.values())
        return record.signal if record.signal != _SIGINT or interrupted == ranks else 0

    def enter(self, on: WorldStep) -> None:
        """Take the one step of `PHASES` that `on` leads to from here."""
        self.phase = PHASES[self.phase, on]

    def end(self) -> None:
        """Be over with the job: nothing of it is due any more."""
        self.enter("the job ends")
        self.deadline_s = self.checkpoint_due_s = self.stacks = None

    def begin(self, generation: int, deadline_s: float) -> "WorldState":
        """Return this world's next generation: of this one it keeps its place and its past."""
        new = WorldState(
            number=self.number,
            phase=self.phase,
            generation=generation,
            placement=self.placement,
            deadline_s=deadline_s,
            failures=self.failures,
            failed_s=self.failed_s,
            first_exit_s=self.first_exit_s,
            replica=ReplicaState(active=self.replica.active),
        )
        new.enter("a generation is begun")
        return new
