"""Commands that look: ps, status, map, diagnose, report. They read files and change nothing."""

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from perdure.cli.act import JobName
from perdure.cli.jobs import find_job, find_jobs
from perdure.cli.options import Json
from perdure.cli.say import note, print_json, render_table
from perdure.model.errors import PerdureError, PlatformError
from perdure.model.report import Snapshot
from perdure.model.verdicts import Verdict
from perdure.telemetry import DelayMatrix, LedgerFold, find_delay_matrix, find_verdicts, make_series

Width = Annotated[int, typer.Option("--width", min=40, help="Columns of the text.")]


def ps(as_json: Json = False) -> None:
    """List the jobs of this machine."""
    rows: list[dict[str, Any]] = []
    for job in find_jobs():
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
    if as_json:
        print_json({"jobs": rows})
    elif not rows:
        print("no jobs; `perdure run SCRIPT` starts one")
    else:
        head = ("job", "state", "step", "ranks", "restarts", "started")
        cells = [
            (r["job"], r["state"], r["step"] if r["step"] >= 0 else "-", r["ranks"], r["restarts"],
             _render_time(r["started_s"]))
            for r in rows
        ]  # fmt: skip
        print(render_table(head, cells))


def status(job: JobName, as_json: Json = False) -> None:
    """Show a job now: its state and each rank."""
    snapshot = find_job(job).snapshot()
    if as_json:
        print_json(snapshot)
        return
    print(render_snapshot(snapshot))


def render_snapshot(snapshot: Snapshot) -> str:
    """Return a snapshot as text."""
    step = f", step {snapshot.step}" if snapshot.step >= 0 else ""
    speed = f" at {snapshot.steps_per_s:.1f} steps/s" if snapshot.steps_per_s > 0 else ""
    lines = [
        f"{snapshot.job}: {snapshot.state}{step}{speed}; generation {snapshot.generation}, "
        f"{snapshot.restarts} restarts, depth {snapshot.depth}"
    ]
    if snapshot.reason:
        lines.append(snapshot.reason)
    if snapshot.metrics:
        lines.append("  ".join(f"{name} {v:.4g}" for name, v in sorted(snapshot.metrics.items())))
    if snapshot.ranks:
        head = ("rank", "node", "pid", "state", "phase", "step", "CPU s", "MB", "collective")
        rows: list[tuple[Any, ...]] = [
            (r.rank, r.node, r.pid, r.state, r.phase, r.step if r.step >= 0 else "-",
             round(r.cpu_s, 1), r.rss_bytes // 1_000_000, r.collective)
            for r in snapshot.ranks
        ]  # fmt: skip
        lines += ["", render_table(head, rows)]
    if snapshot.checkpoints:
        newest = snapshot.checkpoints[-1]
        lines += ["", f"newest checkpoint: step {newest.get('step')}, {newest.get('path')}"]
    lines += [f"{_describe(v)}" for v in snapshot.verdicts[-3:]]
    return "\n".join(lines)


def map_devices(
    job: JobName,
    links: Annotated[bool, typer.Option("--links", help="Show the delay matrix instead.")] = False,
    width: Width = 100,
    as_json: Json = False,
) -> None:
    """Show which device runs which rank, or how slowly which rank reaches which."""
    found = find_job(job)
    if links:
        matrix = find_delay_matrix(found.entries())
        if as_json:
            print_json({"links": matrix.comms, "note": matrix.note})
        else:
            print(_render_matrix(matrix, width))
        return
    devices = found.snapshot().devices
    if as_json:
        print_json({"devices": devices})
        return
    head = ("device", "node", "ranks", "replicas", "state")
    rows: list[tuple[Any, ...]] = [
        (d.device, d.node, _join(d.ranks), _join(d.replicas) or "-", d.state) for d in devices
    ]
    print(render_table(head, rows))


def diagnose(job: JobName, as_json: Json = False) -> None:
    """Say what went wrong: each verdict with its culprit and evidence."""
    found = find_job(job)
    entries = found.entries()
    verdicts = find_verdicts(entries)
    vanished = None if found.alive else found.explain_vanishing(entries)
    if as_json:
        print_json({"verdicts": verdicts, **({"vanished": vanished} if vanished else {})})
        return
    if vanished is not None:
        print(f"`perdure run` is gone: {vanished.cause}: {vanished.reason}")
        for name, value in vanished.evidence.items():
            print("\n".join(_render_evidence(name, value)))
        print()
    start_s = entries[0].at_s if entries else 0.0
    if verdicts:
        print("\n\n".join(render_verdict(verdict, start_s) for verdict in verdicts))
    else:
        snapshot = found.snapshot()
        print(f"{job}: {snapshot.state}; nothing was found wrong. {snapshot.reason}".rstrip())
    print("\n" + _render_matrix(find_delay_matrix(entries), 100))


def _render_matrix(matrix: DelayMatrix, width: int) -> str:
    from perdure.dash.links import render_links

    return render_links(matrix, width)


def render_verdict(verdict: Verdict, start_s: float) -> str:
    """Return a verdict and its evidence as text."""
    lines = [
        f"{verdict.first_seen_s - start_s:9.1f} s  {_describe(verdict)}",
        f"{'':13}confirmed after {verdict.confirmed_s - verdict.first_seen_s:.2f} s, "
        f"confidence {verdict.confidence:.0%}, generation {verdict.generation}",
    ]
    for name, value in verdict.evidence.items():
        lines += _render_evidence(name, value)
    return "\n".join(lines)


def _describe(verdict: Verdict) -> str:
    return f"{verdict.kind} of {verdict.culprit}: {verdict.reason}"


def _render_evidence(name: str, value: Any) -> list[str]:
    indent = " " * 13
    if isinstance(value, str) and "\n" in value:
        body = [f"{indent}  {line}" for line in value.rstrip().splitlines()]
        return [f"{indent}{name}:", *body]
    if isinstance(value, dict) and any("\n" in str(item) for item in value.values()):
        return [
            line for key, item in value.items() for line in _render_evidence(f"{name} {key}", item)
        ]
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return [f"{indent}{name}:", *[f"{indent}  {item}" for item in value]]
    if isinstance(value, float):
        value = round(value, 3)
    if isinstance(value, dict | list | tuple):
        value = msgspec.json.encode(value).decode()
    return [f"{indent}{name}: {value}"]


def report(
    job: JobName,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with plots.")
    ] = None,
    width: Width = 100,
    as_json: Json = False,
) -> None:
    """Print the goodput ledger: where every paid second went, and each recovery by phase."""
    found = find_job(job)
    entries = found.entries()
    now = found.now(entries)
    fold = LedgerFold()
    for entry in entries:
        fold.add(entry)
    result = fold.report(now)
    if html is not None:
        from perdure.dash import render_html

        matrix = find_delay_matrix(entries)
        page = render_html(result, found.snapshot(), make_series(entries, now), matrix)
        try:
            html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise PlatformError(f"cannot write {html}: {error.strerror}", hint="--html FILE") from (
                error
            )
        note(f"wrote {html}")
    if as_json:
        print_json(result)
    else:
        from perdure.dash import render_text

        print(render_text(result, make_series(entries, now), width=width), end="")


def _render_time(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s)) if at_s else "-"


def _join(numbers: tuple[int, ...]) -> str:
    return ",".join(str(number) for number in numbers)
