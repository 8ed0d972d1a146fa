"""Traces, simulations and live replays as text, as SVG and as pages."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate

from perdure.dash.page import Document, render_html_paragraphs, render_html_table
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
from perdure.model.input.plain import REASON_MAX, shorten_line
from perdure_lab.report import Comparison, DriveResult, ReplayResult, Share
from perdure_lab.traces.figures import Availability

Counts = Sequence[tuple[float, float]]
"""(seconds, nodes from then on), in order; of a stretch with very many changes their mean."""


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
    label, unit_s = _choose_unit(end_s)
    stairs = make_stairs(counts, end_s, unit_s=unit_s)
    return render_lines([("nodes", stairs)], x_label=label, y_label="nodes")


def _choose_unit(end_s: float) -> tuple[str, float]:
    """Return in which unit an axis of time is labelled, and how long that is."""
    return ("hours", 3600.0) if end_s >= 7200.0 else ("seconds", 1.0)


def make_trace_document(figures: Availability, counts: Counts) -> Document:
    """Return a trace's figures and its plot."""
    rows = [row for row in describe(figures) if row[1]]
    sections = (
        ("Figures", render_html_table(("figure", "value"), rows)),
        ("Nodes over time", draw_nodes(counts, figures.duration_s)),
    )
    return Document(figures.name, (), sections)


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
    head, *rows = _list_policies(c)
    wide = max(len(name) for name, *_ in (head, *rows))
    sources = [f"  {row.policy:<{wide}}  {row.source}" for row in c.policies]
    table = align([head, *rows], range(1, len(head)))
    parts = [*_tell_bounds(c), "", *table, _LOSSES, "", "parameters from", *sources]
    return "\n".join([*parts, *_list_sweep(c)])


_LOSSES = "losses: of nodes that trained; back: to a checkpoint, since nobody had the state"


def _tell_bounds(c: Comparison) -> list[str]:
    """Return what was simulated, and what was possible at most."""
    return [
        f"{c.trace}: {render_time(c.duration_s)}, {c.slot_s / 3600:.1f} slot-hours; "
        f"victims {_tell_victims(c.seed)}",
        f"throughput: {c.throughput}; links {c.physics.bytes_per_s * 8e-9:g} Gbit/s",
        f"U1 {c.u1:.0f} samples; U2 {render_share(c.u2, c.u1)} of it; "
        f"U2' {render_share(c.u2_online, c.u1)} (hindsight at perdure's cost of a change)",
    ]


def _tell_victims(seed: int | None) -> str:
    return "as the trace names them" if seed is None else f"drawn with seed {seed}"


def _list_policies(c: Comparison) -> list[tuple[str, ...]]:
    """Return the table of policies, its head first."""
    return [
        ("policy", "of U1", "of U2", "of U2'", "losses", "back", *GROUPS),
        *(_list(row.policy, row, str(row.restarts)) for row in c.policies),
    ]


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
    label, unit_s = _choose_unit(end_s)
    lines = [
        (name, make_stairs(rows, end_s, unit_s=unit_s)) for name, rows in rates.items() if rows
    ]
    return render_lines(lines, x_label=label, y_label="samples/s") if lines else ""


def draw_committed(comparison: Comparison, rates: Rates) -> str:
    """Return the samples that each policy has made by then as SVG, lost ones not taken off."""
    lines = []
    label, unit_s = _choose_unit(comparison.duration_s)
    for name, rows in rates.items():
        ends = [*(at_s for at_s, _ in rows[1:]), comparison.duration_s]
        made = (rate * (end - begin) for (begin, rate), end in zip(rows, ends, strict=True))
        times = [0.0, *(end_s / unit_s for end_s in ends)]
        lines.append((name, list(zip(times, accumulate(made, initial=0.0), strict=True))))
    return render_lines(lines, x_label=label, y_label="samples") if lines else ""


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


def make_simulation_document(comparison: Comparison, counts: Counts, rates: Rates) -> Document:
    """Return shares of what was possible, plots, ledgers and sources."""
    c = comparison
    words = [
        f"{row.fraction_of_u2:.4f} of U2, {row.fraction_of_u2_online:.4f} of U2'"
        for row in c.policies
    ]
    ledgers = [(row.policy, said, row) for row, said in zip(c.policies, words, strict=True)]
    head, *rows = _list_policies(c)
    sources = [(row.policy, row.source) for row in c.policies]
    sweep = [
        (f"{row.communicator_s:g}", f"{row.fraction_of_u2:.4f}", f"{row.u2_online_of_u2:.4f}")
        for row in c.sweep
    ]
    sections = (
        ("Shares of what was possible", _render_shares(head, rows, _LOSSES)),
        ("Nodes over time", draw_nodes(counts, c.duration_s)),
        ("Throughput over time", draw_rates(c, rates)),
        ("Samples, those that were lost again among them", draw_committed(c, rates)),
        ("Where the slot-seconds went", _render_ledgers(ledgers)),
        (
            "Time to form the communicator",
            draw_sweep(c) + render_html_table(_SWEEP_HEAD, sweep, range(3)),
        ),
        ("Where parameters come from", render_html_table(("policy", "source"), sources)),
    )
    return Document(c.trace, tuple(_tell_bounds(c)), sections)


_SWEEP_HEAD = ("communicator, seconds", "perdure of U2", "U2' of U2")


def _render_shares(head: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    """Return a table whose first column alone is words, and what is to be said of the others."""
    return render_html_table(head, rows, range(1, len(head))) + render_html_paragraphs([note])


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
    head, *rows = _list_systems(r)
    costs, shapes = _list_costs(r), _list_shapes(r)
    lines = [
        *_tell_play(r),
        "",
        *align([head, *rows], range(1, len(head))),
        *_list_drive(r),
        _tell_columns(r),
        *([""] if costs else []),
        *costs,
        *(text for line in shapes for text in ("", line)),
        "",
        render_plots(r, width),
    ]
    return "\n".join(lines)


def _tell_play(r: ReplayResult) -> list[str]:
    """Return what was played against what, and what was possible at most."""
    part = "" if r.complete else ", interrupted"
    tau = ", ".join(
        f"{n}: {rate:.{0 if r.unit == 'samples' else 2}f}" for n, rate in r.throughput.items()
    )
    return [
        f"{r.trace}: {render_time(r.duration_s)} played{part}, {r.slot_s / 3600:.2f} slot-hours; "
        f"victims {_tell_victims(r.seed)}",
        f"{r.unit}/s of {r.reference} by nodes: {tau}"
        + (
            f" (measurements differ by up to {r.reference_spread:.1%})"
            if r.reference_spread
            else ""
        ),
        f"U1 {r.u1:.0f} {r.unit}; U2 {render_share(r.u2, r.u1)} of it; "
        f"U2' {render_share(r.u2_online, r.u1)} (hindsight at perdure's measured cost of a change)",
    ]


def _list_systems(r: ReplayResult) -> list[tuple[str, ...]]:
    """Return the table of systems, its head first."""
    return [
        ("system", "of U1", "of U2", "of U2'", "losses", "joins", "gap s", "pace", *GROUPS),
        *(
            _list(x.system, x, str(x.joins), f"{x.longest_gap_s:.2f}", f"{x.pace:.3f}")
            for x in r.systems
        ),
    ]


def _tell_columns(r: ReplayResult) -> str:
    return (
        "gap: the longest time without a commit; pace: an undisturbed step, as a multiple of "
        + r.reference
    )


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
        f"perdure's medians: a loss {c.loss.total_s:.3f} s (of {c.losses}), a join "
        f"{c.join.total_s:.3f} s (of {c.joins}), a node's start {c.start_s:.2f} s, steady overhead "
        f"{c.steady:.2%}",
        f"simulated with these: {r.simulated.fraction_of_u2:.4f} of U2, "
        f"{r.simulated.fraction_of_u2_online:.4f} of U2'; live is {apart:+.2%} from it",
    ]


def _list_shapes(r: ReplayResult) -> list[str]:
    """Return how the model was spread over the nodes, copies x stages, and since when."""
    lines = []
    for row in r.systems:
        words = [
            f"{one.shape} at {one.at_s:.1f} s" + (", cut anew" if one.morphed else "")
            for one in row.shapes
        ]
        anew = sum(one.morphed for one in row.shapes)
        if words:
            lines.append(f"{row.system}'s shapes: {'; '.join(words)} (cut anew {anew} times)")
    return lines


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
    label, unit_s = _choose_unit(r.duration_s)
    best = [(at_s, r.throughput.get(str(n), 0.0)) for at_s, n in r.counts]
    lines = [("possible (U1)", make_stairs(best, r.duration_s, unit_s=unit_s))]
    lines += [(s.system, make_stairs(s.rates, r.duration_s, unit_s=unit_s)) for s in r.systems]
    return render_lines(lines, x_label=label, y_label=f"{r.unit}/s")


def make_replay_document(r: ReplayResult) -> Document:
    """Return shares of what was possible, plots, ledgers, and what changes cost."""
    ledgers = [(row.system, f"{row.fraction_of_u2:.4f} of U2", row) for row in r.systems]
    head, *rows = _list_systems(r)
    sections = (
        ("Shares of what was possible", _render_shares(head, rows, _tell_columns(r))),
        ("Nodes over time", draw_nodes(r.counts, r.duration_s)),
        (f"Committed {r.unit} a second over time", draw_replay(r)),
        ("Where the slot-seconds went", _render_ledgers(ledgers)),
        ("What changes cost", render_html_paragraphs(_list_costs(r))),
        ("Shapes", render_html_paragraphs(_list_shapes(r))),
    )
    title = f"{r.trace} against {r.job}" if isinstance(r, DriveResult) else r.trace
    return Document(title, (*_tell_play(r), *_list_drive(r)), sections)
