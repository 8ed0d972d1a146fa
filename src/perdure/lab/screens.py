"""Traces, simulations and live replays as text, as SVG and as pages."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate

from perdure.dash.page import render_document
from perdure.dash.shape import align
from perdure.dash.svg import (
    INKS,
    compute_means,
    make_stairs,
    render_legend,
    render_lines,
    render_stack,
)
from perdure.dash.text import render_chart
from perdure.lab.report import Comparison, DriveResult, ReplayResult, ReplayRow, Share
from perdure.lab.traces.figures import Availability
from perdure.model.plain import REASON_MAX, shorten_line

Counts = Sequence[tuple[float, int]]
"""(seconds, nodes from then on), in order."""


def render_summary(figures: Availability, counts: Counts, width: int) -> str:
    """Return a trace's figures and its plot as text."""
    table = "\n".join(align([row for row in describe(figures) if row[1]], ()))
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
    chart = render_chart(compute_means(rows, end_s, columns), height=height, low=0.0)
    labels = [f"{most:6.0f}", *[" " * 6] * (len(chart) - 2), f"{0:6d}"]
    return [title, *(f"{a}  {b}".rstrip() for a, b in zip(labels, chart, strict=True))]


def draw_nodes(counts: Counts, end_s: float) -> str:
    """Return nodes over time as SVG."""
    return render_lines([("nodes", make_stairs(counts, end_s))], x_label="hours", y_label="nodes")


def render_page(figures: Availability, counts: Counts) -> str:
    """Return figures and plot as one HTML file."""
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
    rows = [
        ("policy", "of U1", "of U2", "of U2'", "losses", "back", *GROUPS),
        *(_list(row.policy, row, str(row.restarts)) for row in c.policies),
    ]
    wide = max(len(name) for name, *_ in rows)
    sources = [f"  {row.policy:<{wide}}  {row.source}" for row in c.policies]
    note = "losses: of nodes that trained; back: to a checkpoint, since nobody had the state"
    table = align(rows, range(1, len(rows[0])))
    return "\n".join([*head, "", *table, note, "", "parameters from", *sources, *_list_sweep(c)])


def _list(name: str, row: Share, *more: str) -> tuple[str, ...]:
    """Return a row of a table: of the bounds, losses and `more`, then the groups of accounts."""
    return (
        name,
        *(f"{f:.4f}" for f in (row.fraction_of_u1, row.fraction_of_u2, row.fraction_of_u2_online)),
        *(str(row.losses), *more),
        *(render_percent(sum(row.ledger[a] for a in group)) for group in GROUPS.values()),
    )


def _render_ledgers(rows: Sequence[tuple[str, str, Share]]) -> str:
    """Return (name, words, whose ledger) as bars, below what the colours mean."""
    bars = "".join(
        f"<p><b>{escape(name)}</b> {words}</p>"
        f'<div class="bar">{render_stack(row.ledger.items(), height=24)}</div>'
        for name, words, row in rows
    )
    used = [name for name in INKS if any(abs(row.ledger[name]) > 1e-6 for _, _, row in rows)]
    return render_legend(used) + bars


def _list_sweep(c: Comparison) -> list[str]:
    lines = [
        f"{row.communicator_s:>14g}  {row.fraction_of_u2:>13.4f}  {row.u2_online_of_u2:>9.4f}"
        for row in c.sweep
    ]
    return ["", "communicator_s  perdure of U2  U2' of U2", *lines] if lines else []


def render_share(part: float, whole: float) -> str:
    """Return a part of a whole; a dash where there is no whole."""
    return f"{part / whole:.4f}" if whole else "-"


def render_percent(share: float) -> str:
    """Return a share as a percentage; nothing is a bare 0."""
    return f"{100 * share + 0.0:.2f}%" if abs(share) >= 5e-7 else "0"


def draw_rates(comparison: Comparison, rates: Rates) -> str:
    """Return the throughput of each policy over time as SVG."""
    end_s = comparison.duration_s
    lines = [(name, make_stairs(rows, end_s)) for name, rows in rates.items() if rows]
    return render_lines(lines, x_label="hours", y_label="samples/s") if lines else ""


def draw_committed(comparison: Comparison, rates: Rates) -> str:
    """Return the samples that each policy has made by then as SVG, lost ones not taken off."""
    lines = []
    for name, rows in rates.items():
        ends = [*(at_s for at_s, _ in rows[1:]), comparison.duration_s]
        made = (rate * (end - begin) for (begin, rate), end in zip(rows, ends, strict=True))
        times = [0.0, *(end_s / 3600.0 for end_s in ends)]
        lines.append((name, list(zip(times, accumulate(made, initial=0.0), strict=True))))
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
    words = [
        f"{row.fraction_of_u2:.4f} of U2, {row.fraction_of_u2_online:.4f} of U2'"
        for row in c.policies
    ]
    ledgers = [(row.policy, said, row) for row, said in zip(c.policies, words, strict=True)]
    sections = (
        ("Nodes", draw_nodes(counts, c.duration_s)),
        ("Throughput", draw_rates(c, rates)),
        ("Samples, those that were lost again among them", draw_committed(c, rates)),
        ("Where the slot-seconds went", _render_ledgers(ledgers)),
        ("Time to form the communicator", draw_sweep(c)),
        ("All figures", f"<pre>{escape(render_comparison(c))}</pre>"),
    )
    return render_document(c.trace, f"<h1>{escape(c.trace)}</h1>", sections)


_ACTS = {"notice": "are told", "leave": "are killed", "come": "may start"}


def render_schedule(
    first: Sequence[int],
    acts: Sequence[tuple[float, str, Sequence[int], float]],
    job: str,
    duration_s: float,
    nodes: Sequence[tuple[int, str, str]] = (),
) -> str:
    """Return what is done to a job's nodes when: (seconds, what, nodes, notice in seconds).

    Of each of `nodes` it is said on which machine it is, and why it stays where it does.
    """
    rows = [("at s", "nodes", "what")]
    for at_s, kind, places, notice_s in acts:
        told = f", {notice_s:g} s before they go" if kind == "notice" else ""
        rows.append((f"{at_s:.1f}", ", ".join(map(str, places)), _ACTS[kind] + told))
    begin = ", ".join(map(str, first))
    machines = [
        f"node {number} is {machine}" + (f", and stays: {stays}" if stays else "")
        for number, machine, stays in nodes
    ]
    head = f"{job}: {render_time(duration_s)}, begins with the nodes {begin}"
    return "\n".join([head, *machines, *align(rows, (0,))])


def render_replay(result: ReplayResult, width: int) -> str:
    """Return figures and plots as text."""
    r = result
    victims = "as the trace names them" if r.seed is None else f"drawn with seed {r.seed}"
    part = "" if r.complete else ", interrupted"
    tau = ", ".join(
        f"{n}: {rate:.{0 if r.unit == 'samples' else 2}f}" for n, rate in r.throughput.items()
    )
    rows = [
        ("system", "of U1", "of U2", "of U2'", "losses", "joins", "gap s", "pace", *GROUPS),
        *(
            _list(x.system, x, str(x.joins), f"{x.longest_gap_s:.2f}", f"{x.pace:.3f}")
            for x in r.systems
        ),
    ]
    lines = [
        f"{r.trace}: {render_time(r.duration_s)} played{part}, {r.slot_s / 3600:.2f} slot-hours; "
        f"victims {victims}",
        f"{r.unit}/s of {r.reference} by nodes: {tau}"
        + (
            f" (measurements differ by up to {r.reference_spread:.1%})"
            if r.reference_spread
            else ""
        ),
        f"U1 {r.u1:.0f} {r.unit}; U2 {render_share(r.u2, r.u1)} of it; "
        f"U2' {render_share(r.u2_online, r.u1)} (hindsight at perdure's measured cost of a change)",
        "",
        *align(rows, range(1, len(rows[0]))),
        *_list_drive(r),
        "gap: the longest time without a commit; pace: an undisturbed step, as a multiple of "
        + r.reference,
        *_list_costs(r),
        *(line for row in r.systems for line in _list_shapes(row)),
        "",
        render_plots(r, width),
    ]
    return "\n".join(lines)


def _list_drive(r: ReplayResult) -> list[str]:
    """Return what is told of a user's own job alone."""
    if not isinstance(r, DriveResult):
        return []
    assumed = ", ".join(map(str, r.assumed))
    return [
        *(
            [f"it ended before the trace did: {shorten_line(r.ended, REASON_MAX)}"]
            if r.ended
            else []
        ),
        *([f"it could not be played on: {r.trouble}"] if r.trouble else []),
        *([r.fixed] if r.fixed else []),
        *([f"throughput of {assumed} nodes: in proportion, not seen"] if assumed else []),
        f"all of the job, its start and its end: perdure report {r.job}",
    ]


def _list_costs(r: ReplayResult) -> list[str]:
    if r.costs is None or r.simulated is None:
        return []
    c, live = r.costs, next(row for row in r.systems if row.system == "perdure")
    apart = live.committed / r.simulated.committed - 1 if r.simulated.committed else 0.0
    return [
        "",
        f"perdure's medians: a loss {c.loss.total_s:.3f} s (of {c.losses}), a join "
        f"{c.join.total_s:.3f} s (of {c.joins}), a node's start {c.start_s:.2f} s, steady overhead "
        f"{c.steady:.2%}",
        f"simulated with these: {r.simulated.fraction_of_u2:.4f} of U2, "
        f"{r.simulated.fraction_of_u2_online:.4f} of U2'; live is {apart:+.2%} from it",
    ]


def _list_shapes(row: ReplayRow) -> list[str]:
    """Return how the model was spread over the nodes, copies x stages, and since when."""
    if not row.shapes:
        return []
    words = [
        f"{one.shape} at {one.at_s:.1f} s" + (", cut anew" if one.morphed else "")
        for one in row.shapes
    ]
    anew = sum(one.morphed for one in row.shapes)
    return ["", f"{row.system}'s shapes: {'; '.join(words)} (cut anew {anew} times)"]


def render_plots(r: ReplayResult, width: int) -> str:
    """Return nodes, and committed throughput of each system, over time."""
    columns = width - 8
    lines = render_curve("nodes over time", r.counts, r.duration_s, columns, r.nodes_max)
    top = max(r.throughput.values())
    for row in r.systems:
        name = f"{row.system}: committed {r.unit}/s over time"
        lines += ["", *render_curve(name, row.rates, r.duration_s, columns, top)]
    return "\n".join([*lines, f"{'':8}0{render_time(r.duration_s):>{columns - 1}}"])


def draw_replay(r: ReplayResult) -> str:
    """Return what the nodes could have done, and what was committed, as SVG."""
    best = [(at_s, r.throughput.get(str(n), 0.0)) for at_s, n in r.counts]
    lines = [("possible (U1)", make_stairs(best, r.duration_s, unit_s=1.0))]
    lines += [(s.system, make_stairs(s.rates, r.duration_s, unit_s=1.0)) for s in r.systems]
    return render_lines(lines, x_label="seconds", y_label="samples/s")


def render_replay_page(r: ReplayResult) -> str:
    """Return plots, ledgers and figures as one HTML file."""
    ledgers = [(row.system, f"{row.fraction_of_u2:.4f} of U2", row) for row in r.systems]
    sections = (
        ("Nodes", draw_nodes(r.counts, r.duration_s)),
        ("Committed", draw_replay(r)),
        ("Where the slot-seconds went", _render_ledgers(ledgers)),
        ("All figures", f"<pre>{escape(render_replay(r, 100))}</pre>"),
    )
    return render_document(r.trace, f"<h1>{escape(r.trace)}</h1>", sections)
