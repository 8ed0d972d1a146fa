"""What buttons of the page and keys of the screen ask of a job: verbs, as commands ask for them."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import msgspec

from perdure.cli.jobs import Job, send_command
from perdure.cli.page.runs import name_run
from perdure.cli.steering.act import parse_changes
from perdure.model.errors import ConfigError, SafetyError
from perdure.model.steering import LEAVE_DEADLINE_S, NOTE_MAX, PlaceVerb, Verb

Asking = Literal[
    "pause", "resume", "checkpoint", "stop", "note", "set", "undo", "drain", "cordon", "evict",
    "restore", "inject",
]  # fmt: skip
_ANSWER_S = 60.0


class Act(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What somebody has asked for by a button or a key."""

    verb: Asking
    target: str = ""
    """Of those that move work: `node:3`; of `inject`, whom it kills: `rank:3`."""
    key: str = ""
    """Of `set`."""
    value: str = ""
    """Of `set`, as it was typed."""
    text: str = ""
    """Of `note`."""
    preview: bool = True
    """Only what it would do is asked for."""
    run: str = ""
    """Which run of the job was shown (`runs.name_run`); empty: whichever there is."""


def ask(job: Job, act: Act) -> str:
    """Return what a job's controller answers.

    Raises:
        ConfigError: it cannot be asked for like this, or the job does not run.
        SafetyError: it is refused, or this is not the job that was shown.
        PlatformError: no answer.
    """
    if act.run not in ("", name_run(job)):
        raise SafetyError("another job has begun under this name since", hint="look at it first")
    verb, args = ACTS[act.verb](job, act)
    if act.preview:
        asked = {"verb": verb, "args": args}
        result = send_command(job, "preview", asked, timeout_s=_ANSWER_S)
        return str(result.get("reason", "It can be done."))
    timeout_s = _ANSWER_S + (LEAVE_DEADLINE_S if verb in get_args(PlaceVerb) else 0.0)
    result = send_command(job, verb, args, timeout_s=timeout_s)
    step = result.get("applied_at_step", result.get("step"))
    where = f" at step {step}" if isinstance(step, int) and step >= 0 else ""
    return f"{act.verb}: {result.get('reason') or 'done'}{where}"


def _plain(verb: Verb) -> Callable[[Job, Act], tuple[Verb, dict[str, Any]]]:
    return lambda _job, _act: (verb, {})


def _place(verb: Verb) -> Callable[[Job, Act], tuple[Verb, dict[str, Any]]]:
    return lambda _job, act: (verb, {"targets": [act.target], "why": "asked for on a screen"})


def _note(job: Job, act: Act) -> tuple[Verb, dict[str, Any]]:
    if not act.text.strip():
        raise ConfigError("nothing to keep", hint=f"a remark of at most {NOTE_MAX} characters")
    return "note", {"text": act.text}


def _set(job: Job, act: Act) -> tuple[Verb, dict[str, Any]]:
    return "set", {"changes": parse_changes(job, [f"{act.key}={act.value}"]), "why": ""}


def _kill_rank(job: Job, act: Act) -> tuple[Verb, dict[str, Any]]:
    kind, _, number = act.target.partition(":")
    if kind != "rank" or not number.isdecimal():
        raise ConfigError("no rank is chosen", hint="rank:3")
    return "inject", {"rank": int(number), "kind": "crash"}


def _undo(job: Job, act: Act) -> tuple[Verb, dict[str, Any]]:
    return "set", {"undo": True, "why": ""}


ACTS: dict[Asking, Callable[[Job, Act], tuple[Verb, dict[str, Any]]]] = {
    "pause": _plain("pause"),
    "resume": _plain("resume"),
    "checkpoint": _plain("checkpoint"),
    "stop": _plain("stop"),
    "note": _note,
    "set": _set,
    "undo": _undo,
    "drain": _place("drain"),
    "cordon": _place("cordon"),
    "evict": _place("evict"),
    "restore": _place("restore"),
    "inject": _kill_rank,
}
"""Button -> the verb, and what goes with it."""
