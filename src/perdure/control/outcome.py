"""What an event means to a world: what is to be done, and whether the world goes on."""

from dataclasses import dataclass, field

from perdure.model.actions import AnyAction


@dataclass(frozen=True, slots=True)
class Outcome:
    """What follows from an event for a world that it may have broken."""

    actions: list[AnyAction] = field(default_factory=list)
    """What is to be done where the world goes on."""
    broken: str = ""
    """Why the world cannot go on as it is, and another has to be formed; empty where it goes on."""
