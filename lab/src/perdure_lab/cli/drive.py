"""`perdure trace drive`: a trace played against your own job, started for it or running already."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from perdure.cli.platforms.profiles import Host, ask_person, choose_profile, here
from perdure.cli.speech.say import Json, Width, answer, check_writable, note, show_play
from perdure.model.errors import ConfigError, SafetyError
from perdure.service.jobfolders import resolve_home
from perdure_lab.cli.trace import (
    AllNodes,
    CoalesceLive,
    Draw,
    Duration,
    File,
    FormatName,
    Notice,
    Seed,
    Speed,
    Until,
    app,
    load_trace,
    prepare,
    tell_replay,
)
from perdure_lab.traces import AvailabilityTrace

if TYPE_CHECKING:
    from perdure.model.job import JobSpec
    from perdure.model.platforms.launching import LaunchRecord
    from perdure_lab.live.fleets.fleet import Fleet, Node
    from perdure_lab.live.live import Schedule


Target = Annotated[
    str,
    typer.Argument(metavar="JOB", help="A job file, which is started for it; or a job that runs."),
]
Place = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="PROFILE",
        help="Profile on which the job file starts; default: this machine.",
    ),
]
NodesMax = Annotated[
    int | None,
    typer.Option(
        "--nodes-max", min=1, help="Scale to this many nodes at most; default: the job's."
    ),
]
Keep = Annotated[
    bool, typer.Option("--keep", help="Nodes that cannot be taken are no part of the trace.")
]
Start = Annotated[
    float,
    typer.Option(
        "--start", metavar="SECONDS", min=1.0, help="Seconds that the job may take until it trains."
    ),
]
Stop = Annotated[bool, typer.Option("--stop", help="Stop a running job at the end.")]
Yes = Annotated[bool, typer.Option("--yes", help="Take the nodes of a running job without asking.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done when, and do nothing.")
]


@app.command()
def drive(
    file: File,
    job: Target,
    on: Place = None,
    host: Host = None,
    nodes_max: NodesMax = None,
    keep: Keep = False,
    speed: Speed = 1.0,
    until: Until = None,
    notice: Notice = 0.0,
    coalesce_s: CoalesceLive = 0.5,
    draw: Draw = False,
    seed: Seed = 0,
    start_s: Start = 600.0,
    stop: Stop = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    format_name: FormatName = None,
    duration: Duration = None,
    nodes: AllNodes = None,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Without --dry-run: also draw it there."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Without --dry-run: also write a page."),
    ] = None,
    width: Width = 100,
    as_json: Json = False,
) -> int:
    """Play a trace against your own job: its nodes are taken and given back at its instants.

    A job file is started by `perdure run` or `perdure launch --on PROFILE` under another name, and
    stopped at the end. A running job gets all its nodes back. The job is compared with its own
    pace. Ctrl-C ends it with the results so far.
    """
    from perdure_lab.live import driving
    from perdure_lab.traces.formats import add_quiet

    trace = load_trace(file, format_name, duration, nodes=nodes, until=until)
    drawn = seed if draw or not trace.named else None
    check_writable(svg, html)
    home = resolve_home()
    with open_fleet(job, on, host, home, notice_s=notice, dry_run=dry_run) as (fleet, runs):
        there = fleet.list_nodes()
        staying = sum(bool(node.stays) for node in there) if keep else 0
        most = max(1, min(nodes_max or len(there), len(there) - staying))
        trace = prepare(trace, most, speed, notice, coalesce_s, drawn)
        trace = add_quiet(trace, len(trace.nodes) + staying)
        wish = driving.DriveWish(trace, home, speed, notice, drawn, start_s, stop=stop or not runs)
        schedule = driving.check_drive(wish, fleet.spec, there)
        if dry_run:
            _tell_schedule(schedule, trace, fleet.spec, there, as_json=as_json)
            return 0
        if runs and not yes:
            _ask_name(fleet, there)
        with show_play("drive") as bar:
            result = driving.drive(wish, fleet, bar.say)
    tell_replay(result, svg, html, width, as_json=as_json)
    return 3 if result.trouble else 0


def _tell_schedule(
    schedule: "Schedule",
    trace: AvailabilityTrace,
    spec: "JobSpec",
    nodes: "Sequence[Node]",
    *,
    as_json: bool,
) -> None:
    """Say what would be done to which node when, and on which machine."""
    from perdure_lab.live.driving import tell_enough
    from perdure_lab.screens import render_schedule

    told, length_s = tell_enough(trace, spec), trace.duration_s
    document = {"dry_run": True, "job": spec.name, "duration_s": length_s,
                "nodes": [node._asdict() for node in nodes], "fixed": told}  # fmt: skip
    text = render_schedule(schedule.first, schedule.acts, spec.name, length_s, nodes)
    answer(document | schedule._asdict(), f"{text}\n{told}".rstrip("\n"), as_json=as_json)


def _ask_name(fleet: "Fleet", nodes: "Sequence[Node]") -> None:
    """Have a person type the job's name: what runs there is taken from a job that is theirs."""
    name, able = fleet.spec.name, [node for node in nodes if not node.stays]
    machines = ", ".join(dict.fromkeys(node.machine for node in able))
    note(
        f"the job's processes on {len(able)} nodes ({machines}) are killed at the trace's instants"
    )
    if ask_person(f"type the job's name ({name}) to go on: ") != name:
        raise SafetyError("not driven: the job's name was not typed", hint="--dry-run, or --yes")


@contextmanager
def open_fleet(
    job: str, on: str | None, host: str | None, home: str, *, notice_s: float, dry_run: bool
) -> "Iterator[tuple[Fleet, bool]]":
    """Give the nodes of a job, and whether it runs already; nothing is started.

    Raises:
        ConfigError: there is no such file or job, or it cannot be driven where it is.
    """
    if not (os.path.exists(job) or job.endswith((".toml", ".json"))):
        if on or host:
            raise ConfigError(
                f"--on: job `{job}` is where it was started", hint="or the path of a job file"
            )
        yield _find_running(job, home), True
    elif on in (None, "local"):
        with _make_local(job, home, dry_run=dry_run) as fleet:
            yield fleet, False
    else:
        yield _make_elsewhere(job, on, host, notice_s), False


def _find_running(job: str, home: str) -> "Fleet":
    """Return the nodes of a job that runs, here or elsewhere."""
    from perdure.cli.jobs import ElsewhereError, find_job
    from perdure_lab.live.fleets.local import LocalFleet

    try:
        return LocalFleet(find_job(job).spec, home, None)
    except ElsewhereError as elsewhere:
        return _follow_elsewhere(elsewhere.record)


def _follow_elsewhere(record: "LaunchRecord") -> "Fleet":
    """Return the nodes of a job that was launched.

    Raises:
        ConfigError: nodes of such a place cannot be taken away.
    """
    _check_kind(record.profile.kind)
    if record.profile.kind == "kubernetes":
        from perdure_lab.live.fleets import pods

        client = pods.Client(record.profile.kubernetes)
        return pods.PodFleet(pods.read_spec(record), client, here(), record=record)
    if record.profile.kind == "slurm":
        raise ConfigError(
            f"job `{record.job}` runs on Slurm: the nodes of its allocation are the "
            "administrator's to drain",
            hint="perdure trace drive FILE JOB.TOML --on PROFILE starts one whose nodes are Slurm "
            "jobs of their own",
        )
    from perdure_lab.live.fleets.boxes import BoxFleet, read_spec

    hosts = [box.box for box in record.boxes]
    return BoxFleet(read_spec(record), hosts, here(), record=record)


def _make_elsewhere(job_file: str, on: str, host: str | None, notice_s: float) -> "Fleet":
    """Return the nodes of a job that is to be launched; the place is looked at.

    Raises:
        ConfigError: nodes of such a place cannot be taken away.
    """
    from perdure.cli.platforms.launch import check_launch, make_launch_spec, make_plan, submit

    place = here()
    profile = choose_profile(on, host, place.home).profile
    _check_kind(profile.kind)
    spec = name_drive(make_launch_spec(job_file, place.home))
    if profile.kind == "kubernetes":  # Each loss is a pod that has failed.
        section = msgspec.structs.replace(profile.kubernetes, backoff_limit=_FAILURES)
        plan = make_plan(spec, msgspec.structs.replace(profile, kubernetes=section))
        from perdure_lab.live.fleets import pods

        plan = check_launch(spec, plan, place)
        client = pods.Client(section)
        return pods.PodFleet(spec, client, place, launch=lambda: submit(spec, plan, place))
    if profile.kind == "slurm":
        from perdure_lab.live.fleets.allocations import AllocationFleet, separate

        spec = separate(spec)
        plan = check_launch(spec, make_plan(spec, profile), place)
        return AllocationFleet(spec, notice_s, place, lambda: submit(spec, plan, place))
    plan = make_plan(spec, profile)
    hosts = profile.launch.hosts or (profile.launch.host,)
    from perdure_lab.live.fleets.boxes import BoxFleet

    if len(hosts) > 1:  # Else it is refused, and nobody need be asked.
        plan = check_launch(spec, plan, place)
    return BoxFleet(spec, hosts, place, launch=lambda: submit(spec, plan, place))


_FAILURES = 10_000
_WHY_NOT = {
    "notebook": "a session is one machine, and has no address",
}


def _check_kind(kind: str) -> None:
    """Refuse platforms whose nodes cannot be taken and given back.

    Raises:
        ConfigError: this is one.
    """
    if why := _WHY_NOT.get(kind):
        raise ConfigError(
            f"nodes on a platform of kind {kind} are not driven: {why}",
            hint="a profile of kind ssh with several hosts, slurm or kubernetes; or no --on",
        )


@contextmanager
def _make_local(job_file: str, home: str, *, dry_run: bool) -> "Iterator[Fleet]":
    """Give the nodes of a job of this machine, which ends with this process."""
    from perdure.cli.running.jobspec import check_job, choose_name, make_spec
    from perdure.cli.running.options import RunOptions
    from perdure_lab.live.driving import make_folder
    from perdure_lab.live.fleets.local import LocalFleet

    environ = dict(os.environ)
    spec, named, notes = make_spec(RunOptions(config=job_file, environ=environ))
    spec = name_drive(spec if named else choose_name(spec, home))
    spec = msgspec.structs.replace(spec, tee="none")
    notes += check_job(spec, home, environ)
    if spec.checkpoint.url:
        notes.append(f"checkpoints are read from and written to {spec.checkpoint.url}")
    for text in notes:
        note(text)
    if dry_run:
        yield LocalFleet(spec, home, Path(os.devnull))
        return
    with make_folder(home) as folder:
        yield LocalFleet(spec, home, folder)


def name_drive(spec: "JobSpec") -> "JobSpec":
    """Return a job under a name of its own: it neither finds nor adds to another's checkpoints."""
    return msgspec.structs.replace(spec, name=f"{spec.name[:48]}-drive-{token_hex(2)}")
