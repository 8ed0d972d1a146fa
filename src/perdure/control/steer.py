"""The beginning of `perdure set`, `pause`, `resume`: validated; begun, queued or refused."""

from typing import Any

from perdure.control.answers import answer
from perdure.control.boundary import abort_boundary, open_boundary
from perdure.control.changes import commit_change, find_key, find_value, keep_change
from perdure.control.pauses import begin_resume, stands
from perdure.control.state import ControllerState, OpenCommand
from perdure.model.actions import AnyAction
from perdure.model.errors import ConfigError
from perdure.model.settings import (
    Change,
    Value,
    find_fault,
    find_product_fault,
    is_kept_elsewhere,
)
from perdure.plan.settings import apply_spec

_NO_PART = "the script does not call perdure.init(), so no step can be agreed upon"


def start_set(state: ControllerState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Begin a change, if it can begin now; refuse what cannot be."""
    steering = state.steering
    try:
        undoes, values = _find_values(state, command)
    except ConfigError as error:
        if state.stepping and not _is_waiting_for_keys(state):
            return answer(state, command.id, False, error.message, {})
        return []  # The script may yet declare it.
    own = all(is_kept_elsewhere(name) for name in values)
    if state.stepping and not state.joined:
        if not own:
            why = _NO_PART
            return answer(state, command.id, False, why, {})
        return _set_alone(state, now, command, undoes, values)
    if state.phase != "running" or not (state.stepping and state.resumable):
        return []
    before = {name: find_value(state, name) for name in values}
    steering.epoch += 1
    args, last = command.args, steering.changes[-1].step if steering.changes else 0
    wanted = int(args.get("at_step", -1) if "at" not in args else args["at"])
    if wanted >= 0 and wanted < max(last, state.step + 1):
        steering.epoch -= 1
        why = f"step {wanted} is over: the job is at step {state.step}"
        if wanted > state.step:
            why = f"an older change is agreed for step {last}, and changes come in order"
        return answer(state, command.id, False, why, {})
    change = Change(
        epoch=steering.epoch,
        step=0,
        values=values,
        before=before,
        undoes=undoes,
        who=command.who,
        why=str(args.get("why", "")),
        at_s=now,
    )
    words = ", ".join(f"{name}={value}" for name, value in values.items())
    reason = f"{'undo: ' if undoes else ''}{words}, asked for by {command.who or 'an operator'}"
    return open_boundary(
        state,
        now,
        "set",
        reason=reason,
        command=command.id,
        change=change,
        not_before=last,
        at_step=wanted if wanted >= 0 else None,
    )


def _is_waiting_for_keys(state: ControllerState) -> bool:
    """Whether this generation's script has yet to say which keys it has."""
    return bool(state.joined) and state.steering.generation < state.generation


def _find_values(state: ControllerState, command: OpenCommand) -> tuple[int, dict[str, Value]]:
    """Return which epoch is undone (0: none) and what is to be set.

    Raises:
        ConfigError: it cannot be; the message says why.
    """
    steering = state.steering
    if command.args.get("undo"):
        undone = {change.undoes for change in steering.changes}
        for change in reversed(steering.changes):
            if not change.undoes and change.epoch not in undone and change.before:
                return change.epoch, dict(change.before)
        raise ConfigError("there is no change to take back")
    asked = command.args.get("changes")
    if not isinstance(asked, dict) or not asked:
        raise ConfigError("nothing to set")
    values: dict[str, Value] = {}
    for name, value in asked.items():
        spec = find_key(state, str(name))
        fault = find_fault(spec, value)
        if fault:
            raise ConfigError(fault)
        values[spec.name] = float(value) if spec.type == "float" else value
    now = {**{spec.name: spec.default for spec in steering.keys.values()}, **steering.values}
    fault = find_product_fault(steering.keys, now, values)
    if fault:
        raise ConfigError(fault)
    apply_spec(state.the_spec(), values)
    return 0, values


def _set_alone(
    state: ControllerState, now: float, command: OpenCommand, undoes: int, values: dict[str, Value]
) -> list[AnyAction]:
    """Change what only perdure's own parts look at, at once: there is no step to agree on."""
    steering = state.steering
    steering.epoch += 1
    change = Change(
        epoch=steering.epoch,
        step=max(state.step, 0),
        values=values,
        before={name: find_value(state, name) for name in values},
        undoes=undoes,
        who=command.who,
        why=str(command.args.get("why", "")),
        at_s=now,
    )
    actions = commit_change(state, change)
    keep_change(state, change)
    result: dict[str, Any] = {
        "changes": values,
        "applied_at_step": None,
        "ranks": [],
        "epoch": change.epoch,
    }
    return actions + answer(state, command.id, True, "", result)


# --- pauses -------------------------------------------------------------------------------------


def start_pause(state: ControllerState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Begin a pause, if it can begin now; one that is there already is as good."""
    pause = state.steering.pause
    if pause is not None:
        if not stands(state):
            return []  # It is answered with the one that is under way.
        result: dict[str, Any] = {"step": pause.step, "ranks": list(state.world), "paused": True}
        return answer(state, command.id, True, "it is paused already", result)
    if state.stepping and not state.joined:
        return answer(state, command.id, False, _NO_PART, {})
    if state.phase != "running" or not (state.stepping and state.resumable):
        return []
    if state.steering.resume is not None:
        return []
    reason = f"pause asked for by {command.who or 'an operator'}"
    return open_boundary(state, now, "pause", reason=reason, command=command.id)


def receive_resume(state: ControllerState, now: float, command: OpenCommand) -> list[AnyAction]:
    """End the pause, wherever it is; none is as good as ended."""
    who = command.who or "an operator"
    if state.steering.pause is not None:
        state.commands[command.id] = command
        return begin_resume(state, now, command.id, command.who)
    if state.steering.resume is not None:
        state.commands[command.id] = command
        return []
    actions: list[AnyAction] = []
    for id_ in sorted(c.id for c in state.commands.values() if c.kind == "pause"):
        actions += answer(state, id_, False, f"resumed by {who} before it began", {})
    boundary = state.boundary
    if boundary is not None and boundary.kind == "pause":
        actions.append(abort_boundary(state, f"resumed by {who}"))
        state.boundary = None
    done: dict[str, Any] = {"step": state.step, "ranks": list(state.world), "paused": False}
    reason = "the pause had not begun" if actions else "it is not paused"
    return actions + answer(state, command.id, True, reason, done)
