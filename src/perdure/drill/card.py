"""The report card of a drill: what was done to a job, and what became of it; a contract, as JSON.

A page or a template takes a `Card` as it is: everything that is shown of a drill is in it.
"""

from typing import Literal

import msgspec

from perdure.service.results import Kept

Verdict = Literal["passed", "failed", "not tried"]
Losses = Literal["equal", "differ", "not compared"]


class FaultRow(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, and what the job made of it. Seconds count from the instant of the fault."""

    fault: str
    """Its name, such as `crash`."""
    verdict: Verdict
    why: str = ""
    """Why it failed or was not tried; or what else is to be known."""
    what: str = ""
    """What was done, in words."""
    step: int = -1
    """Committed steps when it was done; -1: none are known."""
    found_s: float | None = None
    """Until perdure knew; None: it never did."""
    found_as: str = ""
    """What it found, in its own words."""
    culprit_right: bool | None = None
    """Whether it blamed who was harmed; None: it found nothing."""
    back_s: float | None = None
    """Until the job was as before: it trained, or had its part, or its checkpoint; None: never,
    or this was not asked."""
    steps_redone: int | None = None
    """None: not known, because the script declares no steps, or it did not come back."""
    losses: Losses = "not compared"
    losses_why: str = ""
    """Where they differ, or why they were not compared."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """`perdure drill --json`."""

    job: str
    seed: int
    ranks: int
    nodes: int
    declares_steps: bool
    """Whether the script does (`run.steps`, a Trainer's, an elastic one); False also where it never
    trained."""
    passed: bool
    """Every fault that applies was tried, and passed."""
    rows: tuple[FaultRow, ...]
    reason: str = ""
    """Why nothing could be tried, or the drill ended early."""
    compared: str = ""
    """What was compared with the undisturbed run, such as `loss`."""
    budget_s: float
    drilled_s: float
    """The time that the faults took, starts among it."""
    undisturbed_s: float = 0.0
    """The time of the run that nothing was done to; it does not count for the budget."""
    starts: int = 0
    """How often the job was started anew for it, the undisturbed run left out."""
    changed: tuple[str, ...] = ()
    """What is otherwise than in the user's job, a sentence each."""
    notes: tuple[str, ...] = ()
    """What else was seen, such as failures that nobody had made."""
    version: str = ""
    """Perdure's."""
    place: str = ""
    """Where it was, such as `box1, box2`; empty: on one machine, whose nodes are emulated."""

    @property
    def exit_code(self) -> int:
        """Return what `perdure drill` leaves with."""
        return 0 if self.passed else 1


class KeptDrill(Kept, frozen=True, kw_only=True, tag="drill"):
    """A card that `perdure dash` shows later."""

    card: Card
