"""The boundary agreement: all ranks do one thing at one step, or none does.

    prepare(S) to all --every rank: "yes, my step is below S"--> commit
                      --a veto, or silence until the deadline--> abort, then again with a later S

A prepared rank that reaches S waits for the decision, so no rank can pass S before the others
have agreed; a bare look-ahead without that wait put ranks on different steps.
"""

from typing import Literal

from msgspec import structs

from perdure.control.agreement.changes import commit_open, note_high, plan_change, refuse_change
from perdure.control.agreement.groups import ask_members
from perdure.control.agreement.pace import correct_pace, look_ahead, note_answered
from perdure.control.agreement.pauses import commit_pause
from perdure.control.agreements import ANSWER_TIMEOUT_S, TRIES_MAX, OpenBoundary
from perdure.control.answers import answer_open
from perdure.control.job import JobState
from perdure.model.actions import AnyAction
from perdure.model.orders import SendBoundary
from perdure.model.settings import Change
from perdure.model.steering import BoundaryAnswered, BoundaryReached

_REACH_TIMEOUT_S = 600.0


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
    every: int = 0,
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
        deadline_s=now + ANSWER_TIMEOUT_S,
        reason=reason,
        command=command,
        change=change,
        not_before=not_before,
        at_step=at_step,
        every=every,
        ranks=state.asked,
        leaves=leaves,
    )
    if state.of_replicas:
        return ask_members(state, now, state.boundary, reason)
    _choose_step(state, now, state.boundary)
    return [send_boundary(state, reason)]


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
        number=state.boundaries * (TRIES_MAX + 1) + boundary.tries,
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
    if boundary.tries >= TRIES_MAX or boundary.at_step is not None:
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
    boundary.deadline_s = now + ANSWER_TIMEOUT_S
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
