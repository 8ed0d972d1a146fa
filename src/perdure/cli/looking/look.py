"""`perdure status`: all jobs, one of them, its devices or its links, by what lies on the disk.

Only `--clean` changes something: it ends what dead supervisors have left.
"""

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.jobs import (
    Job,
    find_job,
    list_jobs_elsewhere,
    list_local_jobs,
)
from perdure.cli.platforms.remote import list_reminders, print_forward, print_reminders
from perdure.cli.speech.say import (
    Json,
    answer,
    choose_newest_job,
    complete_jobs,
    note,
    print_json,
    render_table,
)
from perdure.model.errors import PerdureError
from perdure.model.input.plain import REASON_MAX, shorten_line
from perdure.service.jobfolders import is_alive, paths_of, resolve_home

if TYPE_CHECKING:
    from perdure.model.platforms.launching import LaunchRecord
    from perdure.model.report import DeviceRow, Snapshot
    from perdure.service.processes import Leftover


def status(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="The job's name; none: the list of jobs.",
            autocompletion=complete_jobs,
        ),
    ] = None,
    devices: Annotated[
        bool, typer.Option("--devices", help="Alone: show which device runs which rank.")
    ] = False,
    links: Annotated[
        bool, typer.Option("--links", help="Alone: show how slow the links are, as a matrix.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="With --devices: until the job has ended.")
    ] = False,
    width: Annotated[
        int, typer.Option("--width", min=40, help="With --links: columns of the text.")
    ] = 100,
    port: Annotated[
        list[int] | None,
        typer.Option(
            "--port",
            min=1,
            max=65535,
            help="Alone: print a command that brings this port of a launched job; repeatable.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ALIAS", help="With --port: the box. Default: the first."),
    ] = None,
    running: Annotated[
        bool, typer.Option("--running", "-r", help="Without JOB: list only jobs that run.")
    ] = False,
    show_all: Annotated[
        bool,
        typer.Option("--all", "-a", help="Without JOB or --running: list also old jobs."),
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Without JOB: end processes that dead jobs left behind.")
    ] = False,
    remind: Annotated[
        bool,
        typer.Option(
            "--remind",
            help="Without JOB, --running, --all or --clean: ask all boxes what costs money for "
            "nothing, and alert; for cron.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """List jobs, or show one: its state and each rank.

    The list also has launched jobs that may cost money, and processes that jobs left behind.
    """
    if port:
        print_forward(job or choose_newest_job(), port, host, as_json)
    elif remind:
        return print_reminders(as_json)
    elif devices or links:
        found = find_job(job or choose_newest_job())
        _show_links(found, width, as_json) if links else _show_devices(found, watch, as_json)
    elif job is None:
        _list_jobs(running, show_all, clean, as_json)
    else:
        _show_job(job, as_json)
    return 0


def _list_jobs(running: bool, show_all: bool, clean: bool, as_json: bool) -> None:
    import msgspec

    from perdure.adapters.host import kill_process
    from perdure.dash.colours import print_painted
    from perdure.service.processes import find_leftovers

    rows = _collect_rows()
    launched = [_describe_launch(record) for record in list_jobs_elsewhere()]
    shown = rows if show_all else [r for r in rows if r["alive"] or not _is_old(r)]
    shown = [r for r in shown if r["alive"] or not running]
    home = resolve_home()
    left = find_leftovers(home, lambda job: is_alive(paths_of(home, job)))
    ended = {one.pid for one in left if clean and kill_process(one.pid, one.start)}
    lines = _render_jobs(shown)
    if len(shown) < len(rows) and not running:
        lines.append(f"{len(rows) - len(shown)} that ended long ago: perdure status --all")
    for row in launched:
        cost = f", {row['cost']:.2f} {row['currency']}" if row["cost"] else ""
        lines += [
            f"{row['job']}: launched to {row['where']} ({row['profile']}) "
            f"{row['hours']:.1f} h ago{cost}; perdure status {row['job']}",
            *(f"  {reminder.text}" for reminder in row["reminders"]),
        ]
    lines += _render_left(left, ended)
    gone = [msgspec.to_builtins(one) | {"ended": one.pid in ended} for one in left]
    document = {"jobs": shown if running else rows, "launched": launched, "left_behind": gone}
    none = "no job runs" if running else "no jobs"
    text = "\n".join(lines) or f"{none} under {home}; `perdure run SCRIPT` starts one"
    if as_json:
        print_json(document)
    else:
        print_painted(text)
    if left and not ended and not as_json:
        note("perdure status --clean ends what was left behind")


def _collect_rows() -> list[dict[str, Any]]:
    """Return the jobs of this machine, oldest first; say which cannot be read."""
    rows: list[dict[str, Any]] = []
    for job in list_local_jobs():
        try:
            snapshot = job.snapshot()
        except (PerdureError, OSError) as error:
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
    return rows


def _render_jobs(shown: list[dict[str, Any]]) -> list[str]:
    cells = [
        (
            r["job"],
            r["state"],
            r["step"] if r["step"] >= 0 else "-",
            r["ranks"],
            r["restarts"],
            render_ago(r["started_s"]) if r["started_s"] else "-",
        )
        for r in shown
    ]
    head = ("job", "state", "step", "ranks", "restarts", "started")
    return [render_table(head, cells)] if shown else []


_OLD_S = 7 * 86400.0


def _is_old(row: dict[str, Any]) -> bool:
    return time.time() - float(row["started_s"]) > _OLD_S


def render_ago(at_s: float) -> str:
    """Return how long ago a moment of the last day is, else its date."""
    ago_s = time.time() - at_s
    if not 0.0 <= ago_s < 86400.0:
        return time.strftime("%F %R", time.localtime(at_s))
    if ago_s < 60.0:
        return f"{ago_s:.0f} s ago"
    return f"{ago_s / 60:.0f} min ago" if ago_s < 5400.0 else f"{ago_s / 3600:.0f} h ago"


def _render_left(left: "list[Leftover]", ended: set[int]) -> list[str]:
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


def _describe_launch(record: "LaunchRecord") -> dict[str, Any]:
    """Return a job elsewhere as a row; nobody is asked, so that it takes no time."""
    from perdure.launch.reminding import compute_cost

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


def _show_job(job: str, as_json: bool) -> None:
    import msgspec

    from perdure.cli.looking.own import describe_own, render_own
    from perdure.dash.colours import print_painted
    from perdure.dash.live import describe_long_step

    found = find_job(job)
    snapshot = found.snapshot()
    saved = describe_own(found.spec)
    if as_json:
        print_json(msgspec.to_builtins(snapshot) | saved)
    else:
        own = render_own(saved, found.spec.cwd)
        long_ = describe_long_step(snapshot, found.spec.preemption.grace_s)
        print_painted("\n".join(filter(None, (render_snapshot(snapshot), long_, own))))


def render_snapshot(snapshot: "Snapshot") -> str:
    """Return a snapshot as text."""
    from perdure.dash.live import describe_late, describe_left, order_metrics, render_count
    from perdure.dash.shape import render_shape
    from perdure.dash.text import (
        render_empty_slots,
        render_exactness,
        render_hung_saves,
        render_mended,
        render_skipped,
    )
    from perdure.dash.verdicts import describe_verdict, render_withheld
    from perdure.dash.watch import choose_shown_verdicts, holds, render_busy

    step = f", step {snapshot.step}" if snapshot.step >= 0 else ""
    speed = f" at {snapshot.steps_per_s:.1f} steps/s" if snapshot.steps_per_s > 0 else ""
    lines = [
        f"{snapshot.job}: {snapshot.state}{step}{speed}; generation {snapshot.generation}, "
        f"{render_count(snapshot.restarts, 'restart')}, depth {snapshot.depth}"
    ]
    metrics = "  ".join(f"{name} {v:.4g}" for name, v in order_metrics(snapshot))
    reason = shorten_line(snapshot.reason, REASON_MAX)
    hung = render_hung_saves(snapshot.hung_saves[-1:])
    empty = render_empty_slots(snapshot.job, [s for s in snapshot.empty_slots if not s.over_s])
    left = describe_left(snapshot)
    left = f"{left}, by the pace of the last minutes" if left else ""
    said = (
        reason,
        *snapshot.waits,
        render_mended(snapshot.mended[-1:]),
        render_skipped([r for r in snapshot.skipped if r.at_s == snapshot.skipped[-1].at_s]),
        render_exactness(snapshot.exact),
        hung,
        empty,
        *render_withheld(snapshot),
        metrics,
        left,
    )
    lines += [line for line in said if line]
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
    if replicas := render_replicas(snapshot):
        lines += ["", replicas]
    lines += [describe_late(row) for row in snapshot.replicas if row.late]
    if snapshot.world is not None:
        lines += ["", *render_shape(snapshot.world, snapshot.ranks)]
    if snapshot.checkpoints:
        newest = snapshot.checkpoints[-1]
        lines += ["", f"newest checkpoint: step {newest.get('step')}, {newest.get('path')}"]
    for verdict in choose_shown_verdicts(snapshot):
        over = "" if holds(verdict, snapshot) else f"over, {render_ago(verdict.confirmed_s)}: "
        lines.append(f"{over}{describe_verdict(verdict)}")
    return "\n".join(lines)


def _show_links(found: Job, width: int, as_json: bool) -> None:
    from perdure.dash.links import render_links
    from perdure.telemetry.links import read_delay_matrix

    matrix = read_delay_matrix(found.entries(), found.read_newest().links)
    document = {"links": matrix.comms, "note": matrix.note}
    answer(document, render_links(matrix, width), as_json=as_json)


def _show_devices(found: Job, watch: bool, as_json: bool) -> None:
    if watch:
        _watch_devices(found, as_json=as_json)
        return
    snapshot = found.snapshot()
    devices = snapshot.devices
    text = "\n\n".join(filter(None, (render_replicas(snapshot), render_devices(devices))))
    shown = {"devices": devices, "replicas": snapshot.replicas}
    ended = {"replicas_ended": snapshot.replicas_ended}
    answer({**shown, **ended}, text, as_json=as_json)


def render_devices(devices: "Sequence[DeviceRow]") -> str:
    """Return the map as a table."""
    return render_table(*list_devices(devices))


def list_devices(
    devices: "Sequence[DeviceRow]",
) -> tuple[tuple[str, ...], list[tuple[str | int, ...]]]:
    """Return heads and rows of the map; with addresses where a node is not this machine's own."""
    away = any(d.host and not d.host.startswith("127.") for d in devices)
    rows: list[tuple[str | int, ...]] = [
        (
            d.device,
            d.node,
            *([d.host or "-"] if away else ()),
            ",".join(slot.rpartition("/slot")[2] for slot in d.slots),
            ",".join(map(str, d.ranks)) or "-",
            ",".join(map(str, d.replicas)) or "-",
            d.state,
            f"{d.health}: {d.why}" if d.why else d.health or "-",
        )
        for d in devices
    ]
    address = ("address",) if away else ()
    return ("device", "node", *address, "slots", "ranks", "replicas", "state", "health"), rows


def render_replicas(snapshot: "Snapshot") -> str:
    """Return the replica groups that others have started as a table; empty where there are none.

    Of those that have ended it has the last few.
    """
    from perdure.dash.watch import list_shown_groups

    shown = list_shown_groups(snapshot.replicas)
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
        for r in shown
        if r.since_s
    ]
    head = ("group", "replica", "ranks", "manager", "step", "since", "state", "quorum")
    older = len(snapshot.replicas) - len(shown) + snapshot.replicas_ended
    note = f"\n{older} more have ended before: perdure report {snapshot.job}" if older else ""
    return render_table(head, rows) + note if rows else ""


def rate_urgency(row: "DeviceRow") -> int:
    """Return how soon a device has to be looked at: the lower, the sooner."""
    if row.health == "failed" or row.state == "lost":
        return 0
    return 1 if row.health == "warn" else 2 if row.state not in ("in use", "spare") else 3


def _watch_devices(job: Job, *, as_json: bool) -> None:
    """Show the map until the job has ended: as a screen on a terminal, else whenever it changes."""
    from perdure.cli.looking.watch import can_draw, look_again, show_screen

    if can_draw() and not as_json:
        show_screen(job.name, 0.5, "devices")
        return
    shown: object = None
    for snapshot in look_again(job, 0.5):
        head = f"{snapshot.job} {snapshot.state}  generation {snapshot.generation}"
        text = f"{head}\n{render_devices(snapshot.devices)}"
        told = snapshot.devices if as_json else text
        if told != shown:
            shown = told
            answer({"devices": snapshot.devices}, f"{text}\n", as_json=as_json)
