"""The delay matrix as text and as a heat map: who sends to whom, and how slowly.

A cell is busy milliseconds per megabyte of one directed link; a row sends, a column receives.
A slow link is one dark cell, a slow network card a dark row and column. The colour is the cell's
multiple of the median on a logarithmic scale, because a fast and a slow network differ by ten.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from html import escape
from statistics import median
from typing import NamedTuple

from perdure.model.signals.links import LinkSample
from perdure.telemetry.links import DelayMatrix

TABLE_RANKS = 12
"""With more, text lists the worst links instead of a table."""
LISTED = 20
RESENT_MIN = 20
"""Fewer segments sent again are everyday: the kernel probes the tail of a burst that way."""
HEAT_RANKS = 64
_STEPS = (1.5, 2.0, 3.0, 5.0, 10.0)
_COLORS = ("#d7e3ef", "#f6e0a8", "#f3bd6b", "#ea8a4a", "#d1495b", "#8c1c3a")
_TROUBLE = "#3b1f5b"


class Usual(NamedTuple):
    """The median cell of the links that the kernel counts, and of those that NCCL does."""

    kernel: float
    nccl: float

    def rate(self, s: LinkSample) -> float:
        """Return a link's cell as a multiple of what is usual for its kind; 0 for none."""
        usual = self.nccl if s.source == "nccl" else self.kernel
        return s.busy_ms_per_mb / usual if usual else 0.0

    def show(self) -> str:
        """Return both in words, where there are two."""
        kernel, nccl = f"{self.kernel:.2f}", f"{self.nccl:.2g}"
        if not self.nccl:
            return kernel
        return f"{kernel}, of NCCL's {nccl}" if self.kernel else nccl


def render_links(matrix: DelayMatrix, width: int = 100) -> str:
    """Return the matrix as text; where it is empty, why."""
    if not matrix.links:
        return f"Delay matrix: empty; {matrix.note or 'nothing moved'}"
    ranks = _list_link_ranks(matrix.links)
    usual = _compute_usual(matrix.links)
    lines = [
        f"Delay matrix (busy ms/MB over the last {matrix.window_s:.0f} s; generation "
        f"{matrix.generation}; median {usual.show()})"
    ]
    fits = 8 + 8 * len(ranks) <= width
    if len(ranks) <= TABLE_RANKS and fits:
        lines += ["", *_render_table(matrix.links, ranks, usual)]
    lines += ["", *_render_list(_pick_worst(matrix, usual), usual)]
    if matrix.note:
        lines += ["", f"not seen: {matrix.note}"]
    return "\n".join(lines)


def _render_table(links: Iterable[LinkSample], ranks: list[int], usual: Usual) -> list[str]:
    cells = {(s.src, s.dst): s for s in links}
    lines = ["  to".rjust(8) + "".join(f"{rank:>8}" for rank in ranks)]
    for src in ranks:
        row = [_render_cell(cells.get((src, dst)), src == dst, usual) for dst in ranks]
        lines.append(f"{src:>6} {''.join(row)}".rstrip())
    lines.append("  * at least 3 times the median, or sent again, unanswered or stuck")
    return lines


def _render_cell(sample: LinkSample | None, own: bool, usual: Usual) -> str:
    if sample is None:
        return "-".rjust(8) if own else ".".rjust(8)
    mark = "*" if _is_unusual(sample, usual) else " "
    value = f"{sample.busy_ms_per_mb:.2f}" if sample.busy_ms_per_mb else "0"
    return f"{value:>7}{mark}"


def _render_list(links: list[LinkSample], usual: Usual) -> list[str]:
    lines = [
        f"{'link':>10}  {'comm':<12}{'MB':>9}{'ms/MB':>9}{'x usual':>9}{'rtt ms':>9}"
        f"{'resent':>8}{'unsent':>9}{'backoff':>8}"
    ]
    for s in links:
        multiple = usual.rate(s)
        times = f"{multiple:.1f}" if multiple else "-"
        lines.append(
            f"{f'{s.src}->{s.dst}':>10}  {s.comm[:11] or '?':<12}{s.bytes_acked / 1e6:>9.1f}"
            f"{s.busy_ms_per_mb:>9.2f}{times:>9}" + _render_socket(s)
        )
    return lines


def _render_socket(s: LinkSample) -> str:
    """Return what only the kernel knows of a link."""
    if s.source == "nccl":
        return "  counted by NCCL"
    return f"{s.rtt_s * 1e3:>9.2f}{s.retrans:>8}{s.unsent_bytes:>9}{s.backoff:>8}"


def render_heat_map(matrix: DelayMatrix) -> str:
    """Return the matrix as inline SVG with what it shows in words; where it is empty, why."""
    if not matrix.links:
        return f'<p class="soft">Empty: {escape(matrix.note or "nothing moved")}.</p>'
    usual = _compute_usual(matrix.links)
    ranks = _list_link_ranks(matrix.links)
    shown = _pick_ranks(matrix, usual, ranks)
    links = [s for s in matrix.links if s.src in shown and s.dst in shown]
    at = {rank: index for index, rank in enumerate(shown)}
    pitch = min(34, max(9, 640 // len(shown)))
    left, top = 46, 30
    size = pitch * len(shown)
    step = max(1, math.ceil(24 / pitch))
    parts = [
        f'<svg viewBox="0 0 {left + size + 4} {top + size + 4}" role="img" '
        f'aria-label="delay matrix" class="heat" width="{left + size + 4}">'
        f'<text x="{left + size / 2:.0f}" y="10" text-anchor="middle">to rank</text>'
    ]
    for rank, index in at.items():
        middle = pitch * index + pitch / 2
        if index % step == 0:
            parts.append(
                f'<text x="{left + middle:.0f}" y="24" text-anchor="middle">{rank}</text>'
                f'<text x="{left - 6}" y="{top + middle + 4:.0f}" text-anchor="end">{rank}</text>'
            )
    for s in links:
        x, y = left + pitch * at[s.dst], top + pitch * at[s.src]
        parts.append(
            f'<rect x="{x}" y="{y}" width="{pitch - 1}" height="{pitch - 1}" '
            f'fill="{_color(s, usual)}"><title>{escape(_describe(s, usual))}</title></rect>'
        )
    hidden = len(ranks) - len(shown)
    more = f" The {hidden} ranks with nothing slow are left out." if hidden else ""
    missing = f" Not seen: {escape(matrix.note)}." if matrix.note else ""
    note = (
        f'<p class="soft">Busy ms per MB of each directed link (rows send), median {usual.show()}, '
        f"generation {matrix.generation}, the last {matrix.window_s:.0f} s noted."
        f"{more}{missing}</p>"
    )
    return f"{_render_scale()}{''.join(parts)}</svg>{note}{_render_worst(matrix, usual)}"


def _render_scale() -> str:
    words = (f"up to {_STEPS[0]}x", *(f"from {step:g}x" for step in _STEPS), "unanswered")
    items = (
        f'<span class="key"><i class="heat-{number}"></i>{word}</span>'
        for number, word in enumerate(words)
    )
    return f'<p class="legend">{"".join(items)} of the median</p>'


def make_heat_style() -> str:
    """Return the style of the scale's colours."""
    colors = enumerate((*_COLORS, _TROUBLE))
    return "".join(f".heat-{number}{{background:{color}}}" for number, color in colors)


def _render_worst(matrix: DelayMatrix, usual: Usual) -> str:
    worst = [s for s in _pick_worst(matrix, usual) if _is_unusual(s, usual)][:8]
    if not worst:
        return ""
    rows = "".join(f"<tr><td>{escape(_describe(s, usual))}</td></tr>" for s in worst)
    return f"<table><tr><th>unusual links</th></tr>{rows}</table>"


def _describe(s: LinkSample, usual: Usual) -> str:
    multiple = usual.rate(s)
    times = f" ({multiple:.1f}x)" if multiple else ""
    words = (
        f"rank {s.src} to rank {s.dst}" + (f" in {s.comm}" if s.comm else ""),
        f"{s.busy_ms_per_mb:.2f} ms/MB{times}",
        f"{s.bytes_acked / 1e6:.1f} MB",
        "counted by NCCL" if s.source == "nccl" else f"rtt {s.rtt_s * 1e3:.2f} ms",
        f"{s.retrans} sent again" if s.source == "kernel" else "",
        f"unanswered for {s.last_ack_s:.1f} s (backoff {s.backoff})" if s.backoff else "",
        f"{s.unsent_bytes} bytes unsent" if s.unsent_bytes else "",
    )
    return ", ".join(word for word in words if word)


def _color(s: LinkSample, usual: Usual) -> str:
    if s.backoff:
        return _TROUBLE
    return _COLORS[bisect_right(_STEPS, usual.rate(s))]


def _is_unusual(s: LinkSample, usual: Usual) -> bool:
    slow = usual.rate(s) >= 3.0
    lossy = s.retrans >= RESENT_MIN and s.retrans * 1448 > 0.005 * s.bytes_acked
    stuck = s.unsent_bytes > 0 and s.last_ack_s > 0.5
    return bool(slow or lossy or s.backoff or stuck)


def _compute_usual(links: Iterable[LinkSample]) -> Usual:
    cells: dict[str, list[float]] = {"kernel": [0.0], "nccl": [0.0]}
    for s in links:
        if s.busy_ms_per_mb:
            cells[s.source].append(s.busy_ms_per_mb)
    return Usual(*(median(found[1:] or found) for found in cells.values()))


def _list_link_ranks(links: Iterable[LinkSample]) -> list[int]:
    return sorted({rank for s in links for rank in (s.src, s.dst)})


def _pick_worst(matrix: DelayMatrix, usual: Usual) -> list[LinkSample]:
    def badness(s: LinkSample) -> tuple[bool, int, float, int, int, str]:
        return (not _is_unusual(s, usual), -s.backoff, -s.busy_ms_per_mb, s.src, s.dst, s.comm)

    return sorted(matrix.comms or matrix.links, key=badness)[:LISTED]


def _pick_ranks(matrix: DelayMatrix, usual: Usual, ranks: list[int]) -> list[int]:
    """Return the ranks to draw: all, or as many as there is room for, around the worst links."""
    if len(ranks) <= HEAT_RANKS:
        return ranks
    shown: list[int] = []
    ordered = sorted(matrix.links, key=lambda s: (not s.backoff, -s.busy_ms_per_mb, s.src, s.dst))
    for sample in ordered:
        shown += [rank for rank in (sample.src, sample.dst) if rank not in shown]
        if len(shown) >= HEAT_RANKS:
            break
    return sorted(shown[:HEAT_RANKS])
