"""Commands that ask the controller for something, and wait for its answer.

Some steer a run while it runs (set, pause, resume), others move work off nodes (drain, cordon,
evict, restore). By `perdure node notify` somebody outside tells a job what it cannot see of a
machine.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import typer

from perdure.cli.jobs import Job, find_job, send_command
from perdure.cli.speech.say import (
    JobName,
    Json,
    Timeout,
    answer,
    keep_given,
    read_meanings,
    render_table,
)
from perdure.cli.speech.say import note as say_beside
from perdure.model.errors import ConfigError, PerdureError
from perdure.model.faults import FAULTS
from perdure.model.input.plain import name_step
from perdure.model.input.values import refuse_value
from perdure.model.report import Snapshot
from perdure.model.steering import (
    LEAVE_DEADLINE_S,
    NOTE_MAX,
    KeySpec,
    Value,
    find_note_fault,
    find_product_fault,
    parse_value,
    render_value,
)
from perdure.model.verdicts import HANGS
from perdure.plan.settings import SECTIONS, apply_spec, list_own_keys


def inject(
    job: JobName,
    fault: Annotated[str, typer.Argument(metavar="FAULT", help=" | ".join(FAULTS))],
    rank: Annotated[int, typer.Option("--rank", min=0, help="The rank that is harmed.")],
    at_step: Annotated[
        int | None, typer.Option("--at-step", min=0, help="When it begins this step; else now.")
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", metavar="K=V", help="Such as for_s=5, ms=20, code=3: see docs/lab.md."
        ),
    ] = None,
    timeout_s: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Harm a rank on purpose, to see what happens.

    crash is SIGKILL, and stop is SIGSTOP. spin burns CPU, sleep and gil stand still. slow delays
    every step; slow-forward, slow-backward, and slow-data delay one stage. exit ends a rank with an
    exit code. oom uses up memory, in a cgroup of its own if possible. slow-link, drop-link, and
    link-down need nodes with networks of their own. `--arg for_s=N` or heal ends a fault.
    """
    if fault not in FAULTS:
        raise ConfigError(f"unknown fault `{fault}`", hint=f"one of {', '.join(FAULTS)}")
    given = _parse_args(arg or [])
    found = find_job(job)
    if rank >= found.spec.world_size and not found.spec.served:
        raise ConfigError(
            f"there is no rank {rank}", hint=f"the ranks are 0 to {found.spec.world_size - 1}"
        )
    args = {**given, "rank": rank, "kind": fault, **keep_given(at_step=at_step)}
    result = send_command(found, "inject", args, timeout_s=timeout_s)
    when = "now" if at_step is None else f"at step {at_step}"
    note = f" ({result['note']})" if result.get("note") else ""
    answer_of(job, result, f"{fault} on rank {rank} {when}{note}", as_json)


def checkpoint(job: JobName, timeout_s: Timeout = 300.0, as_json: Json = False) -> None:
    """Save a checkpoint at a step that all ranks agree on."""
    result = send_command(find_job(job), "checkpoint", {}, timeout_s=timeout_s)
    answer_of(job, result, f"checkpoint at step {result.get('step', '?')}", as_json)


def note(
    job: JobName,
    text: Annotated[str, typer.Argument(metavar="TEXT", help=f"At most {NOTE_MAX} characters.")],
    timeout_s: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Keep a remark in the job's journal, for report and curves.

    `report` shows it, and marks it on curves.
    """
    fault = find_note_fault(text)
    if fault:
        raise ConfigError(fault, hint=f"perdure note {job} TEXT")
    result = send_command(find_job(job), "note", {"text": text}, timeout_s=timeout_s)
    answer_of(job, result, "noted" + name_step(result.get("step", -1)), as_json)


def stop(
    job: JobName,
    now: Annotated[
        bool, typer.Option("--now", help="Kill the ranks; work since the last checkpoint is lost.")
    ] = False,
    timeout_s: Timeout = 300.0,
    as_json: Json = False,
) -> None:
    """End the job, after a checkpoint at an agreed step.

    A script that does not call perdure.init() gets SIGTERM.
    """
    with _telling_of_hangs(find_job(job)) as found:
        result = send_command(found, "kill" if now else "stop", {}, timeout_s=timeout_s)
    step = result.get("step")
    known = step if isinstance(step, int) else -1
    answer_of(job, result, f"stopped{name_step(known)}", as_json)


def restart(
    job: JobName,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, help="Its world; of an elastic job, this rank alone."),
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="Save nothing; work since the last checkpoint is lost.")
    ] = False,
    timeout_s: Timeout = 300.0,
    as_json: Json = False,
) -> None:
    """Restart the ranks, from a checkpoint that they save first.

    Steps that they make meanwhile are made again. A script that does not call perdure.init() saves
    nothing. A restart does not count for restart.max_restarts.
    """
    with _telling_of_hangs(find_job(job)) as found:
        if not now and found.snapshot().step >= 0:
            send_command(found, "checkpoint", {}, timeout_s=timeout_s)
        result = send_command(found, "restart", keep_given(rank=rank), timeout_s=timeout_s)
    answer_of(
        job, result, "the ranks restart" if rank is None else f"rank {rank} restarts", as_json
    )


_HANG_LOOK_S = 5.0


@contextmanager
def _telling_of_hangs(job: Job) -> Iterator[Job]:
    """Say, while the body waits for ranks to come to a step, that one of them may come to none.

    Nothing else is done about it: it may be evaluating, and go on.
    """
    answered = Event()

    def look() -> None:
        while not answered.wait(_HANG_LOOK_S):
            with contextlib.suppress(PerdureError):
                picture = job.snapshot()
                hangs = [
                    verdict
                    for verdict in picture.verdicts
                    if verdict.kind in HANGS
                    and verdict.generation == picture.generation
                    and "withdrawn" not in verdict.evidence
                ]
                if hangs:
                    for_s = picture.at_s - hangs[0].first_seen_s
                    say_beside(
                        f"{hangs[0].culprit}: {hangs[0].kind} for {for_s:.0f} s; it is waited for, "
                        f"as it may go on: perdure stop {job.name} --now kills the ranks"
                    )
                    return

    thread = Thread(target=look, name="perdure-hangs", daemon=True)
    thread.start()
    try:
        yield job
    finally:
        answered.set()


def _parse_args(pairs: list[str]) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--arg {pair}: no `=`", hint="--arg NAME=NUMBER")
        try:
            args[key] = float(text) if "." in text else int(text)
        except ValueError:
            raise ConfigError(f"--arg {pair}: not a number", hint="--arg NAME=NUMBER") from None
        if why := refuse_value(args[key]):
            raise ConfigError(f"--arg {key}: {why}", hint="--arg NAME=NUMBER")
    return args


def answer_of(job: str, result: dict[str, Any], text: str, as_json: bool) -> None:
    """Print what a job's controller has answered; `text` says it in words."""
    answer({"job": job, "ok": True, **result}, f"{job}: {text}", as_json=as_json)


Targets = Annotated[
    list[str],
    typer.Argument(metavar="TARGET...", help="node:1 (or 1), rank:3, replica:2, or a device's id."),
]
Deadline = Annotated[
    float | None,
    typer.Option("--deadline", metavar="S", min=0.1, help="Seconds; then it is taken back."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change nothing.")]
Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="For the journal.")]
Wait = Annotated[bool, typer.Option("--wait", help="For a spare node, should none be ready.")]

_ANSWER_S = 15.0


def drain(
    job: JobName,
    targets: Targets,
    deadline: Deadline = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Evict where it cannot be drained, or not in time."),
    ] = False,
    wait: Wait = False,
    dry_run: DryRun = False,
    why: Why = "",
    as_json: Json = False,
) -> None:
    """Move the ranks off a node; no committed step is lost.

    All ranks agree on a step, save a checkpoint, and stop. A spare node takes the node's place, and
    the job resumes. perdure refuses this without a spare node, or without perdure.init().
    """
    _send(job, "drain", targets, deadline, why, dry_run, as_json, force=force, wait=wait)


def cordon(
    job: JobName,
    targets: Targets,
    dry_run: DryRun = False,
    why: Why = "",
    as_json: Json = False,
) -> None:
    """Let a node take no new ranks; those that run there stay.

    It counts from the next world on.
    """
    _send(job, "cordon", targets, None, why, dry_run, as_json)


def evict(
    job: JobName,
    targets: Targets,
    deadline: Deadline = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    why: Why = "",
    as_json: Json = False,
) -> None:
    """End the ranks on a node now; a spare node stands in.

    It goes on from the newest checkpoint.
    """
    _send(job, "evict", targets, deadline, why, dry_run, as_json, wait=wait)


def restore(
    job: JobName,
    targets: Targets,
    dry_run: DryRun = False,
    why: Why = "",
    as_json: Json = False,
) -> None:
    """Let a node run ranks again: undoes cordon, drain and evict."""
    _send(job, "restore", targets, None, why, dry_run, as_json)


def _send(
    job: str,
    verb: Literal["drain", "cordon", "evict", "restore"],
    targets: list[str],
    deadline_s: float | None,
    why: str,
    dry_run: bool,
    as_json: bool,
    **flags: bool,
) -> None:
    given = keep_given(dry_run=dry_run, why=why, deadline_s=deadline_s, **flags)
    timeout_s = _ANSWER_S + (deadline_s or LEAVE_DEADLINE_S)
    result = send_command(find_job(job), verb, {"targets": targets, **given}, timeout_s=timeout_s)
    text = f"{f'{verb} would' if dry_run else verb}: {result.get('reason', 'done')}"
    answer_of(job, result, text, as_json)


KINDS = ("device-failed", "device-ok", "preemption", "preemption-withdrawn", "machine")


def notify(
    job: JobName,
    kind: Annotated[str, typer.Argument(metavar="KIND", help=" | ".join(KINDS))],
    device: Annotated[
        str | None,
        typer.Argument(
            metavar="DEVICE", help="Its id, as `perdure status JOB --devices` shows it."
        ),
    ] = None,
    node: Annotated[int | None, typer.Option("--node", min=0, help="Instead of a device.")] = None,
    machine: Annotated[
        str | None,
        typer.Option("--machine", metavar="NAME", help="Instead of both: one that has joined."),
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option("--grace", min=0, help="With preemption: seconds until the machine is gone."),
    ] = 0.0,
    waits: Annotated[bool, typer.Option("--waits", help="With preemption: leave at once.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Such as `XID 79`.")] = "",
    source: Annotated[
        str, typer.Option("--source", help="Name of the operator; default: you.")
    ] = "",
    timeout_s: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Tell a job of a failed device, or a machine that will go.

    The job cannot see it by itself. A failed device gives the verdict UnhealthyDevice, and
    `policy.unhealthy_device` acts on it. After a preemption, ranks leave the node within its grace.
    `machine` says why a machine is gone.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown notice `{kind}`", hint=f"one of {', '.join(KINDS)}")
    named = keep_given(device=device, node=node, machine=machine)
    if len(named) != 1:
        raise ConfigError(f"{kind} of what?", hint="a DEVICE, --node N or --machine NAME")
    if not kind.startswith("device") and device is not None:
        raise ConfigError(f"{kind} is of a node", hint="--node N or --machine NAME")
    told = keep_given(grace_s=grace_s or None, waits=waits, reason=reason, source=source)
    result = send_command(
        find_job(job), "notify", {"kind": kind, **named, **told}, timeout_s=timeout_s
    )
    answer_of(job, result, result.get("reason", "told"), as_json)


def set_(
    job: JobName,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Without any, the keys are listed."),
    ] = None,
    at_step: Annotated[
        int | None,
        typer.Option(
            "--at-step", min=0, help="With KEY=VALUE or --undo: begin with this step; else soon."
        ),
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Without KEY=VALUE: take the newest change back.")
    ] = False,
    show_all: Annotated[
        bool,
        typer.Option(
            "--all", help="Without KEY=VALUE or --undo: list all keys, also unchanged ones."
        ),
    ] = False,
    why: Annotated[
        str,
        typer.Option("--why", metavar="TEXT", help="With KEY=VALUE or --undo: for the journal."),
    ] = "",
    timeout_s: Timeout = 60.0,
    as_json: Json = False,
) -> None:
    """Change settings of a running job, on all ranks from one step on.

    All of them are in force, on every rank, from one step on, or none. Keys are those that the
    script has declared (run.config.declare), and perdure's own. A rank that cannot apply a change
    refuses it for all.
    """
    found = find_job(job)
    snapshot = found.snapshot()
    keys = _list_keys(found, snapshot)
    if not changes and not undo:
        _list(job, keys, snapshot, show_all=show_all, as_json=as_json)
        return
    values = _parse(found, keys, snapshot, changes) if changes else None
    args = {"why": why, **keep_given(undo=undo, changes=values, at=at_step)}
    result = send_command(found, "set", args, timeout_s=timeout_s)
    step, ranks = result.get("applied_at_step"), result.get("ranks", [])
    set_to = " ".join(f"{k}={render_value(v)}" for k, v in result.get("changes", {}).items())
    where = f"on {len(ranks)} ranks from step {step} on"
    where = "by perdure's own parts, at once" if step is None else where
    _answer(job, result, f"{set_to} {where}", as_json)


def pause(job: JobName, why: Why = "", timeout_s: Timeout = 300.0, as_json: Json = False) -> None:
    """Have all ranks stand still before the same step.

    They stand until they are resumed. A paused job can be set, saved and stopped. If a rank fails
    in a pause, the job recovers, makes the lost steps again, and stands before the same step.
    """
    result = send_command(find_job(job), "pause", {"why": why}, timeout_s=timeout_s)
    _answer(job, result, f"paused before step {result.get('step', '?')}", as_json)


def resume(job: JobName, timeout_s: Timeout = 60.0, as_json: Json = False) -> None:
    """Let a paused job go on, or start an ended one again.

    A job that has ended is started with the script and settings of its last `perdure run`, in the
    environment of this shell, and goes on from its newest checkpoint. The command then stays, as
    `perdure run` does. It shows the lines of all ranks, also if --tee, --redirects or
    --local-ranks-filter of that run chose some.
    """
    found = find_job(job)
    if not found.alive:
        _start_again(found, as_json)
    result = send_command(found, "resume", {}, timeout_s=timeout_s)
    _answer(job, result, f"goes on at step {result.get('step', '?')}", as_json)


def _start_again(job: Job, as_json: bool) -> NoReturn:
    """Become the `perdure run` of a job that has ended.

    Raises:
        ConfigError: more than this command started it.
        PlatformError: the state directory cannot be written.
    """
    from perdure.launch.local import render, write_files
    from perdure.service.jobfiles import load_parts

    parts = load_parts(job.paths)
    elsewhere = parts and (parts.slurm or parts.host not in ("", socket.gethostname()))
    if elsewhere or job.spec.remote or "JOB_DIR" in os.environ:  # Which a launched job has.
        raise ConfigError(
            f"job `{job.name}` has ended, and more than a `perdure run` here started it",
            hint="the same `perdure launch`, `sbatch`, or `perdure run --nnodes` starts it again",
        )
    plan = render(job.spec, job.home)
    write_files(plan)
    os.chdir(plan.cwd)
    words = (*plan.command, *(["--json"] if as_json else []))
    os.execve(words[0], words, {**os.environ, **plan.env})


def _answer(job: str, result: dict[str, Any], text: str, as_json: bool) -> None:
    reason = result.get("reason")
    answer_of(job, result, text + (f" ({reason})" if reason else ""), as_json)


# --- what was typed -----------------------------------------------------------------------------


def parse_changes(job: Job, changes: list[str]) -> dict[str, Value]:
    """Return the values of `KEY=VALUE` texts, checked against what the job has declared.

    Raises:
        ConfigError: one of them cannot be.
    """
    snapshot = job.snapshot()
    return _parse(job, _list_keys(job, snapshot), snapshot, changes)


def _list_keys(job: Job, snapshot: Snapshot) -> dict[str, KeySpec]:
    return {spec.name: spec for spec in (*snapshot.keys, *list_own_keys(job.spec))}


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
                hint=f"the script has declared {own or 'none'}; "
                f"perdure set {job.name} --all lists all",
            )
        else:
            values[name] = _guess(text)  # The script has not declared its keys yet.
    apply_spec(job.spec, values)
    fault = find_product_fault(keys, _read_values(keys, snapshot), values)
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


def _read_values(keys: dict[str, KeySpec], snapshot: Snapshot) -> dict[str, Any]:
    return {name: snapshot.settings.get(name, spec.default) for name, spec in keys.items()}


def _list(
    job: str, keys: dict[str, KeySpec], snapshot: Snapshot, *, show_all: bool, as_json: bool
) -> None:
    values = _read_values(keys, snapshot)
    meanings = {
        f"{section}.{field}": text
        for section, type_ in SECTIONS.items()
        for field, text in read_meanings(type_).items()
    }
    notes = {s.name: s.note or meanings.get(s.name, "") for s in keys.values()}
    order = sorted(keys.values(), key=lambda spec: (spec.owner != "script", spec.name))
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
    shown = [s for s in order if show_all or s.owner == "script" or s.name in snapshot.settings]
    cells = [(s.name, s.type, render_value(values[s.name]), s.range, notes[s.name]) for s in shown]
    lines = [render_table(("key", "type", "value", "range", "note"), cells)] if cells else []
    if len(shown) < len(order):
        own = "settings of perdure's own, which nobody has changed"
        lines.append(f"{len(order) - len(shown)} {own}: perdure set {job} --all")
    document = {"job": job, "epoch": snapshot.epoch, "settings": rows}
    answer(document, "\n".join(lines), as_json=as_json)
