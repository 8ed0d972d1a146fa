"""The beginning of `perdure set`, `pause`, `resume`: validated; begun, queued or refused."""

from typing import Any

from msgspec import structs

from perdure.control.agreement.boundary import drop_boundary, open_boundary
from perdure.control.agreement.changes import (
    commit_change,
    find_key,
    keep_change,
    note_high,
    tell_lighthouse,
    value_at,
)
from perdure.control.agreement.pauses import answer_pause, begin_resume, hold_all
from perdure.control.job import JobState, OpenCommand
from perdure.control.membership import membership_of
from perdure.model.errors import ConfigError
from perdure.model.orders import AnyAction
from perdure.model.steering import Change, Value, find_fault, find_product_fault, is_kept_elsewhere
from perdure.plan.settings import apply_spec


def start_set(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Begin a change, if it can begin now; refuse what cannot be."""
    steering, membership = state.steering, membership_of(state)
    try:
        undoes, values = resolve_change(state, command)
    except ConfigError as error:
        if membership.has_declared(state):
            return state.answer(command.id, False, error.message, {})
        if why := membership.refuse_step(state):
            return state.answer(command.id, False, why, {})
        return []  # The script may yet declare it.
    own = all(is_kept_elsewhere(name) for name in values)
    saving = any(name.startswith("checkpoint.") for name in values)
    if saving and state.the_spec().served:
        return state.answer(command.id, False, membership.refuse_saving(state), {})
    if own and membership.sets_at_once(state):
        return set_alone(state, now, command, undoes, values) + tell_lighthouse(state, values)
    why = membership.refuse_step(state)
    if why:
        return state.answer(command.id, False, why, {})
    if not membership.can_ask(state):
        return []
    note_high(state, state.step)
    first = max(steering.high, int(command.args.get("not_before", 0)))
    wanted = int(command.args.get("at", -1))
    if 0 <= wanted < first:
        return state.answer(command.id, False, f"step {wanted} is over: {first} were made", {})
    change, reason = draw_change(state, now, command, undoes, values)
    at_step = wanted if wanted >= 0 else None
    return open_boundary(
        state, now, "set",
        reason=reason, command=command.id, change=change, not_before=first, at_step=at_step,
    )  # fmt: skip


def draw_change(
    state: JobState, now: float, command: OpenCommand, undoes: int, values: dict[str, Value]
) -> tuple[Change, str]:
    """Return a change under an epoch of its own, its step yet open, and what it is in words."""
    state.steering.settings_epoch += 1
    change = Change(
        epoch=state.steering.settings_epoch,
        step=0,
        values=values,
        undoes=undoes,
        who=command.who,
        why=str(command.args.get("why", "")),
        at_s=now,
    )
    words = ", ".join(f"{name}={value}" for name, value in values.items())
    asker = command.who or "an operator"
    return change, f"{'undo: ' if undoes else ''}{words}, asked for by {asker}"


def resolve_change(state: JobState, command: OpenCommand) -> tuple[int, dict[str, Value]]:
    """Return which epoch is undone (0: none) and what is to be set.

    Raises:
        ConfigError: it cannot be; the message says why.
    """
    steering = state.steering
    if command.args.get("undo"):
        undone = {change.undoes for change in steering.changes}
        left = [c for c in steering.changes if not c.undoes and c.epoch not in undone and c.before]
        if not left:
            raise ConfigError("there is no change to take back")
        newest = max(left, key=lambda change: change.epoch)
        command.args["not_before"] = newest.step  # It may be yet to come.
        return newest.epoch, dict(newest.before)
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
    now = {name: value_at(state, name, steering.high) for name in steering.keys}
    fault = find_product_fault(steering.keys, now, values)
    if fault:
        raise ConfigError(fault)
    apply_spec(state.the_spec(), values)
    return 0, values


def set_alone(
    state: JobState, now: float, command: OpenCommand, undoes: int, values: dict[str, Value]
) -> list[AnyAction]:
    """Change what only perdure's own parts look at, at once: there is no step to agree on."""
    before = {name: value_at(state, name, state.step) for name in values}
    change, _ = draw_change(state, now, command, undoes, values)
    change = structs.replace(change, step=max(state.step, 0), before=before)
    actions = commit_change(state, change)
    keep_change(state, change)
    result: dict[str, Any] = {
        "changes": values,
        "applied_at_step": None,
        "ranks": [],
        "epoch": change.epoch,
    }
    return actions + state.answer(command.id, True, "", result)


# --- pauses -------------------------------------------------------------------------------------


def start_pause(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Begin a pause, if it can begin now; one that is there already is as good."""
    if state.steering.pause is not None:
        return answer_pause(state)  # Or it is answered with the one that is under way.
    membership = membership_of(state)
    if not membership.needs_agreement(command.kind):
        return hold_all(state, now, command)
    why = membership.refuse_step(state)
    if why:
        return state.answer(command.id, False, why, {})
    if not membership_of(state).agrees(state) or state.steering.resume is not None:
        return []
    reason = f"pause asked for by {command.who or 'an operator'}"
    return open_boundary(state, now, "pause", reason=reason, command=command.id)


def receive_resume(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """End the pause, wherever it is; none is as good as ended."""
    paused = state.steering.pause is not None
    if paused or state.steering.resume is not None:
        state.commands[command.id] = command
        return begin_resume(state, now, command.who) if paused else []
    who = command.who or "an operator"
    actions = state.answer_all("pause", False, f"resumed by {who} before it began", {})
    if state.boundary is not None and state.boundary.kind == "pause":
        actions += drop_boundary(state, f"resumed by {who}")
    done = {
        "step": max(state.step, 0),
        "ranks": list(membership_of(state).list_asked(state)),
        "paused": False,
    }
    reason = "the pause had not begun" if actions else "it is not paused"
    return actions + state.answer(command.id, True, reason, done)
