"""One picture: what is missed against what is said falsely, of each tree that was measured.

A verdict may be believed at once, or only once it has stood for a while; the longer one waits, the
less is false and the more is missed. Each curve is that, for `WAITS_S`: false verdicts an hour of
the healthy workloads along the axis, and up it the share of faults that no verdict with the right
culprit had named in time, and then for so long.
"""

from collections.abc import Sequence
from typing import Any

from perdure.dash.svg import render_lines

Row = dict[str, Any]
Points = list[tuple[float, float]]
WAITS_S = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
LEAST = 1e-3
"""False verdicts an hour below which the axis does not go."""


def compute_curve(healthy: Sequence[Row], faults: Sequence[Row]) -> Points:
    """Return (false verdicts an hour, percent of faults missed) for each of `WAITS_S`."""
    hours = sum(row["simulated_s"] for row in healthy) / 3600.0
    said = [told for row in healthy for told in row["told"]]
    false = [told for told in said if not told["right"] and not told["silent"]]
    curve = []
    for wait_s in WAITS_S:
        kept = sum(told["lasted_s"] is None or told["lasted_s"] >= wait_s for told in false)
        missed = sum(not _is_found(row, wait_s) for row in faults)
        rate = max(kept / max(hours, 1e-9), LEAST)
        curve.append((rate, 100.0 * missed / max(len(faults), 1)))
    return curve


def _is_found(row: Row, wait_s: float) -> bool:
    """Return whether a right verdict came in time and stood for so long, as far as was looked."""
    return any(
        at_s <= row["limit_s"] and (stood_s is None or stood_s >= wait_s)
        for at_s, stood_s in zip(row["right_at_s"], row["stood_s"], strict=True)
    )


def render_picture(rows: Sequence[Row]) -> str:
    """Return the curves of all trees with both healthy runs and faults, as a file of SVG."""
    healthy = [row for row in rows if "number" in row]
    faults = [row for row in rows if "fault" in row]
    lines = []
    for tree in sorted({row["tree"] for row in healthy} & {row["tree"] for row in faults}):
        mine = [row for row in healthy if row["tree"] == tree]
        lines.append((tree, compute_curve(mine, [row for row in faults if row["tree"] == tree])))
    svg = render_lines(
        lines, x_label="false verdicts an hour of healthy training", y_label="faults missed, %",
        x_log=True,
    )  # fmt: skip
    head = '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
    return svg.replace("<svg ", head, 1) + "\n"
