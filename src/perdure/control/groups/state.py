"""What the controller remembers of a torchft job's replica groups.

pending --> forming --its older ranks gone, its store up--> starting --> running
running --a rank failed, or its step does not come--> forming (a new generation)
running --all its ranks ended with 0--> done;  any --gives up--> failed
any --an operator's drain or evict, or lost while cordoned--> parked --restore--> forming
"""

from dataclasses import dataclass, field
from typing import Literal

from perdure.model.actions import Assignment, SendBoundary
from perdure.model.events import ExitRecord, StoreReady
from perdure.policy import Failure

GroupPhase = Literal["pending", "forming", "starting", "running", "done", "failed", "parked"]


@dataclass(slots=True)
class GroupState:
    """One replica group: a world of its own, on the node of its number."""

    group: int
    active: bool = True
    """It trains, or shall; otherwise it is a spare, held at the lighthouse."""
    phase: GroupPhase = "pending"
    generation: int = -1
    """Drawn from the job's one counter, so that no two groups share one."""
    assignment: Assignment | None = None
    store: StoreReady | None = None
    exits: dict[int, ExitRecord] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    replica: str = ""
    """Its replica id, once it has asked the lighthouse for a quorum."""
    trained: bool = False
    """It was in a quorum since it was started."""
    absent: str = ""
    """Why it was left out of the quorum, while it lives."""
    absent_s: float = 0.0
    """Since when."""
    deadline_s: float | None = None
    """By when it shall have been formed, or have come back."""
    leaving: str = ""
    """Why it is about to be left: it gets no quorum any more."""
    stands: int | None = None
    """The step that it asks to begin, where it is held at the lighthouse; else None."""

    @property
    def alive(self) -> bool:
        """Whether it runs, or is about to."""
        return self.phase in ("pending", "forming", "starting", "running")


@dataclass(slots=True)
class GroupMove:
    """Groups that are being left (drain, evict): all of them, or none."""

    id: str
    """Of the operator's command."""
    kind: Literal["drain", "evict"]
    groups: list[int]
    who: str
    why: str
    at_s: float
    deadline_s: float
    wait: bool = False
    """For a spare group, should too few be left without."""
    stage: Literal["waiting", "leaving", "ending"] = "waiting"
    """For a spare group; for the quorum without these; for the end of their processes."""
    step: int = -1
    """Committed when they were left."""
    actives: list[int] = field(default_factory=list)
    """Those that were no spares."""
    stand_ins: list[int] = field(default_factory=list)
    """Spare groups that were released in their place."""


@dataclass(slots=True)
class QuorumState:
    """The newest quorum, as the lighthouse has told of it, and what it was ordered."""

    quorum_id: int = -1
    members: tuple[str, ...] = ()
    holds: int = 0
    """Numbers the orders to it."""
    paused: str = ""
    """Who has paused the job; empty while it runs."""
    pause_id: str = ""
    """Of the pause that is in force."""
    pause_hold: int = 0
    """Number of the order to the lighthouse with which it began."""
    pauses_noted: list[str] = field(default_factory=list)
    """Pauses whose record is in the journal."""
    moves: dict[str, GroupMove] = field(default_factory=dict)
    """Groups that are being left, by command."""
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
    aborted: list[SendBoundary] = field(default_factory=list)
    """The newest abort, to each group."""
