"""A failure as one fact of the journal, and what is said of its cause.

A controller decides what failed, who is to blame, and what follows; it writes that down once, and
every report, screen and alert reads it there.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from perdure.model.event import Event
from perdure.model.exits import ExitRecord
from perdure.model.verdicts import Verdict

Rung = Literal["restart", "give up", "reform", "retry", "move", "none"]
"""What follows: the next generation; the end; the next epoch without who was lost, or with the same
members; the next world without nodes that were to be left; nothing, for it was no failure."""


BROKEN = "the world broke"
"""Cause of an epoch that was formed again although nobody was lost."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What failed, as far as it is known when something is decided about it."""

    cause: str
    culprit: str
    at_step: int
    """Committed steps; -1 where they are not known."""
    failure_s: float
    detected_s: float
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


def find_early(exits: Iterable[ExitRecord], record: ExitRecord) -> int | None:
    """Return the first rank that left with exit code 0 before `record`; None where none did.

    Its leaving in good order took the others' connections away.
    """
    if not record.lost_peer:
        return None
    left = [e for e in exits if not e.failed and not e.asked and e.at_s <= record.at_s]
    return min(left, key=lambda e: (e.at_s, e.rank)).rank if left else None


def explain_exit(record: ExitRecord, detected_s: float, step: int, early: int | None) -> Cause:
    """Return what a rank's end is as a cause; `early` is who had left before (`find_early`)."""
    culprit, cause = f"rank {record.rank}", record.cause
    where = f" at step {step}" if step >= 0 else ""
    reason = f"{culprit} ended with {record.cause}{where}"
    if early is not None:
        culprit, cause = f"rank {early}", f"left early; then {culprit}: {cause}"
        reason = f"{culprit} ended with exit code 0 while others needed it: {reason}"
    return Cause(
        cause=cause, culprit=culprit, at_step=step,
        failure_s=record.at_s, detected_s=detected_s, reason=reason,
    )  # fmt: skip


def explain_verdict(verdict: Verdict) -> Cause:
    """Return what a verdict that is acted upon is as a cause."""
    return Cause(
        cause=f"{verdict.kind} ({verdict.activity})",
        culprit=str(verdict.culprit),
        at_step=verdict.step,
        failure_s=verdict.first_seen_s,
        detected_s=verdict.confirmed_s,
        reason=verdict.reason,
    )


def explain_node(
    node: int, cause: str, step: int, lost_s: float, known_s: float, reason: str
) -> Cause:
    """Return the loss of a node, or of its keeper, as a cause."""
    return Cause(
        cause=cause, culprit=f"node {node}", at_step=step,
        failure_s=lost_s, detected_s=known_s, reason=reason,
    )  # fmt: skip


def explain_break(at_s: float) -> Cause:
    """Return that a world broke although nobody is lost: how far it was its members say."""
    return Cause(
        cause=BROKEN, culprit="the world", at_step=-1,
        failure_s=at_s, detected_s=at_s, reason="nobody is lost",
    )  # fmt: skip


def name_preemption(cause: Cause, node: int, words: str) -> Cause:
    """Return a loss that a platform had announced of `node` as what it is: the platform's doing."""
    what = cause.cause if cause.culprit.startswith("node") else cause.reason
    announced = f"Preemption ({words}); {what}"
    return msgspec.structs.replace(cause, cause=announced, culprit=f"node {node}")
