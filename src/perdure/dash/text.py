"""The report for a terminal: plain text, so that a file, a pipe and a test read the same."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perdure.dash.shape import clip
from perdure.dash.svg import clip_value
from perdure.dash.verdicts import render_withheld
from perdure.model.input.plain import REASON_MAX, name_step, shorten_line, show_controls
from perdure.model.report import (
    PHASES,
    EmptySlotRow,
    Exactness,
    HungSaveRow,
    MendRow,
    NoteRow,
    Recovery,
    Report,
    SkipRow,
    WindowRow,
)

if TYPE_CHECKING:
    from perdure.telemetry.series import Series

_BLOCKS = " ▁▂▃▄▅▆▇█"

_SKIPPED_MAX = 1200
"""Longest text about one checkpoint; the command that moves it is part of the text."""


def render_text(
    report: Report, series: "Series | None" = None, width: int = 100, *, ledger: bool = True
) -> str:
    """Return incidents by phase, the loss curve and the ledger, `width` columns wide."""
    parts = [_render_head(report), _render_recoveries(report, series, width)]
    parts.append(_render_notes(report, series, width))
    parts.append(render_mended(report.mended))
    parts.append(render_skipped(report.skipped))
    parts.append(render_windows(report.windows))
    parts.append(render_hung_saves(report.hung_saves))
    parts.append(render_empty_slots(report.job, report.empty_slots))
    if series is not None:
        parts.append(_render_loss(report, series, width))
    if ledger:
        parts.append(render_ledger(report, width))
    return "\n\n".join(part for part in parts if part) + "\n"


LOST_UNKNOWN = (
    "what was lost is unknown: the script declares no steps, so all that it did counts as useful"
)


def _render_head(report: Report) -> str:
    ranks = f"{report.ranks_left} of {report.ranks}" if report.ranks_left else report.ranks
    pace = "" if report.step_s is None else f" of {report.step_s * 1000:.0f} ms"
    steps = "" if report.steps_committed is None else f", {report.steps_committed} steps{pace}"
    line = (
        f"{report.job}: {report.state} after {report.wall_s:.1f} s on {ranks} ranks{steps}; "
        f"goodput {'at most ' if report.lost_unknown else ''}{report.goodput:.1%}"
    )
    lines = [line, shorten_line(report.reason, REASON_MAX)] if report.reason else [line]
    if exact := render_exactness(report.exact):
        lines.append(exact)
    if report.lost_unknown:
        lines.append(LOST_UNKNOWN)
    return "\n".join([*lines, *render_withheld(report)])


def _render_recoveries(report: Report, series: "Series | None", width: int) -> str:
    if not report.recoveries:
        return "No incidents."
    start_s = series.start_s if series is not None else min(r.at_s for r in report.recoveries)
    lines = ["Incidents (seconds of wall time by phase)"]
    for number, r in enumerate(report.recoveries, 1):
        rung = r.rung if r.rung != "none" else "no restart"
        what = f"{r.culprit}: {r.cause}{name_step(r.at_step)} -> {rung}"
        lines.append(clip(f"{number:>3}  {r.at_s - start_s:7.1f} s  {what}", width))
        if r.rung == "none":
            lines.append(clip(f"{'':16}{r.reason}", width))
            continue
        lines += [
            f"{'':16}{describe_phases(r)}",
            f"{'':16}total {r.total_s:.2f}; {describe_loss(r)}",
        ]
        if r.began:
            lines.append(clip(f"{'':16}{r.began}", width))
    return "\n".join(lines)


def _render_notes(report: Report, series: "Series | None", width: int) -> str:
    if not report.notes:
        return ""
    start_s = series.start_s if series is not None else min(n.at_s for n in report.notes)
    lines = ["Remarks"]
    for note in report.notes:
        what = shorten_line(show_controls(describe_note(note)))
        lines.append(clip(f"     {note.at_s - start_s:7.1f} s  {what}", width))
    return "\n".join(lines)


def render_mended(rows: Sequence[MendRow]) -> str:
    """Return what was found damaged of the journal, a line each; empty where nothing was."""
    return "\n".join(f"The journal was damaged: {show_controls(row.reason)}" for row in rows)


def render_skipped(rows: Sequence[SkipRow]) -> str:
    """Return which checkpoints could not be used, a line each; empty where all could."""
    return "\n".join(
        f"{_name_skipped(row)}: {shorten_line(show_controls(row.why), _SKIPPED_MAX)}"
        for row in rows
    )


def _name_skipped(row: SkipRow) -> str:
    if row.fetched:
        return "This machine had no checkpoint of the script"
    if row.resumed < 0:
        return "A checkpoint of the script is torn"
    return f"A checkpoint was not used, and training went on from step {row.resumed}"


def render_windows(rows: Sequence[WindowRow]) -> str:
    """Return how much of the announced times ranks used, a line each."""
    return "\n".join(
        f"Notice for {show_controls(row.who) or 'the job'}: "
        f"ranks used {row.used_s:.1f} of {row.window_s:.1f} announced seconds"
        for row in rows
    )


def render_exactness(exact: Exactness | None) -> str:
    """Return whether resumes are exact, and why; empty if nothing can resume."""
    if exact is None:
        return ""
    return f"exact: {exact.state}; {shorten_line(show_controls(exact.reason), REASON_MAX)}"


def render_hung_saves(rows: Sequence[HungSaveRow]) -> str:
    """Return which checkpoints' disks hung, a line each."""
    lines = []
    for row in rows:
        end = "no checkpoint was saved since"
        if row.over_s:
            count = f"{row.skipped} save{'' if row.skipped == 1 else 's'}"
            end = f"over after {row.over_s - row.at_s:.0f} s, in which {count} did not begin"
        why = shorten_line(show_controls(row.why), REASON_MAX)
        lines.append(f"Storage of checkpoints: {why}; {end}")
    return "\n".join(lines)


def render_empty_slots(job: str, rows: Sequence[EmptySlotRow]) -> str:
    """Return which slots were given up, a line each."""
    lines = []
    for row in rows:
        why = shorten_line(show_controls(row.why), REASON_MAX)
        end = f"`perdure node restore {job} {row.node}` tries it again"
        if row.over_s:
            end = f"it was tried again {row.over_s - row.at_s:.0f} s later"
        lines.append(f"Slot {row.slot} of node {row.node} was left empty: {why}; {end}")
    return "\n".join(lines)


def describe_note(note: NoteRow) -> str:
    """Return who has remarked what, and at which step."""
    return f"{note.who or 'an operator'}{name_step(note.step)}: {note.text}"


def describe_phases(r: Recovery) -> str:
    """Return the seconds of a recovery by phase."""
    return "  ".join(f"{p} {getattr(r, f'{p}_s'):.2f}" for p in PHASES)


def describe_loss(r: Recovery) -> str:
    """Return how many steps were lost, as far as that is known."""
    if r.lost_steps is None:
        why = "the script declares none" if r.at_step < 0 else "no run has resumed them"
        return f"lost steps unknown ({why})"
    return "1 step lost" if r.lost_steps == 1 else f"{r.lost_steps} steps lost"


def _render_loss(report: Report, series: "Series", width: int) -> str:
    name = next((n for n in ("loss", *sorted(series.metrics)) if n in series.metrics), None)
    if name is None or len(series.metrics[name]) < 2:
        return ""
    rows = series.metrics[name]
    columns = min(width - 10, len(rows))
    begin, span = rows[0][0], rows[-1][0] - rows[0][0]
    wanted = (begin + i * span // max(1, columns - 1) for i in range(columns))
    shown = [rows[bisect_right(rows, step, key=lambda row: row[0]) - 1] for step in wanted]
    chart = render_chart([value for _, value in shown], height=6)
    finite = [value for _, value in shown if math.isfinite(value)] or [0.0]
    labels = [_label(max(finite)), *[" " * 8] * 4, _label(min(finite))]
    strange = sum(not math.isfinite(value) for _, value in rows)
    at = {r.at_step for r in report.recoveries if r.at_step >= 0 and r.failed}
    lines = [f"{name} by step, {rows[0][0]} to {rows[-1][0]}"]
    if strange:
        lines[0] += f"; x nan or inf, {strange} of {len(rows)}"
    if at:
        lines[0] += "; each ^ below the curve is the step of an incident"
    lines += [f"{label}  {line}" for label, line in zip(labels, chart, strict=True)]
    steps = [step for step, _ in shown]
    marks = [" "] * columns
    for step in at:
        marks[next((i for i, s in enumerate(steps) if s >= step), columns - 1)] = "^"
    lines.append(" " * 10 + "".join(marks))
    return "\n".join(line.rstrip() for line in lines)


def _label(value: float) -> str:
    """Return a value of an axis in eight columns: a loss of 1e-9 is not 0.000."""
    plain = value == 0.0 or 1e-3 <= abs(value) < 1e3
    return f"{value:8.3f}" if plain else f"{value:8.1e}"


def render_chart(values: Sequence[float], height: int, *, low: float | None = None) -> list[str]:
    """Return `height` lines of block characters, highest first, one column a value.

    The lowest block stands for `low`, else for the lowest value; an `x` for one not finite.
    """
    tame = [clip_value(value) for value in values]
    finite = [value for value in tame if value is not None] or [0.0]
    low, high = min(finite) if low is None else low, max(finite)
    span = (high - low) or 1.0
    eighths = [0 if v is None else 1 + round((v - low) / span * (height * 8 - 1)) for v in tame]
    levels = range(height - 1, -1, -1)
    lines = ["".join(_BLOCKS[min(8, max(0, e - 8 * n))] for e in eighths) for n in levels]
    marked = ["x" if v is None else block for v, block in zip(tame, lines[-1], strict=True)]
    return [*lines[:-1], "".join(marked)]


def render_ledger(report: Report, width: int) -> str:
    """Return where the paid time went, a line an account."""
    lines = [f"Ledger ({report.slot_s:.1f} slot-seconds)"]
    room = max(10, min(40, width - 52))
    for name, account in report.ledger.items():
        share = clip_value(account.fraction) or 0.0
        full = min(max(share, 0.0), 1.0) * room
        bar = "█" * int(full) + (_BLOCKS[round(full % 1 * 8)] if full % 1 >= 0.0625 else "")
        lines.append(f"{name:<29}{account.s:>11.2f} s{account.fraction:>9.2%}  {bar}".rstrip())
    return "\n".join(lines)
