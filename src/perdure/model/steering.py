"""Events of agreements on a step, of live configuration and of pauses."""

from typing import Any, Literal

import msgspec

from perdure.model.event import Event
from perdure.model.settings import Change, KeySpec

RESUMED = ".resumed"
"""Added to the id of a pause or drain in `BoundaryReached`: the rank goes on."""


Verb = Literal[
    "checkpoint",
    "stop",
    "inject",
    "kill",
    "probe",
    "set",
    "pause",
    "resume",
    "drain",
    "cordon",
    "evict",
    "restore",
    "notify",
    "join",
    "invite",
    "revoke",
    "note",
]
"""What an operator may ask for."""


PlaceVerb = Literal["drain", "cordon", "evict", "restore"]
"""Those that take a place out of the job or back into it: a node, device, rank or replica."""

NOTE_MAX = 500
"""Characters of a remark."""

LEAVE_DEADLINE_S = 600.0
"""Of a drain or an evict that names none."""


def find_note_fault(text: object) -> str:
    """Return why `text` is no remark, in a line; empty where it is one.

    >>> find_note_fault("  ")
    'the remark is empty'
    """
    if not isinstance(text, str) or not text.strip():
        return "the remark is empty"
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        return "the remark is no text"
    if len(text) > NOTE_MAX:
        return f"the remark has {len(text)} characters, and {NOTE_MAX} are kept"
    return ""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How far the ranks are and how fast they go, from heartbeats, which no journal has."""

    generation: int
    """-1 in a torchft job: of all groups, each of which has one of its own."""
    step: int
    """Committed by the furthest rank at `at_s`."""
    at_s: float
    step_s: float
    """What a step takes, by the last few seconds; above 0."""

    def find_step(self, now: float) -> float:
        """Return where that rank should be at `now`, parts of a step included."""
        return self.step + max(0.0, now - self.at_s) / self.step_s


class BoundaryAnswered(Event, frozen=True, kw_only=True):
    """A rank acknowledged a prepared boundary (`ok`), or vetoed it with a reason."""

    id: str
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


class BoundaryReached(Event, frozen=True, kw_only=True):
    """A rank has carried out the agreed action at the agreed step."""

    id: str
    rank: int
    step: int
    at_s: float
    error: str = ""


class OperatorNoted(Event, frozen=True, kw_only=True):
    """An operator has made a remark on the job; nothing follows from it."""

    id: str
    """Of the command."""
    text: str
    step: int
    """How far the job was; -1 where that is not known."""
    at_s: float
    who: str = ""


class KeysDeclared(Event, frozen=True, kw_only=True):
    """Rank 0's script has declared its keys; those of the newest generation count."""

    generation: int
    keys: tuple[KeySpec, ...]
    epoch: int = 0
    """The change in force when the generation began, from its checkpoint."""
    values: dict[str, Any] = msgspec.field(default_factory=dict)
    """The values in force then."""
    step: int = 0
    """Committed steps then."""


class SettingsChanged(Event, frozen=True, kw_only=True):
    """All ranks have promised `change`: it will be, whoever dies meanwhile."""

    change: Change


class JobPaused(Event, frozen=True, kw_only=True):
    """All ranks have promised to stand still before `step`."""

    id: str
    step: int
    at_s: float
    who: str = ""
    reason: str = ""


class JobResumed(Event, frozen=True, kw_only=True):
    """The pause `id` is over."""

    id: str
    step: int
    at_s: float
    who: str = ""
    reason: str = ""
