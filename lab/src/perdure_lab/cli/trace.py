"""`perdure trace`: recorded availability read, shown, changed, made up, simulated and played."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from perdure.cli.page.keeping import keep
from perdure.cli.speech.say import (
    Json,
    Width,
    answer,
    check_writable,
    keep_given,
    note,
    print_json,
    show_play,
    write_asked,
)
from perdure.dash.terminal import print_exact
from perdure.files.regular import read_file
from perdure.model.errors import ConfigError
from perdure.service.jobfolders import resolve_home
from perdure_lab.cli.plan import load_profile, parse_size, read_text
from perdure_lab.policies.policies import (
    POLICIES,
    Policy,
    apply_costs,
    change_policy,
    parse_policies,
    pick_names,
)
from perdure_lab.policies.throughput import MODELS, Throughput, read_throughput, tabulate
from perdure_lab.report import DriveResult, MeasuredCosts, Physics, ReplayResult
from perdure_lab.traces import (
    FORMATS,
    AvailabilityTrace,
    find_format,
    list_intervals,
    read_trace,
)
from perdure_lab.traces.figures import (
    AvailabilityModel,
    describe_availability,
    draw_victims,
    fit_availability,
)
from perdure_lab.traces.figures import generate as generate_trace
from perdure_lab.traces.formats import Format, add_quiet
from perdure_lab.traces.transform import announce, coalesce, cut, scale_to, speed_up

app = typer.Typer(
    no_args_is_help=True,
    help="Recorded availability: show, convert, generate, simulate, replay.",
)

_NAMES = ", ".join(format_.name for format_ in FORMATS)

File = Annotated[Path, typer.Argument(help="A trace in any of the formats of docs/traces.md.")]
FormatName = Annotated[
    str | None,
    typer.Option("--format", help=f"Format of FILE, if perdure does not recognise it: {_NAMES}."),
]
Duration = Annotated[
    float | None, typer.Option("--duration", metavar="SECONDS", min=0.001, help="Its end.")
]
Speed = Annotated[
    float, typer.Option("--speed", min=1e-9, help="Speed-up of the trace, notices too.")
]
ScaleTo = Annotated[
    int | None,
    typer.Option(
        "--scale-to", metavar="NODES", min=1, help="Number of nodes to scale to, at most."
    ),
]
AllNodes = Annotated[
    int | None,
    typer.Option("--nodes", min=1, help="All nodes, with those that a trace of faults omits."),
]
Notice = Annotated[
    float,
    typer.Option("--notice", metavar="SECONDS", min=0, help="Announce departures without notice."),
]
Coalesce = Annotated[
    float,
    typer.Option("--coalesce", metavar="SECONDS", min=0, help="Take changes so close together."),
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page.")]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Also draw it there.")]


def load_trace(
    file: Path,
    format_name: str | None = None,
    duration_s: float | None = None,
    *,
    nodes: int | None = None,
    until: float | None = None,
    speed: float = 1.0,
    scale: int | None = None,
    notice_s: float = 0.0,
    coalesce_s: float = 0.0,
) -> AvailabilityTrace:
    """Return the trace in `file`, changed in the order of the arguments.

    Raises:
        ConfigError: There is no such file, or it is malformed.
    """
    text = read_text(file, str(file), "a trace file; docs/traces.md shows each format")
    trace = read_trace(text, str(file), format_name=format_name, duration_s=duration_s, tell=note)
    trace = msgspec.structs.replace(trace, name=file.name)
    if nodes is not None:
        trace = add_quiet(trace, nodes)
    trace = cut(trace, until) if until is not None else trace
    if speed != 1.0:
        trace = speed_up(trace, speed)
    if scale is not None:
        trace = scale_to(trace, scale)
    if notice_s:
        trace = announce(trace, notice_s)
    return coalesce(trace, coalesce_s) if coalesce_s else trace


@app.command()
def show(
    file: File,
    format_name: FormatName = None,
    duration: Duration = None,
    nodes: AllNodes = None,
    speed: Speed = 1.0,
    scale_to: ScaleTo = None,
    coalesce: Coalesce = 0.0,
    svg: Svg = None,
    html: Html = None,
    width: Width = 100,
    as_json: Json = False,
) -> None:
    """Show a trace: how many nodes were there when, how often that changed, and how."""
    from perdure_lab.results import KeptTrace, fold_counts
    from perdure_lab.screens import draw_nodes, make_trace_document, render_summary

    trace = load_trace(
        file, format_name, duration, nodes=nodes, speed=speed, scale=scale_to, coalesce_s=coalesce
    )
    figures = describe_availability(trace)
    counts = [(i.begin_s, len(i.living)) for i in list_intervals(trace)]
    write_drawn(
        svg,
        lambda: draw_nodes(counts, trace.duration_s),
        html,
        lambda: make_trace_document(figures, counts),
    )
    keep(KeptTrace(figures=figures, counts=fold_counts(counts, trace.duration_s)))
    samples = [{"at_s": at_s, "nodes": count} for at_s, count in counts]
    document = {**msgspec.to_builtins(figures), "counts": samples}
    answer(document, render_summary(figures, counts, width), as_json=as_json)


@app.command()
def convert(
    file: File,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"One of {_NAMES}.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Instead of the terminal.")
    ] = None,
    gap: Annotated[
        float,
        typer.Option("--gap", min=0.001, help="With skypilot or polls: seconds between entries."),
    ] = 60.0,
    format_name: FormatName = None,
    duration: Duration = None,
    nodes: AllNodes = None,
    speed: Speed = 1.0,
    scale_to: ScaleTo = None,
    notice: Notice = 0.0,
    coalesce: Coalesce = 0.0,
    as_json: Json = False,
) -> None:
    """Write a trace in another format, changed where options ask for it.

    With --json the document says what was written where; the trace needs --out then.
    """
    if as_json and out is None:
        raise ConfigError("--json needs --out", hint="the trace itself goes to that file")
    target = find_format(to)
    trace = load_trace(
        file,
        format_name,
        duration,
        nodes=nodes,
        speed=speed,
        scale=scale_to,
        notice_s=notice,
        coalesce_s=coalesce,
    )
    _write_trace(trace, target, gap, out)
    if as_json:
        print_json({"file": str(out), "format": target.name, "loses": target.loses})


def _write_trace(trace: AvailabilityTrace, to: Format, gap_s: float, out: Path | None) -> None:
    """Write `trace` to `out`, or to the terminal."""
    text = to.write(trace, gap_s)
    if to.loses:
        note(f"{to.name} has no place for {to.loses}")
    if out is None:
        print_exact(text, end="")
    else:
        write_asked(out, text)


@app.command()
def generate(
    like: Annotated[
        Path | None, typer.Option("--like", metavar="FILE", help="Rates and sizes of this trace.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Most nodes at once (else 16).")
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(
            "--mtbf",
            min=0.1,
            help="Seconds on a node for each instant at which some leave (else 4 h).",
        ),
    ] = None,
    absence: Annotated[
        float | None,
        typer.Option(
            "--absence",
            min=0.1,
            help="Seconds of an empty place for each instant at which some come (else 0.5 h).",
        ),
    ] = None,
    burst: Annotated[
        int | None,
        typer.Option("--burst", min=1, help="Lose up to this many nodes at once (default 1)."),
    ] = None,
    notice: Annotated[
        float | None, typer.Option("--notice", min=0, help="Seconds of notice for all.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option("--hours", min=0.001, help="Its length (else FILE's, or 12).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same trace.")] = 0,
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help=f"One of {_NAMES}.")
    ] = "perdure",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Instead of the terminal.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make up a trace from a seed: like another one, from rates, or both.

    Nodes leave and come without memory, in bursts. With --json the document is the model drawn
    from; the trace needs --out then.
    """
    if as_json and out is None:
        raise ConfigError("--json needs --out", hint="the trace itself goes to that file")
    if like is not None:
        recorded = load_trace(like)
        model, length_s = fit_availability(recorded), recorded.duration_s
    else:
        model, length_s = AvailabilityModel(16, 16, 0.25, 2.0), 12 * 3600.0
    model = _change_model(model, nodes, mtbf, absence, burst, notice)
    trace = generate_trace(model, hours * 3600.0 if hours is not None else length_s, seed)
    _write_trace(trace, find_format(to), 60.0, out)
    if as_json:
        document = {"file": str(out), "format": to, "seed": seed, "duration_s": trace.duration_s}
        print_json({**document, "model": model})


def _change_model(
    model: AvailabilityModel,
    nodes: int | None,
    mtbf_s: float | None,
    absence_s: float | None,
    burst: int | None,
    notice_s: float | None,
) -> AvailabilityModel:
    """Return `model` with what is not None said by hand."""
    share = model.nodes_first / model.nodes_max if model.nodes_max else 1.0
    changes = keep_given(
        nodes_max=nodes,
        nodes_first=None if nodes is None else round(nodes * share),
        losses_per_node_h=3600.0 / mtbf_s if mtbf_s else None,
        gains_per_vacancy_h=3600.0 / absence_s if absence_s else None,
        loss_sizes=tuple((size, 1) for size in range(1, burst + 1)) if burst else None,
        notice_s=notice_s,
        announced=None if notice_s is None else float(notice_s > 0),
    )
    return msgspec.structs.replace(model, **changes)


Draw = Annotated[
    bool, typer.Option("--draw-victims", help="Draw who leaves; a trace of counts always does.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the choice of victims.")]
SWEEP_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


Tau = Annotated[
    str,
    typer.Option(
        "--tau",
        metavar="TABLE",
        help="Samples a second by shape: FILE, FILE:MODEL, plan:PROFILE:BATCH:MEMORY, or "
        + " or ".join(MODELS)
        + ".",
    ),
]


@app.command()
def simulate(
    file: File,
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAMES", help="all, or of " + ", ".join(POLICIES))
    ] = "all",
    tau: Tau = "linear",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="POLICY.FIELD=VALUE", help="Change a parameter; repeated."),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            "--costs", metavar="FILE", help="perdure's costs, as trace replay has measured them."
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep-communicator", help="Also perdure with communicators of 0.1 to 10 s."
        ),
    ] = False,
    state_gb: Annotated[
        float | None,
        typer.Option("--state-gb", min=1e-6, help="Model and optimizer state, instead of TABLE's."),
    ] = None,
    link_gbit: Annotated[
        float, typer.Option("--link-gbit", min=1e-6, help="Rate of each node, per second.")
    ] = 10.0,
    draw: Draw = False,
    seed: Seed = 0,
    format_name: FormatName = None,
    duration: Duration = None,
    nodes: AllNodes = None,
    speed: Speed = 1.0,
    scale_to: ScaleTo = None,
    notice: Notice = 0.0,
    coalesce: Coalesce = 0.0,
    svg: Svg = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Simulate each system on a trace, beside the best possible.

    U1 is the fastest shape at every moment. U2 is the best plan with perfect knowledge of the
    trace, and U2' is U2 with perdure's measured cost of a change.
    """
    trace = load_trace(
        file,
        format_name,
        duration,
        nodes=nodes,
        speed=speed,
        scale=scale_to,
        notice_s=notice,
        coalesce_s=coalesce,
    )
    policies = parse_policies(policy)
    if costs is not None:
        measured = load_costs(costs)
        policies = [apply_costs(p, measured) if p.name == "perdure" else p for p in policies]
    for setting in settings or ():
        policies = change_policy(policies, setting)
    drawn = draw or not trace.named
    if drawn:
        trace = draw_victims(trace, seed)
    table = load_throughput(tau, trace, state_gb)
    physics = Physics(bytes_per_s=link_gbit / 8e-9)
    _simulate(trace, table, policies, physics, seed if drawn else None, sweep, svg, html, as_json)


def load_costs(path: Path) -> MeasuredCosts:
    """Return the costs in a file that `trace replay --costs` has written.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        return msgspec.json.decode(read_file(path, follow=True), type=MeasuredCosts)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"cannot read measured costs from {path}: {error}",
            hint="a file that `perdure trace replay --costs FILE` has written",
        ) from error


def load_throughput(tau: str, trace: AvailabilityTrace, state_gb: float | None) -> Throughput:
    """Return the table called `tau`: a built-in one, a file, a file's model, or a planned one.

    Raises:
        ConfigError: There is none, or it is malformed.
    """
    state_bytes = state_gb * 1e9 if state_gb is not None else None
    if tau in MODELS or tau.startswith("plan:"):
        nodes_max = max(len(i.living) for i in list_intervals(trace))
        table = MODELS[tau](nodes_max) if tau in MODELS else plan_throughput(tau, nodes_max)
        table.state_bytes = state_bytes or table.state_bytes
        return table
    path, model = Path(tau), None
    if not path.exists() and ":" in tau:
        name, _, model = tau.rpartition(":")
        path = Path(name)
    hint = f"--tau FILE, FILE:MODEL, {' or '.join(MODELS)}"
    text = read_text(path, f"a table of throughput from {tau}", hint)
    return read_throughput(text, str(path), model, state_bytes=state_bytes)


def plan_throughput(tau: str, nodes_max: int) -> Throughput:
    """Return what the planner predicts for `plan:PROFILE:GLOBAL_BATCH:MEMORY`.

    Raises:
        ConfigError: it is not of that form, the profile is malformed, or nothing fits.
    """
    name, colon, memory = tau.removeprefix("plan:").rpartition(":")
    file, second, batch = name.rpartition(":")
    if not colon or not second or not batch.isdecimal() or int(batch) < 1:
        raise ConfigError(
            f"--tau {tau}", hint="plan:PROFILE:GLOBAL_BATCH:MEMORY, as p.json:64:16GB"
        )
    return tabulate(load_profile(Path(file)), nodes_max, parse_size(memory), int(batch))


def _simulate(
    trace: AvailabilityTrace,
    table: Throughput,
    policies: list[Policy],
    physics: Physics,
    seed: int | None,
    sweep: bool,
    svg: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    from perdure.cli.speech.bar import Bar
    from perdure_lab.results import KeptSimulation, fold_counts
    from perdure_lab.screens import draw_rates, make_simulation_document, render_comparison
    from perdure_lab.simulation.compare import compare, sweep_communicator

    with Bar(as_json=as_json) as bar:
        comparison, outcomes = compare(trace, table, policies, physics, seed=seed, progress=bar.say)
        if sweep:
            perdure = next((p for p in policies if p.name == "perdure"), POLICIES["perdure"])
            rows = sweep_communicator(trace, table, perdure, physics, SWEEP_S, bar.say)
            comparison = msgspec.structs.replace(comparison, sweep=rows)
    rates = {"U1": compute_area_rates(trace, table)}
    rates |= {name: outcome.rates for name, outcome in outcomes.items()}
    counts = [(i.begin_s, len(i.living)) for i in list_intervals(trace)]
    write_drawn(
        svg,
        lambda: draw_rates(comparison, rates),
        html,
        lambda: make_simulation_document(comparison, counts, rates),
    )
    end_s = trace.duration_s
    folded = {name: fold_counts(rows, end_s) for name, rows in rates.items()}
    keep(KeptSimulation(comparison=comparison, counts=fold_counts(counts, end_s), rates=folded))
    answer(comparison, render_comparison(comparison), as_json=as_json)


def compute_area_rates(
    trace: AvailabilityTrace, table: Throughput
) -> tuple[tuple[float, float], ...]:
    """Return the rate of the fastest shape over time: (seconds, samples a second)."""
    best = ((i.begin_s, table.choose_fastest(len(i.living))) for i in list_intervals(trace))
    return tuple((at_s, table.rates[shape] if shape else 0.0) for at_s, shape in best)


Systems = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAMES",
        help="Systems to replay, in turn: all, or of perdure, torchrun, torchft, torchft-default; "
        "with --stages of perdure, varuna.",
    ),
]

Until = Annotated[
    float | None,
    typer.Option("--until", metavar="SECONDS", min=1.0, help="Play the trace up to there."),
]

CoalesceLive = Annotated[
    float,
    typer.Option(
        "--coalesce",
        metavar="SECONDS",
        min=0,
        help="Take changes so close together, in seconds as they are played.",
    ),
]


@app.command()
def replay(
    file: File,
    policy: Systems = "perdure",
    nodes_max: Annotated[
        int, typer.Option("--nodes-max", min=1, max=8, help="Number of nodes to scale to, at most.")
    ] = 8,
    speed: Speed = 1.0,
    until: Until = None,
    notice: Notice = 0.0,
    coalesce_s: CoalesceLive = 0.5,
    draw: Draw = False,
    seed: Seed = 0,
    pace_ms: Annotated[
        float,
        typer.Option("--pace-ms", min=1.0, help="Declared time of a micro-batch, of 56 a step."),
    ] = 20.0,
    stages: Annotated[
        int,
        typer.Option(
            "--stages", min=1, max=8, help="Number of stages of perdure's model, if they fit."
        ),
    ] = 1,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --stages: measure again, though it is known.")
    ] = False,
    costs: Annotated[
        Path | None,
        typer.Option("--costs", metavar="FILE", help="Also write what changes cost, for simulate."),
    ] = None,
    format_name: FormatName = None,
    duration: Duration = None,
    nodes: AllNodes = None,
    svg: Svg = None,
    html: Html = None,
    width: Width = 100,
    as_json: Json = False,
) -> None:
    """Play a trace against a real elastic job: its nodes are killed and started at its instants.

    Nodes are process groups of this machine, devices are virtual. Plain DDP's throughput by number
    of nodes is measured before and between the systems, and the replay is refused where it does not
    rise. Ctrl-C ends it with the results so far.
    """
    from perdure_lab.live import session

    known = session.STAGED if stages > 1 else session.SYSTEMS
    systems = pick_names(policy, known, f"no system `{{}}` to replay against with {stages} stages")
    trace = load_trace(file, format_name, duration, nodes=nodes, until=until)
    drawn = seed if draw or not trace.named else None
    trace = prepare(trace, nodes_max, speed, notice, coalesce_s, drawn)
    home, pace_s = resolve_home(), pace_ms / 1000.0
    wish = session.Wish(trace, systems, home, pace_s, stages, measure, speed, notice, drawn)
    check_writable(svg, html, costs)
    with show_play("replay") as bar:
        result = session.replay(wish, bar.say)
    if costs is not None and result.costs is not None:
        write_asked(costs, msgspec.json.format(msgspec.json.encode(result.costs)).decode() + "\n")
    tell_replay(result, svg, html, width, as_json=as_json)


def write_drawn(
    svg: Path | None, draw: Callable[[], str], html: Path | None, make: Callable[[], Any]
) -> None:
    """Write a drawing to `svg` and a page to `html`, if a person asked for them."""
    from perdure.dash.svg import stand_alone

    if svg is not None:
        write_asked(svg, stand_alone(draw()))
    if html is not None:
        write_asked(html, make().render_file())


def tell_replay(
    result: ReplayResult, svg: Path | None, html: Path | None, width: int, *, as_json: bool
) -> None:
    """Answer with what a play has shown, and write what was asked for beside it."""
    from perdure_lab.results import KeptDrive, KeptReplay
    from perdure_lab.screens import draw_replay, make_replay_document, render_replay

    keep(KeptDrive(result=result) if isinstance(result, DriveResult) else KeptReplay(result=result))
    write_drawn(svg, lambda: draw_replay(result), html, lambda: make_replay_document(result))
    answer(result, render_replay(result, width), as_json=as_json)


def prepare(
    trace: AvailabilityTrace,
    nodes_max: int,
    speed: float,
    notice_s: float,
    coalesce_s: float,
    seed: int | None,
) -> AvailabilityTrace:
    """Return `trace` as it is played: its seconds are those of the clock."""
    trace = speed_up(trace, speed) if speed != 1.0 else trace
    if max(len(i.living) for i in list_intervals(trace)) > nodes_max:
        trace = scale_to(trace, nodes_max)
    trace = draw_victims(trace, seed) if seed is not None else trace
    trace = announce(trace, notice_s) if notice_s else trace
    return coalesce(trace, coalesce_s) if coalesce_s else trace
