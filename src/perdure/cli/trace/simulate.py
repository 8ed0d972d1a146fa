"""`perdure trace simulate`: policies and oracles on one trace."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from perdure.cli.running.options import Json
from perdure.cli.speech.say import answer, write_asked
from perdure.cli.trace.show import (
    AllNodes,
    Coalesce,
    Duration,
    File,
    FormatName,
    Html,
    Notice,
    ScaleTo,
    Speed,
    Svg,
    app,
    load_trace,
)
from perdure.dash.terminal import find_stream
from perdure.lab.live.report import MeasuredCosts
from perdure.lab.policies.policies import (
    POLICIES,
    Policy,
    apply_costs,
    change_policy,
    find_policies,
)
from perdure.lab.policies.throughput import MODELS, Throughput, read_throughput
from perdure.lab.simulation.report import Physics
from perdure.lab.traces import AvailabilityTrace, find_intervals
from perdure.model.errors import ConfigError

Draw = Annotated[
    bool, typer.Option("--draw-victims", help="Draw who leaves; a trace of counts always does.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the victims that are drawn.")]
CostsIn = Annotated[
    Path | None,
    typer.Option(
        "--costs", metavar="FILE", help="perdure's costs, as trace replay has measured them."
    ),
]
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
    costs: CostsIn = None,
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
        float, typer.Option("--link-gbit", min=1e-6, help="Of each node, per second.")
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
    """Say what each system would have made of a trace, beside what was possible at all.

    U1 is the fastest shape at every moment; U2 the best plan of who knows the future; U2' the same
    at perdure's measured cost of a change.
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
    policies = find_policies(policy)
    if costs is not None:
        measured = load_costs(costs)
        policies = [apply_costs(p, measured) if p.name == "perdure" else p for p in policies]
    for setting in settings or ():
        policies = change_policy(policies, setting)
    drawn = draw or not trace.named
    if drawn:
        from perdure.lab.traces.generate import draw_victims

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
        return msgspec.json.decode(path.read_bytes(), type=MeasuredCosts)
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
        nodes_max = max(len(i.living) for i in find_intervals(trace))
        table = MODELS[tau](nodes_max) if tau in MODELS else plan_throughput(tau, nodes_max)
        table.state_bytes = state_bytes or table.state_bytes
        return table
    path, model = Path(tau), None
    if not path.exists() and ":" in tau:
        name, _, model = tau.rpartition(":")
        path = Path(name)
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        hint = f"--tau FILE, FILE:MODEL, {' or '.join(MODELS)}"
        raise ConfigError(f"cannot read a table of throughput from {tau}", hint=hint) from error
    return read_throughput(text, str(path), model, state_bytes=state_bytes)


def plan_throughput(tau: str, nodes_max: int) -> Throughput:
    """Return what the planner predicts for `plan:PROFILE:GLOBAL_BATCH:MEMORY`.

    Raises:
        ConfigError: it is not of that form, the profile is malformed, or nothing fits.
    """
    from perdure.cli.plan import load_profile, parse_size
    from perdure.lab.policies.tabulate import tabulate

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
    from perdure.dash.lines import stand_alone
    from perdure.lab.screens.simulation import draw_rates, render_comparison, render_simulation_page
    from perdure.lab.simulation.compare import compare, sweep_communicator

    comparison, outcomes = compare(
        trace, table, policies, physics, seed=seed, progress=_show_progress
    )
    if sweep:
        perdure = next((p for p in policies if p.name == "perdure"), POLICIES["perdure"])
        rows = sweep_communicator(trace, table, perdure, physics, SWEEP_S, _show_progress)
        comparison = msgspec.structs.replace(comparison, sweep=rows)
    _show_progress("", 1.0)
    rates = {"U1": find_area_rates(trace, table)}
    rates |= {name: outcome.rates for name, outcome in outcomes.items()}
    if svg is not None:
        write_asked(svg, stand_alone(draw_rates(comparison, rates)))
    if html is not None:
        counts = [(i.begin_s, len(i.living)) for i in find_intervals(trace)]
        write_asked(html, render_simulation_page(comparison, counts, rates))
    answer(comparison, render_comparison(comparison), as_json=as_json)


def find_area_rates(trace: AvailabilityTrace, table: Throughput) -> tuple[tuple[float, float], ...]:
    """Return the rate of the fastest shape over time: (seconds, samples a second)."""
    best = ((i.begin_s, table.find_best(len(i.living))) for i in find_intervals(trace))
    return tuple((at_s, table.rates[shape] if shape else 0.0) for at_s, shape in best)


def _show_progress(what: str, share: float) -> None:
    """Show on a terminal what is being done; an empty `what` clears it."""
    if not sys.stderr.isatty():
        return
    bar = f"{what:<12} {'█' * round(30 * share):<30} {share:4.0%}" if what else ""
    print(f"\r{bar:<50}" + ("" if what else "\r"), end="", file=find_stream(sys.stderr), flush=True)
