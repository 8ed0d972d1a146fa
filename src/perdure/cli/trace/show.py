"""`perdure trace`: recorded availability read, shown, changed, made up and simulated."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from perdure.cli.running.options import Json
from perdure.cli.speech.say import answer, note, print_json, write_asked
from perdure.dash.terminal import print_exact
from perdure.lab.traces import (
    FORMATS,
    AvailabilityTrace,
    find_format,
    find_intervals,
    read_trace,
)
from perdure.lab.traces.faults import add_quiet
from perdure.lab.traces.figures import (
    AvailabilityModel,
    describe_availability,
    fit_availability,
)
from perdure.lab.traces.transform import announce, coalesce, scale_to, speed_up
from perdure.model.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    help="Availability of nodes over time: show, convert, generate and simulate traces.",
)

_NAMES = ", ".join(format_.name for format_ in FORMATS)

File = Annotated[Path, typer.Argument(help="A trace in any of the formats of docs/traces.md.")]
FormatName = Annotated[
    str | None, typer.Option("--format", help=f"What FILE is, instead of recognised: {_NAMES}.")
]
Duration = Annotated[
    float | None, typer.Option("--duration", metavar="SECONDS", min=0.001, help="Its end.")
]
Speed = Annotated[
    float, typer.Option("--speed", min=1e-9, help="Play it so many times as fast, notice too.")
]
ScaleTo = Annotated[
    int | None,
    typer.Option("--scale-to", metavar="NODES", min=1, help="Scale to so many nodes at most."),
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
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Also draw it there.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page.")]
Width = Annotated[int, typer.Option("--width", min=40, help="Columns of the text.")]


def load_trace(
    file: Path,
    format_name: str | None = None,
    duration_s: float | None = None,
    *,
    nodes: int | None = None,
    speed: float = 1.0,
    scale: int | None = None,
    notice_s: float = 0.0,
    coalesce_s: float = 0.0,
) -> AvailabilityTrace:
    """Return the trace in `file`, changed in the order of the arguments.

    Raises:
        ConfigError: There is no such file, or it is malformed.
    """
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", hint="a trace file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: byte {error.start} is not text; expected UTF-8",
            hint="docs/traces.md shows each format",
        ) from error
    trace = read_trace(text, str(file), format_name=format_name, duration_s=duration_s)
    trace = msgspec.structs.replace(trace, name=file.name)
    if nodes is not None:
        trace = add_quiet(trace, nodes)
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
    from perdure.lab.screens.availability import render_page, render_plot, render_summary

    trace = load_trace(
        file,
        format_name,
        duration,
        nodes=nodes,
        speed=speed,
        scale=scale_to,
        coalesce_s=coalesce,
    )
    figures = describe_availability(trace)
    counts = [(i.begin_s, len(i.living)) for i in find_intervals(trace)]
    if svg is not None:
        write_asked(svg, render_plot(counts, trace.duration_s))
    if html is not None:
        write_asked(html, render_page(figures, counts))
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
        float, typer.Option("--gap", min=0.001, help="Seconds between entries: skypilot, polls.")
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
    _write_trace(trace, target.name, gap, out, as_json)


def _write_trace(
    trace: AvailabilityTrace, to: str, gap_s: float, out: Path | None, as_json: bool
) -> None:
    """Write `trace` to `out`, or to the terminal."""
    target = find_format(to)
    text = target.write(trace, gap_s)
    if target.loses:
        note(f"{to} has no place for {target.loses}")
    if out is None:
        print_exact(text, end="")
    else:
        write_asked(out, text)
    if as_json:
        print_json({"file": str(out), "format": to, "loses": target.loses})


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
        int | None, typer.Option("--burst", min=1, help="Leave one to so many at once (else 1).")
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
    from perdure.lab.traces.generate import generate as draw

    if as_json and out is None:
        raise ConfigError("--json needs --out", hint="the trace itself goes to that file")
    if like is not None:
        recorded = load_trace(like)
        model, length_s = fit_availability(recorded), recorded.duration_s
    else:
        model, length_s = AvailabilityModel(16, 16, 0.25, 2.0), 12 * 3600.0
    model = _change_model(model, nodes, mtbf, absence, burst, notice)
    trace = draw(model, hours * 3600.0 if hours is not None else length_s, seed)
    _write_trace(trace, to, 60.0, out, False)
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
    changes: dict[str, object] = {}
    if nodes is not None:
        share = model.nodes_first / model.nodes_max if model.nodes_max else 1.0
        changes |= {"nodes_max": nodes, "nodes_first": round(nodes * share)}
    if mtbf_s is not None:
        changes["losses_per_node_h"] = 3600.0 / mtbf_s
    if absence_s is not None:
        changes["gains_per_vacancy_h"] = 3600.0 / absence_s
    if burst is not None:
        changes["loss_sizes"] = tuple((size, 1) for size in range(1, burst + 1))
    if notice_s is not None:
        changes |= {"notice_s": notice_s, "announced": 1.0 if notice_s > 0 else 0.0}
    return msgspec.structs.replace(model, **changes)
