"""What a page shows of a job, section by section: of templates that a file and a server share.

A section is HTML of one Picture. Whatever comes from a job's ranks or its operators is escaped by
the templates; what is drawn here escapes for itself.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from perdure.dash.groups import TROUBLE, describe_group, group_ranks
from perdure.dash.live import describe_left
from perdure.dash.ranktime import Span, render_rank_time
from perdure.dash.shape import render_shape, render_span
from perdure.dash.svg import INKS, Mark, name_ink, render_curve, render_stack
from perdure.dash.text import (
    LOST_UNKNOWN,
    describe_note,
    render_mended,
    render_skipped,
    render_windows,
)
from perdure.dash.verdicts import describe_grounds, describe_verdict, render_waits, render_withheld
from perdure.dash.watch import holds, render_busy
from perdure.model.input.plain import show_controls
from perdure.model.report import PHASES, DeviceRow, RankRow, Recovery, Report, Snapshot
from perdure.model.steering import render_value
from perdure.model.verdicts import Verdict

if TYPE_CHECKING:
    from jinja2 import Environment

    from perdure.telemetry.links import DelayMatrix
    from perdure.telemetry.series import Series

FAILURE, PART, NOTE, CHANGE, SAVED = "#d1495b", "#8d99ae", "#7b5ea7", "#1f6feb", "#2a9d6f"
"""Colours of marks: training stopped, it did not, a remark, a setting changed, a checkpoint."""
CURVES_MAX = 6
CHECKPOINTS_MAX = 100
GROUPS_MAX = 24
"""Rows of a table of ranks."""
BEAT_S = 10.0
"""Without news something is sent a page all the same: it says so once it hears nothing for two."""
INCIDENTS_MAX = 200
"""Of a live page, the newest."""
EVIDENCE_MAX = 100_000
"""Characters of one piece of a verdict's evidence."""
_ZOOM_S = 2.0


class Picture(NamedTuple):
    """A job at one instant."""

    report: Report
    snapshot: Snapshot | None
    series: "Series"
    matrix: "DelayMatrix | None" = None
    damage: str = ""
    """What of the journal could not be read."""
    own: str = ""
    """The newest whole checkpoint that the script saved, in words."""


LOG_LINES = 200
"""Of a log, so many lines are shown."""


class LogLine(NamedTuple):
    """A line that a rank has written."""

    generation: int
    rank: int
    stream: str
    """out or err."""
    text: str


class Asked(msgspec.Struct, frozen=True, omit_defaults=True):
    """What somebody wants to see of a job: the query of a page's address."""

    at: float | None = None
    """Seconds since the job's start; None: as it is now."""
    begin: float | None = None
    end: float | None = None
    """The stretch of time that is drawn; None: all of it."""
    node: int | None = None
    """Whose ranks are listed one by one."""
    rank: int | None = None
    """Of whom everything is shown."""
    search: str = ""
    """What lines of the log must have in them."""
    curves: str = ""
    """What the names of the curves must have in them."""

    def link(self, **other: Any) -> str:
        """Return the address of the same page with some of it different."""
        from urllib.parse import urlencode

        fields = msgspec.to_builtins(msgspec.structs.replace(self, **other))
        return "?" + urlencode({k: v for k, v in fields.items() if v not in (None, "")})


@cache
def open_templates() -> "Environment":
    """Return the templates, in which whatever is put is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("perdure.dash"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    found.filters |= {
        "seconds": show_seconds,
        "span": lambda numbers: render_span(list(numbers)),
        "value": render_value,
    }
    found.tests["in_force"] = holds
    found.globals |= {
        "INKS": INKS,
        "PHASES": PHASES,
        "LOST_UNKNOWN": LOST_UNKNOWN,
        "TROUBLE": TROUBLE,
        "beat_s": BEAT_S,
        "incidents_max": INCIDENTS_MAX,
    }
    found.globals |= {function.__name__: function for function in _CALLED}
    return found


def render(template: str, **values: Any) -> str:
    """Return what a template makes of `values`; nothing in it acts on a terminal."""
    return show_controls(open_templates().get_template(template).render(**values))


def render_section(name: str, picture: Picture, asked: Asked | None = None, **more: Any) -> str:
    """Return one section's HTML; empty where it has nothing to show."""
    values = {**picture._asdict(), "asked": asked or Asked(), "picture": picture, "live": False}
    values["served"] = False
    return render(f"sections/{name}.html", **values | more).strip()


def show_seconds(value: float) -> str:
    """Return a length of time in words.

    >>> show_seconds(61.04), show_seconds(3725)
    ('61.0 s', '1 h 02 min')
    """
    if value < 120:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def list_marks(picture: Picture, *, by_step: bool) -> list[Mark]:
    """Return what happened to a job, at steps or at seconds since its start."""
    report, start_s = picture.report, picture.series.start_s
    marks = []
    for r in report.recoveries:
        if by_step and (r.at_step < 0 or not r.failed):
            continue
        where = f" at step {r.at_step}" if by_step else ""
        ink = FAILURE if r.failed else PART
        marks.append(
            Mark(r.at_step if by_step else r.at_s - start_s, f"{r.culprit}: {r.cause}{where}", ink)
        )
    for n in report.notes:
        if not by_step or n.step >= 0:
            marks.append(Mark(n.step if by_step else n.at_s - start_s, describe_note(n), NOTE))
    for c in picture.series.changes:
        words = " ".join(f"{name}={render_value(value)}" for name, value in c.values.items())
        label = f"{'undone: ' if c.undoes else ''}{words}, by {c.who or 'an operator'}"
        marks.append(Mark(c.step if by_step else c.at_s - start_s, label, CHANGE))
    return marks


# --- what templates call ------------------------------------------------------------------------


def _markup(html: str) -> Any:
    from markupsafe import Markup

    return Markup(html)


def draw_ledger(report: Report) -> Any:
    """Return the bar of the paid time."""
    return _markup(
        render_stack((name, account.fraction) for name, account in report.ledger.items())
    )


def list_curves(series: "Series", asked: Asked) -> list[str]:
    """Return the names of the curves that are asked for; only so many of them are drawn."""
    wanted = asked.curves.lower()
    names = (name for name in series.metrics if wanted in name.lower())
    return sorted(names, key=lambda name: ("loss" not in name, name))


def draw_curves(picture: Picture, asked: Asked) -> list[tuple[str, Any]]:
    """Return (name, drawing) of the curves of `run.log`, else of the steps committed."""
    series = picture.series
    marks = list_marks(picture, by_step=True)
    names = list_curves(series, asked)
    plots = []
    for name in names[:CURVES_MAX]:
        rows = [(float(step), value) for step, value in series.metrics[name]]
        plots.append((name, render_curve(rows, x_label="step", y_label=name, marks=marks)))
    if not any(plot for _, plot in plots) and series.progress:
        points = [*series.progress, *_read_newest_step(picture)]
        rows = [(at_s - series.start_s, float(step)) for at_s, step in points]
        marks = list_marks(picture, by_step=False)
        plot = render_curve(rows, x_label="seconds", y_label="steps", marks=marks)
        plots = [("steps committed", plot)]
    return [(name, _markup(plot)) for name, plot in plots if plot]


def _read_newest_step(picture: Picture) -> list[tuple[float, int]]:
    """Return (job time, step) of this moment where the journal does not tell so much yet."""
    snapshot, known = picture.snapshot, picture.series.progress[-1]
    if snapshot is None or (snapshot.at_s, snapshot.step) <= known or snapshot.step < known[1]:
        return []
    return [(snapshot.at_s, snapshot.step)]


def draw_rank_time(picture: Picture, asked: Asked) -> Any:
    """Return what each rank's time went to."""
    report, series = picture.report, picture.series
    span = Span(
        max(0.0, asked.begin or 0.0),
        min(report.wall_s, report.wall_s if asked.end is None else asked.end),
    )
    marks = [
        Mark(r.at_s - series.start_s, f"{r.culprit}: {r.cause}", FAILURE if r.failed else PART)
        for r in report.recoveries
    ]
    return _markup(render_rank_time(series.segments, report.ranks, series.start_s, span, marks))


def draw_links(matrix: "DelayMatrix") -> Any:
    """Return the heat map of the links."""
    from perdure.dash.links import render_heat_map  # Screens need neither this nor telemetry.

    return _markup(render_heat_map(matrix))


def list_evidence(verdict: Verdict) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return a verdict's evidence as rows of (name, value), and what is long as (name, text)."""
    evidence = dict(verdict.evidence)
    stacks = evidence.pop("stacks", {})
    long: dict[str, object] = {
        name: evidence.pop(name) for name in ("traceback", "last_output") if name in evidence
    }
    if isinstance(evidence.get("waits"), list | tuple):
        long["who waits for whom"] = render_waits(evidence.pop("waits"))
    if isinstance(stacks, dict) and stacks:
        from perdure.telemetry.stacks import render_stacks

        long["stacks"] = render_stacks({str(rank): str(text) for rank, text in stacks.items()})
    rows = [(str(name), _cut(str(value))) for name, value in evidence.items()]
    return rows, [(name, _block(text)) for name, text in long.items()]


def _block(text: object) -> str:
    lines: Iterable[object] = text if isinstance(text, list | tuple) else (text,)
    return _cut("\n".join(str(line) for line in lines))


def _cut(text: str) -> str:
    """Return a text, of a very long one its beginning and its end."""
    if len(text) <= EVIDENCE_MAX:
        return text
    half, more = EVIDENCE_MAX // 2, len(text) - EVIDENCE_MAX
    return f"{text[:half]}\n({more:,} characters are left out)\n{text[-half:]}"


def list_checkpoints(series: "Series") -> list[tuple[float, int, Any]]:
    """Return (seconds since the start, step, what was saved or failed), the newest last."""
    rows: list[tuple[float, int, Any]] = [
        (c.at_s - series.start_s, c.step, c) for c in series.checkpoints[-CHECKPOINTS_MAX:]
    ]
    rows += [(e.at_s - series.start_s, e.step, e) for e in series.checkpoints_failed]
    return sorted(rows, key=lambda row: row[:2])[-CHECKPOINTS_MAX:]


def list_rank_rows(snapshot: Snapshot, asked: Asked) -> list[tuple[tuple[str, ...], Any]]:
    """Return (cells, the ranks that they are of) of a node's ranks, or of all, folded."""
    ranks = [row for row in snapshot.ranks if asked.node is None or row.node == asked.node]
    most = GROUPS_MAX if asked.node is None else 1024
    return [(describe_group(group), group) for group in group_ranks(ranks, most)]


def list_why(r: Recovery) -> str:
    """Return why a recovery went as it did."""
    return "; ".join(part for part in (r.reason, r.began) if part)


def find_zoom(r: Recovery, start_s: float) -> dict[str, float]:
    """Return the stretch of time around an incident, seconds since the job's start."""
    at_s, length_s = r.at_s - start_s, max(r.total_s, _ZOOM_S)
    return {"begin": round(max(0.0, at_s - length_s), 2), "end": round(at_s + 2 * length_s, 2)}


def find_rank(snapshot: Snapshot, rank: int) -> RankRow | None:
    """Return the row of a rank."""
    return next((row for row in snapshot.ranks if row.rank == rank), None)


def find_stack(picture: Picture, rank: int) -> tuple[float, str]:
    """Return when a rank's stack was taken last, seconds since the start, and the stack."""
    for verdict in reversed(picture.series.verdicts):
        stacks = verdict.evidence.get("stacks")
        if isinstance(stacks, Mapping):
            text = next((t for r, t in stacks.items() if str(r) == str(rank)), None)
            if text:
                return verdict.confirmed_s - picture.series.start_s, _cut(str(text))
    return 0.0, ""


class NodeView(NamedTuple):
    """One node: its ranks, its devices, and what is particular about it."""

    node: int
    ranks: list[int]
    devices: list[DeviceRow]
    state: str


def list_nodes(snapshot: Snapshot) -> list[NodeView]:
    """Return all nodes that are known, those first that somebody should look at."""
    found: dict[int, NodeView] = {}
    for row in snapshot.ranks:
        found.setdefault(row.node, NodeView(row.node, [], [], "")).ranks.append(row.rank)
    for device in snapshot.devices:
        found.setdefault(device.node, NodeView(device.node, [], [], "")).devices.append(device)
    views = []
    for number, view in sorted(found.items()):
        states = {device.state for device in view.devices}
        state = states.pop() if len(states) == 1 else ""
        views.append(view._replace(state="cordoned" if number in snapshot.cordoned else state))
    troubled = {row.node for row in snapshot.ranks if row.state in TROUBLE}
    troubled |= {d.node for d in snapshot.devices if d.health in ("warn", "failed")}

    def is_well(view: NodeView) -> bool:
        return view.node not in troubled and view.state not in ("cordoned", "draining", "lost")

    return sorted(views, key=is_well)


def list_settings(snapshot: Snapshot) -> list[tuple[str, str, str, str]]:
    """Return (key, value, range, meaning) of what the script declares, or anybody has changed."""
    own = {spec.name: spec.default for spec in snapshot.keys if spec.owner == "perdure"}
    specs = {spec.name: spec for spec in snapshot.keys}
    names = {spec.name for spec in snapshot.keys if spec.owner == "script"}
    names |= {n for n, v in snapshot.settings.items() if n not in own or v != own[n]}
    rows = []
    for name in sorted(names):
        spec = specs.get(name)
        value: Any = snapshot.settings.get(name, spec.default if spec else "")
        rows.append(
            (name, render_value(value), spec.range if spec else "", spec.note if spec else "")
        )
    return rows


_CALLED: tuple[Callable[..., Any], ...] = (
    describe_grounds,
    describe_left,
    describe_note,
    describe_verdict,
    draw_curves,
    draw_ledger,
    draw_links,
    draw_rank_time,
    find_rank,
    find_stack,
    find_zoom,
    holds,
    list_checkpoints,
    list_curves,
    list_evidence,
    list_nodes,
    list_rank_rows,
    list_settings,
    list_why,
    name_ink,
    render_busy,
    render_mended,
    render_shape,
    render_skipped,
    render_windows,
    render_withheld,
)


def make_ink_style() -> str:
    """Return the style of what has the colour of an account, or of a link's slowness."""
    from perdure.dash.links import make_heat_style

    inks = (f".{name_ink(name)}{{background:{ink.color}}}" for name, ink in INKS.items())
    return "".join(inks) + make_heat_style()
