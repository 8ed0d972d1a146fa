"""`perdure watch` and `perdure map --watch`: the newest Snapshot, again and again, until the end.

It reads the file that `status --json` prints and asks nobody, so that any number of watchers cost
the job nothing. On a terminal the screen is drawn in place; on a pipe a line is written when
something changes and once in a while.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer

from perdure.cli.jobs import ENDED, LOST, Job, find_job
from perdure.cli.speech.say import JobName, Json, note, print_json
from perdure.dash.live import render_status
from perdure.dash.watch import ScreenLine, render_clock, render_watch
from perdure.model.plain import REASON_MAX, shorten_line
from perdure.model.report import Snapshot

SPEEDS_KEPT = 400
QUIET_S = 10.0
"""On a pipe: seconds between two lines of an unchanged state."""
_LEAVE = b"qQ\x03\x04"
"""Typed: q, or Ctrl-C and Ctrl-D where they come as keys."""

Screen = Callable[[Snapshot, int, int], Sequence[ScreenLine]]


def watch(
    job: JobName,
    once: Annotated[bool, typer.Option("--once", help="Show it once and leave.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks.")] = 0.5,
    as_json: Json = False,
) -> None:
    """Watch a job: ranks, speed, verdicts, incidents, configuration; q leaves, a key looks now."""
    found = find_job(job)
    speeds: deque[float] = deque(maxlen=SPEEDS_KEPT)

    def draw(snapshot: Snapshot, width: int, height: int) -> Sequence[ScreenLine]:
        speeds.append(snapshot.steps_per_s)
        return render_watch(snapshot, width, height, tuple(speeds))

    if as_json:
        for snapshot in look_again(found, every, once=once):
            print_json(snapshot)
        return
    show(found, draw, every, once=once)


def show(job: Job, draw: Screen, every: float, *, once: bool = False) -> None:
    """Show what `draw` makes of each look: once, in place on a terminal, or as lines."""
    if once:
        size = shutil.get_terminal_size((100, 50))
        height = size.lines - 1 if sys.stdout.isatty() else 1000
        for line in draw(job.snapshot(), size.columns, height):
            print(line.text)
    elif sys.stdout.isatty():
        _show_in_place(job, draw, every)
    else:
        _show_lines(job, every)


def look_again(
    job: Job, every: float, *, once: bool = False, pause: Callable[[float], object] = time.sleep
) -> Iterator[Snapshot]:
    """Yield snapshots until the job has ended, or `pause` says that nobody looks any more."""
    while True:
        snapshot = job.snapshot()
        yield snapshot
        if once or snapshot.state in ENDED or snapshot.state == LOST:
            return
        if pause(every):
            return


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


def _show_in_place(job: Job, draw: Screen, every: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    last: Sequence[ScreenLine] = ()
    with (
        _leave_on_signals() as (leave_if_asked, woken),
        _read_keys(woken) as wait_key,
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live,
    ):

        def pause(seconds: float) -> bool:
            leaves = wait_key(seconds)
            leave_if_asked()
            return leaves

        for snapshot in look_again(job, every, pause=pause):
            width, height = console.size
            last = draw(snapshot, width, height)
            text = Text("\n", no_wrap=True, overflow="crop", end="").join(
                Text(line.text, style=line.style) for line in last
            )
            live.update(text, refresh=True)
    for line in last:  # What was last seen stays, with the job's end in it.
        console.print(Text(line.text, style=line.style), overflow="crop", no_wrap=True, crop=True)
    if snapshot.state in ("failed", LOST):
        note(f"why: perdure diagnose {job.name}")
    elif snapshot.state in ENDED:
        note(f"where the time went: perdure report {job.name}")


@contextlib.contextmanager
def _leave_on_signals() -> Iterator[tuple[Callable[[], None], int]]:
    """Have a signal that ends the command unwind it, so that the terminal is given back first.

    Yield what leaves once there was one, and a descriptor that can be read from then on: a handler
    alone does not end a wait that had all but begun, and what it raises is dropped where it is
    called in an object's finalizer. It is not suspended: a shell would get the terminal as the
    screen has it.
    """
    asked: list[int] = []

    def leave_if_asked() -> None:
        if asked:
            raise SystemExit(128 + asked[0])

    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wakes_before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    before = {
        number: signal.signal(number, lambda number, _frame: asked.append(number))
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield leave_if_asked, woken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakes_before)
        os.close(woken)
        os.close(wakes)


@contextlib.contextmanager
def _read_keys(woken: int) -> Iterator[Callable[[float], bool]]:
    """Yield a pause that any key ends, and that says so when it was one to leave by.

    What can be read from `woken` ends it as well.

    The terminal's own descriptor is read, past Python's buffer: what lies in there is not seen by
    `select`.
    """
    fd = sys.stdin.fileno() if sys.stdin.isatty() else -1

    def wait(seconds: float) -> bool:
        if fd not in select.select([woken, fd] if fd >= 0 else [woken], [], [], seconds)[0]:
            return False
        keys = os.read(fd, 1024)
        return not keys or any(key in _LEAVE for key in keys)

    if fd < 0:
        yield wait
        return
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield wait
    finally:
        with contextlib.suppress(termios.error):  # Whose terminal is gone.
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
