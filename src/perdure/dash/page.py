"""The report as one HTML file: everything is inside it, so that it can be mailed and kept."""

from collections.abc import Iterable
from html import escape

from perdure.dash.links import render_heat_map
from perdure.dash.svg import (
    INKS,
    Bar,
    Mark,
    render_curve,
    render_legend,
    render_stack,
    render_timeline,
)
from perdure.dash.text import describe_note, render_mended
from perdure.dash.verdicts import describe_grounds, render_waits
from perdure.model.plain import show_controls
from perdure.model.report import PHASES, Recovery, Report, Snapshot
from perdure.model.verdicts import Verdict
from perdure.telemetry.links import DelayMatrix
from perdure.telemetry.series import Series
from perdure.telemetry.stacks import render_stacks

_FAILURE, _PART, _NOTE = "#d1495b", "#8d99ae", "#7b5ea7"

_STYLE = """
:root{--bg:#fbfbfa;--fg:#1c2024;--soft:#667;--card:#fff;--edge:#e2e2df;--curve:#1f6feb}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e6e8ea;--soft:#9aa3ad;--card:#1c2024;
--edge:#30363d;--curve:#6cb0ff}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1060px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0}h2{font-size:17px;margin:34px 0 10px}
.soft,.legend{color:var(--soft)}.card{background:var(--card);border:1px solid var(--edge);
border-radius:10px;padding:16px;overflow-x:auto}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0}
.tiles .card b{display:block;font-size:24px;font-variant-numeric:tabular-nums}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--soft);font-weight:500}th,td{padding:5px 10px 5px 0;
border-bottom:1px solid var(--edge);vertical-align:top}td.n,th.n{text-align:right}
tr:last-child td{border-bottom:0}.plot{width:100%;height:auto;display:block}
.plot text{fill:var(--soft);font-size:11px}.grid{stroke:var(--edge)}
.curve{fill:none;stroke:var(--curve);stroke-width:1.8}
.key{margin-right:14px;white-space:nowrap;font-size:13px}
i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
pre{white-space:pre-wrap;background:var(--bg);border:1px solid var(--edge);border-radius:8px;
padding:10px;font-size:12.5px;overflow-x:auto}details{margin:8px 0}summary{cursor:pointer}
.bar{height:30px}.withdrawn{opacity:.65}
"""


def render_html(
    report: Report, snapshot: Snapshot | None, series: Series, matrix: DelayMatrix | None = None
) -> str:
    """Return the whole page."""
    sections = (
        ("Where the time went", _render_ledger(report)),
        ("Curves", _render_curves(report, series)),
        ("Ranks over time", _render_ranks(report, series)),
        ("Incidents", _render_recoveries(report, series)),
        ("Remarks", _render_notes(report, series) if report.notes else ""),
        ("Journal", escape(render_mended(report.mended))),
        (
            "Verdicts and their evidence",
            "".join(_render_verdict(v, series.start_s) for v in series.verdicts),
        ),
        ("Links between ranks", render_heat_map(matrix) if matrix else ""),
        ("Checkpoints", _render_checkpoints(series)),
    )
    return render_document(report.job, _render_head(report, snapshot), sections)


def render_document(title: str, head: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return a page of perdure's with everything inside it; an empty section is left out."""
    cards = (
        f'<h2>{name}</h2><div class="card">{content}</div>' for name, content in sections if content
    )
    body = head + "".join(cards)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>perdure: {escape(show_controls(title))}</title><style>{_STYLE}</style></head>"
        f"<body><main>{show_controls(body)}</main></body></html>\n"
    )


def _render_head(report: Report, snapshot: Snapshot | None) -> str:
    stopped = [r for r in report.recoveries if r.failed]
    tiles = [
        ("goodput", f"{report.goodput:.1%}", "of the paid time became kept training"),
        ("wall time", _seconds(report.wall_s), f"{report.slot_s:.0f} slot-seconds paid for"),
        (
            "steps committed",
            "unknown" if report.steps_committed is None else str(report.steps_committed),
            "" if report.step_s is None else f"{report.step_s * 1000:.0f} ms each (median)",
        ),
        (
            "incidents",
            str(len(report.recoveries)),
            f"{sum(r.total_s for r in stopped):.1f} s of training stopped",
        ),
        (
            "unattributed",
            f"{report.ledger['unattributed'].fraction:.2%}",
            "what no stamp explains",
        ),
    ]
    cards = "".join(
        f'<div class="card"><span class="soft">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="soft">{escape(note)}</span></div>'
        for name, value, note in tiles
    )
    depth = f", {snapshot.depth}" if snapshot else ""
    restarts = f", {snapshot.restarts} restarts" if snapshot else ""
    why = f'<p class="soft">{escape(report.reason)}</p>' if report.reason else ""
    return (
        f"<h1>{escape(report.job)}: {escape(report.state)}</h1>"
        f'<span class="soft">{report.ranks} ranks{escape(depth)}{restarts}</span>{why}'
        f'<div class="tiles">{cards}</div>'
    )


def _render_ledger(report: Report) -> str:
    bar = render_stack((name, account.fraction) for name, account in report.ledger.items())
    rows = [
        f'<tr><td><i style="background:{INKS[name].color}"></i>{escape(name)}</td>'
        f'<td class="n">{account.s:.2f}</td><td class="n">{account.fraction:.2%}</td>'
        f'<td class="soft">{escape(INKS[name].meaning)}</td></tr>'
        for name, account in report.ledger.items()
    ]
    return (
        f'<div class="bar">{bar}</div><table><tr><th>account</th><th class="n">slot-seconds</th>'
        f'<th class="n">share</th><th></th></tr>{"".join(rows)}</table>'
    )


def _render_curves(report: Report, series: Series) -> str:
    marks = [
        Mark(r.at_step, f"{r.culprit}: {r.cause} at step {r.at_step}", _FAILURE)
        for r in report.recoveries
        if r.at_step >= 0 and r.failed
    ]
    marks += [Mark(n.step, describe_note(n), _NOTE) for n in report.notes if n.step >= 0]
    names = sorted(series.metrics, key=lambda name: ("loss" not in name, name))
    plots = []
    for name in names[:6]:
        rows = [(float(step), value) for step, value in series.metrics[name]]
        plot = render_curve(rows, x_label="step", y_label=name, marks=marks)
        if plot:
            plots.append(f"<p><b>{escape(name)}</b></p>{plot}")
    if not plots and series.progress:
        rows = [(at_s - series.start_s, float(step)) for at_s, step in series.progress]
        times = [
            Mark(r.at_s - series.start_s, f"{r.culprit}: {r.cause}", _FAILURE)
            for r in report.recoveries
        ]
        times += [Mark(n.at_s - series.start_s, describe_note(n), _NOTE) for n in report.notes]
        plot = render_curve(rows, x_label="seconds", y_label="steps", marks=times)
        plots += [f"<p><b>steps committed</b></p>{plot}"] if plot else []
    return "".join(plots)


def _render_notes(report: Report, series: Series) -> str:
    rows = "".join(
        f'<tr><td class="n">{_seconds(note.at_s - series.start_s)}</td>'
        f"<td>{escape(note.who or 'an operator')}</td>"
        f'<td class="n">{note.step if note.step >= 0 else ""}</td><td>{escape(note.text)}</td></tr>'
        for note in report.notes
    )
    return (
        f'<table><tr><th class="n">at</th><th>who</th><th class="n">step</th><th>remark</th></tr>'
        f"{rows}</table>"
    )


def _render_ranks(report: Report, series: Series) -> str:
    bars: list[Bar] = []
    for segment in series.segments:
        # Inside a stretch of training its accounts are drawn one after the other: their share
        # is right, their place is not (a checkpoint every few steps would be a hairline).
        at_s = segment.begin_s - series.start_s
        for account, seconds in segment.seconds:
            label = f"rank {segment.rank}, generation {segment.generation}: {account}"
            bars.append(Bar(segment.rank, at_s, at_s + seconds, account, label))
            at_s += seconds
    if not bars:
        return ""
    marks = [
        Mark(
            r.at_s - series.start_s,
            f"{r.culprit}: {r.cause}",
            _FAILURE if r.failed else _PART,
        )
        for r in report.recoveries
    ]
    names = [f"rank {rank}" for rank in range(report.ranks)]
    plot = render_timeline(bars, names, end_s=report.wall_s, marks=marks)
    used = {bar.account for bar in bars}
    note = (
        "Within a stretch of training, useful, lost, checkpoint and overhead are drawn as shares."
    )
    legend = render_legend(name for name in INKS if name in used)
    return f'{legend}{plot}<p class="soft">{note}</p>'


def _render_recoveries(report: Report, series: Series) -> str:
    if not report.recoveries:
        return '<p class="soft">None.</p>'
    head = "".join(f'<th class="n">{phase}</th>' for phase in PHASES)
    rows = "".join(_render_recovery(r, series.start_s) for r in report.recoveries)
    return (
        '<table><tr><th class="n">at</th><th>culprit</th><th>cause</th><th class="n">step</th>'
        f'{head}<th class="n">total</th><th class="n">lost steps</th><th>rung</th></tr>{rows}'
        '</table><p class="soft">Seconds of wall time. '
        "Communicator includes the start of the processes.</p>"
    )


def _render_recovery(r: Recovery, start_s: float) -> str:
    phases = "".join(f'<td class="n">{getattr(r, f"{p}_s"):.2f}</td>' for p in PHASES)
    step = str(r.at_step) if r.at_step >= 0 else ""
    lost = "unknown" if r.lost_steps is None else str(r.lost_steps)
    return (
        f'<tr><td class="n">{r.at_s - start_s:.1f} s</td><td>{escape(r.culprit)}</td>'
        f'<td title="{escape(r.reason)}">{escape(r.cause)}</td><td class="n">{step}</td>{phases}'
        f'<td class="n"><b>{r.total_s:.2f}</b></td><td class="n">{lost}</td>'
        f"<td>{escape(r.rung)}</td></tr>"
    )


def _render_verdict(verdict: Verdict, start_s: float) -> str:
    evidence = dict(verdict.evidence)
    stacks = evidence.pop("stacks", {})
    long: dict[str, object] = {
        name: evidence.pop(name) for name in ("traceback", "last_output") if name in evidence
    }
    if waits := evidence.pop("waits", None):
        long["who waits for whom"] = render_waits(waits)
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>"
        for name, value in evidence.items()
    )
    blocks = [f"<p>{escape(name)}</p><pre>{_block(text)}</pre>" for name, text in long.items()]
    if isinstance(stacks, dict) and stacks:
        lines = render_stacks({str(rank): str(text) for rank, text in stacks.items()})
        blocks.append(f"<p>stacks</p><pre>{_block(lines)}</pre>")
    name = "withdrawn" if "withdrawn" in verdict.evidence else ""
    note = " (withdrawn)" if name else ""
    grounds = describe_grounds(verdict)
    return (
        f'<details class="{name}"><summary><b>{escape(verdict.kind)}</b>, '
        f"{escape(str(verdict.culprit))}: {escape(verdict.reason)}{note}</summary>"
        f'<p class="soft">generation {verdict.generation}, first seen at '
        f"{verdict.first_seen_s - start_s:.2f} s, confirmed "
        f"{verdict.confirmed_s - verdict.first_seen_s:.2f} s later, "
        f"confidence {verdict.confidence:.0%}{'; ' if grounds else ''}{escape(grounds)}</p>"
        f"<table>{rows}</table>{''.join(blocks)}</details>"
    )


def _block(text: object) -> str:
    lines: Iterable[object] = text if isinstance(text, list | tuple) else (text,)
    return escape("\n".join(str(line) for line in lines))


def _render_checkpoints(series: Series) -> str:
    rows = [
        (
            c.at_s,
            c.step,
            f'<td class="n">{c.bytes / 1e6:.2f}</td><td class="n">{c.stall_s * 1000:.1f}</td>'
            f'<td class="n">{c.save_s:.2f}</td>'
            f"<td>{escape(c.reason)}</td><td>{escape(c.path)}</td>",
        )
        for c in series.checkpoints
    ]
    rows += [
        (f.at_s, f.step, f'<td colspan="5">failed: {escape(f.error)}</td>')
        for f in series.checkpoints_failed
    ]
    if not rows:
        return ""
    shown = "".join(
        f'<tr><td class="n">{at_s - series.start_s:.1f} s</td><td class="n">{step}</td>{cells}</tr>'
        for at_s, step, cells in sorted(rows)[-100:]
    )
    return (
        '<table><tr><th class="n">at</th><th class="n">step</th><th class="n">MB</th>'
        '<th class="n">stall, ms</th><th class="n">save, s</th><th>reason</th><th>path</th></tr>'
        f"{shown}</table>"
    )


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
