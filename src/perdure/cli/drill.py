"""`perdure drill`: a rehearsal of the user's own job, in a copy: does it survive its failures?

It runs on this machine, where nodes are emulated, or on the boxes of a profile (`--on`). What is
drilled is a copy of the job's project, held to its own folders by the kernel: nothing of the user's
is written.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from perdure.cli.page.keeping import keep
from perdure.cli.platforms.profiles import Host, ask_person
from perdure.cli.plugins import load_plugin
from perdure.cli.running.options import RunOptions
from perdure.cli.speech.say import (
    Json,
    Width,
    Yes,
    answer,
    check_writable,
    note,
    show_play,
    write_asked,
)
from perdure.drill.card import Card, KeptDrill
from perdure.drill.isolation import check_drillable, list_changes
from perdure.drill.planning import FAULTS, DrillWish, plan_acts
from perdure.model.errors import ConfigError, PlatformError, SafetyError
from perdure.model.job import JobSpec
from perdure.service.jobfolders import resolve_home

if TYPE_CHECKING:
    from perdure.drill.rehearsal import Say

_BUDGET_MIN_S = 20.0
_WORLDS_STOP = ("crash", "stop", "hang", "node", "torn")
"""Faults for which the world starts again."""
UNCONFINED = "--unconfined, if your script writes nothing at absolute paths that you need"
_ROOM_BYTES = 256 << 20
"""Of a disk, beyond the copies: for journals, logs, and checkpoints of a small model."""
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Without --dry-run: also write a page."),
]


def drill(
    job: Annotated[str, typer.Argument(metavar="JOB.TOML", help="The job file.")],
    budget: Annotated[
        str,
        typer.Option("--budget", metavar="TIME", help="For all faults together, such as 90s, 10m."),
    ] = "10m",
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the victims and of the time after a checkpoint.")
    ] = 0,
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="NAME", help=f"Only this; repeatable: {', '.join(FAULTS)}"),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="PROFILE", help="On its boxes, behind ssh (perdure-lab)."),
    ] = None,
    host: Host = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Emulated nodes; else the job file's.")
    ] = None,
    writable: Annotated[
        list[Path] | None,
        typer.Option("--writable", metavar="DIR", help="Without --unconfined: it may write there."),
    ] = None,
    unconfined: Annotated[
        bool,
        typer.Option("--unconfined", help="Do not hold the script to its copy: it may write."),
    ] = False,
    yes: Yes = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the planned faults, and do nothing.")
    ] = False,
    html: Html = None,
    width: Width = 100,
    as_json: Json = False,
) -> int:
    """Rehearse a job: harm a copy of it, and grade what follows.

    perdure makes the faults one after another, at random steps from a seed. The card says for each
    fault when it was found, whether the culprit was right, and when the job was back. It also has
    the repeated steps, and compares losses with an undisturbed run. The cost is shown before.
    Ctrl-C ends it, and leaves nothing.
    """
    request = Request(job, parse_budget(budget), seed, fault or list(FAULTS), nodes,
                      writable or [], not unconfined, {})  # fmt: skip
    check_writable(html)
    check_faults(request)
    here = on in (None, "local")
    if host and here:
        raise ConfigError("--host: no box is meant", hint="--on PROFILE, such as generic-ssh")
    site = look_here(request) if here else load_plugin("drill-on", "drill --on")(request, on, host)
    if dry_run:
        tell_plan(site.wish, site.told, as_json=as_json)
        return 0
    if site.forbidden is not None:
        raise site.forbidden
    confirm(site.told, yes=yes)
    from perdure.drill.screens import make_card_document, render_card

    with show_play("drill") as bar:
        card = site.drill(bar.say)
    keep(KeptDrill(card=card))
    if html is not None:
        write_asked(html, make_card_document(card).render_file())
    answer(card, render_card(card, width), as_json=as_json)
    return card.exit_code


class Request(NamedTuple):
    """What was asked for on the command line."""

    job: str
    budget_s: float
    seed: int
    names: list[str]
    nodes: int | None
    writable: list[Path]
    confined: bool
    changed: Mapping[Path, str]
    """Other texts for files of the project, in the copy."""


class Site(NamedTuple):
    """Where a drill would be, looked at, and not touched."""

    wish: DrillWish
    told: list[str]
    """What it costs and touches."""
    forbidden: SafetyError | None
    """Why it may not be done, though it can be planned."""
    drill: Callable[["Say"], Card]


def check_faults(request: Request) -> None:
    """Refuse what is no job file, and faults that there are not.

    Raises:
        ConfigError: that is so.
    """
    job = request.job
    if job.endswith(".py"):
        hint = f"perdure init {job} writes one, job.toml"
        raise ConfigError(f"{job} is a script, and a drill is of a job file", hint=hint)
    if wrong := [name for name in request.names if name not in FAULTS]:
        raise ConfigError(f"--fault {wrong[0]}: no such fault", hint=f"one of {', '.join(FAULTS)}")


def confirm(told: list[str], *, yes: bool) -> None:
    """Have a person agree to what it costs, or have agreed before.

    Raises:
        SafetyError: nobody does.
    """
    if yes:
        return
    for line in told:
        note(line)
    if ask_person("go on? [y/N] ").lower() not in ("y", "yes"):
        raise SafetyError("not drilled: it was not confirmed", hint="--yes, or --dry-run")


def look_here(request: Request) -> Site:
    """Return a drill on this machine.

    Raises:
        ConfigError: the job file is wrong, or such a job cannot be drilled.
        SafetyError: its project is too large to be copied.
        PlatformError: the machine cannot take the job, or has no room for a copy.
    """
    from functools import partial

    from perdure.drill.here import drill as drill_here

    wish = make_wish(request)
    told, forbidden = describe_cost(wish), check_confinement(confined=request.confined)
    return Site(wish, told, forbidden, partial(drill_here, wish))


def count_starts(wish: DrillWish) -> int:
    """Return how often the job starts."""
    return 2 + sum(act.fault in _WORLDS_STOP for act in wish.acts)


def make_wish(request: Request) -> DrillWish:
    """Return what is to be done, checked.

    Raises:
        ConfigError: the job file is wrong, or such a job cannot be drilled.
        SafetyError: its project is too large to be copied.
        PlatformError: the machine cannot take the job.
    """
    from perdure.cli.running.jobspec import check_job, make_spec

    job, budget_s, seed, names, nodes, writable, confined, changed = request
    for path in writable:
        if not path.is_dir():
            raise ConfigError(f"--writable {path}: no such folder", hint="a folder that is there")
    home, environ = resolve_home(), dict(os.environ)
    spec, named, notes = make_spec(RunOptions(config=job, nodes=nodes, environ=environ))
    check_drillable(spec)
    spec, project = locate_project(spec, job)
    if not named:
        stem = re.sub(r"[^A-Za-z0-9_.-]", "-", Path(spec.script).stem).strip("-.") or "job"
        spec = msgspec.structs.replace(spec, name=stem[:40])
    own = msgspec.structs.replace(spec.checkpoint, url="")  # Nobody looks at the user's.
    for text in [
        *notes, *check_job(msgspec.structs.replace(spec, checkpoint=own), home, environ)
    ]:  # fmt: skip
        note(text)
    acts, left_out = plan_acts(names, seed, spec.nodes, spec.nproc, python=not spec.no_python)
    return DrillWish(
        spec, project, home, acts, left_out, seed, budget_s, environ,
        writable=[str(path.resolve()) for path in writable], confined=confined,
        changed={os.path.relpath(path, project): text for path, text in changed.items()},
    )  # fmt: skip


def locate_project(spec: JobSpec, job: str) -> tuple[JobSpec, Path]:
    """Return the job, and the folder that is copied for it: both without links.

    What is relative is so to the working directory, as for `perdure run`; where there is no such
    script, to the job file's folder, as for `perdure launch`.
    """
    folder = Path(job).resolve().parent
    declared = (folder / os.path.expanduser(spec.launch.project)).resolve()
    cwd, script = Path(spec.cwd).resolve(), os.path.expanduser(spec.script)
    is_file = not (spec.module or spec.no_python)
    if is_file and not (cwd / script).exists() and (folder / script).exists():
        cwd = folder
    if is_file:
        script = str((cwd / script).resolve() if os.path.isabs(script) else script)
    place = (cwd / script).resolve() if is_file else cwd
    project = next(
        (p for p in (declared, cwd) if place.is_relative_to(p)),
        place.parent if is_file else cwd,
    )
    if is_file and not cwd.is_relative_to(project):
        cwd, script = project, str(place)
    if is_file and Path(script).is_absolute():
        script = os.path.relpath(script, cwd)
    return msgspec.structs.replace(spec, cwd=str(cwd), script=script), project


def describe_cost(wish: DrillWish) -> list[str]:
    """Return what a drill will cost, and what it does otherwise than the user's job.

    Raises:
        SafetyError: the project is too large to be copied.
        PlatformError: there is no room for a copy.
    """
    import shutil

    from perdure.drill.copies import check_size, list_links

    spec = wish.spec
    size = check_size(
        wish.project, "a drill copies the job's project", (Path(wish.home).resolve(),)
    )
    Path(wish.home).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(wish.home).free
    if free < 2 * size + _ROOM_BYTES:
        raise PlatformError(
            f"{free >> 20} MiB are free at {wish.home}, and a drill needs "
            f"{(2 * size + _ROOM_BYTES) >> 20}, and room for checkpoints",
            hint="make room, or another PERDURE_HOME",
        )
    names = ", ".join(act.fault for act in wish.acts)
    told = [
        f"drill of `{spec.name}` on this machine: {spec.world_size} ranks, {len(wish.acts)} faults "
        f"({names}), seed {wish.seed}",
        f"it takes at most {wish.budget_s / 60:.4g} min or so, and then an undisturbed run of as "
        f"many steps; its ranks start about {count_starts(wish)} times",
        f"disk: copies of {wish.project} ({size / (1 << 20):.1f} MiB) and the checkpoints of the "
        f"job below {wish.home}/drill ({free >> 20} MiB free), removed afterwards",
        "trackers (Weights & Biases, Comet, Neptune, ClearML) are off, MLflow writes into the "
        "drill's folder; the script may write in its copy, in caches of your home"
        + "".join(f", in {path}" for path in wish.writable)
        + ("" if wish.confined else "; --unconfined: and wherever else it wants to"),
    ]
    if links := list_links(wish.project):
        told.append(f"what links lead to is read where it is: {', '.join(links[:5])}")
    told += list_changes(spec)
    return told + [f"{name} is not tried: {why}" for name, why in wish.left_out.items()]


def check_confinement(*, confined: bool) -> SafetyError | None:
    """Return the refusal of a kernel that cannot hold the script to its copy, as is wanted."""
    from perdure.adapters.confinement import can_confine

    if not confined or can_confine():
        return None
    return SafetyError(
        "this kernel has no Landlock (Linux 5.19), which would hold the script to its copy",
        hint=UNCONFINED,
    )


def tell_plan(wish: DrillWish, told: list[str], *, as_json: bool) -> None:
    """Answer with what would be done."""
    rows = [act._asdict() for act in wish.acts]
    text = [f"{act.fault}: {FAULTS[act.fault]}, {_name_victim(act.fault, act.rank, act.node)}"
            for act in wish.acts]  # fmt: skip
    document = {"dry_run": True, "job": wish.spec.name, "acts": rows, "told": told,
                "left_out": dict(wish.left_out)}  # fmt: skip
    answer(document, "\n".join([*told, *text]), as_json=as_json)


def _name_victim(fault: str, rank: int, node: int) -> str:
    if fault == "node":
        return f"node {node}"
    return "of perdure's own" if fault in ("controller", "bus", "disk") else f"rank {rank}"


def parse_budget(text: str) -> float:
    """Return seconds: of `90s`, `10m`, `1h`, `600`.

    Raises:
        ConfigError: it is no time, or too short for anything.
    """
    from perdure.cli.looking.chosen import UNITS_S

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None:
        raise ConfigError(f"--budget {text}: not a time", hint="such as 90s, 10m, 1h")
    budget_s = float(match[1]) * UNITS_S[match[2] or "s"]
    if budget_s < _BUDGET_MIN_S:
        raise ConfigError(
            f"--budget {text}: a start alone takes seconds", hint=f"{_BUDGET_MIN_S:g}s or more"
        )
    return budget_s
