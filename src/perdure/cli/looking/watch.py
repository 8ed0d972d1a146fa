"""`perdure watch`: on a terminal a screen over all jobs (`cli/watching`), elsewhere lines of one.

Both read what lies on the disk, as `status --json` prints it, and ask nobody, so that any number
of watchers cost the job nothing. On a pipe a line is written when something changes and once in a
while.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from perdure.cli.jobs import ENDED, LOST, Job, find_job
from perdure.cli.speech.say import Json, choose_newest_job, complete_jobs, note, print_json
from perdure.dash.colours import print_painted
from perdure.dash.live import render_status
from perdure.dash.terminal import unwrap_stream
from perdure.dash.watch import render_clock, render_watch
from perdure.model.input.plain import REASON_MAX, shorten_line
from perdure.model.report import Snapshot

QUIET_S = 10.0
"""On a pipe: seconds between two lines of an unchanged state."""


def watch(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="The job's name; else the screen begins with all, and lines are of the newest.",
            autocompletion=complete_jobs,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once and leave.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the screen.")] = False,
    every: Annotated[
        float, typer.Option("--every", min=0.1, help="Without --once: seconds between looks.")
    ] = 0.5,
    as_json: Json = False,
) -> None:
    """Watch jobs live, and steer them by keys.

    On a terminal a screen: jobs, their nodes, ranks, incidents, settings, logs. Enter goes in,
    Escape back, / finds, ? lists the keys, q leaves. A key that acts shows first what it would do.
    """
    if not (once or plain or as_json) and can_draw():
        show_screen(job, every)
        return
    found = find_job(job or choose_newest_job())
    if as_json:
        for snapshot in look_again(found, every, once=once):
            print_json(snapshot)
    elif once:
        columns = shutil.get_terminal_size((100, 50)).columns
        print_painted("\n".join(render_watch(found.snapshot(), columns)))
    else:
        _show_lines(found, every)


def can_draw() -> bool:
    """Return whether a person sits at a terminal that a screen can be drawn on."""
    streams = (sys.stdin, unwrap_stream(sys.stdout), unwrap_stream(sys.stderr))
    return all(stream.isatty() for stream in streams) and os.environ.get("TERM", "dumb") != "dumb"


def show_screen(job: str | None, every: float, tab: str = "") -> None:
    """Show the screen until it is left, where there is what draws it; else lines of a job."""
    found = find_job(job) if job else None
    try:
        from perdure.cli.watching.app import run_screen
    except ModuleNotFoundError as error:
        if error.name not in ("textual", "perdure.cli.watching"):  # A notebook has neither.
            raise
        note("these are lines: the screen needs Textual (pip install textual)")
        _show_lines(found or find_job(choose_newest_job()), every)
        return
    code = run_screen(found, every, tab)
    if code:
        raise typer.Exit(code)


def look_again(job: Job, every: float, *, once: bool = False) -> Iterator[Snapshot]:
    """Yield snapshots until the job has ended."""
    while True:
        snapshot = job.snapshot()
        yield snapshot
        if once or snapshot.state in ENDED or snapshot.state == LOST:
            return
        time.sleep(every)


def _show_lines(job: Job, every: float) -> None:
    shown: tuple[object, ...] = ()
    at_s = 0.0
    for snapshot in look_again(job, every):
        newest = snapshot.verdicts[-1] if snapshot.verdicts else None
        state = (
            snapshot.state,
            snapshot.generation,
            snapshot.incidents,
            snapshot.epoch,
            snapshot.paused,
            newest and (newest.kind, newest.confirmed_s),
        )
        if state != shown or snapshot.at_s - at_s >= QUIET_S:
            shown, at_s = state, snapshot.at_s
            reason = f"  {shorten_line(snapshot.reason, REASON_MAX)}" if snapshot.reason else ""
            print(f"{render_clock(snapshot.at_s)} {render_status(snapshot)}{reason}", flush=True)
