"""How far something is that takes more than a moment: a bar on a terminal, with rate and time left.

There is none in the first two seconds, none where standard error is no terminal, and none beside
an answer as JSON. All commands draw theirs by this class.
"""

import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from perdure.cli.speech.say import note
from perdure.model.input.plain import show_controls

APPEARS_S = 2.0
_LOOK_S = 0.5


class _Rate(ProgressColumn):
    """How much of what is counted is done in a second."""

    def render(self, task: Task) -> Text:
        """Return it; nothing where only a share is known."""
        if not task.fields["unit"] or task.speed is None:
            return Text("")
        per_s = task.speed / (1e6 if task.fields["unit"] == "MB" else 1.0)
        return Text(f"{per_s:.3g} {task.fields['unit']}/s")


class Bar:
    """A bar on a terminal, else a line for each part of what is done."""

    def __init__(
        self, name: str = "", *, as_json: bool = False, appears_s: float = APPEARS_S
    ) -> None:
        """Draw nothing yet; `name` begins the lines, of which there are none without it."""
        console = Console(stderr=True)
        # Not `is_terminal`: rich believes FORCE_COLOR, which logs of CI have without a terminal.
        self._shown = console.file.isatty() and not as_json
        self._bar = Progress(
            TextColumn("{task.description:<9}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[more]}", markup=False),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, more="", unit="")
        self._said, self._name = "", name
        self._over = threading.Event()
        self._appears_s = appears_s
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Bar":
        """Begin to draw, two seconds from now."""
        if self._shown:
            self._begin(self._appear)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._shown:
            self._bar.stop()

    def say(self, what: str, share: float | None, more: str = "") -> None:
        """Show that `share` of `what` is done; None: nobody knows how much there is."""
        if self._shown:
            total = None if share is None else 1.0
            self._update(what, share or 0.0, total, more, "")
        elif self._name and what != self._said:
            note(f"{self._name}: {what} {more}".rstrip())
        self._said = what

    def count(self, what: str, done: float, total: float, unit: str = "MB") -> None:
        """Show how much of `total` is done, in bytes or in what `unit` says."""
        if self._shown:
            scale = 1e6 if unit == "MB" else 1.0
            self._update(what, done, total, f"{done / scale:,.0f} of {total / scale:,.0f}", unit)

    def watch(self, what: str, total: float, measure: Callable[[], float]) -> None:
        """Show how much of `total` bytes is done, by what `measure` returns twice a second."""

        def look() -> None:
            while not self._over.wait(_LOOK_S):
                self.count(what, min(measure(), total), total)

        if self._shown and total > 0:
            self._begin(look)

    def _begin(self, what: Callable[[], None]) -> None:
        thread = threading.Thread(target=what, name="perdure-bar", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _appear(self) -> None:
        if not self._over.wait(self._appears_s):
            self._bar.start()

    def _update(self, what: str, done: float, total: float | None, more: str, unit: str) -> None:
        fields: dict[str, Any] = {"more": show_controls(more), "unit": unit}
        if what != self._said:
            self._bar.reset(self._task, total=total)  # The time left is of this part.
        self._bar.update(
            self._task, description=show_controls(what), completed=done, total=total, **fields
        )
        self._said = what
