"""Room for checkpoints on a disk, and the event that tells of its change."""

from typing import Literal

from perdure.model.event import Event

Grade = Literal["ok", "low", "short"]
"""`low`: enough for now, not for all that will be kept; `short`: not even for the next one."""


class RoomNoted(Event, frozen=True, kw_only=True):
    """The room where checkpoints land has become less than is needed, or enough again."""

    grade: Grade
    reason: str
    place: str
    at_s: float
