"""The boundary agreement: all ranks do one thing at one step, or none does.

    prepare(S) to all --every rank: "yes, my step is below S"--> commit
                      --a veto, or silence until the deadline--> abort, then again with a later S

A prepared rank that reaches S waits for the decision, so no rank can pass S before the others
have agreed; a bare look-ahead without that wait put ranks on different steps. The look-ahead
grows with every try, for jobs whose steps are shorter than a message's way.
"""

from typing import Literal

from perdure.control.state import ControllerState, OpenBoundary
from perdure.model.actions import AnyAction, SendBoundary
from perdure.model.events import BoundaryAnswered, BoundaryReached

_ANSWER_TIMEOUT_S = 5.0
_REACH_TIMEOUT_S = 600.0
_TRIES_MAX = 12


def open_boundary(
    state: ControllerState,
    now: float,
    kind: Literal["checkpoint", "stop", "drain"],
    *,
    reason: str,
    command: str = "",
) -> list[AnyAction]:
    """Begin an agreement; the caller has checked that none is open."""
    assert state.boundary is None
    state.boundaries += 1
    step = max(state.step, 0) + 2
    state.boundary = OpenBoundary(
        id=f"b{state.boundaries}",
        kind=kind,
        step=step,
        move="prepare",
        tries=1,
        deadline_s=now + _ANSWER_TIMEOUT_S,
        reason=reason,
        command=command,
    )
    return [send_boundary(state, reason)]


def send_boundary(
    state: ControllerState, reason: str, move: Literal["abort"] | None = None
) -> SendBoundary:
    """Return the open agreement's current move (or its abort) for all ranks; safe to repeat."""
    boundary = state.boundary
    assert boundary is not None
    return SendBoundary(
        id=f"{boundary.id}.{boundary.tries}",
        move=move or boundary.move,
        kind=boundary.kind,
        step=boundary.step,
        ranks=state.world,
        generation=state.generation,
        number=state.boundaries * (_TRIES_MAX + 1) + boundary.tries,
        reason=reason,
    )


def answer_boundary(state: ControllerState, now: float, event: BoundaryAnswered) -> list[AnyAction]:
    """Take one rank's answer; commit once all have said yes, try again after a no."""
    boundary = state.boundary
    if boundary is None or event.id != f"{boundary.id}.{boundary.tries}":
        return []
    if boundary.move == "commit":
        return []
    state.step = max(state.step, event.step)
    if not event.ok:
        return retry_boundary(state, now, event.reason or f"rank {event.rank} had passed the step")
    boundary.yes.add(event.rank)
    if len(boundary.yes) < len(state.world):
        return []
    boundary.move = "commit"
    boundary.deadline_s = now + _REACH_TIMEOUT_S
    return [send_boundary(state, f"all ranks agreed on step {boundary.step}")]


def retry_boundary(state: ControllerState, now: float, reason: str) -> list[AnyAction]:
    """Abort this try and prepare a later step; after too many, give it up."""
    boundary = state.boundary
    assert boundary is not None
    actions: list[AnyAction] = [abort_boundary(state, reason)]
    if boundary.tries >= _TRIES_MAX:
        state.boundary = None
        return actions
    boundary.tries += 1
    boundary.yes.clear()
    boundary.step = max(state.step, 0) + 2 ** min(boundary.tries, 10)
    boundary.deadline_s = now + _ANSWER_TIMEOUT_S
    return [*actions, send_boundary(state, f"again at a later step: {reason}")]


def abort_boundary(state: ControllerState, reason: str) -> SendBoundary:
    """Return the abort of the open try, which a later controller has to repeat."""
    state.aborted = send_boundary(state, reason, "abort")
    return state.aborted


def send_boundary_again(state: ControllerState, reason: str) -> list[SendBoundary]:
    """Return what a new controller says of agreements: the open one, or the end of the last.

    Nobody but the controller may end a prepared rank's wait: it has promised, and the others may
    be told to go ahead. So what may have been lost with the older controller is said again.
    """
    if state.boundary is not None:
        return [send_boundary(state, reason)]
    last = state.aborted
    return [last] if last is not None and last.generation == state.generation else []


def reach_boundary(state: ControllerState, event: BoundaryReached) -> OpenBoundary | None:
    """Take one rank's report; return the agreement once every rank has carried it out."""
    boundary = state.boundary
    if boundary is None or event.id != f"{boundary.id}.{boundary.tries}":
        return None
    boundary.reached.add(event.rank)
    if len(boundary.reached) < len(state.world):
        return None
    state.boundary = None
    return boundary
