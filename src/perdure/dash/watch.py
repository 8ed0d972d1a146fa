"""A Snapshot as a screen of lines: `perdure watch`, at any width, height and number of ranks.

Every line is text with one style for all of it, so that a terminal, a pipe and a test see the same.
Where ranks do not fit they are folded into groups that do the same at the moment; whoever is in
trouble comes first and stands alone as long as there is room.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from perdure.dash.live import render_count, render_status
from perdure.dash.shape import align, clip, render_shape, render_span
from perdure.dash.verdicts import describe_verdict
from perdure.model.report import RankRow, Snapshot
from perdure.model.steering import render_value
from perdure.model.verdicts import Verdict

WIDTH_MIN, HEIGHT_MIN = 20, 4
_TROUBLE = ("failed", "suspected", "waiting")
_STYLES = {"failed": "bold red", "suspected": "bold red", "waiting": "yellow", "exited": "dim"}
_STATE_STYLES = {
    "running": "bold green",
    "done": "bold green",
    "failed": "bold red",
    "recovering": "bold red",
    "paused": "bold yellow",
    "lost": "bold red",
}
_SPEED_BLOCKS = "▁▂▃▄▅▆▇█"


class ScreenLine(NamedTuple):
    """One line of a screen."""

    text: str
    style: str = ""


def render_watch(
    snapshot: Snapshot, width: int, height: int, speeds: Sequence[float] = ()
) -> list[ScreenLine]:
    """Return at most `height` lines of at most `width` columns.

    `speeds` are steps a second of the last looks, oldest first.
    """
    width, height = max(WIDTH_MIN, width), max(HEIGHT_MIN, height)
    head = _render_head(snapshot, width, height, speeds)
    shape = render_shape(snapshot.world, snapshot.ranks) if snapshot.world else []
    around = [
        _section("Verdicts", [_describe(v, snapshot) for v in choose_shown_verdicts(snapshot)]),
        _section("Incidents", _render_incidents(snapshot)),
        _section("Replica groups", _render_replicas(snapshot)),
        _section("Stages", [ScreenLine(text) for text in shape]),
        _section("Configuration", _render_settings(snapshot, width)),
        _section("Devices", _render_devices(snapshot)),
    ]
    room = height - len(head)
    ranks_min = min(4, 2 + len(snapshot.ranks))
    below: list[ScreenLine] = []
    for section in around:  # In order of their worth, as long as there is room beside the ranks.
        left = room - ranks_min - len(below)
        if len(section) >= 2 and left >= 3:
            below += section[:left]
    rows = room - len(below) - 1
    ranks = render_ranks(snapshot.ranks, rows, width) if rows > 1 else []
    lines = [*head, *([ScreenLine("")] if ranks else []), *ranks, *below]
    return [
        ScreenLine(clip("".join(c if c.isprintable() else " " for c in text), width), style)
        for text, style in lines[:height]
    ]


def render_ranks(ranks: Sequence[RankRow], rows: int, width: int = 1000) -> list[ScreenLine]:
    """Return a table of all ranks in at most `rows` lines, its head included.

    Where it is wider than `width`, columns that say least are left out.
    """
    if not ranks:
        return []
    together: list[tuple[RankRow, ...]] = [(row,) for row in ranks]
    if len(ranks) >= rows:
        alone = [row for row in ranks if row.state in _TROUBLE]
        groups = [(row,) for row in alone] if len(alone) <= rows // 2 else []
        rest = [row for row in ranks if not groups or row.state not in _TROUBLE]
        together = [*groups, *_fold(rest, max(1, rows - 1 - len(groups)))]
    return _table(together, width)


def _fold(ranks: Sequence[RankRow], most: int) -> list[tuple[RankRow, ...]]:
    """Return at most `most` groups: by node where those fit, else by what ranks do."""
    by_doing = _group(ranks, lambda r: (_severity(r.state), r.state, r.phase))
    by_node = _group(ranks, lambda r: (_severity(r.state), r.state, r.phase, r.node))
    groups = by_node if len(by_node) <= most else by_doing
    if len(groups) <= most:
        return groups
    last = tuple(row for group in groups[most - 1 :] for row in group)
    return [*groups[: most - 1], last]


def _group(ranks: Iterable[RankRow], key: Any) -> list[tuple[RankRow, ...]]:
    return [tuple(group) for _, group in groupby(sorted(ranks, key=key), key)]


def _severity(state: str) -> int:
    return _TROUBLE.index(state) if state in _TROUBLE else len(_TROUBLE)


_HEAD = ("ranks", "nodes", "state", "phase", "step", "steps/s", "collective")
_RIGHT = (4, 5)
_COLLECTIVE = 6
_COLLECTIVE_MIN = 12
"""Columns that it gets at least, or none: it is the last and is clipped."""
_LEAST = (1, 3, 6, 5)
"""What is left out first."""


def _rank_cells(group: Sequence[RankRow]) -> tuple[str, ...]:
    first = group[0]
    steps = [row.step for row in group if row.step >= 0]
    low, high = (min(steps), max(steps)) if steps else (-1, -1)
    step = "-" if low < 0 else str(low) if low == high else f"{low}-{high}"
    states = {row.state for row in group}
    phases = {row.phase for row in group}
    waits = next((row.collective for row in group if "waiting" in row.collective), "")
    return (
        render_span([row.rank for row in group]),
        render_span(sorted({row.node for row in group})),
        first.state if len(states) == 1 else "several",
        first.phase if len(phases) == 1 else "several",
        step,
        f"{min(row.steps_per_s for row in group):.1f}",
        waits or first.collective,
    )


def _table(groups: Sequence[Sequence[RankRow]], width: int) -> list[ScreenLine]:
    everything = [_HEAD, *map(_rank_cells, groups)]
    styles = ["bold", *(_STYLES.get(group[0].state, "") for group in groups)]
    widths = [max(len(row[i]) for row in everything) for i in range(len(_HEAD))]
    columns = list(range(len(_HEAD)))
    for column in _LEAST:
        room = width - (_COLLECTIVE_MIN if columns[-1] == _COLLECTIVE else 0)
        if sum(widths[i] + 2 for i in columns if i != _COLLECTIVE) <= room:
            break
        columns.remove(column)
    right = [place for place, i in enumerate(columns) if i in _RIGHT]
    lines = align([[row[i] for i in columns] for row in everything], right)
    return [ScreenLine(*row) for row in zip(lines, styles, strict=True)]


def _render_head(
    snapshot: Snapshot, width: int, height: int, speeds: Sequence[float]
) -> list[ScreenLine]:
    first = render_status(snapshot, incident=len(snapshot.ranks) + 8 > height)
    saved = snapshot.checkpoints[-1].get("step") if snapshot.checkpoints else None
    since_s = snapshot.at_s - snapshot.started_s
    rest = (
        f"generation {snapshot.generation}",
        snapshot.depth,
        render_count(snapshot.incidents, "incident") if snapshot.incidents else "",
        f"checkpoint of step {saved}" if snapshot.checkpoints else "",
        f"cordoned: node {render_span(snapshot.cordoned)}" if snapshot.cordoned else "",
        f"for {_render_duration(since_s)}" if snapshot.started_s > 0 else "",
    )
    lines = [
        ScreenLine(first, _STATE_STYLES.get(snapshot.state, "bold")),
        ScreenLine("  ".join(part for part in rest if part)),
        *([ScreenLine(snapshot.reason, "dim")] if snapshot.reason else []),
    ]
    lines += [ScreenLine(text, "cyan") for text in render_busy(snapshot)[:2]]
    curve = render_curve(speeds, max(8, width - 26))
    if curve:
        lines.append(
            ScreenLine(f"steps/s {curve} {speeds[-1]:.1f} (max {max(speeds):.1f})", "cyan")
        )
    return lines


def render_busy(snapshot: Snapshot, most: int = 4) -> list[str]:
    """Return what ranks have declared to be busy with, a line a phase, the oldest phase first.

    Such a line is `rank 0 is busy: evaluate, at most 600 s, for 12 s`.
    """
    groups: dict[tuple[str, float], list[RankRow]] = {}
    for row in snapshot.ranks:
        if row.busy_phase is not None:
            length_s = round(row.busy_phase.until_s - row.busy_phase.since_s, 3)
            groups.setdefault((row.busy_phase.name, length_s), []).append(row)
    found = []
    for rows in groups.values():
        phase = min((r.busy_phase for r in rows if r.busy_phase), key=lambda p: p.since_s)
        ranks = render_span([row.rank for row in rows])
        who = f"rank {ranks} is" if len(rows) == 1 else f"ranks {ranks} are"
        over = " (longer than declared: it counts no more)"
        over = over if snapshot.at_s > phase.until_s else ""
        found.append((phase.since_s, f"{who} busy: {phase.describe(snapshot.at_s)}{over}"))
    return [text for _, text in sorted(found)[:most]]


def render_curve(values: Sequence[float], columns: int) -> str:
    """Return the newest values as blocks, lowest to highest; empty where nothing moves.

    >>> render_curve([0.0, 1.0, 2.0], 10)
    '▁▅█'
    """
    shown, top = values[-columns:], max(values, default=0.0)
    if len(shown) < 2 or top <= 0:
        return ""
    return "".join(_SPEED_BLOCKS[min(7, round(v / top * 7 + 1e-9))] for v in shown)


def _render_incidents(snapshot: Snapshot) -> list[ScreenLine]:
    lines = []
    for row in snapshot.recent[:-4:-1]:
        over = "not over yet" if row.total_s is None else f"{row.total_s:.2f} s"
        what = "training went on" if row.rung == "none" else f"{row.rung}, {over}"
        text = f"{_render_age(snapshot, row.at_s)}  {row.culprit}: {row.cause}; {what}"
        lines.append(ScreenLine(text, "bold red" if row.total_s is None else ""))
    return lines


def choose_shown_verdicts(snapshot: Snapshot, most: int = 3) -> list[Verdict]:
    """Return the verdicts to show: those that hold now, then the newest of the others."""
    newest = sorted(snapshot.verdicts, key=lambda v: v.confirmed_s, reverse=True)
    return sorted(newest, key=lambda v: not _holds(v, snapshot))[:most]


def _holds(verdict: Verdict, snapshot: Snapshot) -> bool:
    return verdict.generation == snapshot.generation and "withdrawn" not in verdict.evidence


def _describe(verdict: Verdict, snapshot: Snapshot) -> ScreenLine:
    age = _render_age(snapshot, verdict.confirmed_s)
    style = "bold red" if _holds(verdict, snapshot) else "dim"
    return ScreenLine(f"{age}  {describe_verdict(verdict)}", style)


def _render_replicas(snapshot: Snapshot) -> list[ScreenLine]:
    return [
        ScreenLine(
            f"group {r.group}  node {r.node}  {r.state:<9}step {r.step if r.step >= 0 else '-'}"
            + (f"  quorum {r.quorum_id}" if r.quorum_id >= 0 else "")
            + (f"  late: {r.late}" if r.late else ""),
            "" if r.state in ("training", "spare") and not r.late else "yellow",
        )
        for r in snapshot.replicas[:8]
    ]


def _render_settings(snapshot: Snapshot, width: int) -> list[ScreenLine]:
    """What the script has declared, what of perdure's own was changed, and what is to come."""
    own = {spec.name: spec.default for spec in snapshot.keys if spec.owner == "perdure"}
    words = [
        f"{name}={_short(value)}"
        for name, value in sorted(snapshot.settings.items())
        if name not in own or value != own[name]
    ]
    if snapshot.epoch:
        words.insert(0, f"change {snapshot.epoch}")
    rows: list[str] = []
    for word in words:
        if rows and len(rows[-1]) + 2 + len(word) <= width:
            rows[-1] += f"  {word}"
        else:
            rows.append(word)
    lines = [ScreenLine(row) for row in rows[:4]]
    for change in snapshot.coming[:2]:
        words = [f"{name}={_short(value)}" for name, value in sorted(change.values.items())]
        lines.append(ScreenLine(f"from step {change.step} on: {'  '.join(words)}", "yellow"))
    return lines


def _render_devices(snapshot: Snapshot) -> list[ScreenLine]:
    """Only those that are not well: `perdure map` has them all."""
    bad = [d for d in snapshot.devices if d.health in ("failed", "warn") or d.state == "lost"]
    return [
        ScreenLine(
            f"{d.device} on node {d.node}: {d.health or d.state} {d.why}".rstrip(),
            "bold red" if d.health == "failed" else "yellow",
        )
        for d in bad[:4]
    ]


def _section(title: str, lines: list[ScreenLine]) -> list[ScreenLine]:
    return [ScreenLine(""), ScreenLine(title, "bold"), *lines] if lines else []


def _short(value: object) -> str:
    if isinstance(value, bool | int | float | str):
        return f"{value:.4g}" if isinstance(value, float) else render_value(value)
    return str(value)


def _render_age(snapshot: Snapshot, at_s: float) -> str:
    return f"{_render_duration(snapshot.at_s - at_s):>7} ago"


def _render_duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}m{seconds % 60:02.0f}s"
    return f"{seconds // 3600:.0f}h{seconds % 3600 // 60:02.0f}m"


def render_clock(at_s: float) -> str:
    """Return a time of day, for lines of a log."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))
