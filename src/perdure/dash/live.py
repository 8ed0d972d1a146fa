"""Progress of `perdure run` on a terminal: the ranks' lines, and one status line below them.

On a terminal the status line is redrawn in place by Rich. Elsewhere (a file, a pipe) a line is
written when the state changes and once in a while, so that a log stays readable.
"""

import math
import sys
from typing import TYPE_CHECKING, TextIO

from perdure.dash.terminal import unwrap_stream
from perdure.model.input.plain import show_controls, show_output
from perdure.model.report import ReplicaRow, Snapshot

if TYPE_CHECKING:
    from rich.live import Live

_UNITS_S = (("days", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_LEFT_S_MAX = 1e9
"""Beyond it there is no end in sight."""
QUIET_S = 30.0
"""Without a terminal: seconds between two lines of an unchanged state."""


def render_status(snapshot: Snapshot, *, incident: bool = True) -> str:
    """Return the job in one line, such as `demo running  step 120  8.1 steps/s  loss 2.31`.

    Without `incident`, nothing of what went wrong: it stands elsewhere.

    >>> from perdure.model.report import ReplicaRow, Snapshot
    >>> render_status(Snapshot(1, "demo", "running", 9, 0, 1, 1, 120, 8.06, 2, "resumable", "r"))
    'demo running  step 120  8.1 steps/s  2 ranks  1 restart'
    """
    busy = sorted({row.busy_phase.name for row in snapshot.ranks if row.busy_phase is not None})
    newest = max(snapshot.verdicts, key=lambda verdict: verdict.confirmed_s, default=None)
    told = newest if newest and incident and "withdrawn" not in newest.evidence else None
    parts = (
        f"{snapshot.job} {snapshot.state}",
        "observed only" if snapshot.observed else "",
        f"step {snapshot.step}" if snapshot.step >= 0 else "",
        f"{snapshot.steps_per_s:.1f} steps/s" if snapshot.steps_per_s > 0 else "",
        describe_left(snapshot),
        *(f"{name} {value:.4g}" for name, value in order_metrics(snapshot)[:2]),
        render_count(snapshot.world_size, "rank"),
        render_count(snapshot.restarts, "restart") if snapshot.restarts else "",
        f"busy: {', '.join(busy[:2])}" if busy else "",
        f"last verdict: {told.kind} of {told.culprit}" if told else "",
    )
    return "  ".join(part for part in parts if part)


def order_metrics(snapshot: Snapshot) -> list[tuple[str, float]]:
    """Return what `run.log` has told last, losses first: a Trainer logs five figures beside."""
    return sorted(snapshot.metrics.items(), key=lambda row: ("loss" not in row[0], row[0]))


def describe_late(row: ReplicaRow) -> str:
    """Return in one line for whom the other replica groups wait."""
    return f"group {row.group} is late: {row.late}"


def describe_left(snapshot: Snapshot) -> str:
    """Return how long a job still takes; empty while nobody knows.

    Rounded outwards: the shorter one down, the longer one up.
    """
    if snapshot.state != "running" or snapshot.left_s is None:
        return ""
    least_s, most_s = snapshot.left_s
    if not 0 <= least_s <= most_s <= _LEFT_S_MAX:
        return ""
    unit, size = next((u, s) for u, s in _UNITS_S if most_s >= 2 * s or s == 1.0)
    least, most = math.floor(least_s / size), math.ceil(most_s / size)
    return f"{least} to {most} {unit} left" if most > least else f"{most} {unit} left"


def describe_open_step(snapshot: Snapshot, at_least_s: float = 1.0) -> str:
    """Return how long the step in progress has lasted, and what a step takes; empty if less."""
    open_s = snapshot.step_open_s
    step_s = 1.0 / snapshot.steps_per_s if snapshot.steps_per_s > 0 else 0.0
    if not open_s or max(open_s, step_s) < at_least_s:
        return ""
    takes = f"; a step takes about {step_s:.0f} s" if step_s else ""
    return f"step {snapshot.step + 1} has been in progress for {open_s:.0f} s{takes}"


def describe_long_step(snapshot: Snapshot, notice_s: float) -> str:
    """Return that a step is longer than the notice of a preemption; empty if it is not."""
    told = describe_open_step(snapshot, notice_s)
    end = f"longer than a notice of {notice_s:g} s; a preemption loses it"
    return f"{told}: {end}, and a stop waits for its end" if told else ""


def render_count(number: int, noun: str) -> str:
    """Return a number of things, such as `2 ranks`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


class LiveScreen:
    """Shows lines and snapshots on `output`; a context manager."""

    def __init__(self, output: TextIO | None = None) -> None:
        """Write to `output`, by default the standard output of this moment."""
        self._output = unwrap_stream(output or sys.stdout)
        self._live: Live | None = None
        self._state = ("", 0)
        self._shown_s = 0.0

    def __enter__(self) -> "LiveScreen":
        """Take the last line of the terminal, where there is one."""
        if self._output.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                "",
                console=Console(file=self._output, soft_wrap=True, highlight=False),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the last line back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show_line(self, line: str) -> None:
        """Show one line of a rank above the status, with its colours."""
        line = show_output(line)
        if self._live is not None:
            self._live.console.out(line, highlight=False)
        else:
            self._output.write(line + "\n")
            self._output.flush()

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Show how the job is."""
        if self._live is not None:
            from rich.text import Text

            status = show_controls(render_status(snapshot))
            text = Text(status, style="bold", no_wrap=True, overflow="ellipsis")
            self._live.update(text, refresh=True)
            return
        state = (snapshot.state, snapshot.generation)
        if state != self._state or snapshot.at_s - self._shown_s >= QUIET_S:
            self._state, self._shown_s = state, snapshot.at_s
            self.show_line(f"[perdure] {render_status(snapshot)}")
