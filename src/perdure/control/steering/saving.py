"""Checkpoints: asked for by an operator, or due by themselves; what became of them.

In a torchft job one group saves, for all have the same state at a step: what its Manager would hand
to a healing peer. The group's ranks agree on the step; should it be lost before the checkpoint is
verified, another group does it. The job's own interval is by steps (`checkpoint.every_steps`), by
time (`every_s`), or, where nothing but the place is given (`url`), by what a checkpoint costs and
how often all groups were lost at once. A script that was told nothing of checkpoints gets none: a
later run under the same name would go on from them.
"""

from perdure.control.agreement.boundary import open_boundary
from perdure.control.job import JobState, OpenCommand
from perdure.control.membership import membership_of
from perdure.control.steering.moves import note_saved
from perdure.model.events import CheckpointFailed, CheckpointSaved
from perdure.model.orders import AnyAction
from perdure.plan.checkpoints import daly
from perdure.policy import decide_checkpoint_interval

_OWN = "own-checkpoint"
"""Id of the one command that the controller gives itself."""


def start_checkpoint(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Begin a checkpoint, if it can begin now."""
    membership = membership_of(state)
    why = membership.refuse_saving(state)
    if why:
        return state.answer(command.id, False, why, {})
    if not membership.can_save(state):
        return []
    reason, every = f"asked for by {command.who or 'an operator'}", 0
    if command.id == _OWN:
        every = state.the_spec().checkpoint.every_steps
        reason = f"due every {every} steps" if every else "the interval has passed"
    return open_boundary(state, now, "checkpoint", reason=reason, command=command.id, every=every)


def note_checkpoint(
    state: JobState, now: float, event: CheckpointSaved | CheckpointFailed
) -> list[AnyAction]:
    """Take what became of a checkpoint, and answer who asked for it."""
    if isinstance(event, CheckpointSaved):
        state.stall_s, state.saved_s, state.unsaved = event.stall_s, now, ""
    elif state.saved_s is None:
        state.unsaved = event.error
    actions = note_saved(state, now, event)
    state.quorum.save_since_s = now
    world = state.find_world(event.generation)
    if world is not None and world.checkpoint_due_s is not None:
        plan_checkpoint(state, now)
    for command in sorted(state.commands.values(), key=lambda c: c.id):
        if command.kind != "checkpoint" or _find_step(state, command) != event.step:
            continue
        if command.id == _OWN:
            del state.commands[_OWN]
        elif isinstance(event, CheckpointSaved):
            result = {"step": event.step, "path": event.path, "bytes": event.bytes}
            actions += state.answer(command.id, True, "saved and verified", result)
        else:
            actions += state.answer(command.id, False, event.error, {"step": event.step})
    return actions


def _find_step(state: JobState, command: OpenCommand) -> int | None:
    """Return the step of a command's checkpoint.

    A save may have failed at once, before the last rank has said that it came to the step.
    """
    boundary = state.boundary
    if boundary is not None and boundary.command == command.id and boundary.move == "commit":
        return boundary.step
    return command.settled.get("at_step")


def plan_checkpoint(state: JobState, now: float) -> None:
    """Set when the next checkpoint of the controller's own is due."""
    state.world.checkpoint_due_s = None
    if not membership_of(state).begins_saves(state) or state.steering.pause is not None:
        return  # In a pause nothing new comes about.
    interval_s = decide_checkpoint_interval(
        state.the_spec().checkpoint,
        stall_s=state.stall_s,
        failures=state.failures.total,
        elapsed_s=now - state.submitted_s,
        optimum=daly,
    )
    state.world.checkpoint_due_s = None if interval_s is None else now + interval_s


def save_if_due(state: JobState, now: float) -> list[AnyAction]:
    """Begin the controller's own checkpoint if it is time for it."""
    due_s = state.world.checkpoint_due_s
    if due_s is None or now < due_s:
        return []
    state.world.checkpoint_due_s = None
    return open_boundary(state, now, "checkpoint", reason="the interval has passed")


# --- of replica groups ---------------------------------------------------------------------------


def next_save_deadline(state: JobState) -> float | None:
    """Return when the job's next checkpoint by time is due; None for none, or while one is made."""
    since_s = state.quorum.save_since_s
    if since_s is None or not _saves_itself(state) or _OWN in state.commands:
        return None
    interval_s = decide_checkpoint_interval(
        state.the_spec().checkpoint,
        stall_s=state.stall_s,
        failures=state.quorum.outages,
        elapsed_s=since_s - state.submitted_s,
        optimum=daly,
    )
    return None if interval_s is None else since_s + interval_s


def open_due_checkpoint(state: JobState, now: float) -> None:
    """Ask for a checkpoint of the job's own where one is due. Called after every event."""
    quorum = state.quorum
    if not _saves_itself(state) or _OWN in state.commands:
        return
    if quorum.save_since_s is None:
        quorum.save_since_s = now
    due_s = next_save_deadline(state)
    every = state.the_spec().checkpoint.every_steps
    if not every and (due_s is None or now < due_s):
        return
    quorum.save_since_s = now
    if every or state.steering.pause is None:  # By time, nothing comes about while all stand still.
        state.commands[_OWN] = OpenCommand(_OWN, "checkpoint", {}, "", now)


def _saves_itself(state: JobState) -> bool:
    config = state.the_spec().checkpoint
    wanted = bool(config.every_steps or config.every_s or config.url)
    known = not membership_of(state).refuse_saving(state) and bool(state.quorum.members)
    return wanted and known and state.phase == "running"


def reopen_lost(state: JobState) -> None:
    """Have those begun again whose group was lost before it had saved."""
    known = {-1, *(g.generation for g in state.worlds.values() if g.phase == "running")}
    for command in state.commands.values():
        if command.kind == "checkpoint" and command.settled.get("generation", -1) not in known:
            command.settled.clear()
