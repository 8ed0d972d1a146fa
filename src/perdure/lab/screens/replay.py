"""A live replay as text, as SVG and as a page: who was there, and what was committed."""

from html import escape

from perdure.dash.lines import make_stairs, render_lines
from perdure.dash.page import render_document
from perdure.dash.palette import INKS
from perdure.dash.svg import render_legend, render_stack
from perdure.lab.live.report import ReplayResult, ReplayRow
from perdure.lab.screens.availability import draw_nodes, render_curve, render_time
from perdure.lab.screens.simulation import GROUPS, render_percent, render_rows, render_share


def render_replay(result: ReplayResult, width: int) -> str:
    """Return figures and plots as text."""
    r = result
    victims = "as the trace names them" if r.seed is None else f"drawn with seed {r.seed}"
    part = "" if r.complete else ", interrupted"
    tau = ", ".join(f"{n}: {rate:.0f}" for n, rate in r.throughput.items())
    lines = [
        f"{r.trace}: {render_time(r.duration_s)} played{part}, {r.slot_s / 3600:.2f} slot-hours; "
        f"victims {victims}",
        f"measured samples/s by nodes: {tau}",
        f"U1 {r.u1:.0f} samples; U2 {render_share(r.u2, r.u1)} of it; "
        f"U2' {render_share(r.u2_online, r.u1)} (hindsight at perdure's measured cost of a change)",
        "",
        *render_rows(
            ("system", "of U1", "of U2", "of U2'", "losses", "joins", "gap s", *GROUPS),
            [_list(row) for row in r.systems],
        ),
        "gap: the longest time without a commit",
        *_list_costs(r),
        *(line for row in r.systems for line in _list_shapes(row)),
        "",
        render_plots(r, width),
    ]
    return "\n".join(lines)


def _list(row: ReplayRow) -> tuple[str, ...]:
    fractions = (row.fraction_of_u1, row.fraction_of_u2, row.fraction_of_u2_online)
    return (
        row.system,
        *(f"{f:.4f}" for f in fractions),
        *(str(row.losses), str(row.joins), f"{row.longest_gap_s:.2f}"),
        *(render_percent(sum(row.ledger[a] for a in group)) for group in GROUPS.values()),
    )


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
        name = f"{row.system}: committed samples/s over time"
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
    ledgers = "".join(
        f"<p><b>{escape(row.system)}</b> {row.fraction_of_u2:.4f} of U2</p>"
        f'<div class="bar">{render_stack(row.ledger.items(), height=24)}</div>'
        for row in r.systems
    )
    used = [name for name in INKS if any(abs(row.ledger[name]) > 1e-6 for row in r.systems)]
    sections = (
        ("Nodes", draw_nodes(r.counts, r.duration_s)),
        ("Committed", draw_replay(r)),
        ("Where the slot-seconds went", render_legend(used) + ledgers),
        ("All figures", f"<pre>{escape(render_replay(r, 100))}</pre>"),
    )
    return render_document(r.trace, f"<h1>{escape(r.trace)}</h1>", sections)
