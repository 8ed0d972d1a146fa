"""A Snapshot as lines of text, for any number of ranks: `perdure watch --once`, and screens' heads.

Where ranks do not fit they are folded into groups that do the same at the moment; whoever is in
trouble comes first and stands alone as long as there is room.
"""

import time
from collections.abc import Iterable, Sequence

from perdure.dash.groups import describe_group, group_ranks
from perdure.dash.live import render_count, render_status
from perdure.dash.shape import align, clip, render_shape, render_span
from perdure.dash.verdicts import describe_verdict
from perdure.model.report import IncidentRow, RankRow, ReplicaRow, Snapshot
from perdure.model.steering import render_value
from perdure.model.verdicts import Verdict

WIDTH_MIN = 20
RANKS_SHOWN = 24
"""Rows of ranks; more are folded."""
_GROUPS_SHOWN = 8
"""Replica groups; and of those that others have started, so many that have ended."""


def render_watch(snapshot: Snapshot, width: int) -> list[str]:
    """Return all that is to be known of a job as lines of at most `width` columns."""
    width = max(WIDTH_MIN, width)
    shape = render_shape(snapshot.world, snapshot.ranks) if snapshot.world else []
    ranks = render_ranks(snapshot.ranks, RANKS_SHOWN + 1, width)
    lines = [
        *render_head(snapshot),
        *(["", *ranks] if ranks else []),
        *_section("Verdicts", [_describe(v, snapshot) for v in choose_shown_verdicts(snapshot)]),
        *_section("Incidents", [describe_incident(r, snapshot) for r in snapshot.recent[:-4:-1]]),
        *_section("Replica groups", _render_replicas(snapshot)),
        *_section("Stages", shape),
        *_section("Configuration", _render_settings(snapshot, width)),
        *_section("Devices", _render_devices(snapshot)),
    ]
    return [clip("".join(c if c.isprintable() else " " for c in line), width) for line in lines]


def render_ranks(ranks: Sequence[RankRow], rows: int, width: int = 1000) -> list[str]:
    """Return a table of all ranks in at most `rows` lines, its head included.

    Where it is wider than `width`, columns that say least are left out.
    """
    return _table(group_ranks(ranks, rows - 1), width) if ranks else []


_HEAD = ("ranks", "nodes", "state", "phase", "step", "steps/s", "collective")
_RIGHT = (4, 5)
_COLLECTIVE = 6
_COLLECTIVE_MIN = 12
"""Columns that it gets at least, or none: it is the last and is clipped."""
_LEAST = (1, 3, 6, 5)
"""What is left out first."""


def _table(groups: Sequence[Sequence[RankRow]], width: int) -> list[str]:
    everything = [_HEAD, *map(describe_group, groups)]
    widths = [max(len(row[i]) for row in everything) for i in range(len(_HEAD))]
    columns = list(range(len(_HEAD)))
    for column in _LEAST:
        room = width - (_COLLECTIVE_MIN if columns[-1] == _COLLECTIVE else 0)
        if sum(widths[i] + 2 for i in columns if i != _COLLECTIVE) <= room:
            break
        columns.remove(column)
    right = [place for place, i in enumerate(columns) if i in _RIGHT]
    return align([[row[i] for i in columns] for row in everything], right)


def render_head(snapshot: Snapshot, *more: str) -> list[str]:
    """Return how the job is, where it stands, why, and what its ranks are busy with.

    `more` goes with where it stands.
    """
    saved = snapshot.checkpoints[-1].get("step") if snapshot.checkpoints else None
    since_s = snapshot.at_s - snapshot.started_s
    rest = (
        *more,
        f"generation {snapshot.generation}",
        snapshot.depth,
        render_count(snapshot.incidents, "incident") if snapshot.incidents else "",
        f"checkpoint of step {saved}" if snapshot.checkpoints else "",
        f"cordoned: node {render_span(snapshot.cordoned)}" if snapshot.cordoned else "",
        f"for {_render_duration(since_s)}" if snapshot.started_s > 0 else "",
    )
    lines = [render_status(snapshot, incident=False), "  ".join(part for part in rest if part)]
    return [*lines, *([snapshot.reason] if snapshot.reason else []), *render_busy(snapshot)[:2]]


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


def describe_incident(row: IncidentRow, snapshot: Snapshot) -> str:
    """Return an incident in one line: how long ago, whose, why, and what came of it."""
    over = "not over yet" if row.total_s is None else f"{row.total_s:.2f} s"
    what = "training went on" if row.rung == "none" else f"{row.rung}, {over}"
    return f"{_render_age(snapshot, row.at_s)}  {row.culprit}: {row.cause}; {what}"


def choose_shown_verdicts(snapshot: Snapshot, most: int = 3) -> list[Verdict]:
    """Return the verdicts to show: those that hold now, then the newest of the others."""
    newest = sorted(snapshot.verdicts, key=lambda v: v.confirmed_s, reverse=True)
    return sorted(newest, key=lambda v: not holds(v, snapshot))[:most]


def holds(verdict: Verdict, snapshot: Snapshot) -> bool:
    """Return whether a verdict is about now: of a world that is over, or ended well, it is not.

    A replica group is a world of its own. An elastic world goes on in place: what has broken it is
    over once it was formed again.
    """
    worlds = {snapshot.generation, *(row.generation for row in snapshot.replicas)}
    if snapshot.replicas and verdict.culprit.rank is not None:
        worlds.discard(snapshot.generation)
        worlds |= {row.generation for row in snapshot.replicas}
    of_now = verdict.generation in worlds and snapshot.state not in ("done", "stopped")
    mended = any(
        row.total_s and row.at_s <= verdict.confirmed_s <= row.at_s + row.total_s
        for row in snapshot.recent
    )
    return of_now and not mended and "withdrawn" not in verdict.evidence


def _describe(verdict: Verdict, snapshot: Snapshot) -> str:
    return f"{_render_age(snapshot, verdict.confirmed_s)}  {describe_verdict(verdict)}"


def _render_replicas(snapshot: Snapshot) -> list[str]:
    return [
        f"group {r.group}  node {r.node}  {r.state:<9}step {r.step if r.step >= 0 else '-'}"
        + (f"  quorum {r.quorum_id}" if r.quorum_id >= 0 else "")
        + (f"  late: {r.late}" if r.late else "")
        for r in list_shown_groups(snapshot.replicas)[:_GROUPS_SHOWN]
    ]


def list_shown_groups(replicas: Iterable[ReplicaRow]) -> list[ReplicaRow]:
    """Return the replica groups that are there, then those that have ended last."""
    there = [row for row in replicas if not row.away_s]
    gone = sorted((row for row in replicas if row.away_s), key=lambda row: -row.away_s)
    return [*there, *gone[:_GROUPS_SHOWN]]


def _render_settings(snapshot: Snapshot, width: int) -> list[str]:
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
    lines = rows[:4]
    for change in snapshot.coming[:2]:
        words = [f"{name}={_short(value)}" for name, value in sorted(change.values.items())]
        lines.append(f"from step {change.step} on: {'  '.join(words)}")
    return lines


def _render_devices(snapshot: Snapshot) -> list[str]:
    """Only those that are not well: `perdure status --devices` has them all."""
    bad = [d for d in snapshot.devices if d.health in ("failed", "warn") or d.state == "lost"]
    return [f"{d.device} on node {d.node}: {d.health or d.state} {d.why}".rstrip() for d in bad[:4]]


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *lines] if lines else []


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
