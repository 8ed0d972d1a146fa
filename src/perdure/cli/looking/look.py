"""Commands that look: ps, status, map, diagnose, report. They read files and change nothing.

`ps --clean` alone does: it ends what dead supervisors have left.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from perdure.adapters.host import kill_process
from perdure.adapters.stacks import dump_stack
from perdure.cli.jobs import (
    Job,
    find_job,
    list_jobs_elsewhere,
    list_local_jobs,
    read_start_s,
    say_damage,
)
from perdure.cli.looking.story import AGREEMENTS, tell_story
from perdure.cli.platforms.remote import list_reminders
from perdure.cli.speech.say import (
    JobName,
    Json,
    Width,
    answer,
    note,
    print_json,
    render_table,
    write_asked,
)
from perdure.dash.links import render_links
from perdure.dash.live import render_count
from perdure.dash.shape import render_shape
from perdure.dash.text import render_mended
from perdure.dash.verdicts import (
    describe_verdict,
    render_aside,
    render_evidence,
    render_verdict,
    render_withheld,
)
from perdure.dash.watch import choose_shown_verdicts, render_busy
from perdure.launch.reminding import compute_cost
from perdure.model.errors import PerdureError
from perdure.model.plain import REASON_MAX, shorten_line
from perdure.model.platforms.launching import LaunchRecord
from perdure.model.report import DeviceRow, ReplicaRow, Snapshot
from perdure.service.jobfiles import is_alive, paths_of, resolve_home
from perdure.service.processes import Leftover, find_leftovers
from perdure.telemetry import (
    list_verdicts,
    read_delay_matrix,
    render_stacks,
)
from perdure.telemetry.asides import list_asides
from perdure.telemetry.outcome import collect_last_words
from perdure.traps import find_trap, name_symptoms

_BULK = (*AGREEMENTS, "ProgressNoted", "RankJoined", "CheckpointRestored", "RanksStarted")
"""Entries that no verdict and no outcome is made from."""
_NATIVE_TIMEOUT_S = 30.0
"""Symbols of torch's libraries are read from disk at first."""


def ps(
    clean: Annotated[
        bool, typer.Option("--clean", help="End what jobs without a `perdure run` have left.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the jobs of this machine, and those that it launched to others and that still cost.

    Processes that a job has left behind, whose `perdure run` is gone, are named.
    """
    rows: list[dict[str, Any]] = []
    launched = [_describe_launch(record) for record in list_jobs_elsewhere()]
    for job in list_local_jobs():
        try:
            snapshot = job.snapshot()
        except PerdureError as error:
            note(f"{job.name}: {error}")
            continue
        rows.append(
            {
                "job": job.name,
                "state": snapshot.state,
                "alive": job.alive,
                "step": snapshot.step,
                "ranks": snapshot.world_size,
                "generation": snapshot.generation,
                "restarts": snapshot.restarts,
                "started_s": snapshot.started_s,
                "reason": snapshot.reason,
            }
        )
    home = resolve_home()
    left = find_leftovers(home, lambda job: is_alive(paths_of(home, job)))
    ended = {one.pid for one in left if clean and kill_process(one.pid, one.start)}
    cells = [
        (
            r["job"],
            r["state"],
            r["step"] if r["step"] >= 0 else "-",
            r["ranks"],
            r["restarts"],
            time.strftime("%F %T", time.localtime(r["started_s"])) if r["started_s"] else "-",
        )
        for r in rows
    ]
    head = ("job", "state", "step", "ranks", "restarts", "started")
    lines = [render_table(head, cells)] if rows else []
    for row in launched:
        cost = f", {row['cost']:.2f} {row['currency']}" if row["cost"] else ""
        lines += [
            f"{row['job']}: launched to {row['where']} ({row['profile']}) "
            f"{row['hours']:.1f} h ago{cost}; perdure status {row['job']}",
            *(f"  {reminder.text}" for reminder in row["reminders"]),
        ]
    lines += _render_left(left, ended)
    gone = [msgspec.to_builtins(one) | {"ended": one.pid in ended} for one in left]
    document = {"jobs": rows, "launched": launched, "left_behind": gone}
    text = "\n".join(lines) or "no jobs; `perdure run SCRIPT` starts one"
    answer(document, text, as_json=as_json)
    if left and not ended and not as_json:
        note("perdure ps --clean ends what was left behind")


def _render_left(left: list[Leftover], ended: set[int]) -> list[str]:
    """Return what was left behind, and why it is known to be that job's."""
    lines = []
    for job, group in itertools.groupby(left, key=lambda one: one.job):
        lines += [
            f"left behind by {job}, which nobody watches over (PERDURE_JOB={job} and this "
            "PERDURE_HOME are in their environment):",
            *(
                f"  pid {one.pid}, {'ended' if one.pid in ended else 'lives'}, "
                f"{_render_age(one.age_s)} old: {one.command[:80]}"
                for one in group
            ),
        ]
    return lines


def _render_age(age_s: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{age_s:.0f} s"


def _describe_launch(record: LaunchRecord) -> dict[str, Any]:
    """Return a job elsewhere as a row; nobody is asked, so that it takes no time."""
    hours, cost = compute_cost(record, time.time())
    return {
        "job": record.job,
        "profile": record.profile.platform,
        "where": ", ".join(b.profile.launch.host for b in record.boxes) or record.profile.kind,
        "launched_s": record.launched_s,
        "hours": hours,
        "cost": cost,
        "currency": record.profile.teardown.currency,
        "pulled_to": record.pulled_to,
        "reminders": list_reminders(record, resolve_home()),
    }


def status(job: JobName, as_json: Json = False) -> None:
    """Show a job now: its state and each rank."""
    snapshot = find_job(job).snapshot()
    answer(snapshot, render_snapshot(snapshot), as_json=as_json)


def render_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot as text."""
    step = f", step {snapshot.step}" if snapshot.step >= 0 else ""
    speed = f" at {snapshot.steps_per_s:.1f} steps/s" if snapshot.steps_per_s > 0 else ""
    lines = [
        f"{snapshot.job}: {snapshot.state}{step}{speed}; generation {snapshot.generation}, "
        f"{render_count(snapshot.restarts, 'restart')}, depth {snapshot.depth}"
    ]
    metrics = "  ".join(f"{name} {v:.4g}" for name, v in sorted(snapshot.metrics.items()))
    reason = shorten_line(snapshot.reason, REASON_MAX)
    mended = render_mended(snapshot.mended[-1:])
    lines += [line for line in (reason, mended, *render_withheld(snapshot), metrics) if line]
    if snapshot.ranks:
        head = ("rank", "node", "pid", "state", "phase", "step", "CPU s", "MB", "collective")
        rows = [
            (
                r.rank,
                r.node,
                r.pid,
                r.state,
                r.phase,
                r.step if r.step >= 0 else "-",
                round(r.cpu_s, 1),
                r.rss_bytes // 1_000_000,
                r.collective,
            )
            for r in snapshot.ranks
        ]
        lines += ["", render_table(head, rows)]
    if busy := render_busy(snapshot):
        lines += ["", *busy]
    if replicas := render_replicas(snapshot.replicas):
        lines += ["", replicas]
    lines += [describe_late(row) for row in snapshot.replicas if row.late]
    if snapshot.world is not None:
        lines += ["", *render_shape(snapshot.world, snapshot.ranks)]
    if snapshot.checkpoints:
        newest = snapshot.checkpoints[-1]
        lines += ["", f"newest checkpoint: step {newest.get('step')}, {newest.get('path')}"]
    lines += [describe_verdict(v) for v in choose_shown_verdicts(snapshot)]
    return "\n".join(lines)


def describe_late(row: ReplicaRow) -> str:
    """Return in one line for whom the other replica groups wait."""
    return f"group {row.group} is late: {row.late}"


def map_devices(
    job: JobName,
    links: Annotated[bool, typer.Option("--links", help="Show the delay matrix instead.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again and again, until the job has ended.")
    ] = False,
    width: Width = 100,
    as_json: Json = False,
) -> None:
    """Show which device runs which rank and how it is, or how slowly which rank reaches which."""
    found = find_job(job)
    if links:
        matrix = read_delay_matrix(found.entries(), found.read_newest().links)
        document = {"links": matrix.comms, "note": matrix.note}
        answer(document, render_links(matrix, width), as_json=as_json)
    elif watch:
        show_map(found, as_json=as_json)
    else:
        snapshot = found.snapshot()
        devices = snapshot.devices
        replicas = snapshot.replicas
        text = "\n\n".join(filter(None, (render_replicas(replicas), render_devices(devices))))
        answer({"devices": devices, "replicas": replicas}, text, as_json=as_json)


def render_devices(devices: Sequence[DeviceRow]) -> str:
    """Return the map as a table."""
    rows = [
        (
            d.device,
            d.node,
            ",".join(slot.rpartition("/slot")[2] for slot in d.slots),
            ",".join(map(str, d.ranks)) or "-",
            ",".join(map(str, d.replicas)) or "-",
            d.state,
            f"{d.health}: {d.why}" if d.why else d.health or "-",
        )
        for d in devices
    ]
    return render_table(("device", "node", "slots", "ranks", "replicas", "state", "health"), rows)


def render_replicas(replicas: Sequence[ReplicaRow]) -> str:
    """Return the replica groups that others have started as a table; empty where there are none."""
    rows = [
        (
            r.group,
            r.replica,
            r.ranks,
            r.manager,
            r.step if r.step >= 0 else "-",
            time.strftime("%T", time.localtime(r.since_s)),
            r.state,
            f"in {r.quorum_id}" if r.quorum_id >= 0 else f"out: {r.why}" if r.why else "out",
        )
        for r in replicas
        if r.since_s
    ]
    head = ("group", "replica", "ranks", "manager", "step", "since", "state", "quorum")
    return render_table(head, rows) if rows else ""


def _rate_urgency(row: DeviceRow) -> int:
    """Return how soon a device has to be looked at: the lower, the sooner."""
    if row.health == "failed" or row.state == "lost":
        return 0
    return 1 if row.health == "warn" else 2 if row.state not in ("in use", "spare") else 3


def show_map(job: Job, *, as_json: bool) -> None:
    """Show the map until the job has ended: in place on a terminal, else whenever it changes."""
    from perdure.cli.looking.watch import look_again, show
    from perdure.dash.watch import ScreenLine

    def draw(snapshot: Snapshot, _width: int, height: int) -> list[ScreenLine]:
        head = f"{snapshot.job} {snapshot.state}  generation {snapshot.generation}"
        devices, more = snapshot.devices, ""
        if len(devices) + 2 > height:  # Those that are not well come first, and all are counted.
            devices = tuple(sorted(devices, key=_rate_urgency))[: max(1, height - 3)]
            more = f"... and {len(snapshot.devices) - len(devices)} more: perdure map {job.name}"
        lines = [head, *render_devices(devices).splitlines(), *([more] if more else [])]
        return [ScreenLine(line) for line in lines][:height]

    if sys.stdout.isatty() and not as_json:
        show(job, draw, 0.5)
        return
    shown: object = None
    for snapshot in look_again(job, 0.5):
        text = "\n".join(line.text for line in draw(snapshot, 0, 1 << 20))
        told = snapshot.devices if as_json else text
        if told != shown:
            shown = told
            answer({"devices": snapshot.devices}, f"{text}\n", as_json=as_json)


def diagnose(
    job: JobName,
    native: Annotated[
        bool,
        typer.Option("--native", help="Stacks of all living ranks now, with native frames."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what went wrong: each verdict with its culprit and evidence."""
    found = find_job(job)
    stacks = _take_native_stacks(found.snapshot()) if native else {}
    reader = found.read(without=_BULK)
    entries = list(reader)
    verdicts = list_verdicts(entries)
    vanished = None if found.alive else found.explain_vanishing(entries)
    outcome = found.judge_outcome(entries)
    named = [  # The traps that the last words of ranks that failed speak of.
        {"trap": s.trap, "says": s.says, "line": line, "mend": find_trap(s.trap).mend}
        for s, line in name_symptoms(collect_last_words(entries))
    ]
    attempts, asides = found.list_attempts(), list_asides(entries, found.read_curves().dropped)
    snapshot = found.snapshot()
    damage = say_damage(reader.tally)
    if as_json:
        more: dict[str, Any] = {
            **damage,
            "vanished": vanished,
            "native_stacks": stacks,
            "traps": named,
            "slurm": attempts,
            "observed": snapshot.observed,
            "withheld": snapshot.withheld,
            "mended": snapshot.mended,
        }
        document = {"verdicts": verdicts, "fate": outcome, "set_aside": asides}
        print_json(document | {k: v for k, v in more.items() if v})
        return
    if outcome.state in ("dead", "stalled"):
        print(f"{job} is {outcome.state}: {outcome.reason}\n")
    for row in named:
        print(f"{row['trap']}: {row['says']}: {shorten_line(row['line'])}\n  mend: {row['mend']}\n")
    if vanished is not None:
        print(f"`perdure run` is gone: {vanished.cause}: {vanished.reason}")
        for name, value in vanished.evidence.items():
            print("\n".join(render_evidence(name, value)))
        print()
    for number, end in enumerate(attempts):
        where = f" on {end.nodes}" if end.nodes else ""
        print(
            f"Slurm, attempt {number}: {end.state}{where}, {end.start} to {end.end}: {end.reason}"
        )
    start_s = read_start_s(entries[0]) if entries else 0.0
    if withheld := render_withheld(snapshot):
        print("\n".join(withheld) + "\n")
    late = [describe_late(row) for row in snapshot.replicas if row.late]
    if verdicts or late:
        print("\n\n".join([*late, *(render_verdict(verdict, start_s) for verdict in verdicts)]))
    elif not snapshot.withheld:
        reason = shorten_line(snapshot.reason, REASON_MAX)
        print(f"{job}: {snapshot.state}; nothing was found wrong. {reason}".rstrip())
    if native:
        print("\nstacks now, with native frames")
        print("\n".join(f"  {line}" for line in render_stacks(stacks)) or "  no rank is alive")
    for aside in asides:
        print("\n" + render_aside(aside, start_s))
    if snapshot.mended:
        print("\n" + render_mended(snapshot.mended))
    print("\n" + render_links(read_delay_matrix(entries, found.read_newest().links), 100))


def _take_native_stacks(snapshot: Snapshot) -> dict[str, str]:
    """Return the stacks of the ranks that are alive, by rank."""
    alive = [row for row in snapshot.ranks if row.pid and row.state not in ("exited", "failed")]

    async def take() -> list[str]:
        dumps = [
            dump_stack(
                row.pid,
                nonblocking=row.state == "suspected",
                native=True,
                timeout_s=_NATIVE_TIMEOUT_S,
            )
            for row in alive
        ]
        return list(await asyncio.gather(*dumps))

    return dict(zip((str(row.rank) for row in alive), asyncio.run(take()), strict=True))


def report(
    job: JobName,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with plots.")
    ] = None,
    width: Width = 100,
    as_json: Json = False,
) -> None:
    """Print the goodput ledger: where every paid second went, and each recovery by phase."""
    from perdure.dash import render_html, render_text

    found = find_job(job)
    story = tell_story(found, page=html is not None)
    result, series = story.report, story.series
    damage = say_damage(story.tally)
    if html is not None:
        page = render_html(result, found.snapshot(), series, story.matrix)
        write_asked(html, page, hint="--html FILE")
    text = render_text(result, series, width=width)
    document = msgspec.to_builtins(result) | damage
    answer(document, text.removesuffix("\n"), as_json=as_json)
