"""What a command would do, said without doing it: nothing is journaled, nothing follows."""

from collections.abc import Callable
from typing import Any

from perdure.control.job import Answer, JobState, OpenCommand
from perdure.control.membership import membership_of
from perdure.control.steering.steer import resolve_change
from perdure.control.steering.verbs import preview_verb
from perdure.model.errors import ConfigError
from perdure.model.faults import FAULTS
from perdure.model.steering import find_note_fault, is_kept_elsewhere, render_value


def preview(state: JobState, kind: str, args: dict[str, Any]) -> Answer | None:
    """Return the answer to a preview, and to a dry run; None where the command is neither."""
    if kind != "preview":
        return preview_verb(state, kind, args)
    verb, given = str(args.get("verb")), args.get("args", {})
    if state.spec is None or state.over:
        return Answer(False, "the job is ending" if state.over else "it has not begun", {})
    try:
        answer = preview_verb(state, verb, {**given, "dry_run": True})
        if answer is None and verb in _SAID:
            why = membership_of(state).refuse(state, verb)
            ok, text = (False, why) if why else _SAID[verb](state, dict(given))
            answer = Answer(ok, text, {"dry_run": True})
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        return Answer(False, f"malformed arguments: {error}", {})
    return answer or Answer(False, f"what {verb} would do cannot be said before", {})


_SERVED_END = "perdure ends and its lighthouse with it; groups that others have started go on alone"


def _say_stop(state: JobState, args: dict[str, Any]) -> tuple[bool, str]:
    if state.the_spec().served:
        return True, _SERVED_END
    if membership_of(state).agrees(state):
        return True, "all ranks save a checkpoint at one step, and the job ends"
    grace_s = state.the_spec().restart.grace_s
    return True, (
        "the ranks can agree on no step: they get SIGTERM, and SIGKILL "
        f"{grace_s:g} s later (2 s if they do not handle it); what the script has not saved is lost"
    )


def _say_kill(state: JobState, args: dict[str, Any]) -> tuple[bool, str]:
    if state.the_spec().served:
        return True, _SERVED_END
    since = f" since the checkpoint of step {state.saved_step}" if state.saved_step >= 0 else ""
    return True, f"the ranks are killed now, and the job ends; what was made{since} is lost"


def _say_checkpoint(state: JobState, args: dict[str, Any]) -> tuple[bool, str]:
    membership = membership_of(state)
    if why := membership.refuse_saving(state):
        return False, why
    when = "soon" if membership.can_save(state) else "once the ranks train"
    return True, f"all ranks save a checkpoint at one step, {when}, and train on"


def _say_pause(state: JobState, args: dict[str, Any]) -> tuple[bool, str]:
    if state.steering.pause is not None:
        return True, "it is paused already"
    membership = membership_of(state)
    if not membership.needs_agreement("pause"):
        return True, "the lighthouse holds each group before its next step, until it is resumed"
    if why := membership.refuse_step(state):
        return False, why
    return True, "all ranks stand still before one step, until they are resumed"


def _say_resume(state: JobState, args: dict[str, Any]) -> tuple[bool, str]:
    if state.steering.pause is None:
        return True, "it is not paused: nothing changes"
    return True, "all ranks train on"


def _say_set(state: JobState, args: dict[str, Any]) -> tuple[bool, str]:
    membership = membership_of(state)
    try:
        _, values = resolve_change(state, OpenCommand("", "set", args, "", 0.0))
    except ConfigError as error:
        asked = args.get("undo") or (isinstance(args.get("changes"), dict) and args["changes"])
        if not asked or membership.has_declared(state):
            return False, error.message
        if why := membership.refuse_step(state):
            return False, why
        return True, f"it waits until the script has declared its settings ({error.message})"
    saving = any(name.startswith("checkpoint.") for name in values)
    if saving and state.the_spec().served:
        return False, membership.refuse_saving(state)
    words = ", ".join(f"{name}={render_value(value)}" for name, value in values.items())
    if all(is_kept_elsewhere(name) for name in values) and membership.sets_at_once(state):
        return True, f"{words}, by perdure's own parts at once"
    if why := membership.refuse_step(state):
        return False, why
    return True, f"{words}, on all ranks from one step on; a rank may refuse it"


def _say_note(state: JobState, args: dict[str, Any]) -> tuple[bool, str]:
    fault = find_note_fault(args.get("text"))
    return not fault, fault or "the remark is kept in the journal, and marked on curves"


def _say_inject(state: JobState, args: dict[str, Any]) -> tuple[bool, str]:
    rank, kind = int(args.get("rank", -1)), str(args.get("kind", "crash"))
    if membership_of(state).find_world_of(state, rank) is None:
        return False, f"there is no rank {rank} at the moment"
    text = f"rank {rank} is harmed now: {kind} ({FAULTS.get(kind, 'unknown')})"
    if kind not in _ENDING or state.the_spec().served:
        return True, text
    since = f"the checkpoint of step {state.saved_step}" if state.saved_step >= 0 else "the start"
    return True, f"{text}; what was made since {since} may have to be made again"


_ENDING = ("crash", "exit", "oom")
"""Faults that end a rank."""
_Say = Callable[[JobState, dict[str, Any]], tuple[bool, str]]
_SAID: dict[str, _Say] = {
    "stop": _say_stop,
    "kill": _say_kill,
    "checkpoint": _say_checkpoint,
    "pause": _say_pause,
    "resume": _say_resume,
    "set": _say_set,
    "note": _say_note,
    "inject": _say_inject,
}
"""Verb -> whether it could be carried out now, and what it would do or why it could not."""
