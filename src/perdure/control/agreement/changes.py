"""`perdure set`: one change, the same on every rank from one step on, or none at all.

    set -> validate -> prepare(S, values) --a rank cannot--> refused for all, its epoch burned
                            |--already past S--> again, later, under a new epoch
                            +--all promised--> committed: from here on it will be, whoever dies

A committed change belongs to the job and not to a generation: the next world is told of it before
its first step (`Steering`), and a rank applies at its very step what its checkpoint has not seen.
So a step that is made again is made with the values of the first time. For the same reason no
change is agreed for a step that was ever committed, even if a crash has taken it back.

What concerns controller and detector (`detect.*`, `policy.*`, `checkpoint.every_s`) is agreed in
the same way, and taken over once all ranks have come to the step; a script that takes no part in
agreements can be given only those, at once.
"""

from collections.abc import Mapping

import msgspec

from perdure.control.job import JobState
from perdure.control.membership import membership_of
from perdure.control.promises import OpenBoundary, OpenChange
from perdure.model.errors import ConfigError
from perdure.model.events import (
    BoundaryReached,
    KeysDeclared,
    SettingsChanged,
)
from perdure.model.orders import AnyAction, RecordEvent
from perdure.model.steering import Change, KeySpec, Value, is_kept_elsewhere
from perdure.plan.settings import apply_spec, list_own_keys

CHANGES_MAX = 100
"""Kept one by one; a generation that resumes before the oldest of them runs with all of those."""
FAR_STEPS = 1000
"""An operator does not wait for a step that is further away."""


def declare_keys(state: JobState, event: KeysDeclared) -> None:
    """Take over the keys of the newest generation's script, and what it resumed with."""
    steering = state.steering
    if event.generation < steering.generation:
        return
    steering.generation = event.generation
    steering.keys = {spec.name: spec for spec in event.keys} | own_keys(state)
    steering.settings_epoch = max(steering.settings_epoch, event.epoch)
    steering.values = {spec.name: spec.default for spec in event.keys} | event.values
    steering.since = event.step


def value_at(state: JobState, name: str, step: int) -> Value:
    """Return what a key has at `step`, as far as it was agreed by now.

    Raises:
        ConfigError: there is no such key.
    """
    steering, spec = state.steering, find_key(state, name)
    if is_kept_elsewhere(name):
        section, _, field = name.partition(".")
        kept: Value = getattr(getattr(state.the_spec(), section), field)
        return kept  # Of the configuration in force.
    value = steering.values.get(name, spec.default)
    for change in steering.changes:
        if steering.since < change.step <= step and name in change.values:
            value = change.values[name]
    return value


def own_keys(state: JobState) -> dict[str, KeySpec]:
    """Return perdure's own keys, which need no declaration."""
    return {spec.name: spec for spec in list_own_keys(state.the_spec())}


def note_high(state: JobState, step: int) -> None:
    """Some rank has committed `step` steps."""
    state.steering.high = max(state.steering.high, step)


def find_key(state: JobState, name: str) -> KeySpec:
    """Return a key.

    Raises:
        ConfigError: there is none of that name.
    """
    keys = own_keys(state) | state.steering.keys
    if name not in keys:
        known = ", ".join(
            n for n, spec in sorted(state.steering.keys.items()) if spec.owner == "script"
        )
        raise ConfigError(f"unknown key {name} (the script has declared: {known or 'none'})")
    return keys[name]


# --- the agreement ------------------------------------------------------------------------------


def commit_change(state: JobState, change: Change) -> list[AnyAction]:
    """Make `change` a part of the job."""
    steering = state.steering
    steering.changes.append(change)
    steering.changes.sort(key=lambda c: (c.step, c.epoch))
    if len(steering.changes) > CHANGES_MAX and steering.changes[1].step <= steering.high:
        first, second = steering.changes[:2]
        values = {**first.values, **second.values}
        steering.changes[:2] = [
            msgspec.structs.replace(second, values=values, before={}, undoes=0, why="folded")
        ]
    said = ", ".join(f"{name}={value}" for name, value in change.values.items())
    reason = f"all ranks have promised {said} from step {change.step} on"
    return [RecordEvent(event=SettingsChanged(change=change), reason=reason)]


def commit_open(state: JobState, boundary: OpenBoundary) -> list[AnyAction]:
    """Commit a change that all ranks have promised: from now on nothing takes it back."""
    assert boundary.change is not None
    before = {n: value_at(state, n, boundary.step) for n in boundary.change.values}
    change = msgspec.structs.replace(boundary.change, before=before)
    open_ = OpenChange(change, boundary.command, boundary.name, state.generation, boundary.ranks)
    state.steering.open.append(open_)
    return commit_change(state, change)


def drop_change(state: JobState, event: BoundaryReached) -> list[AnyAction]:
    """Take back a change that all ranks have dropped, so that no later world makes it."""
    steering = state.steering
    found = next((o for o in steering.open if o.boundary == event.id), None)
    if found is None:
        return []
    change = found.change
    steering.open.remove(found)
    steering.changes = [one for one in steering.changes if one.epoch != change.epoch]
    steering.settings_epoch += 1
    back = msgspec.structs.replace(
        change,
        epoch=steering.settings_epoch,
        values=change.before,
        before=change.values,
        undoes=change.epoch,
        why=event.error,
    )
    return [RecordEvent(event=SettingsChanged(change=back), reason=event.error)]


def refuse_change(state: JobState, command: str, rank: int, why: str) -> list[AnyAction]:
    """Refuse a change that one rank cannot make: then none makes it."""
    result = {"rank": rank}
    return state.answer_open(command, False, f"rank {rank}: {why}", result)


def plan_change(state: JobState, id_: str) -> list[AnyAction]:
    """Plan a change that all ranks know of; answer who should not wait for a far step."""
    why = "all ranks have promised it; the step is yet to come"
    known = [o for o in state.steering.open if o.boundary == id_ and not o.answered]
    far = [open_ for open_ in known if open_.change.step - state.step > FAR_STEPS]
    for open_ in far:
        open_.answered = True
    return [action for open_ in far for action in _answer(state, open_, why)]


def reach_change(state: JobState, event: BoundaryReached) -> list[AnyAction]:
    """Take one rank's report that a change is in force there."""
    name = event.id.partition("@")[0]  # A replica group's number goes with it.
    for open_ in list(state.steering.open):
        if name not in (open_.boundary, f"e{open_.change.epoch}"):
            continue
        if event.error:
            state.steering.open.remove(open_)
            return refuse_change(state, open_.command, event.rank, event.error)
        open_.reached.add(event.rank)
    return close_changes(state)


def close_changes(state: JobState) -> list[AnyAction]:
    """Close what is in force wherever it was promised, or surely will be."""
    membership = membership_of(state)
    done = [open_ for open_ in state.steering.open if membership.is_in_force(state, open_)]
    return [action for open_ in done for action in _close(state, open_)]


def settle_changes(state: JobState, event: KeysDeclared) -> list[AnyAction]:
    """Close what a generation's checkpoint has brought with it."""
    older = [open_ for open_ in state.steering.open if open_.generation < event.generation]
    done = [open_ for open_ in older if open_.change.step <= event.step]
    return [action for open_ in done for action in _close(state, open_)]


def answer_early(state: JobState) -> list[AnyAction]:
    """Answer who would wait for a step that no replica group comes to: they are held before it."""
    if state.steering.pause is None:
        return []
    asking = None if state.boundary is None else state.boundary.command
    waiting = [open_ for open_ in state.steering.open if open_.command != asking]
    why = "all ranks have promised it; the job is paused"
    return [action for open_ in waiting for action in _answer(state, open_, why)]


def _close(state: JobState, open_: OpenChange) -> list[AnyAction]:
    state.steering.open.remove(open_)
    keep_change(state, open_.change)
    answered = [] if open_.answered else _answer(state, open_, "")
    return answered + tell_lighthouse(state, open_.change.values)


def _answer(state: JobState, open_: OpenChange, reason: str) -> list[AnyAction]:
    change = open_.change
    result = {
        "changes": change.values,
        "applied_at_step": change.step,
        "ranks": membership_of(state).list_changed(state, open_),
        "epoch": change.epoch,
        "before": change.before,
    }
    return state.answer_open(open_.command, True, reason, result)


def tell_lighthouse(state: JobState, values: Mapping[str, Value]) -> list[AnyAction]:
    """Hand on what of `values`, which are in force by now, the lighthouse goes by."""
    own = [name for name in ("detect.phase_allowance_s", "detect.hang_action_s") if name in values]
    return membership_of(state).tell(state, f"{' and '.join(own)} set") if own else []


def keep_change(state: JobState, change: Change) -> None:
    """Put the controller's and the detector's share of `change` in force."""
    if change.epoch > state.steering.kept:
        state.steering.kept = change.epoch
        state.spec = apply_spec(state.the_spec(), change.values)
