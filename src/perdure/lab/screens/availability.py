"""Traces of availability on a terminal, as one SVG, and as a page."""

from collections.abc import Sequence
from html import escape

from perdure.dash.lines import find_means, make_stairs, render_lines, stand_alone
from perdure.dash.text import render_chart
from perdure.lab.traces.figures import Availability

Counts = Sequence[tuple[float, int]]
"""(seconds, nodes from then on), in order."""


def render_summary(figures: Availability, counts: Counts, width: int) -> str:
    """Return a trace's figures and its plot as text."""
    rows = [(name, value) for name, value in describe(figures) if value]
    wide = max(len(name) for name, _ in rows)
    table = "\n".join(f"{name:<{wide}}  {value}" for name, value in rows)
    return f"{table}\n\n{render_nodes(figures, counts, width)}"


def describe(figures: Availability) -> list[tuple[str, str]]:
    """Return what is to be said of a trace, a line each."""
    f = figures
    who = f"{f.nodes} different" if f.named else "counts only; who leaves is made up"
    notice = f"{f.announced:.0%} of departures, median {f.notice_s:g} s" if f.announced else "none"
    return [
        ("trace", f.name),
        ("length", f"{render_time(f.duration_s)}, {f.node_hours:.1f} node-hours"),
        ("nodes", f"{f.nodes_min} to {f.nodes_max}, mean {f.nodes_mean:.2f}; {who}"),
        ("slots", "" if f.slots_max == f.nodes_max else f"{f.slots_max} at most"),
        ("availability", f"{f.availability:.1%} of the most"),
        ("changes", f"{f.changes}, {f.changes_per_h:.2f} an hour"),
        ("departures", f"{f.departures} at {sum(f.losses.values())} instants{_sizes(f.losses)}"),
        ("arrivals", f"{f.arrivals} at {sum(f.gains.values())} instants{_sizes(f.gains)}"),
        ("MTBF of a node", render_time(f.node_mtbf_s)),
        ("MTBF of a job", f"{render_time(f.job_mtbf_s)} (on all of them)"),
        ("notice", notice if f.departures else ""),
    ]


def _sizes(sizes: dict[int, int]) -> str:
    shown = [f"{times} of {size}" for size, times in list(sizes.items())[:6]]
    more = ["..."] if len(sizes) > 6 else []
    return f": {', '.join(shown + more)}" if shown else ""


def render_time(seconds: float | None) -> str:
    """Return a length of time in the unit that suits it."""
    if seconds is None:
        return "-"
    for unit, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds:.4g} s"


def render_nodes(figures: Availability, counts: Counts, width: int) -> str:
    """Return nodes over time in block characters; each column is a mean."""
    columns = width - 8
    end_s, most = figures.duration_s, figures.nodes_max
    lines = render_curve("nodes over time", counts, end_s, columns, most, height=6)
    return "\n".join([*lines, f"{'':8}0{render_time(end_s):>{columns - 1}}"])


def render_curve(
    title: str,
    rows: Sequence[tuple[float, float]],
    end_s: float,
    columns: int,
    most: float,
    *,
    height: int = 4,
) -> list[str]:
    """Return what `rows` (seconds, value from then on) are like in block characters, from 0 on."""
    chart = render_chart(find_means(rows, end_s, columns), height=height, low=0.0)
    labels = [f"{most:6.0f}", *[" " * 6] * (len(chart) - 2), f"{0:6d}"]
    return [title, *(f"{a}  {b}".rstrip() for a, b in zip(labels, chart, strict=True))]


def draw_nodes(counts: Counts, end_s: float) -> str:
    """Return nodes over time as SVG."""
    stairs = make_stairs(counts, end_s)
    return render_lines([("nodes", stairs)], x_label="hours", y_label="nodes")


def render_plot(counts: Counts, end_s: float) -> str:
    """Return nodes over time as an SVG file."""
    return stand_alone(draw_nodes(counts, end_s))


def render_page(figures: Availability, counts: Counts) -> str:
    """Return figures and plot as one HTML file."""
    from perdure.dash.page import render_document

    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
        for name, value in describe(figures)
        if value
    )
    sections = (
        ("Nodes over time", draw_nodes(counts, figures.duration_s)),
        ("Figures", f"<table>{rows}</table>"),
    )
    return render_document(figures.name, f"<h1>{escape(figures.name)}</h1>", sections)
