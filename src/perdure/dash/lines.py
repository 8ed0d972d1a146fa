"""Several lines in one plot, and plots that stand alone as a file."""

import math
from collections.abc import Sequence
from html import escape

from perdure.dash.svg import (
    LEFT,
    POINTS_MAX,
    RIGHT,
    WIDTH,
    begin_plot,
    draw_grid,
    draw_text,
    find_ticks,
    thin,
)
from perdure.model.plain import show_controls

Line = tuple[str, Sequence[tuple[float, float]]]
"""A name and its (x, y), x rising."""

COLORS = (
    "#1f6feb",
    "#2a9d6f",
    "#d1495b",
    "#8e5fc2",
    "#f4a259",
    "#3d7ea6",
    "#c9a227",
    "#667",
    "#b388d9",
    "#d1661c",
    "#7fb7d6",
    "#1c2024",
)
STEPS_MAX = POINTS_MAX // 2
_TOP, _HEIGHT = 26, 300
_BOTTOM = _HEIGHT - 36
_ALONE = (
    'xmlns="http://www.w3.org/2000/svg" style="background:#fff" font-family="system-ui,sans-serif" '
)
_INK = "<style>text{fill:#667;font-size:11px}.grid{stroke:#e2e2df}</style>"


def render_lines(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_low: float = 0.0,
) -> str:
    """Return the lines, each in its colour, with a legend; y begins at `y_low`."""
    points = [point for _, line in lines for point in line]
    if not points:
        return ""

    def scale(x: float) -> float:
        return math.log10(x) if x_log else x

    x0, x1 = min(scale(x) for x, _ in points), max(scale(x) for x, _ in points)
    most = max(y for _, y in points)
    high = most + 0.05 * (most - y_low) or 1.0

    def at_x(x: float) -> float:
        return LEFT + (scale(x) - x0) / ((x1 - x0) or 1.0) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return _BOTTOM - (y - y_low) / (high - y_low) * (_BOTTOM - _TOP)

    out = [begin_plot(_HEIGHT, f"{y_label} by {x_label}"), *draw_grid(y_low, high, at_y)]
    for x in _find_log_ticks(x0, x1) if x_log else find_ticks(x0, x1, 8):
        out.append(draw_text(at_x(x), _BOTTOM + 16, f"{x:g}", "middle"))
    begin = LEFT + 40
    room = (WIDTH - begin) / len(lines)
    for index, (name, line) in enumerate(lines):
        color = COLORS[index % len(COLORS)]
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in thin(line))
        out.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{path}">'
            f"<title>{escape(name)}</title></polyline>"
            f'<rect x="{begin + index * room:.0f}" y="6" width="10" height="10" fill="{color}"/>'
            f"{draw_text(begin + index * room + 14, 15, name, 'start')}"
        )
    axes = draw_text(LEFT / 4, 15, y_label, "start")
    return "".join(
        [*out, axes, draw_text((LEFT + WIDTH) / 2, _HEIGHT - 4, x_label, "middle"), "</svg>"]
    )


def make_stairs(
    rows: Sequence[tuple[float, float]], end_s: float, *, unit_s: float = 3600.0
) -> list[tuple[float, float]]:
    """Return (time, value from then on) as the corners of a staircase, time in `unit_s`.

    Where there are more steps than a plot can show, each is the mean of a stretch.
    """
    if len(rows) > STEPS_MAX:
        means = find_means(rows, end_s, STEPS_MAX)
        rows = [(end_s * index / STEPS_MAX, mean) for index, mean in enumerate(means)]
    ends = [*rows[1:], (end_s, 0.0)]
    corners = []
    for (begin_s, y), (until_s, _) in zip(rows, ends, strict=True):
        corners += [(begin_s / unit_s, y), (until_s / unit_s, y)]
    return corners


def find_means(counts: Sequence[tuple[float, float]], end_s: float, columns: int) -> list[float]:
    """Return the mean of a staircase in each of `columns` equal parts of 0 to `end_s`."""
    means, at = [], 0
    for column in range(columns):
        begin_s, stop_s = end_s * column / columns, end_s * (column + 1) / columns
        total, now_s = 0.0, begin_s
        while now_s < stop_s:
            while at + 1 < len(counts) and counts[at + 1][0] <= now_s:
                at += 1
            until_s = min(stop_s, counts[at + 1][0] if at + 1 < len(counts) else end_s)
            if until_s <= now_s:
                break
            total += counts[at][1] * (until_s - now_s)
            now_s = until_s
        means.append(total / (stop_s - begin_s))
    return means


def stand_alone(svg: str) -> str:
    """Return a plot as a file of its own, for a light background."""
    return (
        show_controls(svg).replace("<svg ", f"<svg {_ALONE}", 1).replace(">", f">{_INK}", 1) + "\n"
    )


def _find_log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
    return [x for x in ticks if 10**low * 0.999 <= x <= 10**high * 1.001]
