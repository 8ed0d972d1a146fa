"""`perdure doctor`: what this machine, or a job, lets perdure see; each lack with its mend."""

import ast
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from perdure.cli.jobs import Job, find_job, send_command
from perdure.cli.platforms.profiles import Host
from perdure.cli.speech.pages import point_to_pages
from perdure.cli.speech.say import Json, answer, note, render_table
from perdure.model.errors import ConfigError, PerdureError, PlatformError
from perdure.service.jobfolders import resolve_home

if TYPE_CHECKING:
    from perdure.model.platforms.traps import Check, Scope, Trap

_PING_S = 5.0
_PROBE_S = 30.0
_STALE_S = 5.0
_LOST = {
    "status": "no durations, stages or waits: no slow rank or link by its collectives",
    "off": "hangs are told by steps alone",
}
_RECORDERS = {
    "compiled": "every collective, begin and end; about 2 µs each",
    "status": "sequence numbers ten times a second; nothing per collective",
}


def doctor(
    job: Annotated[
        str | None, typer.Argument(help="A job, or a script (FILE.py); none: this machine.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="With JOB: test the paths and processors of its nodes.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="PROFILE", help="Also a platform: what it says, its traps."),
    ] = None,
    host: Host = None,
    project: Annotated[
        str,
        typer.Option("--project", metavar="DIR", help="Without JOB: whose scripts are looked at."),
    ] = ".",
    every: Annotated[
        bool, typer.Option("--all", help="Show the traps that do not lie ahead as well.")
    ] = False,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Alone: print the schema of a job file, or of a `profile`."),
    ] = False,
    permissions: Annotated[
        bool,
        typer.Option("--permissions", help="Alone: print what each role may say and hear in JOB."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check what perdure can see and do here, or for a job or profile.

    docs/doctor.md lists all traps, and the part of perdure that handles each.
    """
    if schema or permissions:
        from perdure.cli.looking.schema import print_schema

        print_schema(job, permissions)
        return
    from perdure.adapters.health import check_machine
    from perdure.cli.platforms.asking import check_platform
    from perdure.cli.platforms.profiles import choose_profile

    if job is not None and job.endswith(".py"):
        if probe or on is not None or every:
            raise ConfigError("--probe, --on and --all are not for a script")
        carried = find_carried(job)
        text = "\n".join(carried) or f"{job}: what its loops hand from step to step is registered"
        answer({"script": job, "carried": carried}, text, as_json=as_json)
        return
    found = find_job(job) if job else None
    if found:
        checks = _check_job(found) + ((_probe(found),) if probe else ())
    else:
        machine = check_machine(resolve_home())
        checks = (*machine, check_recorder(), check_nccl_plugin())
    if on is not None:
        checks += check_platform(choose_profile(on, host, resolve_home()))
    traps = look_for_traps(found, on, project)
    rows = [
        {name: getattr(trap, name) for name in ("id", "title", "scope", "mend")}
        | {"state": check.state, "evidence": check.evidence}
        for trap, check in traps
    ]
    document = {"job": job, "checks": checks, "traps": rows}
    text = "\n".join([render_checks(checks), "", render_traps(traps, every=every)])
    answer(document, text, as_json=as_json)
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(PlatformError.exit_code)


def find_carried(path: str) -> list[str]:
    """Return what loops over `run.steps` hand from step to step, and no checkpoint has, in words.

    It is found by the script's text. What its objects keep is named as it runs.

    Raises:
        ConfigError: it is no script that can be read.
    """
    from perdure.cli.adopting.script import Reading
    from perdure.worker.carried import is_only_shown, list_carried

    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", hint="name a job or a script"
        ) from None
    reading = Reading(text, path)
    registered = {
        node.id
        for call in reading.methods("register")
        for word in call.keywords
        for node in ast.walk(word.value)
        if isinstance(node, ast.Name)
    }
    loops = [
        above
        for method in ("steps", "batches")
        for call in reading.methods(method)
        for above in reading.ancestors(call)
        if isinstance(above, ast.For) and call in ast.walk(above.iter)
    ]
    found: dict[str, None] = {}
    for loop in loops:
        used = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
        drawn = [name for name in reading.names("generator") if name in used]
        for name in (*list_carried(loop), *drawn):
            if name not in registered and (name in drawn or not is_only_shown(loop, name)):
                found[
                    f"{path}:{loop.lineno}: no checkpoint has {name}, which one step hands to the "
                    "next; register an object with state_dict and load_state_dict"
                ] = None
    return list(found)


def look_for_traps(
    job: Job | None, on: str | None, project: str
) -> "tuple[tuple[Trap, Check], ...]":
    """Return what this machine says of the traps of a platform; without one, of its own.

    Raises:
        ConfigError: there is no such profile.
    """
    from perdure.adapters.box import read_box
    from perdure.cli.platforms.profiles import choose_profile
    from perdure.traps import judge

    home = resolve_home()
    kind = choose_profile(on, None, home).profile.kind if on is not None else "ssh"
    scopes: set[Scope] = {"any", "nodes"} if kind == "local" else {"any", "nodes", kind}
    project = os.path.abspath(project) if job is None else job.spec.cwd
    facts = read_box(home, project, job.checkpoints if job else "")
    if on is None and facts.slurm:
        scopes.add("slurm")
    return judge(facts, frozenset(scopes))


def render_traps(traps: "tuple[tuple[Trap, Check], ...]", *, every: bool = False) -> str:
    """Return the traps that lie ahead (with `every`: all that were looked for) as a table."""
    shown = [(trap, check) for trap, check in traps if every or check.state != "ok"]
    rows = [(c.state, t.id, t.title, c.evidence) for t, c in shown]
    mends = ["" if check.state == "ok" else trap.mend for trap, check in shown]
    lines = _render_mends(("state", "trap", "what", "evidence"), rows, mends, "what")
    well = sum(check.state == "ok" for _, check in traps)
    page = point_to_pages("docs/doctor.md")
    end = f"{len(traps)} traps were looked for, {well} do not lie ahead; {page}"
    return "\n".join([*(lines if rows else []), end])


def _render_mends(
    head: tuple[str, ...], rows: Sequence[tuple[Any, ...]], mends: list[str], below: str
) -> list[str]:
    """Return the lines of a table; what mends a row stands under it, in the column `below`."""
    first, *table = render_table(head, rows).splitlines()
    lines = [first]
    for line, mend in zip(table, mends, strict=True):
        lines += [line, f"{' ' * first.index(below)}mend: {mend}"] if mend else [line]
    return lines


def check_recorder() -> "Check":
    """Return which recorder a rank would get here, and what it costs."""
    from perdure.model.platforms.traps import Check
    from perdure.worker.native.build import status as recorder_status

    found = recorder_status()
    name, evidence = "recorder", f"{found.kind} ({found.reason}), {found.cost}"
    if found.kind == "compiled":
        return Check(name=name, state="ok", evidence=evidence)
    mend = found.better
    if found.reason.startswith("PERDURE_RECORDER="):
        mend = "unset PERDURE_RECORDER"
    elif found.broken:
        mend = "report this; PERDURE_RECORDER=status needs no compiled code"
    return Check(
        name=name, state="degraded", evidence=f"{evidence}: {_LOST.get(found.kind, '')}", mend=mend
    )


def check_nccl_plugin() -> "Check":
    """Return whether NCCL could be given perdure's profiler plugin; only GPUs need it."""
    from perdure.adapters.devices import list_gpus
    from perdure.model.platforms.traps import Check
    from perdure.worker.native.build import find_nccl_plugin

    path, gpus = find_nccl_plugin(), list_gpus()
    if path:
        idle = "" if gpus else "; used where there are GPUs"
        return Check(name="NCCL plugin", state="ok", evidence=f"built: {path}{idle}")
    return Check(
        name="NCCL plugin",
        state="degraded" if gpus else "note",
        evidence="not built: of NCCL's transfers nothing is seen",
        mend="install a C compiler; make setup builds it, or an agent that finds a GPU",
    )


def render_checks(checks: "tuple[Check, ...]") -> str:
    """Return checks as a table, the mend of each below it."""
    rows = [(c.state, c.name, c.evidence) for c in checks]
    mends = [check.mend if check.state != "ok" else "" for check in checks]
    return "\n".join(_render_mends(("state", "check", "evidence"), rows, mends, "evidence"))


def _check_job(job: Job) -> "tuple[Check, ...]":
    from perdure.model.platforms.traps import Check

    if not job.alive:
        state = job.snapshot().state
        return (
            Check(
                name="perdure run",
                state="note",
                evidence=f"not running: {state}",
                mend=f"perdure diagnose {job.name}",
            ),
        )
    checks = [Check(name="perdure run", state="ok", evidence="alive"), _check_controller(job)]
    return (*checks, *_check_storage(job), *_check_ranks(job))


def _check_storage(job: Job) -> "list[Check]":
    """Say whether the checkpoints to come find room, by the size of the newest one."""
    from perdure.model.platforms.traps import Check
    from perdure.service.storage_watch import compute_storage_budget

    budget = compute_storage_budget(job.spec, job.paths)
    if budget is None:
        return []
    mend = f"perdure rm {job.name} --checkpoints-until GB, or checkpoint.keep_last"
    state: Literal["ok", "degraded"] = "ok" if budget.grade == "ok" else "degraded"
    return [Check(name="storage", state=state, evidence=budget.reason, mend=mend)]


def _probe(job: Job) -> "Check":
    """Have the job's agents transfer and compute, beside the training; say what was slow."""
    from perdure.model.platforms.traps import Check

    note("probing: a few seconds, outside the training's own connections")
    found = send_command(job, "probe", {}, timeout_s=_PROBE_S)
    evidence = f"{found['reason']} (confidence {found['confidence']:.0%})"
    rates = [8.0 / seconds for _, _, seconds in found.get("pairs", []) if seconds]
    if rates:
        evidence += f"; {len(rates)} transfers of 8 MB at {min(rates):.0f} to {max(rates):.0f} MB/s"
    if found["kind"] == "nothing":
        return Check(name="probe", state="ok", evidence=evidence)
    mend = f"perdure diagnose {job.name}; policy.cordon_after says when a node is left out"
    return Check(name="probe", state="degraded", evidence=evidence, mend=mend)


def _check_controller(job: Job) -> "Check":
    from perdure.model.platforms.traps import Check

    began = time.perf_counter()
    try:
        found = send_command(job, "ping", {}, timeout_s=_PING_S)
    except PerdureError as error:
        return Check(
            name="controller",
            state="degraded",
            evidence=str(error),
            mend=f"training goes on without it; its log is in {job.paths.logs}",
        )
    took_ms = (time.perf_counter() - began) * 1000
    evidence = f"pid {found.get('pid')}, answers in {took_ms:.0f} ms"
    return Check(name="controller", state="ok", evidence=evidence)


def _check_ranks(job: Job) -> "list[Check]":
    """Say of each rank who records it, and how long ago it was last heard of."""
    from perdure.adapters.rings import read_ring
    from perdure.model.platforms.traps import Check
    from perdure.service.jobfiles import load_endpoint

    generation = job.snapshot().generation
    offset_s = load_endpoint(job.paths).clock_offset_s
    now = time.monotonic() + offset_s
    checks = []
    for rank in range(job.spec.world_size):
        name = f"rank {rank}"
        reading = read_ring(job.paths.ring(generation, rank), offset_s)
        if reading is None or not reading.pid:
            checks.append(Check(name=name, state="note", evidence="not started"))
            continue
        age_s = now - reading.heartbeat_s
        sees = _RECORDERS.get(reading.recorder)
        evidence = (
            f"recorder {reading.recorder}: {sees or 'no collectives'}; phase {reading.phase}, "
            f"last sign {age_s:.1f} s ago"
        )
        if any(comm.stamps == "enqueued" for comm in reading.comms):
            evidence += "; times of a device's collectives are those of enqueuing"
        mend = ""
        if sees is None:
            page = point_to_pages("docs/ring.md")
            mend = f"hangs are told by steps alone; see {page} for what a recorder needs"
        elif age_s > _STALE_S and reading.phase == "step":
            mend = f"perdure diagnose {job.name}"
        state: Literal["ok", "degraded"] = "degraded" if mend else "ok"
        checks.append(Check(name=name, state=state, evidence=evidence, mend=mend))
    return checks
