"""A bar on a terminal, for what takes minutes."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from perdure.cli.speech.say import note
from perdure.model.plain import show_controls


class Bar:
    """How far something is: a bar on a terminal, else a line for each of its parts."""

    def __init__(self, name: str = "") -> None:
        """Draw nothing yet; `name` begins the lines, of which there are none without it."""
        console = Console(stderr=True)
        self._shown = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description:<9}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[more]}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1.0, more="")
        self._said, self._name = "", name

    def __enter__(self) -> "Bar":
        """Begin to draw."""
        if self._shown:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        if self._shown:
            self._bar.stop()

    def say(self, what: str, share: float, more: str = "") -> None:
        """Show that `share` of `what` is done."""
        if self._shown:
            self._bar.update(
                self._task,
                description=show_controls(what),
                completed=share,
                more=show_controls(more),
            )
        elif self._name and what != self._said:
            note(f"{self._name}: {what} {more}".rstrip())
        self._said = what
