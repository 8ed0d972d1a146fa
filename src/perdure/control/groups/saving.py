"""`perdure checkpoint` of a torchft job: one group saves, for all have the same state at a step.

What is saved is what its Manager would hand to a healing peer. The group's ranks agree on the step;
should it be lost before the checkpoint is verified, another group does it.
"""

from typing import Any

from perdure.control.answers import answer
from perdure.control.groups.agreement import ask_members, is_whole
from perdure.control.state import ControllerState, OpenBoundary, OpenCommand
from perdure.model.actions import AnyAction
from perdure.model.events import CheckpointFailed, CheckpointSaved


def start_group_checkpoint(
    state: ControllerState, now: float, command: OpenCommand
) -> list[AnyAction]:
    """Begin a checkpoint, if it can begin now."""
    if state.the_spec().torchft.lighthouse != "perdure":
        why = "who has the state is known to perdure's own lighthouse only (torchft.lighthouse)"
        return answer(state, command.id, False, why, {})
    if not is_whole(state):
        return []
    state.boundaries += 1
    state.boundary = OpenBoundary(
        id=f"b{state.boundaries}",
        kind="checkpoint",
        step=0,
        move="prepare",
        tries=1,
        deadline_s=now,
        reason=f"asked for by {command.who or 'an operator'}",
        command=command.id,
    )
    return ask_members(state, now, state.boundary, state.boundary.reason)


def note_group_checkpoint(
    state: ControllerState, event: CheckpointSaved | CheckpointFailed
) -> list[AnyAction]:
    """Take what became of it, and answer who asked."""
    actions: list[AnyAction] = []
    if isinstance(event, CheckpointSaved):
        state.saved_step = max(state.saved_step, event.step)
    for command in sorted(state.commands.values(), key=lambda c: c.id):
        args = command.args
        if command.kind != "checkpoint" or args.get("at_step") != event.step:
            continue
        if isinstance(event, CheckpointSaved):
            result: dict[str, Any] = {"step": event.step, "path": event.path, "bytes": event.bytes}
            actions += answer(state, command.id, True, "saved and verified", result)
        else:
            actions += answer(state, command.id, False, event.error, {"step": event.step})
    return actions


def reopen_lost(state: ControllerState) -> None:
    """Have those begun again whose group was lost before it had saved."""
    living = {g.generation for g in state.groups.values() if g.phase == "running"}
    for command in state.commands.values():
        if command.kind == "checkpoint" and command.args.get("generation", -1) not in {-1, *living}:
            del command.args["at_step"], command.args["generation"]
