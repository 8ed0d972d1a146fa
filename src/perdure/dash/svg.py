"""The few plots of a report, drawn as inline SVG: no library, no script, no network.

Text takes its colour from the page (`currentColor`), so a plot suits a light and a dark screen.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby, pairwise

import msgspec

from perdure.model.input.plain import show_controls
from perdure.model.report import ACCOUNTS


class Ink(msgspec.Struct, frozen=True):
    """How an account looks and what it means."""

    color: str
    label: str
    meaning: str


INKS: dict[str, Ink] = {
    "useful": Ink("#2a9d6f", "useful", "steps that were kept"),
    "packing": Ink("#8d99ae", "packing", "ranks that fit no shape"),
    "reconfiguration.detect": Ink("#f4a259", "detect", "failure until somebody knew"),
    "reconfiguration.decide": Ink("#ee8434", "decide", "until the controller acted"),
    "reconfiguration.abort": Ink("#d1661c", "abort", "until no old process was left"),
    "reconfiguration.communicator": Ink(
        "#b388d9", "communicator", "start of processes, process group formed"
    ),
    "reconfiguration.state": Ink("#8e5fc2", "state", "checkpoint read"),
    "reconfiguration.warmup": Ink("#6a3d9a", "warm-up", "until the first new step"),
    "lost_work": Ink("#d1495b", "lost work", "steps that were not kept, and steps cut off"),
    "checkpoint": Ink("#3d7ea6", "checkpoint", "training stalled for a checkpoint"),
    "steady_overhead": Ink("#7fb7d6", "overhead", "perdure's own code in the training thread"),
    "startup": Ink("#c9a227", "start-up", "before the very first step"),
    "idle": Ink("#b8bcc4", "idle", "spares, and ranks that were done"),
    "unattributed": Ink("#ff3ea5", "unattributed", "what no stamp explains"),
}

"""One colour, one word and one sentence for each account of the ledger, on every screen."""
assert tuple(INKS) == ACCOUNTS


def name_ink(account: str) -> str:
    """Return the class of what has an account's colour on a page."""
    return f"ink-{account.replace('.', '-')}"


POINTS_MAX = 600
_GAPS_MAX = 50
_GAP = "#888"
_HUGE = 1e300
"""The difference of two values is still finite below it."""
WIDTH, LEFT, RIGHT = 960, 64, 16
"""Of a plot, and of what is beside its axes."""
_ROW_LETTER = 10.2
"""How wide a letter of a row's name is where it is drawn largest: on a phone."""
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
    gaps = _list_gaps(rows)
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
    out += [draw_text(at_x(x), bottom + 16, f"{x:g}", "middle") for x in choose_ticks(x0, x1, 8)]
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


def _list_gaps(rows: Sequence[tuple[float, float]]) -> list[tuple[float, str]]:
    """Return where values cease to be finite, and what they are; the first `_GAPS_MAX`."""
    said = [(x, "" if math.isfinite(y) else f"{y:g}") for x, y in rows]
    gaps = [new for old, new in pairwise([(0.0, ""), *said]) if new[1] not in ("", old[1])]
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
    bars: Sequence[Bar],
    rows: Sequence[str],
    *,
    end_s: float,
    begin_s: float = 0.0,
    marks: Iterable[Mark] = (),
    together: bool = False,
) -> str:
    """Return rows of bars over time from `begin_s` to `end_s`; what is outside is cut off.

    All bars of an account are one shape where they are drawn `together`: for very many of them.
    """
    if not rows or end_s <= begin_s:
        return ""
    pitch = 22 if len(rows) <= 24 else max(4, 528 // len(rows))
    bottom = _TOP + pitch * len(rows)
    height = bottom + 34
    left = max(LEFT, round(8 + _ROW_LETTER * max(map(len, rows))))
    scale = (WIDTH - left - RIGHT) / (end_s - begin_s)

    def at_x(at_s: float) -> float:
        return left + (min(max(at_s, begin_s), end_s) - begin_s) * scale

    out = [begin_plot(height, "timeline of ranks", left=left)]
    for index, name in enumerate(rows):
        if pitch >= 12 or index % max(1, len(rows) // 24) == 0:
            out.append(draw_text(left - 8, _TOP + pitch * (index + 0.7), name, "end"))
    shapes: dict[str, list[str]] = {}
    for bar in bars:
        x, width = at_x(bar.begin_s), at_x(bar.end_s) - at_x(bar.begin_s)
        if together:
            high = max(pitch - 3, 2)
            place = f"M{x:.1f} {_TOP + pitch * bar.row + 1}h{width:.1f}v{high}h-{width:.1f}z"
            shapes.setdefault(bar.account, []).append(place)
            continue
        label = f"{bar.label}: {bar.begin_s:.2f} to {bar.end_s:.2f} s"
        out.append(
            f'<rect x="{x:.2f}" y="{_TOP + pitch * bar.row + 1:.1f}" width="{max(width, 0.4):.2f}" '
            f'height="{max(pitch - 3, 2)}" fill="{INKS[bar.account].color}">'
            f"<title>{escape(label)}</title></rect>"
        )
    for account, places in shapes.items():
        ink = INKS[account]
        out.append(
            f'<path d="{"".join(places)}" fill="{ink.color}"><title>{ink.label}</title></path>'
        )
    for mark in marks:
        if not begin_s <= mark.x <= end_s:
            continue
        x = at_x(mark.x)
        out.append(
            f'<g><title>{escape(mark.label)}</title><line x1="{x:.1f}" y1="4" x2="{x:.1f}" '
            f'y2="{bottom}" stroke="{mark.color}" stroke-width="1.5"/>'
            f'<path d="M{x - 4:.1f} 2h8l-4 7z" fill="{mark.color}"/></g>'
        )
    ticks = choose_ticks(begin_s, end_s, 10)
    out += [draw_text(at_x(t), bottom + 16, f"{t:g} s", "middle") for t in ticks]
    return "".join([*out, "</svg>"])


def render_legend(accounts: Iterable[str]) -> str:
    """Return swatches with words."""
    items = (
        f'<span class="key"><i class="{name_ink(a)}"></i>{escape(INKS[a].label)}</span>'
        for a in accounts
    )
    return f'<p class="legend">{"".join(items)}</p>'


def thin(rows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `POINTS_MAX` points; of each stretch of the axis the lowest and the highest.

    `rows` lie in order along the axis, old ones perhaps further apart than new ones.
    """
    if len(rows) <= POINTS_MAX:
        return list(rows)
    stretches = POINTS_MAX // 2
    begin, width = rows[0][0], (rows[-1][0] - rows[0][0]) / stretches or 1.0
    out: list[tuple[float, float]] = []
    for _, group in groupby(rows, key=lambda row: min((row[0] - begin) // width, stretches - 1)):
        bucket = list(group)
        out += sorted({min(bucket, key=lambda r: r[1]), max(bucket, key=lambda r: r[1])})
    return out


def choose_ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers between `low` and `high`, about `count` of them."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw)
    first = math.ceil(low / step)
    return [round(i * step, 10) for i in range(first, math.floor(high / step) + 1)]


def begin_plot(height: int, label: str, *, left: int | None = None) -> str:
    """Return the begin of an SVG; what is no higher than a line of text is as wide as its place.

    A script is told how much of it lies beside the axes where that is said, by `left`.
    """
    stretch = ' preserveAspectRatio="none"' if height <= 40 else ""
    stretch += f' data-left="{left}" data-right="{RIGHT}"' if left is not None else ""
    box = f'viewBox="0 0 {WIDTH} {height}"'
    return f'<svg {box} role="img" aria-label="{escape(label)}" class="plot"{stretch}>'


def draw_grid(low: float, high: float, at_y: Callable[[float], float]) -> list[str]:
    """Return a line across the plot at each round value from `low` to `high`, and its number."""
    return [
        f'<line class="grid" x1="{LEFT}" y1="{at_y(y):.1f}" x2="{WIDTH - RIGHT}" '
        f'y2="{at_y(y):.1f}"/>{draw_text(LEFT - 8, at_y(y) + 4, f"{y:g}", "end")}'
        for y in choose_ticks(low, high, 5)
    ]


def draw_text(x: float, y: float, text: str, anchor: str) -> str:
    """Return a word at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


Curve = tuple[str, Sequence[tuple[float, float]]]
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
_LINES_TOP, _LINES_HEIGHT = 26, 238
"""Above the plot, where a row of the legend has room, and of the plot itself."""
_NAME_MAX, _LETTER, _ROW = 24, 9, 20
"""Characters of a name in the legend, and how wide one and how high a row is on a phone."""
_ALONE = (
    'xmlns="http://www.w3.org/2000/svg" style="background:#fff" font-family="system-ui,sans-serif" '
)
_INK = "<style>text{fill:#667;font-size:11px}.grid{stroke:#e2e2df}</style>"


def render_lines(
    lines: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_low: float = 0.0,
) -> str:
    """Return the lines, each in its colour, with a legend; y begins at `y_low`, or below it.

    What is not finite is left out.
    """
    lines = [(name, _list_finite(line)) for name, line in lines]
    points = [point for _, line in lines for point in line]
    if not points:
        return ""

    def scale(x: float) -> float:
        return math.log10(x) if x_log else x

    x0, x1 = min(scale(x) for x, _ in points), max(scale(x) for x, _ in points)
    names = [name if len(name) <= _NAME_MAX else f"{name[: _NAME_MAX - 1]}…" for name, _ in lines]
    legend, rows = _lay_out_legend(names)
    top = _LINES_TOP + _ROW * (rows - 1)
    bottom = top + _LINES_HEIGHT
    most, y_low = max(y for _, y in points), min([y_low, *(y for _, y in points)])
    high = most + (0.05 * (most - y_low) or 1.0)

    def at_x(x: float) -> float:
        return LEFT + (scale(x) - x0) / ((x1 - x0) or 1.0) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return bottom - (y - y_low) / (high - y_low) * _LINES_HEIGHT

    out = [begin_plot(bottom + 36, f"{y_label} by {x_label}"), *draw_grid(y_low, high, at_y)]
    ticks = _list_log_ticks(x0, x1) if x_log else choose_ticks(x0, x1, 8)
    out += [draw_text(at_x(x), bottom + 16, f"{x:g}", "middle") for x in ticks]
    for index, ((name, line), (x, y)) in enumerate(zip(lines, legend, strict=True)):
        color = COLORS[index % len(COLORS)]
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in thin(line))
        out.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{path}">'
            f"<title>{escape(name)}</title></polyline>"
            f'<rect x="{x:.0f}" y="{y}" width="10" height="10" fill="{color}"/>'
            f"{draw_text(x + 14, y + 9, names[index], 'start')}"
        )
    axes = draw_text(LEFT / 4, 15, y_label, "start")
    return "".join(
        [*out, axes, draw_text((LEFT + WIDTH) / 2, bottom + 32, x_label, "middle"), "</svg>"]
    )


def _lay_out_legend(names: Sequence[str]) -> tuple[list[tuple[float, int]], int]:
    """Return where each name's swatch is, and how many rows they take: none covers another."""
    begin = LEFT + 40
    each = max(map(len, names)) * _LETTER + 26
    in_row = min(len(names), max(1, int((WIDTH - begin) / each)))
    room = (WIDTH - begin) / in_row
    places = [(begin + i % in_row * room, 6 + i // in_row * _ROW) for i in range(len(names))]
    return places, -(-len(names) // in_row)


def _list_finite(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of a line that can be drawn."""
    tame = ((clip_value(x), clip_value(y)) for x, y in line)
    return [(x, y) for x, y in tame if x is not None and y is not None]


def make_stairs(
    rows: Sequence[tuple[float, float]], end_s: float, *, unit_s: float = 3600.0
) -> list[tuple[float, float]]:
    """Return (time, value from then on) as the corners of a staircase, time in `unit_s`.

    Where there are more steps than a plot can show, each is the mean of a stretch.
    """
    rows = fold_stairs(rows, end_s)
    stairs = zip(rows, [*rows[1:], (end_s, 0.0)], strict=True)
    return [(at_s / unit_s, y) for (begin_s, y), (end, _) in stairs for at_s in (begin_s, end)]


def fold_stairs(rows: Sequence[tuple[float, float]], end_s: float) -> Sequence[tuple[float, float]]:
    """Return (time, value from then on) in as many steps as a plot can show."""
    if len(rows) <= STEPS_MAX:
        return rows
    means = compute_means(rows, end_s, STEPS_MAX)
    return [(end_s * index / STEPS_MAX, mean) for index, mean in enumerate(means)]


def compute_means(counts: Sequence[tuple[float, float]], end_s: float, columns: int) -> list[float]:
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


def _list_log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
    return [x for x in ticks if 10**low * 0.999 <= x <= 10**high * 1.001]
