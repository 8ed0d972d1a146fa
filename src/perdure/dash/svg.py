"""The few plots of a report, drawn as inline SVG: no library, no script, no network.

Text takes its colour from the page (`currentColor`), so a plot suits a light and a dark screen.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise

import msgspec

from perdure.dash.palette import INKS

POINTS_MAX = 600
_GAPS_MAX = 50
_GAP = "#888"
_HUGE = 1e300
"""The difference of two values is still finite below it."""
WIDTH, LEFT, RIGHT = 960, 64, 16
"""Of a plot, and of what is beside its axes."""
_TOP = 14


class Mark(msgspec.Struct, frozen=True):
    """A vertical line with a word on hover."""

    x: float
    label: str
    color: str


def render_curve(
    rows: Sequence[tuple[float, float]],
    *,
    x_label: str,
    y_label: str,
    marks: Iterable[Mark] = (),
    height: int = 260,
) -> str:
    """Return one curve with vertical marks; empty text where there is nothing to draw.

    Where values are not finite the curve is broken, and a mark says so.
    """
    tame = [(x, clip_value(y)) for x, y in rows]
    points = thin([(x, y) for x, y in tame if y is not None])
    if len(points) < 2:
        return ""
    gaps = _find_gaps(rows)
    marks = [*marks, *(Mark(x, f"{y_label} is {what} from here on", _GAP) for x, what in gaps)]
    x0 = min([points[0][0], *(m.x for m in marks)])
    x1 = max([points[-1][0], *(m.x for m in marks)])
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = low - margin, high + margin
    bottom = height - 34

    def at_x(x: float) -> float:
        return LEFT + (x - x0) / ((x1 - x0) or 1.0) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return bottom - (y - low) / (high - low) * (bottom - _TOP)

    out = [begin_plot(height, f"{y_label} by {x_label}"), *draw_grid(low, high, at_y)]
    for x in find_ticks(x0, x1, 8):
        out.append(draw_text(at_x(x), bottom + 16, f"{x:g}", "middle"))
    for mark in marks:
        x = at_x(mark.x)
        out.append(
            f'<g><title>{escape(mark.label)}</title><line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" '
            f'y2="{bottom}" stroke="{mark.color}" stroke-width="1.5" stroke-dasharray="4 3"/>'
            f'<circle cx="{x:.1f}" cy="{_TOP}" r="4.5" fill="{mark.color}"/></g>'
        )
    for begin, end in pairwise([-math.inf, *(x for x, _ in gaps), math.inf]):
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points if begin <= x < end)
        out.append(f'<polyline class="curve" points="{path}"/>')
    out.append(draw_text((LEFT + WIDTH) / 2, height - 4, x_label, "middle"))
    return "".join([*out, "</svg>"])


def clip_value(value: float) -> float | None:
    """Return `value`, or one that can still be drawn; None for one that is not finite."""
    return max(-_HUGE, min(_HUGE, value)) if math.isfinite(value) else None


def _find_gaps(rows: Sequence[tuple[float, float]]) -> list[tuple[float, str]]:
    """Return where values cease to be finite, and what they are; the first `_GAPS_MAX`."""
    gaps, before = [], ""
    for x, y in rows:
        what = "" if math.isfinite(y) else f"{y:g}"
        if what and what != before:
            gaps.append((x, what))
        before = what
    return gaps[:_GAPS_MAX]


def render_stack(parts: Iterable[tuple[str, float]], *, height: int = 34) -> str:
    """Return one bar of (account, fraction) parts from 0 to 1."""
    out, x = [begin_plot(height, "ledger")], 0.0
    for account, fraction in parts:
        width = min(max(clip_value(fraction) or 0.0, 0.0), 1.0) * WIDTH
        if width > 0:
            ink = INKS[account]
            out.append(
                f'<rect x="{x:.2f}" y="0" width="{max(width, 0.6):.2f}" height="{height}" '
                f'fill="{ink.color}"><title>{ink.label}: {fraction:.2%}</title></rect>'
            )
        x += width
    return "".join([*out, "</svg>"])


class Bar(msgspec.Struct, frozen=True):
    """A piece of a row of the timeline."""

    row: int
    begin_s: float
    end_s: float
    account: str
    label: str


def render_timeline(
    bars: Sequence[Bar], rows: Sequence[str], *, end_s: float, marks: Iterable[Mark] = ()
) -> str:
    """Return rows of bars over time from 0 to `end_s`."""
    if not rows or end_s <= 0:
        return ""
    pitch = 22 if len(rows) <= 24 else max(4, 528 // len(rows))
    bottom = _TOP + pitch * len(rows)
    height = bottom + 34
    scale = (WIDTH - LEFT - RIGHT) / end_s
    out = [begin_plot(height, "timeline of ranks")]
    for index, name in enumerate(rows):
        if pitch >= 12 or index % max(1, len(rows) // 24) == 0:
            out.append(draw_text(LEFT - 8, _TOP + pitch * (index + 0.7), name, "end"))
    for bar in bars:
        x, width = LEFT + bar.begin_s * scale, (bar.end_s - bar.begin_s) * scale
        label = f"{bar.label}: {bar.begin_s:.2f} to {bar.end_s:.2f} s"
        out.append(
            f'<rect x="{x:.2f}" y="{_TOP + pitch * bar.row + 1:.1f}" width="{max(width, 0.4):.2f}" '
            f'height="{max(pitch - 3, 2)}" fill="{INKS[bar.account].color}">'
            f"<title>{escape(label)}</title></rect>"
        )
    for mark in marks:
        x = LEFT + mark.x * scale
        out.append(
            f'<g><title>{escape(mark.label)}</title><line x1="{x:.1f}" y1="4" x2="{x:.1f}" '
            f'y2="{bottom}" stroke="{mark.color}" stroke-width="1.5"/>'
            f'<path d="M{x - 4:.1f} 2h8l-4 7z" fill="{mark.color}"/></g>'
        )
    for t in find_ticks(0.0, end_s, 10):
        out.append(draw_text(LEFT + t * scale, bottom + 16, f"{t:g} s", "middle"))
    return "".join([*out, "</svg>"])


def render_legend(accounts: Iterable[str]) -> str:
    """Return swatches with words."""
    items = (
        f'<span class="key"><i style="background:{INKS[a].color}"></i>'
        f"{escape(INKS[a].label)}</span>"
        for a in accounts
    )
    return f'<p class="legend">{"".join(items)}</p>'


def thin(rows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `POINTS_MAX` points; each bucket keeps its lowest and its highest."""
    if len(rows) <= POINTS_MAX:
        return list(rows)
    size = math.ceil(len(rows) / (POINTS_MAX // 2))
    out: list[tuple[float, float]] = []
    for begin in range(0, len(rows), size):
        bucket = rows[begin : begin + size]
        out += sorted({min(bucket, key=lambda r: r[1]), max(bucket, key=lambda r: r[1])})
    return out


def find_ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers between `low` and `high`, about `count` of them."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw)
    first = math.ceil(low / step)
    return [round(i * step, 10) for i in range(first, math.floor(high / step) + 1)]


def begin_plot(height: int, label: str) -> str:
    """Return the begin of an SVG; what is no higher than a line of text is as wide as its place."""
    stretch = ' preserveAspectRatio="none"' if height <= 40 else ""
    box = f'viewBox="0 0 {WIDTH} {height}"'
    return f'<svg {box} role="img" aria-label="{escape(label)}" class="plot"{stretch}>'


def draw_grid(low: float, high: float, at_y: Callable[[float], float]) -> list[str]:
    """Return a line across the plot at each round value from `low` to `high`, and its number."""
    return [
        f'<line class="grid" x1="{LEFT}" y1="{at_y(y):.1f}" x2="{WIDTH - RIGHT}" '
        f'y2="{at_y(y):.1f}"/>{draw_text(LEFT - 8, at_y(y) + 4, f"{y:g}", "end")}'
        for y in find_ticks(low, high, 5)
    ]


def draw_text(x: float, y: float, text: str, anchor: str) -> str:
    """Return a word at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
