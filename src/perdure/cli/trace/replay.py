"""`perdure trace replay`: a trace played on this machine, against real processes."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec import json as msgspec_json

from perdure.cli.running.options import Json
from perdure.cli.speech.say import answer, write_asked
from perdure.cli.trace.show import (
    AllNodes,
    Duration,
    File,
    FormatName,
    Html,
    Notice,
    Speed,
    Svg,
    Width,
    app,
    load_trace,
)
from perdure.cli.trace.simulate import Draw, Seed
from perdure.lab.traces import AvailabilityTrace, find_intervals
from perdure.lab.traces.transform import announce, coalesce, cut, speed_up
from perdure.service.jobfiles import resolve_home

Systems = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAMES",
        help="What is played, in turn: all, or of perdure, torchrun, torchft.",
    ),
]
NodesMax = Annotated[
    int, typer.Option("--nodes-max", min=1, max=8, help="Scale to so many nodes at most.")
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
PaceMs = Annotated[
    float, typer.Option("--pace-ms", min=1.0, help="Declared time of a micro-batch, of 56 a step.")
]
Stages = Annotated[
    int,
    typer.Option("--stages", min=1, max=8, help="Cut perdure's model into so many, if they fit."),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Measure throughput again, though it is known.")
]
CostsOut = Annotated[
    Path | None,
    typer.Option("--costs", metavar="FILE", help="Also write what changes cost, for simulate."),
]


@app.command()
def replay(
    file: File,
    policy: Systems = "perdure",
    nodes_max: NodesMax = 8,
    speed: Speed = 1.0,
    until: Until = None,
    notice: Notice = 0.0,
    coalesce_s: CoalesceLive = 0.5,
    draw: Draw = False,
    seed: Seed = 0,
    pace_ms: PaceMs = 20.0,
    stages: Stages = 1,
    measure: Measure = False,
    costs: CostsOut = None,
    format_name: FormatName = None,
    duration: Duration = None,
    nodes: AllNodes = None,
    svg: Svg = None,
    html: Html = None,
    width: Width = 100,
    as_json: Json = False,
) -> None:
    """Play a trace against a real elastic job: its nodes are killed and started at its instants.

    Nodes are process groups of this machine, devices are virtual. Throughput by number of nodes is
    measured first, and the replay is refused where it does not rise. Ctrl-C ends it with what was
    measured so far.
    """
    from perdure.cli.speech.bar import Bar
    from perdure.dash.lines import stand_alone
    from perdure.lab.live import session
    from perdure.lab.screens.replay import draw_replay, render_replay, render_replay_page

    systems = session.find_systems(policy)
    trace = load_trace(file, format_name, duration, nodes=nodes)
    trace = cut(trace, until) if until is not None else trace
    drawn = seed if draw or not trace.named else None
    trace = prepare(trace, nodes_max, speed, notice, coalesce_s, drawn)
    home, pace_s = resolve_home(), pace_ms / 1000.0
    wish = session.Wish(trace, systems, home, pace_s, stages, measure, speed, notice, drawn)
    with Bar() as bar:
        result = session.replay(wish, bar.say)
    if costs is not None and result.costs is not None:
        write_asked(costs, msgspec_json.format(msgspec_json.encode(result.costs)).decode() + "\n")
    if svg is not None:
        write_asked(svg, stand_alone(draw_replay(result)))
    if html is not None:
        write_asked(html, render_replay_page(result))
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
    from perdure.lab.traces.generate import draw_victims
    from perdure.lab.traces.transform import scale_to

    trace = speed_up(trace, speed) if speed != 1.0 else trace
    if max(len(i.living) for i in find_intervals(trace)) > nodes_max:
        trace = scale_to(trace, nodes_max)
    trace = draw_victims(trace, seed) if seed is not None else trace
    trace = announce(trace, notice_s) if notice_s else trace
    return coalesce(trace, coalesce_s) if coalesce_s else trace
