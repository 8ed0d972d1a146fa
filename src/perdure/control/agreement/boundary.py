"""The boundary agreement: all ranks do one thing at one step, or none does.

    prepare(S) to all --every rank: "yes, my step is below S"--> commit
                      --a veto, or silence until the deadline--> abort, then again with a later S

The deadline is `ANSWER_TIMEOUT_S` after the question. Of one world the timer of
`control/machine.py` sees it pass; of replica groups, every event (`advance_agreement`).

A prepared rank that reaches S waits for the decision, so no rank can pass S before the others
have agreed; a bare look-ahead without that wait put ranks on different steps.

S is the step that the ranks will come to once they have heard the question. The journal knows
only now and then how far they are, so a command, or the timer of a checkpoint, brings with it what
the newest heartbeats say (`Pace`), and that is carried on to the moment when the question should
be there. A guess that is too low costs a veto, which tells more, and another try further ahead;
one that is too high costs waiting. Neither can harm.

In a torchft job groups come and go meanwhile, each with a generation of its own:

- Asked are all members of the quorum in force, and all have to answer. With one that dies first
  the try is given up: somebody may have healed from it. The next one waits for the quorum without.
- A member that joins by healing is bound by the promises in the state that it heals from. A
  promise names the quorum it was made in, so that one made after the state was handed out is told
  apart: the try is given up, and begun anew once that quorum is known here.
- The decision goes to every group that runs, spares too; one that starts later finds it in its
  assignment (`Steering`).
"""

import math
from typing import Literal

from msgspec import structs

from perdure.control.agreement.changes import (
    answer_early,
    close_changes,
    commit_open,
    drop_change,
    note_high,
    plan_change,
    refuse_change,
)
from perdure.control.agreement.pauses import commit_pause, drop_pause
from perdure.control.job import JobState
from perdure.control.membership import membership_of
from perdure.control.promises import ANSWER_TIMEOUT_S, TRIES_MAX, OpenBoundary
from perdure.model.events import BoundaryAnswered, BoundaryReached
from perdure.model.orders import AnyAction, SendBoundary
from perdure.model.steering import Change, Pace

_REACH_TIMEOUT_S = 600.0
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
    every: int = 0,
    leaves: tuple[int, ...] = (),
) -> list[AnyAction]:
    """Begin an agreement; the caller has checked that none is open."""
    assert state.boundary is None
    state.boundaries += 1
    state.boundary = OpenBoundary(
        id=f"b{state.boundaries}",
        kind=kind,
        reason=reason,
        command=command,
        change=change,
        not_before=not_before,
        at_step=at_step,
        every=every,
        leaves=leaves,
    )
    return _ask(state, now, state.boundary, reason)


def _ask(state: JobState, now: float, boundary: OpenBoundary, reason: str) -> list[AnyAction]:
    """Begin a try: at the step asked for, that of a pause, or the next that can be."""
    boundary.tries += 1
    boundary.yes.clear()
    boundary.asked_s, boundary.deadline_s = now, now + ANSWER_TIMEOUT_S
    boundary.ranks = membership_of(state).ask(state, boundary.kind)
    steering, pause = state.steering, state.steering.pause
    if boundary.at_step is not None:
        boundary.step = boundary.at_step
    elif pause is not None and not pause.hold and pause.step >= boundary.not_before:
        boundary.step = pause.step
    else:
        lead_s = min(_LEAD_S_MAX, max(_LEAD_S_MIN, steering.answer_s))
        known, tries = max(state.step, 0), boundary.tries
        soonest = choose_next_step(steering.pace, known, now, lead_s, tries)
        boundary.step = max(soonest, boundary.not_before)
    if boundary.every:
        boundary.step = -(-boundary.step // boundary.every) * boundary.every
    if boundary.change is not None:
        boundary.change = structs.replace(boundary.change, step=boundary.step)
    return send_boundary(state, reason)


def send_boundary(
    state: JobState, reason: str, move: Literal["abort"] | None = None
) -> list[AnyAction]:
    """Return the open agreement's current move (or its abort) for all ranks; safe to repeat."""
    boundary = state.boundary
    assert boundary is not None
    addressed = membership_of(state).address(state, boundary, move or boundary.move)
    return [
        SendBoundary(
            id=boundary.name + suffix,
            move=move or boundary.move,
            kind=boundary.kind,
            step=boundary.step,
            ranks=ranks,
            generation=world.generation,
            number=state.boundaries * (TRIES_MAX + 1) + boundary.tries,
            change=boundary.change,
            leaves=boundary.leaves,
            epoch=world.epoch if boundary.move == "commit" else 0,
            reason=reason,
        )
        for world, suffix, ranks in addressed
    ]


def answer_boundary(state: JobState, now: float, event: BoundaryAnswered) -> list[AnyAction]:
    """Take one rank's answer; commit once all have said yes, try again after a no."""
    boundary, quorum = state.boundary, state.quorum
    if boundary is None or not boundary.is_meant(event.id):
        return []
    if boundary.move == "commit":
        if event.planned:
            boundary.planned.add(event.rank)
        return release_boundary(state)
    state.step = max(state.step, event.step)
    note_high(state, event.step)
    if event.refused:
        actions = drop_boundary(state, f"rank {event.rank}: {event.reason}")
        return actions + refuse_change(state, boundary.command, event.rank, event.reason)
    if not event.ok:
        _correct_pace(state, now, event.step)
        return retry_boundary(state, now, event.reason or f"rank {event.rank} had passed the step")
    if boundary.kind == "set" and event.quorum_id > quorum.asked_quorum:
        quorum.needed = max(quorum.needed, event.quorum_id)
        return retry_boundary(state, now, f"quorum {event.quorum_id} was formed meanwhile")
    boundary.yes.add(event.rank)
    return commit_boundary(state, now)


def commit_boundary(state: JobState, now: float) -> list[AnyAction]:
    """Decide that it shall be, once all who are asked have promised."""
    boundary, steering = state.boundary, state.steering
    if boundary is None or boundary.move == "commit" or not boundary.yes >= set(boundary.ranks):
        return []
    steering.answer_s += 0.3 * (now - boundary.asked_s - steering.answer_s)
    boundary.move = "commit"
    boundary.deadline_s = now + _REACH_TIMEOUT_S
    who = f"ranks {sorted(boundary.ranks)}" if state.quorum.asked else "all ranks"
    actions = send_boundary(state, f"{who} agreed on step {boundary.step}")
    command = state.commands.get(boundary.command)
    if command is not None:  # It will be done; its answer comes then.
        command.settled |= membership_of(state).map_settled(state, boundary)
    if boundary.kind == "set":
        actions += commit_open(state, boundary)
    elif boundary.kind == "pause":
        actions += commit_pause(state, now, boundary)
    return actions


def release_boundary(state: JobState) -> list[AnyAction]:
    """Make room for the next agreement once every rank will act by itself."""
    done = close_boundary(state)
    return plan_change(state, done.name) if done is not None else []


def retry_boundary(state: JobState, now: float, reason: str) -> list[AnyAction]:
    """Abort this try and prepare a later step; after too many, give it up.

    Where it is not known whom to ask, it is begun again once that is.
    """
    boundary = state.boundary
    assert boundary is not None
    actions = drop_boundary(state, reason)
    if not membership_of(state).is_whole(state):
        return actions
    passed = boundary.at_step is not None and state.step >= boundary.at_step
    if boundary.tries >= TRIES_MAX or passed:
        if (
            boundary.kind in ("set", "pause") or state.quorum.asked
        ):  # Others are by `after_boundary`.
            why = f"the ranks could not agree on a step: {reason}"
            actions += state.answer_open(boundary.command, False, why, {})
        return actions
    state.boundary = boundary
    if boundary.change is not None:  # An epoch that was sent once is never used again.
        state.steering.settings_epoch += 1
        boundary.change = structs.replace(boundary.change, epoch=state.steering.settings_epoch)
    return actions + _ask(state, now, boundary, f"again at a later step: {reason}")


def drop_boundary(state: JobState, reason: str) -> list[AnyAction]:
    """End what is open: what is not decided is aborted; a commit is never taken back.

    A later controller has to repeat the abort.
    """
    actions: list[AnyAction] = []
    if state.boundary is not None and state.boundary.move == "prepare":
        actions = send_boundary(state, reason, "abort")
        state.aborted = [order for order in actions if isinstance(order, SendBoundary)]
    state.boundary = None
    return actions


def send_boundary_again(state: JobState, reason: str) -> list[AnyAction]:
    """Return what a new controller says of agreements: the open one, or the end of the last.

    Nobody but the controller may end a prepared rank's wait: it has promised, and the others may
    be told to go ahead. So what may have been lost with the older controller is said again.
    """
    if state.boundary is not None:
        return send_boundary(state, reason)
    return [last for last in state.aborted if state.find_world(last.generation) is not None]


def ask_again(state: JobState, now: float, event: BoundaryReached) -> list[AnyAction]:
    """Begin a later try of what all ranks have dropped, also after a commit that reached none.

    What the ranks did is the truth: a commit that they have dropped is taken back.
    """
    actions = [*drop_change(state, event), *drop_pause(state, now, event)]
    boundary = state.boundary
    if boundary is None or not boundary.is_meant(event.id):
        return actions
    boundary.move = "prepare"
    boundary.reached.clear()
    boundary.planned.clear()
    command = state.commands.get(boundary.command)
    if command is not None:
        command.settled.pop("at_step", None)
    state.step = max(state.step, event.step)
    return actions + retry_boundary(state, now, event.error)


def reach_boundary(state: JobState, event: BoundaryReached) -> OpenBoundary | None:
    """Take one rank's report; return the agreement once every rank has carried it out."""
    boundary = state.boundary
    if boundary is None or not boundary.is_meant(event.id):
        return None
    boundary.reached.add(event.rank)
    return close_boundary(state)


def close_boundary(state: JobState) -> OpenBoundary | None:
    """Make room for the next agreement, and return this one, once all have carried it out."""
    boundary = state.boundary
    if boundary is None or boundary.move != "commit":
        return None
    waited = membership_of(state).list_bound(state, boundary.ranks)
    if not boundary.reached | boundary.planned >= waited:
        return None
    state.boundary = None
    return boundary


def expire_boundary(state: JobState, now: float) -> list[AnyAction]:
    """Ask for a later step where answers are overdue; where it is the step itself, make room."""
    boundary = state.boundary
    if boundary is None or now < boundary.deadline_s:
        return []
    if boundary.move == "commit":
        state.boundary = None  # Who has not come to the step is waited for no longer.
        return []
    silent = sorted(set(boundary.ranks) - boundary.yes)
    return retry_boundary(state, now, f"ranks {silent} did not answer")


def advance_agreement(state: JobState, now: float) -> list[AnyAction]:
    """Do what follows from who is gone, of replica groups. Called after every event."""
    if state.over:
        state.boundary = None
        return []
    actions, boundary = release_boundary(state), state.boundary
    if boundary is not None and boundary.move == "prepare":
        silent = set(boundary.ranks) - boundary.yes
        if not silent <= membership_of(state).list_bound(state, boundary.ranks):
            actions += drop_boundary(state, "one who was asked is gone")  # Begun again without it.
    actions += expire_boundary(state, now)
    return [*actions, *close_changes(state), *answer_early(state)]


# --- the step ------------------------------------------------------------------------------------


def note_pace(state: JobState, pace: Pace | None) -> None:
    """Take what an event has brought; another generation's is worth nothing."""
    if pace is not None:
        known = membership_of(state).is_current(state, pace.generation)
        state.steering.pace = pace if known else None


def choose_next_step(pace: Pace | None, known: int, now: float, lead_s: float, tries: int) -> int:
    """Return the step that the ranks should come to next, `lead_s` from `now`.

    `known` is a step that some rank is known to have committed. Each further try looks twice as
    far ahead, by time and by steps.

    >>> pace = Pace(generation=0, step=100, at_s=10.0, step_s=0.1)
    >>> choose_next_step(pace, known=90, now=10.12, lead_s=0.01, tries=1)
    102
    >>> choose_next_step(None, known=90, now=10.12, lead_s=0.01, tries=1)
    92
    """
    if pace is None or now - pace.at_s > _PACE_S + pace.step_s:
        return known + (1 << min(tries, 10))
    there_s = now + lead_s * (1 << (tries - 1))
    expected = math.floor(pace.estimate_step(there_s) + _JITTER_STEPS)
    return max(expected + 1, known + (1 << min(tries - 1, 10)))


def _correct_pace(state: JobState, now: float, step: int) -> None:
    """A rank was further than expected: go on from there."""
    pace = state.steering.pace
    if pace is not None and pace.estimate_step(now) < step + 1:
        state.steering.pace = structs.replace(pace, step=step, at_s=now)
