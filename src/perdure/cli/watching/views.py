"""What the screen shows of a job, as rows and lines, from the picture that the page has as well."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.text import Text

from perdure.cli.jobs import ENDED, LOST
from perdure.cli.looking.look import list_devices, rate_urgency, render_ago
from perdure.cli.watching.table import Row, plain, plain_lines
from perdure.dash.groups import TROUBLE, describe_group, group_ranks
from perdure.dash.live import render_count
from perdure.dash.sections import (
    NodeView,
    Picture,
    find_stack,
    list_checkpoints,
    list_evidence,
    list_nodes,
    list_settings,
    list_why,
    show_seconds,
)
from perdure.dash.shape import render_span
from perdure.dash.text import LOST_UNKNOWN, describe_loss, describe_phases, render_ledger
from perdure.dash.verdicts import describe_grounds, describe_slowness
from perdure.dash.watch import describe_incident, holds, list_shown_groups, render_head
from perdure.model.input.plain import name_step
from perdure.model.report import DeviceRow, RankRow, Recovery, Snapshot
from perdure.model.steering import render_value
from perdure.model.verdicts import Verdict

RANKS_ALONE = 512
"""Rows of ranks; where there are more, those that do the same share one."""
INCIDENTS_MAX = 200
_NEAR_S = 2.0
"""A verdict that is confirmed so soon after an incident was over is still of it."""
STATE_STYLES = {
    "running": "bold green", "done": "bold green", "paused": "bold yellow", "stopped": "yellow",
    "recovering": "bold red", "failed": "bold red", LOST: "bold red",
}  # fmt: skip
_RANK_STYLES = {"failed": "bold red", "suspected": "bold red", "waiting": "yellow", "exited": "dim"}


def is_over(snapshot: Snapshot) -> bool:
    """Return whether nothing can be asked of the job any more."""
    return snapshot.state in (*ENDED, LOST)


# --- heads ----------------------------------------------------------------------------------------


def describe_job(snapshot: Snapshot, picture: Picture | None) -> Text:
    """Return how a job is, in a few lines."""
    figures: list[str] = []
    if picture is not None:
        report = picture.report
        at_most = "at most " if report.lost_unknown else ""
        figures.append(f"goodput {at_most}{report.goodput:.1%}")
        if report.step_s is not None:
            figures.append(f"step {report.step_s * 1000:.0f} ms")
    first, rest, *others = render_head(snapshot, *figures)
    lines = [plain(first, STATE_STYLES.get(snapshot.state, "bold")), plain(rest)]
    for row in snapshot.recent[-1:]:
        style = "bold red" if row.total_s is None else ""
        lines.append(plain(describe_incident(row, snapshot).strip(), style))
    lines += [plain(text, "dim") for text in others]
    return Text("\n").join(lines)


def describe_rank(row: RankRow | None, rank: int, snapshot: Snapshot) -> Text:
    """Return what a rank does, in three lines."""
    if row is None:
        return plain(f"rank {rank} of {snapshot.job}: there is none of this number at the moment")
    step = row.step if row.step >= 0 else "-"
    memory = f"{row.rss_bytes / 1e6:.0f} MB"
    cpu = show_seconds(row.cpu_s)
    devices = [d for d in snapshot.devices if rank in d.ranks]
    where = ", ".join(f"{d.name or d.device} {d.health or d.state}" for d in devices)
    words = (
        f"node {row.node}  pid {row.pid}  step {step}  {row.steps_per_s:.1f} steps/s  "
        f"{row.phase}  CPU {cpu}  {memory}"
    )
    return Text("\n").join(
        [
            plain(
                f"rank {rank} of {snapshot.job}: {row.state}", _RANK_STYLES.get(row.state, "bold")
            ),
            plain(words),
            plain(
                f"{row.collective or 'no collective was seen'}{f'  on {where}' if where else ''}"
            ),
        ]
    )


# --- tables ---------------------------------------------------------------------------------------

JOBS = ("job", "state", "step", "steps/s", "ranks", "incidents", "started", "reason")
RANKS = ("ranks", "nodes", "state", "phase", "step", "steps/s", "collective")
NODES = ("node", "ranks", "state", "phase", "step", "steps/s", "devices")
GROUPS = ("who", "what", "ranks", "nodes", "state", "step", "why")
INCIDENTS = ("at", "whose", "what", "step", "rung", "total", "lost")
SETTINGS = ("key", "value", "range", "meaning")
CHECKPOINTS = ("at", "step", "MB", "stall, ms", "save, s", "reason", "path")
NUMBERS = ("step", "steps/s", "incidents", "at", "total", "lost", "MB", "stall, ms", "save, s")
"""Columns that lean to the right."""


def list_job_rows(jobs: Iterable[tuple[str, Snapshot]]) -> list[Row]:
    """Return jobs, a row each."""
    return [
        Row(
            name,
            (
                name,
                s.state,
                str(s.step) if s.step >= 0 else "-",
                f"{s.steps_per_s:.1f}",
                str(s.world_size),
                str(s.incidents),
                render_ago(s.started_s) if s.started_s else "-",
                s.reason,
            ),
            STATE_STYLES.get(s.state, "") if s.state != "done" else "",
        )
        for name, s in jobs
    ]


def list_rank_rows(snapshot: Snapshot, node: int | None) -> list[Row]:
    """Return the ranks of a node, or all: those in trouble first, of very many folded."""
    ranks = [row for row in snapshot.ranks if node is None or row.node == node]
    rows = []
    for group in group_ranks(ranks, RANKS_ALONE):
        cells = describe_group(group)
        key = f"rank:{group[0].rank}" if len(group) == 1 else f"ranks:{cells[0]}"
        rows.append(Row(key, cells, _RANK_STYLES.get(group[0].state, ""), group))
    return rows


def list_node_rows(snapshot: Snapshot) -> list[Row]:
    """Return the nodes, those first that somebody should look at."""
    of: dict[int, list[RankRow]] = {}
    for row in snapshot.ranks:
        of.setdefault(row.node, []).append(row)
    return [_make_node_row(view, of.get(view.node, [])) for view in list_nodes(snapshot)]


def _make_node_row(view: NodeView, ranks: Sequence[RankRow]) -> Row:
    states = Counter(row.state for row in ranks)
    worst = next((state for state in TROUBLE if state in states), "")
    does = ", ".join(f"{count} {state}" for state, count in states.items())
    does = does if len(states) > 1 else next(iter(states), "no ranks")
    known = view.state if view.state in ("cordoned", "draining", "lost") else ""
    phase, step, speed = describe_group(ranks)[3:6] if ranks else ("", "-", "-")
    bad = [d for d in view.devices if d.health in ("warn", "failed") or d.state == "lost"]
    devices = "; ".join(f"{d.name or d.device} {d.health or d.state} {d.why}" for d in bad)
    kinds = Counter(d.name or d.kind or "device" for d in view.devices)
    well = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    style = _RANK_STYLES.get(worst, "yellow" if known or bad else "")
    state = f"{known}: {does}" if known else does
    ranks_held = render_span(view.ranks) or "-"
    cells = (str(view.node), ranks_held, state, phase, step, speed, devices or well)
    return Row(f"node:{view.node}", cells, style, view.node)


def list_group_rows(snapshot: Snapshot) -> list[Row]:
    """Return the stages of a pipelined job, then the replica groups of one of torchft."""
    rows = []
    ranks = {row.rank: row for row in snapshot.ranks}
    for number, stage in enumerate(snapshot.world.stages if snapshot.world else ()):
        held = [ranks[rank] for rank in stage.ranks if rank in ranks]
        nodes = render_span(sorted({row.node for row in held})) or "-"
        _, _, state, _, step, _, _ = describe_group(held) if held else ("",) * 7
        worst = next((each for each in TROUBLE if any(r.state == each for r in held)), "")
        blocks = f"blocks {render_span(range(*stage.blocks))}"
        cells = f"stage {number}", blocks, render_span(stage.ranks), nodes, worst or state, step, ""
        rows.append(Row(f"stage:{number}", cells, _RANK_STYLES.get(worst, "")))
    for r in list_shown_groups(snapshot.replicas):
        quorum = f"in quorum {r.quorum_id}" if r.quorum_id >= 0 else "in no quorum"
        step, why = str(r.step) if r.step >= 0 else "-", r.late or r.why or quorum
        cells = f"group {r.group}", r.replica, str(r.ranks or "-"), str(r.node), r.state, step, why
        bad = r.late or r.state in ("failed", "silent", "gone")
        rows.append(Row(f"replica:{r.group}", cells, "bold red" if bad else ""))
    return rows


def list_device_rows(devices: Sequence[DeviceRow]) -> tuple[tuple[str, ...], list[Row]]:
    """Return heads and rows of the devices, those first that are not well."""
    shown = sorted(devices, key=rate_urgency)
    heads, table = list_devices(shown)
    styles = ("bold red", "yellow", "", "")
    return heads, [
        Row(f"{d.device} {d.node}", tuple(map(str, cells)), styles[rate_urgency(d)], d.device)
        for d, cells in zip(shown, table, strict=True)
    ]


def list_setting_rows(snapshot: Snapshot) -> list[Row]:
    """Return what the script has declared, or anybody has changed, and what is to come."""
    coming = {
        name: f" ({render_value(value)} from step {change.step} on)"
        for change in reversed(snapshot.coming)
        for name, value in change.values.items()
    }
    return [
        Row(key, (key, value + coming.get(key, ""), range_, note), item=value)
        for key, value, range_, note in list_settings(snapshot)
    ]


def list_checkpoint_rows(picture: Picture) -> list[Row]:
    """Return the checkpoints, the newest first."""
    rows = []
    for number, (at_s, step, saved) in enumerate(list_checkpoints(picture.series)):
        at, error = show_seconds(at_s), getattr(saved, "error", None)
        if error is not None:
            cells = (at, str(step), "", "", "", f"failed: {error}", "")
        else:
            figures = (saved.bytes / 1e6, saved.stall_s * 1000, saved.save_s)
            cells = (at, str(step), *(f"{f:.2f}" for f in figures), saved.reason, saved.path)
        rows.append(Row(f"{at_s} {step} {number}", cells, "red" if error is not None else ""))
    return rows[::-1]


# --- incidents ------------------------------------------------------------------------------------


def list_incident_rows(picture: Picture) -> list[Row]:
    """Return incidents with the verdicts that led to them, and verdicts without; newest first."""
    report, series, snapshot = picture.report, picture.series, picture.snapshot
    left = list(series.verdicts)
    found: list[tuple[float, Row]] = []
    for r in report.recoveries[-INCIDENTS_MAX:]:
        own = [v for v in left if _is_of(v, r)]
        left = [v for v in left if v not in own]
        at_s = r.at_s - series.start_s
        lost = "unknown" if r.lost_steps is None else str(r.lost_steps)
        step = str(r.at_step) if r.at_step >= 0 else ""
        cells = (show_seconds(at_s), r.culprit, r.cause, step, r.rung, f"{r.total_s:.2f}", lost)
        item = _describe_recovery(r), *(_describe_verdict(v, series.start_s) for v in own)
        found.append((r.at_s, Row(f"{r.at_s} {r.culprit} {r.cause}", cells, "", item)))
    for v in left[-INCIDENTS_MAX:]:
        at_s = v.confirmed_s - series.start_s
        cells = (show_seconds(at_s), str(v.culprit), f"{v.kind}: {v.reason}", "", "", "", "")
        style = "bold red" if snapshot is not None and holds(v, snapshot) else "dim"
        item = (_describe_verdict(v, series.start_s),)
        found.append(
            (v.confirmed_s, Row(f"{v.confirmed_s} {v.culprit} {v.kind}", cells, style, item))
        )
    unique = {row.key: row for _, row in sorted(found, key=lambda pair: -pair[0])}
    return list(unique.values())[:INCIDENTS_MAX]


def _is_of(verdict: Verdict, r: Recovery) -> bool:
    soon = verdict.confirmed_s <= r.at_s + r.total_s + _NEAR_S
    late = max(verdict.confirmed_s, verdict.first_seen_s + _NEAR_S) >= r.at_s
    return str(verdict.culprit) == r.culprit and soon and late


def _describe_recovery(r: Recovery) -> list[tuple[str, str]]:
    lines = [(f"{r.culprit}: {r.cause}{name_step(r.at_step)}", "bold")]
    lines += [(f"decided: {r.rung}, because {why}", "") for why in [list_why(r)] if why]
    if r.rung != "none":
        lines.append((f"back after {r.total_s:.2f} s; {describe_loss(r)}", ""))
        lines.append((describe_phases(r), "dim"))
    return lines


def _describe_verdict(v: Verdict, start_s: float) -> list[tuple[str, str]]:
    over = " (withdrawn)" if "withdrawn" in v.evidence else ""
    lines = [(f"{v.kind} of {v.culprit}: {v.reason}{over}", "bold")]
    first_s, later_s = v.first_seen_s - start_s, v.confirmed_s - v.first_seen_s
    seen = f"first seen at {first_s:.2f} s, confirmed {later_s:.2f} s later"
    lines.append((f"{seen}, confidence {v.confidence:.0%}, generation {v.generation}", "dim"))
    costs = f"costs {describe_slowness(v.slowness)}" if v.slowness else ""
    lines += [(text, "") for text in (describe_grounds(v), costs) if text]
    rows, blocks = list_evidence(v)
    lines += [(f"{name}: {value}", "") for name, value in rows]
    for name, text in blocks:
        lines += [(f"{name}:", "bold"), (text, "")]
    return lines


def describe_item(row: Row | None) -> Text:
    """Return all that is known of an incident or of a verdict."""
    if row is None:
        return Text("Nothing went wrong so far.", "dim")
    lines = [line for part in row.item for line in (*part, ("", ""))]
    return plain_lines(lines[:-1])


def list_rank_evidence(picture: Picture, rank: int) -> Text:
    """Return what was found about a rank, the newest first."""
    name = f"rank {rank}"
    start_s = picture.series.start_s
    parts = [
        _describe_verdict(v, start_s) for v in picture.series.verdicts if str(v.culprit) == name
    ]
    parts += [_describe_recovery(r) for r in picture.report.recoveries if r.culprit == name]
    lines = [line for part in reversed(parts) for line in (*part, ("", ""))]
    return plain_lines(lines[:-1]) if lines else Text("Nothing was found about it.", "dim")


def describe_stack(picture: Picture, rank: int) -> Text:
    """Return a rank's newest stack, as a verdict has it."""
    at_s, stack = find_stack(picture, rank)
    if not stack:
        return Text("Its stack is taken when a verdict is reached; t takes it now.", "dim")
    return plain_lines([(f"taken {show_seconds(at_s)} after the job's start", "bold"), (stack, "")])


def describe_time(picture: Picture, width: int) -> Text:
    """Return where the paid time went."""
    report = picture.report
    known = [(LOST_UNKNOWN, "yellow")] if report.lost_unknown else []
    ledger = render_ledger(report, max(60, width))
    damage = [(f"The journal is damaged: {picture.damage}", "red")] if picture.damage else []
    incidents = render_count(report.incidents, "incident")
    last = f"{incidents}, {show_seconds(report.wall_s)} of wall time"
    return plain_lines([*known, (ledger, ""), *damage, (last, "dim")])
