"""What the ranks were asked to promise, and what they have promised: settings, a pause."""

from dataclasses import dataclass, field
from typing import Literal

from perdure.model.steering import Change, KeySpec, Pace, Steering, Value, is_kept_elsewhere

ANSWER_TIMEOUT_S = 5.0
"""How long a try waits for its answers."""
TRIES_MAX = 12
"""Each asks for a later step."""


@dataclass(slots=True)
class OpenBoundary:
    """A boundary agreement that is not finished."""

    id: str
    kind: Literal["checkpoint", "stop", "set", "pause", "drain"]
    reason: str
    step: int = 0
    move: Literal["prepare", "commit"] = "prepare"
    tries: int = 0
    deadline_s: float = 0.0
    command: str = ""
    """Id of the operator's command behind it; empty for the controller's own."""
    change: Change | None = None
    """What a `set` changes."""
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

    @property
    def name(self) -> str:
        """Return the id of the agreement, its try included."""
        return f"{self.id}.{self.tries}"

    def is_meant(self, id_: str) -> bool:
        """Return whether a rank's word is about this try; a replica group's number goes with it."""
        return id_.partition("@")[0] == self.name


@dataclass(slots=True)
class OpenChange:
    """A change that all ranks have promised, and not all of them have carried out."""

    change: Change
    command: str
    """Id of the operator's command behind it."""
    boundary: str
    """Id of the agreement, its try included."""
    generation: int
    """In which it was promised."""
    ranks: tuple[int, ...] = ()
    """Who has promised it."""
    answered: bool = False
    """The operator has his answer: the step is far away."""
    reached: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Pause:
    """A pause that all ranks have promised."""

    id: str
    """Of the agreement, its try included."""
    step: int
    """No rank begins it."""
    who: str
    why: str
    command: str = ""
    """Id of the operator's command behind it."""
    hold: int = 0
    """Number of the order to the lighthouse with which it began, in a torchft job."""
    reached: set[int] = field(default_factory=set)
    """Ranks of this generation that stand still."""


@dataclass(slots=True)
class Resume:
    """A pause that is over, and not every rank has said so."""

    id: str
    """Of the pause."""
    step: int
    generation: int
    ranks: tuple[int, ...]
    """Who was told."""
    who: str
    reached: set[int] = field(default_factory=set)


@dataclass(slots=True)
class SteeringState:
    """What operators have asked of the ranks, as far as it belongs to the job."""

    keys: dict[str, KeySpec] = field(default_factory=dict)
    """Of the script and of perdure, by name; those of ranks once they have declared them."""
    values: dict[str, Value] = field(default_factory=dict)
    """In force when the newest generation had `since` steps; `changes` lead on from there."""
    since: int = -1
    high: int = 0
    """Steps that any generation has committed: what they ran with is never changed any more."""
    generation: int = -1
    """The newest whose keys are known."""
    settings_epoch: int = 0
    """The newest that was ever given out; one that failed is not used again."""
    changes: list[Change] = field(default_factory=list)
    """Promised by all ranks, by step and epoch; the oldest are folded into one."""
    kept: int = 0
    """Newest epoch whose share for controller and detector is in force."""
    open: list[OpenChange] = field(default_factory=list)
    pace: Pace | None = None
    """What the newest command has brought, corrected by what ranks have answered since."""
    answer_s: float = 0.01
    """How long an agreement's question takes until all have answered it, of late."""
    pause: Pause | None = None
    resume: Resume | None = None
    """The pause that is over, and that not every rank has gone on from."""

    def begin_generation(self) -> None:
        """Forget what ranks have carried out: it is to be seen anew of the next generation's."""
        for open_ in self.open:
            open_.reached.clear()
        if self.pause is not None:
            self.pause.reached.clear()


def make_steering(steering: SteeringState) -> Steering:
    """Return what the ranks of the next generation have to know before their first step."""
    pause = steering.pause
    ranks = tuple(c for c in steering.changes if not all(map(is_kept_elsewhere, c.values)))
    if pause is None or pause.hold:  # Replica groups are held at the lighthouse.
        return Steering(changes=ranks)
    return Steering(changes=ranks, pause=pause.id, pause_step=pause.step)
