"""How far training is, and when the next checkpoint of the controller's own is due."""

from perdure.control.agreement.boundary import (
    answer_boundary,
    ask_again,
    close_boundary,
    commit_boundary,
    reach_boundary,
    release_boundary,
    send_boundary,
)
from perdure.control.agreement.changes import (
    close_changes,
    declare_keys,
    note_high,
    reach_change,
    settle_changes,
)
from perdure.control.agreement.pauses import (
    answer_pause,
    close_resume,
    reach_pause,
    reach_resume,
    settle_resume,
)
from perdure.control.job import RESTARTS_MAX, JobState
from perdure.control.membership import membership_of
from perdure.control.membership.elastic import admit, leave_together, note_joined
from perdure.control.promises import OpenBoundary
from perdure.control.steering.commands import inject_again, start_waiting_command
from perdure.control.steering.moves import note_held
from perdure.control.steering.saving import plan_checkpoint
from perdure.model.events import (
    BoundaryAnswered,
    BoundaryReached,
    CheckpointRestored,
    GenerationStepping,
    KeysDeclared,
    ProgressNoted,
    RankJoined,
)
from perdure.model.orders import AnyAction, SendBoundary


def note_progress(
    state: JobState,
    now: float,
    event: RankJoined | CheckpointRestored | ProgressNoted | GenerationStepping,
) -> list[AnyAction]:
    """Take a sign of progress; begin what waited for the world to train."""
    if event.generation != state.world.generation:
        return []
    match event:
        case RankJoined():
            return note_joined(state, now, event)
        case CheckpointRestored():
            state.world.resumed_step = event.step
            return []
        case ProgressNoted():
            state.step = max(event.step, state.step if state.world.stepping else -1)
            state.progress_max = max(state.progress_max, event.step, event.collectives)
            note_high(state, max((a.step for a in event.accounts.values()), default=event.step))
            return []
        case GenerationStepping():
            state.world.stepping, state.world.stepping_s = True, now
            state.step = event.step
            if state.world.failed_s is not None:
                state.restarts_s.append(max(0.0, now - state.world.failed_s))
                del state.restarts_s[:-RESTARTS_MAX]
                state.world.failed_s = None
            plan_checkpoint(state, now)
            actions = settle_resume(state) + start_waiting_command(state, now)
            reason = f"generation {state.world.generation} is stepping"
            return actions + inject_again(state, reason)


def reach(state: JobState, now: float, event: BoundaryReached) -> list[AnyAction]:
    """Remember an agreement that all ranks carried out, for the command behind its step."""
    moves = any(move.boundary == event.id for move in state.moves.values())
    if event.dropped and not moves:  # Else the move is taken back.
        return after_boundary(state, now, ask_again(state, now, event))
    done = None if event.dropped else reach_boundary(state, event)
    held = note_held(state, now, event, done)
    held += [*reach_change(state, event), *reach_pause(state, event)]
    resumed = reach_resume(state, event)
    if resumed:
        plan_checkpoint(state, now)
    return held + resumed + _finish_boundary(state, now, done, event.step)


def _finish_boundary(
    state: JobState, now: float, done: OpenBoundary | None, step: int
) -> list[AnyAction]:
    """Go on after an agreement that all ranks have carried out; `step` is one that was made."""
    if done is None:
        return []
    if done.kind == "drain":
        if not done.leaves:
            return []
        left = leave_together(state, now, done)
        return [*left, *start_waiting_command(state, now), *admit(state, now)]
    if done.kind in ("set", "pause"):
        state.step = max(state.step, min(done.step, step))
        return start_waiting_command(state, now)
    state.step = max(state.step, done.step)
    command = state.commands.get(done.command)
    if command is not None:
        command.settled["at_step"] = done.step  # Carried out; its answer may come later.
        if done.kind == "checkpoint" and done.shrunk:
            del command.settled["at_step"]  # Who wrote it may be gone: once more.
    if done.kind == "checkpoint":
        plan_checkpoint(state, now)
    return start_waiting_command(state, now) + admit(state, now)


def settle_members(state: JobState, now: float, before: tuple[int, ...]) -> list[AnyAction]:
    """Look again at what waits for members: some have come to an elastic world or left it.

    Who comes in is asked about what is not decided yet; nobody waits for who is gone.
    """
    asked, boundary = membership_of(state).list_fleeting(state), state.boundary
    if not asked or asked == before:
        return []
    lost = set(before) - set(asked)
    actions: list[AnyAction] = []
    if lost:
        for command in state.commands.values():
            open_ = boundary is not None and boundary.command == command.id
            if command.kind == "checkpoint" and not open_:
                command.settled.pop("at_step", None)  # Who was writing it may be gone: once more.
    if boundary is not None and boundary.move == "prepare":
        new = set(asked) - set(boundary.ranks)
        boundary.ranks = asked
        if new:
            why = f"ranks {sorted(new)} have come in"
            actions += send_boundary(state, why)
        actions += commit_boundary(state, now)
    elif boundary is not None:
        boundary.ranks = tuple(rank for rank in boundary.ranks if rank in asked)
        boundary.shrunk |= bool(lost)
        if boundary.kind in ("set", "pause"):
            actions += release_boundary(state)
        done = close_boundary(state)
        actions += _finish_boundary(state, now, done, done.step if done is not None else 0)
    actions += [*close_changes(state), *answer_pause(state), *close_resume(state)]
    return actions + start_waiting_command(state, now)


def note_answer(state: JobState, now: float, event: BoundaryAnswered) -> list[AnyAction]:
    """Take one rank's answer to what is to be agreed upon."""
    return after_boundary(state, now, answer_boundary(state, now, event))


def after_boundary(state: JobState, now: float, actions: list[AnyAction]) -> list[AnyAction]:
    """Go on once there is room for another agreement; tell who asked for one that was given up."""
    if state.boundary is not None:
        return actions
    aborts = [a for a in actions if isinstance(a, SendBoundary) and a.move == "abort"]
    if aborts:
        plan_checkpoint(state, now)
    if any(abort.kind in ("checkpoint", "stop") for abort in aborts):
        for command in sorted(state.commands.values(), key=lambda c: c.id):
            if command.kind == "checkpoint" and "at_step" not in command.settled:
                why = "the ranks could not agree on a step"
                actions += state.answer(command.id, False, why, {})
        return actions
    return actions + start_waiting_command(state, now)


def note_keys(state: JobState, now: float, event: KeysDeclared) -> list[AnyAction]:
    """Take the keys of a generation's script; those of a world that is gone are worth nothing."""
    if event.generation != state.world.generation:
        return []
    declare_keys(state, event)
    return [*settle_changes(state, event), *start_waiting_command(state, now)]
