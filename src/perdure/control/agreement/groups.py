"""`perdure set` in a torchft job: one change, the same in all replica groups from one step on.

As in `steering.boundary`, each rank that trains promises while its step is below S, and one that
comes to S waits for the decision. Groups come and go meanwhile, each with a generation of its own:

- Asked are all members of the quorum in force, and all have to answer. With one that dies first
  the try is given up: somebody may have healed from it. The next one waits for the quorum without.
- A member that joins by healing is bound by the promises in the state that it heals from. A
  promise names the quorum it was made in, so that one made after the state was handed out is told
  apart: the try is given up, and begun anew once that quorum is known here.
- The decision goes to every group that runs, spares too; one that starts later finds it in its
  assignment (`Steering`).
"""

from typing import Any, Literal

import msgspec

from perdure.control.agreement.changes import (
    FAR_STEPS,
    commit_open,
    declare_keys,
    keep_change,
    note_high,
    refuse_change,
)
from perdure.control.agreement.pace import correct_pace, look_ahead, note_answered
from perdure.control.agreements import ANSWER_TIMEOUT_S, TRIES_MAX, OpenBoundary, OpenChange
from perdure.control.answers import answer_open
from perdure.control.job import JobState
from perdure.control.membership import membership_of
from perdure.control.membership.quorum import is_whole
from perdure.model.actions import AnyAction
from perdure.model.orders import SendBoundary
from perdure.model.steering import BoundaryAnswered, BoundaryReached, KeysDeclared


def declare_group_keys(state: JobState, event: KeysDeclared) -> None:
    """Take over the keys of the newest group that has trained."""
    for group in state.worlds.values():
        group.trained |= group.generation == event.generation
    declare_keys(state, event)
    note_high(state, event.step)
    state.step = max(state.step, event.step)
    state.mark = max(state.mark, event.step)


def answer_group_boundary(state: JobState, now: float, event: BoundaryAnswered) -> list[AnyAction]:
    """Take one rank's answer."""
    boundary, quorum = state.boundary, state.quorum
    name = event.id.partition("@")[0]
    if boundary is None or name != f"{boundary.id}.{boundary.tries}":
        return []
    if boundary.move == "commit":
        if event.planned:
            boundary.planned.add(event.rank)
        return []
    state.step = max(state.step, event.step)
    note_high(state, event.step)
    if event.refused:
        actions = _decide(state, boundary, "abort", f"rank {event.rank}: {event.reason}")
        state.boundary = None
        return actions + refuse_change(state, boundary.command, event.rank, event.reason)
    if not event.ok:
        correct_pace(state, now, event.step)
        return _retry(state, now, event.reason or f"rank {event.rank} had passed the step")
    if boundary.kind == "set" and event.quorum_id > quorum.asked_quorum:
        quorum.needed = max(quorum.needed, event.quorum_id)
        return _retry(state, now, f"quorum {event.quorum_id} was formed meanwhile")
    boundary.yes.add(event.rank)
    return []


def reach_group_change(state: JobState, event: BoundaryReached) -> None:
    """Take one rank's report that a change is in force there."""
    name = event.id.partition("@")[0]
    state.step = max(state.step, event.step)
    boundary = state.boundary
    if boundary is not None and name == f"{boundary.id}.{boundary.tries}":
        boundary.reached.add(event.rank)
    for open_ in state.steering.open:
        if name in (open_.boundary, f"e{open_.change.epoch}"):
            open_.reached.add(event.rank)


def advance_agreement(state: JobState, now: float) -> list[AnyAction]:
    """Do what follows from the answers, and from who is gone. Called after every event."""
    if state.over:
        state.boundary = None
        return []
    actions: list[AnyAction] = []
    boundary = state.boundary
    if boundary is not None:
        actions += _advance_open(state, now, boundary)
    for open_ in list(state.steering.open):
        actions += _close(state, open_)
    return actions


def agreement_again(state: JobState, reason: str) -> list[AnyAction]:
    """Return what a new controller says: the open agreement, or the end of the last."""
    boundary = state.boundary
    if boundary is not None:
        return _decide(state, boundary, boundary.move, reason)
    return list(state.quorum.aborted)


# --- one agreement ------------------------------------------------------------------------------


def _find_asked(state: JobState) -> set[int]:
    """Return the ranks that were asked and still count."""
    asked, spec = state.quorum.asked, state.the_spec()
    members = [g for g in state.list_members() if asked.get(g.number) == g.generation]
    return {rank for g in members for rank in spec.ranks_of(g.number)}


def ask_members(
    state: JobState, now: float, boundary: OpenBoundary, reason: str
) -> list[AnyAction]:
    """Choose the step of a try, and ask the members of the quorum in force.

    To save asks one group of them only, since all have the same state at a step.
    """
    members = state.list_members()
    asked = members[:1] if boundary.kind == "checkpoint" else members
    boundary.asked_s, boundary.deadline_s = now, now + ANSWER_TIMEOUT_S
    if boundary.at_step is not None:
        boundary.step = boundary.at_step
    else:
        boundary.step = max(look_ahead(state, now, boundary.tries), boundary.not_before)
    if boundary.every:
        boundary.step = -(-boundary.step // boundary.every) * boundary.every
    if boundary.change is not None:
        boundary.change = msgspec.structs.replace(boundary.change, step=boundary.step)
    state.quorum.asked = {g.number: g.generation for g in asked}
    state.quorum.asked_quorum = state.quorum.quorum_id
    return _decide(state, boundary, "prepare", reason)


def _decide(
    state: JobState,
    boundary: OpenBoundary,
    move: Literal["prepare", "commit", "abort"],
    reason: str,
) -> list[AnyAction]:
    """Return a move for each group: those that were asked, or, of `set`, a decision to all."""
    spec, quorum = state.the_spec(), state.quorum
    sent: list[AnyAction] = []
    for number, group in sorted(state.worlds.items()):
        if not group.has_ranks:
            continue
        mine = move == "prepare" or boundary.kind == "checkpoint"
        if mine and quorum.asked.get(number) != group.generation:
            continue
        order = SendBoundary(
            id=f"{boundary.id}.{boundary.tries}@{number}",
            move=move,
            kind=boundary.kind,
            step=boundary.step,
            ranks=tuple(spec.ranks_of(number)),
            generation=group.generation,
            number=state.boundaries * (TRIES_MAX + 1) + boundary.tries,
            change=boundary.change,
            reason=reason,
        )
        sent.append(order)
    if move == "abort":
        quorum.aborted = [a for a in sent if isinstance(a, SendBoundary)]
    return sent


def _advance_open(state: JobState, now: float, boundary: OpenBoundary) -> list[AnyAction]:
    asked = _find_asked(state)
    if boundary.move == "commit":
        found = next((o for o in state.steering.open if o.command == boundary.command), None)
        reached = found.reached if found is not None else boundary.reached
        if asked <= boundary.planned | reached:
            state.boundary = None
        return []
    spec = state.the_spec()
    all_asked = {rank for group in state.quorum.asked for rank in spec.ranks_of(group)}
    if not all_asked - boundary.yes <= asked:
        actions = _decide(state, boundary, "abort", "one who was asked is gone")
        state.boundary = None  # Begun again with the quorum without it.
        return actions
    if not all_asked <= boundary.yes:
        overdue = now >= boundary.deadline_s
        return _retry(state, now, "not all ranks have answered in time") if overdue else []
    note_answered(state, now, boundary)
    boundary.move = "commit"
    reason = f"ranks {sorted(all_asked)} agreed on step {boundary.step}"
    actions = _decide(state, boundary, "commit", reason)
    command = state.commands.get(boundary.command)
    if command is not None:
        command.args["at_step"] = boundary.step  # It will be done; its answer comes then.
    if boundary.kind == "set":
        return actions + commit_open(state, boundary)
    if command is not None:
        command.args["generation"] = next(iter(state.quorum.asked.values()))
    return actions


def _retry(state: JobState, now: float, reason: str) -> list[AnyAction]:
    boundary = state.boundary
    assert boundary is not None
    actions = _decide(state, boundary, "abort", reason)
    if not is_whole(state):
        state.boundary = None  # Begun again once that quorum is known.
        return actions
    passed = boundary.at_step is not None and state.step >= boundary.at_step
    if boundary.tries >= TRIES_MAX or passed:
        state.boundary = None
        why = f"the ranks could not agree on a step: {reason}"
        return actions + answer_open(state, boundary.command, False, why, {})
    boundary.tries += 1
    boundary.yes.clear()
    if boundary.change is not None:
        state.steering.epoch += 1  # One that was sent once is never used again.
        boundary.change = msgspec.structs.replace(boundary.change, epoch=state.steering.epoch)
    return actions + ask_members(state, now, boundary, f"again at a later step: {reason}")


def tell_lighthouse(state: JobState, values: dict[str, Any]) -> list[AnyAction]:
    """Hand on what of `values`, which are in force by now, the lighthouse goes by."""
    own = [name for name in ("detect.phase_allowance_s", "detect.hang_action_s") if name in values]
    return membership_of(state).tell(state, f"{' and '.join(own)} set") if own else []


def _close(state: JobState, open_: OpenChange) -> list[AnyAction]:
    """Answer once the change is in force wherever it was promised, or surely will be."""
    asked, change, boundary = _find_asked(state), open_.change, state.boundary
    known = boundary is None or boundary.command != open_.command
    # Nobody whom it binds has come past the step without it.
    if state.step > change.step or (asked and asked <= open_.reached):
        state.steering.open.remove(open_)
        keep_change(state, change)
        return _tell(state, open_, "") + tell_lighthouse(state, change.values)
    far = change.step - state.step > FAR_STEPS
    if known and (far or state.steering.pause is not None):
        why = "the job is paused" if state.steering.pause else "the step is yet to come"
        return _tell(state, open_, f"all ranks have promised it; {why}")
    return []


def _tell(state: JobState, open_: OpenChange, reason: str) -> list[AnyAction]:
    change = open_.change
    result: dict[str, Any] = {
        "changes": change.values,
        "applied_at_step": change.step,
        "ranks": sorted(open_.reached | _find_asked(state)),
        "epoch": change.epoch,
        "before": change.before,
    }
    return answer_open(state, open_.command, True, reason, result)
