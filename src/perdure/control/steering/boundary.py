"""The boundary agreement: all ranks do one thing at one step, or none does.

    prepare(S) to all --every rank: "yes, my step is below S"--> commit
                      --a veto, or silence until the deadline--> abort, then again with a later S

A prepared rank that reaches S waits for the decision, so no rank can pass S before the others
have agreed; a bare look-ahead without that wait put ranks on different steps.

S is the step that the ranks will come to once they have heard the question. The journal knows
only now and then how far they are, so a command, or the timer of a checkpoint, brings with it what
the newest heartbeats say (`Pace`), and that is carried on to the moment when the question should
be there. A guess that is too low costs a veto, which tells more, and another try further ahead;
one that is too high costs waiting. Neither can harm.
"""

import math
from typing import Literal

from msgspec import structs

from perdure.control.agreements import OpenBoundary
from perdure.control.answers import answer_open
from perdure.control.job import JobState
from perdure.control.steering.changes import commit_open, note_high, plan_change, refuse_change
from perdure.control.steering.pauses import commit_pause
from perdure.model.actions import AnyAction
from perdure.model.orders import SendBoundary
from perdure.model.settings import Change
from perdure.model.steering import BoundaryAnswered, BoundaryReached, Pace

_ANSWER_TIMEOUT_S = 5.0
_REACH_TIMEOUT_S = 600.0
_TRIES_MAX = 12
_PACE_S = 1.0
"""Older than this and a step, a pace is not carried on: the ranks may have stood meanwhile."""
_JITTER_STEPS = 0.1
"""Steps are not all of one length."""
_LEAD_S_MIN, _LEAD_S_MAX = 0.004, 1.0


def open_boundary(
    state: JobState,
    now: float,
    kind: Literal["checkpoint", "stop", "drain", "set", "pause"],
    *,
    reason: str,
    command: str = "",
    change: Change | None = None,
    not_before: int = 0,
    at_step: int | None = None,
    leaves: tuple[int, ...] = (),
) -> list[AnyAction]:
    """Begin an agreement; the caller has checked that none is open."""
    assert state.boundary is None
    state.boundaries += 1
    state.boundary = OpenBoundary(
        id=f"b{state.boundaries}",
        kind=kind,
        step=0,
        move="prepare",
        tries=1,
        deadline_s=now + _ANSWER_TIMEOUT_S,
        reason=reason,
        command=command,
        change=change,
        not_before=not_before,
        at_step=at_step,
        ranks=state.asked,
        leaves=leaves,
    )
    _choose_step(state, now, state.boundary)
    return [send_boundary(state, reason)]


def note_pace(state: JobState, pace: Pace | None) -> None:
    """Take what an event has brought; another generation's is worth nothing."""
    if pace is not None:
        known = state.the_spec().torchft.replicas or pace.generation == state.world.generation
        state.steering.pace = pace if known else None


def find_next_step(pace: Pace | None, known: int, now: float, lead_s: float, tries: int) -> int:
    """Return the step that the ranks should come to next, `lead_s` from `now`.

    `known` is a step that some rank is known to have committed. Each further try looks twice as
    far ahead, by time and by steps.

    >>> pace = Pace(generation=0, step=100, at_s=10.0, step_s=0.1)
    >>> find_next_step(pace, known=90, now=10.12, lead_s=0.01, tries=1)
    102
    >>> find_next_step(None, known=90, now=10.12, lead_s=0.01, tries=1)
    92
    """
    if pace is None or now - pace.at_s > _PACE_S + pace.step_s:
        return known + (1 << min(tries, 10))
    there_s = now + lead_s * (1 << (tries - 1))
    expected = math.floor(pace.find_step(there_s) + _JITTER_STEPS)
    return max(expected + 1, known + (1 << min(tries - 1, 10)))


def look_ahead(state: JobState, now: float, tries: int) -> int:
    """Return the step to ask for, by what is known of the ranks' pace and of earlier questions."""
    steering = state.steering
    lead_s = min(_LEAD_S_MAX, max(_LEAD_S_MIN, steering.answer_s))
    return find_next_step(steering.pace, max(state.step, 0), now, lead_s, tries)


def note_answered(state: JobState, now: float, boundary: OpenBoundary) -> None:
    """All have answered: so long does a question take."""
    state.steering.answer_s += 0.3 * (now - boundary.asked_s - state.steering.answer_s)


def correct_pace(state: JobState, now: float, step: int) -> None:
    """A rank was further than expected: go on from there."""
    pace = state.steering.pace
    if pace is not None and pace.find_step(now) < step + 1:
        state.steering.pace = structs.replace(pace, step=step, at_s=now)


def _choose_step(state: JobState, now: float, boundary: OpenBoundary) -> None:
    """Set the step of a try: the one asked for, that of a pause, or the next that can be."""
    boundary.asked_s = now
    steering = state.steering
    pause = steering.pause
    if boundary.at_step is not None:
        boundary.step = boundary.at_step
    elif pause is not None and pause.step >= boundary.not_before:
        boundary.step = pause.step
    else:
        boundary.step = max(look_ahead(state, now, boundary.tries), boundary.not_before)
    if boundary.change is not None:
        boundary.change = structs.replace(boundary.change, step=boundary.step)


def send_boundary(
    state: JobState, reason: str, move: Literal["abort"] | None = None
) -> SendBoundary:
    """Return the open agreement's current move (or its abort) for all ranks; safe to repeat."""
    boundary = state.boundary
    assert boundary is not None
    return SendBoundary(
        id=f"{boundary.id}.{boundary.tries}",
        move=move or boundary.move,
        kind=boundary.kind,
        step=boundary.step,
        ranks=boundary.ranks,
        generation=state.world.generation,
        number=state.boundaries * (_TRIES_MAX + 1) + boundary.tries,
        change=boundary.change,
        leaves=boundary.leaves,
        epoch=state.world.elastic.epoch if boundary.move == "commit" else 0,
        reason=reason,
    )


def answer_boundary(state: JobState, now: float, event: BoundaryAnswered) -> list[AnyAction]:
    """Take one rank's answer; commit once all have said yes, try again after a no."""
    boundary = state.boundary
    if boundary is None or event.id != f"{boundary.id}.{boundary.tries}":
        return []
    if boundary.move == "commit":
        if event.planned:
            boundary.planned.add(event.rank)
        return release_boundary(state)
    state.step = max(state.step, event.step)
    note_high(state, event.step)
    if event.refused:
        actions: list[AnyAction] = [abort_boundary(state, f"rank {event.rank}: {event.reason}")]
        state.boundary = None
        return actions + refuse_change(state, boundary.command, event.rank, event.reason)
    if not event.ok:
        correct_pace(state, now, event.step)
        return retry_boundary(state, now, event.reason or f"rank {event.rank} had passed the step")
    boundary.yes.add(event.rank)
    return commit_boundary(state, now)


def commit_boundary(state: JobState, now: float) -> list[AnyAction]:
    """Decide that it shall be, once all who are asked have promised."""
    boundary = state.boundary
    if boundary is None or boundary.move == "commit" or not boundary.yes >= set(boundary.ranks):
        return []
    note_answered(state, now, boundary)
    boundary.move = "commit"
    boundary.deadline_s = now + _REACH_TIMEOUT_S
    actions: list[AnyAction] = [send_boundary(state, f"all ranks agreed on step {boundary.step}")]
    command = state.commands.get(boundary.command)
    alone = boundary.kind == "checkpoint" and state.world.elastic.members  # One saves for all.
    if command is not None and (alone or boundary.kind in ("set", "pause")):
        command.args["at_step"] = boundary.step  # It will be done; its answer comes then.
    if boundary.kind == "set":
        actions += commit_open(state, boundary)
    elif boundary.kind == "pause":
        actions += commit_pause(state, now, boundary)
    return actions


def release_boundary(state: JobState) -> list[AnyAction]:
    """Make room for the next agreement once every rank will act by itself."""
    boundary = state.boundary
    if boundary is None or boundary.move != "commit":
        return []
    if not boundary.planned | boundary.reached >= set(boundary.ranks):
        return []
    state.boundary = None
    return plan_change(state, f"{boundary.id}.{boundary.tries}")


def retry_boundary(state: JobState, now: float, reason: str) -> list[AnyAction]:
    """Abort this try and prepare a later step; after too many, give it up."""
    boundary = state.boundary
    assert boundary is not None
    actions: list[AnyAction] = [abort_boundary(state, reason)]
    if boundary.tries >= _TRIES_MAX or boundary.at_step is not None:
        state.boundary = None
        if boundary.kind in ("set", "pause"):
            why = f"the ranks could not agree on a step: {reason}"
            actions += answer_open(state, boundary.command, False, why, {})
        return actions
    boundary.tries += 1
    boundary.yes.clear()
    if boundary.change is not None:  # An epoch that was sent once is never used again.
        state.steering.epoch += 1
        boundary.change = structs.replace(boundary.change, epoch=state.steering.epoch)
    _choose_step(state, now, boundary)
    boundary.deadline_s = now + _ANSWER_TIMEOUT_S
    return [*actions, send_boundary(state, f"again at a later step: {reason}")]


def abort_boundary(state: JobState, reason: str) -> SendBoundary:
    """Return the abort of the open try, which a later controller has to repeat."""
    state.aborted = send_boundary(state, reason, "abort")
    return state.aborted


def send_boundary_again(state: JobState, reason: str) -> list[SendBoundary]:
    """Return what a new controller says of agreements: the open one, or the end of the last.

    Nobody but the controller may end a prepared rank's wait: it has promised, and the others may
    be told to go ahead. So what may have been lost with the older controller is said again.
    """
    if state.boundary is not None:
        return [send_boundary(state, reason)]
    last = state.aborted
    return [last] if last is not None and last.generation == state.world.generation else []


def reach_boundary(state: JobState, event: BoundaryReached) -> OpenBoundary | None:
    """Take one rank's report; return the agreement once every rank has carried it out."""
    boundary = state.boundary
    if boundary is None or event.id != f"{boundary.id}.{boundary.tries}":
        return None
    boundary.reached.add(event.rank)
    return close_boundary(state)


def close_boundary(state: JobState) -> OpenBoundary | None:
    """Make room for the next agreement, and return this one, once all have carried it out."""
    boundary = state.boundary
    if boundary is None or boundary.move != "commit":
        return None
    if not boundary.reached | boundary.planned >= set(boundary.ranks):
        return None
    state.boundary = None
    return boundary
