"""Policies on a trace, beside each other: as text, as SVG, and as a page."""

from collections.abc import Mapping, Sequence
from html import escape

from perdure.dash.lines import STEPS_MAX, find_means, make_stairs, render_lines
from perdure.dash.page import render_document
from perdure.dash.palette import INKS
from perdure.dash.svg import render_legend, render_stack
from perdure.lab.screens.availability import Counts, draw_nodes, render_time
from perdure.lab.simulation.report import Comparison

Rates = Mapping[str, Sequence[tuple[float, float]]]
"""By policy, and U1: (seconds, samples a second from then on)."""

GROUPS = {
    "useful": ("useful",),
    "pack": ("packing",),
    "reconf": tuple(name for name in INKS if name.startswith("reconfiguration")),
    "lost": ("lost_work",),
    "save": ("checkpoint",),
    "steady": ("steady_overhead",),
    "idle": ("idle", "startup"),
    "unattr": ("unattributed",),
}
"""Columns of the table, and the accounts that each adds up."""


def render_comparison(comparison: Comparison) -> str:
    """Return oracles, policies and their ledgers as text."""
    c = comparison
    victims = "as the trace names them" if c.seed is None else f"drawn with seed {c.seed}"
    head = [
        f"{c.trace}: {render_time(c.duration_s)}, {c.slot_s / 3600:.1f} slot-hours; "
        f"victims {victims}",
        f"throughput: {c.throughput}; links {c.physics.bytes_per_s * 8e-9:g} Gbit/s",
        f"U1 {c.u1:.0f} samples; U2 {render_share(c.u2, c.u1)} of it; "
        f"U2' {render_share(c.u2_online, c.u1)} (hindsight at perdure's cost of a change)",
    ]
    names = ("policy", "of U1", "of U2", "of U2'", "losses", "back", *GROUPS)
    rows = [
        (
            row.policy,
            *(f"{f:.4f}" for f in (row.fraction_of_u1, row.fraction_of_u2)),
            f"{row.fraction_of_u2_online:.4f}",
            str(row.losses),
            str(row.restarts),
            *(render_percent(sum(row.ledger[a] for a in accounts)) for accounts in GROUPS.values()),
        )
        for row in c.policies
    ]
    table = render_rows(names, rows)
    wide = max(len(name) for name, *_ in (names, *rows))
    sources = [f"  {row.policy:<{wide}}  {row.source}" for row in c.policies]
    note = "losses: of nodes that trained; back: to a checkpoint, since nobody had the state"
    return "\n".join([*head, "", *table, note, "", "parameters from", *sources, *_list_sweep(c)])


def render_rows(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose first column leans to the left and whose others lean to the right."""
    widths = [max(len(line[i]) for line in (names, *rows)) for i in range(len(names))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (names, *rows)
    ]


def _list_sweep(c: Comparison) -> list[str]:
    if not c.sweep:
        return []
    lines = ["", "communicator_s  perdure of U2  U2' of U2"]
    lines += [
        f"{row.communicator_s:>14g}  {row.fraction_of_u2:>13.4f}  {row.u2_online_of_u2:>9.4f}"
        for row in c.sweep
    ]
    return lines


def render_share(part: float, whole: float) -> str:
    """Return a part of a whole; a dash where there is no whole."""
    return f"{part / whole:.4f}" if whole else "-"


def render_percent(share: float) -> str:
    """Return a share as a percentage; nothing is a bare 0."""
    return f"{100 * share + 0.0:.2f}%" if abs(share) >= 5e-7 else "0"


def draw_rates(comparison: Comparison, rates: Rates) -> str:
    """Return the throughput of each policy over time as SVG, means of short stretches."""
    end_s = comparison.duration_s
    lines = []
    for name, rows in rates.items():
        if rows:
            means = find_means(rows, end_s, STEPS_MAX)
            steps = [(end_s * index / STEPS_MAX, mean) for index, mean in enumerate(means)]
            lines.append((name, make_stairs(steps, end_s)))
    return render_lines(lines, x_label="hours", y_label="samples/s") if lines else ""


def draw_committed(comparison: Comparison, rates: Rates) -> str:
    """Return the samples that each policy has made by then as SVG, lost ones not taken off."""
    lines = []
    for name, rows in rates.items():
        done, points = 0.0, [(0.0, 0.0)]
        ends = [*(at_s for at_s, _ in rows[1:]), comparison.duration_s]
        for (begin_s, rate), end_s in zip(rows, ends, strict=True):
            done += rate * (end_s - begin_s)
            points.append((end_s / 3600.0, done))
        lines.append((name, points))
    return render_lines(lines, x_label="hours", y_label="samples") if lines else ""


def draw_sweep(comparison: Comparison) -> str:
    """Return the fractions of U2 over the communicator's time as SVG."""
    sweep = comparison.sweep
    if not sweep:
        return ""
    lines = [
        ("perdure", [(row.communicator_s, row.fraction_of_u2) for row in sweep]),
        ("U2'", [(row.communicator_s, row.u2_online_of_u2) for row in sweep]),
    ]
    low = min(y for _, points in lines for _, y in points)
    return render_lines(
        lines,
        x_label="communicator, seconds",
        y_label="of U2",
        x_log=True,
        y_low=max(0.0, low - (1.0 - low) * 0.2),
    )


def render_simulation_page(comparison: Comparison, counts: Counts, rates: Rates) -> str:
    """Return plots, ledgers and sources as one HTML file."""
    c = comparison
    ledgers = "".join(
        f"<p><b>{escape(row.policy)}</b> {row.fraction_of_u2:.4f} of U2, "
        f"{row.fraction_of_u2_online:.4f} of U2'</p>"
        f'<div class="bar">{render_stack(row.ledger.items(), height=24)}</div>'
        for row in c.policies
    )
    used = [name for name in INKS if any(abs(row.ledger[name]) > 1e-6 for row in c.policies)]
    sections = (
        ("Nodes", draw_nodes(counts, c.duration_s)),
        ("Throughput", draw_rates(c, rates)),
        ("Samples, those that were lost again among them", draw_committed(c, rates)),
        ("Where the slot-seconds went", render_legend(used) + ledgers),
        ("Time to form the communicator", draw_sweep(c)),
        ("All figures", f"<pre>{escape(render_comparison(c))}</pre>"),
    )
    return render_document(c.trace, f"<h1>{escape(c.trace)}</h1>", sections)
