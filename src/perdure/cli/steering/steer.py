"""Commands that steer a run while it runs: set, pause, resume."""

from typing import Annotated, Any

import msgspec
import typer

from perdure.cli.jobs import Job, find_job, send_command
from perdure.cli.running.options import Json
from perdure.cli.speech.say import keep_given, print_json, read_meanings, render_table
from perdure.cli.steering.act import JobName, Timeout, answer_of
from perdure.model.errors import ConfigError
from perdure.model.report import Snapshot
from perdure.model.steering import KeySpec, Value, find_product_fault, parse_value, render_value
from perdure.plan.settings import SECTIONS, apply_spec, find_own_keys

Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="For the journal.")]


def set_(
    job: JobName,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Without any, the keys are listed."),
    ] = None,
    at_step: Annotated[
        int | None, typer.Option("--at-step", min=0, help="Begin with this step; else soon.")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Take the newest change back.")] = False,
    why: Why = "",
    timeout_s: Timeout = 60.0,
    as_json: Json = False,
) -> None:
    """Change settings of a running job: all of them, on every rank, from one step on, or none.

    Keys are those that the script has declared (run.config.declare), and perdure's own. A rank
    that cannot apply a change refuses it for all.
    """
    found = find_job(job)
    snapshot = found.snapshot()
    keys = {spec.name: spec for spec in (*snapshot.keys, *find_own_keys(found.spec))}
    if not changes and not undo:
        _list(job, keys, snapshot, as_json)
        return
    if changes and undo:
        raise ConfigError("--undo takes no values", hint=f"perdure set {job} --undo")
    values = _parse(found, keys, snapshot, changes) if changes else None
    args = {"why": why, **keep_given(undo=undo, changes=values, at=at_step)}
    result = send_command(found, "set", args, timeout_s=timeout_s)
    step, ranks = result.get("applied_at_step"), result.get("ranks", [])
    set_to = " ".join(f"{k}={render_value(v)}" for k, v in result.get("changes", {}).items())
    where = f"on {len(ranks)} ranks from step {step} on"
    where = "by perdure's own parts, at once" if step is None else where
    _answer(job, result, f"{set_to} {where}", as_json)


def pause(job: JobName, why: Why = "", timeout_s: Timeout = 300.0, as_json: Json = False) -> None:
    """Have all ranks stand still before the same step, until they are resumed.

    A paused job can be set, saved and stopped. A world that fails meanwhile begins again, makes
    up for what was lost, and stands at the same step.
    """
    result = send_command(find_job(job), "pause", {"why": why}, timeout_s=timeout_s)
    _answer(job, result, f"paused before step {result.get('step', '?')}", as_json)


def resume(job: JobName, timeout_s: Timeout = 60.0, as_json: Json = False) -> None:
    """Let a paused job go on."""
    result = send_command(find_job(job), "resume", {}, timeout_s=timeout_s)
    _answer(job, result, f"goes on at step {result.get('step', '?')}", as_json)


def _answer(job: str, result: dict[str, Any], text: str, as_json: bool) -> None:
    reason = result.get("reason")
    answer_of(job, result, text + (f" ({reason})" if reason else ""), as_json)


# --- what was typed -----------------------------------------------------------------------------


def _parse(
    job: Job, keys: dict[str, KeySpec], snapshot: Snapshot, changes: list[str]
) -> dict[str, Value]:
    """Return the values that were typed, checked against what the job has declared.

    Raises:
        ConfigError: one of them cannot be.
    """
    values: dict[str, Value] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not name or not equals:
            raise ConfigError(f"{change}: no `=`", hint="KEY=VALUE")
        if name in keys:
            values[name] = parse_value(keys[name], text)
        elif snapshot.keys:
            own = ", ".join(sorted(n for n, s in keys.items() if s.owner == "script"))
            raise ConfigError(
                f"unknown key `{name}`",
                hint=f"the script has declared {own or 'none'}; perdure set {job.name} lists all",
            )
        else:
            values[name] = _guess(text)  # The script has not declared its keys yet.
    apply_spec(job.spec, values)
    fault = find_product_fault(keys, _find_values(keys, snapshot), values)
    if fault:
        raise ConfigError(fault, hint="set both at once")
    return values


def _guess(text: str) -> Value:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


# --- the list -----------------------------------------------------------------------------------


def _find_values(keys: dict[str, KeySpec], snapshot: Snapshot) -> dict[str, Any]:
    return {name: snapshot.settings.get(name, spec.default) for name, spec in keys.items()}


def _list(job: str, keys: dict[str, KeySpec], snapshot: Snapshot, as_json: bool) -> None:
    values = _find_values(keys, snapshot)
    meanings = {
        f"{section}.{field}": text
        for section, type_ in SECTIONS.items()
        for field, text in read_meanings(type_).items()
    }
    notes = {s.name: s.note or meanings.get(s.name, "") for s in keys.values()}
    order = sorted(keys.values(), key=lambda spec: (spec.owner != "script", spec.name))
    if as_json:
        rows = [
            {
                **msgspec.to_builtins(s),
                "value": values[s.name],
                "range": s.range,
                "note": notes[s.name],
                "owner": s.owner,
            }
            for s in order
        ]
        print_json({"job": job, "epoch": snapshot.epoch, "settings": rows})
        return
    table = [(s.name, s.type, render_value(values[s.name]), s.range, notes[s.name]) for s in order]
    print(render_table(("key", "type", "value", "range", "note"), table))
