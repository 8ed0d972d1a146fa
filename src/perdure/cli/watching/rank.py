"""One rank: what it writes, where it stands, and what was found about it."""

from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Footer, RichLog, Static, TabbedContent, TabPane

from perdure.adapters.host import read_environ
from perdure.adapters.stacks import dump_stack
from perdure.cli.watching.looking import LookingScreen, make_find_field, make_trouble
from perdure.cli.watching.table import plain_lines
from perdure.cli.watching.views import (
    describe_rank,
    describe_stack,
    is_over,
    list_rank_evidence,
)
from perdure.dash.sections import LOG_LINES, LogLine, Picture, find_rank
from perdure.model.input.plain import show_output
from perdure.model.report import RankRow, Snapshot

if TYPE_CHECKING:
    from perdure.cli.page.reading import JobReading


class LogTail(RichLog):
    """The last lines that ranks have written; new ones are added below."""

    def __init__(self, *, ranks: bool, id: str) -> None:
        """Begin with none; where `ranks`, each line says whose it is."""
        super().__init__(id=id, max_lines=4 * LOG_LINES, markup=False, highlight=False, wrap=True)
        self._ranks = ranks
        self._shown: list[LogLine] = []

    def tell(self, lines: list[LogLine]) -> None:
        """Show `lines`, the newest last."""
        if lines == self._shown:
            return
        new = _list_new(self._shown, lines)
        if new is None:
            self.clear()
        for line in lines if new is None else new:
            self.write(self._draw(line))
        self._shown = lines

    def _draw(self, line: LogLine) -> Text:
        text = Text.from_ansi(show_output(line.text))  # Colours stay, and nothing else that acts.
        if line.stream == "err":
            text.stylize("yellow")
        return Text.assemble((f"{line.rank}: ", "dim"), text) if self._ranks else text


def _list_new(before: list[LogLine], now: list[LogLine]) -> list[LogLine] | None:
    """Return the lines of `now` that follow on `before`; None where it is another text.

    >>> a, b, c, d = (LogLine(0, 0, "out", text) for text in "abcd")
    >>> _list_new([a, b, c], [b, c, d]) == [d], _list_new([a], [b])
    (True, None)
    """
    if not before:
        return None
    last = before[-1]
    for end in range(len(now), 0, -1):
        if now[end - 1] == last and before[-end:] == now[:end][-len(before) :]:
            return now[end:]
    return None


class RankScreen(LookingScreen):
    """A rank's log, stack and evidence."""

    BINDINGS: ClassVar[Any] = [
        Binding("1", "tab('log')", "log", show=False),
        Binding("2", "tab('stack')", "stack", show=False),
        Binding("3", "tab('evidence')", "evidence", show=False),
        Binding("t", "take_stack", "take its stack now"),
        Binding("K", "kill", "kill it"),
    ]

    def __init__(self, reading: "JobReading", rank: int, every: float) -> None:
        """Show `rank` of a job."""
        super().__init__(every)
        self._reading, self.rank = reading, rank
        self._row: RankRow | None = None
        self._snapshot: Snapshot | None = None
        self._wanted = ""
        self._taken = False

    def compose(self) -> ComposeResult:
        """Compose the head, and a tab each."""
        yield Static("", id="head", markup=False)
        yield make_trouble()
        with TabbedContent(initial="log"):
            with TabPane("1 Log", id="log"):
                yield LogTail(ranks=False, id="lines")
            with TabPane("2 Stack", id="stack"), VerticalScroll():
                yield Static("", id="stack-text", markup=False)
            with TabPane("3 Evidence", id="evidence"), VerticalScroll():
                yield Static("", id="evidence-text", markup=False)
        yield make_find_field("a part of a line, in all generations")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Have the keys go to the log."""
        super().on_mount()
        self.focus_main()

    def read(self) -> list[LogLine]:
        """Return the rank's last lines."""
        return self._reading.read_log(self.rank, self._wanted)

    def show(self, found: Any) -> None:
        """Show its lines."""
        self.query_one(LogTail).tell(found)

    def show_picture(self, snapshot: Snapshot, picture: Picture | None) -> None:
        """Show what is known of the rank."""
        self._row, self._snapshot = find_rank(snapshot, self.rank), snapshot
        self.put("head", describe_rank(self._row, self.rank, snapshot))
        if picture is not None:
            self.put("evidence-text", list_rank_evidence(picture, self.rank))
            if not self._taken:
                self.put("stack-text", describe_stack(picture, self.rank))

    def search(self, wanted: str) -> None:
        """Show the lines of all generations with `wanted` in them; else the newest ones."""
        self._wanted = wanted
        self.action_tab("log")
        self._again.set()

    def focus_main(self) -> None:
        """Have the keys scroll the log."""
        self.query_one(LogTail).focus()

    def action_tab(self, name: str) -> None:
        """Go to a tab."""
        self.query_one(TabbedContent).active = name

    def action_kill(self) -> None:
        """Ask whether it is to be killed."""
        from perdure.cli.watching.job import JobScreen

        for screen in self.app.screen_stack:
            if isinstance(screen, JobScreen):
                screen.ask_to_kill(self.rank)

    @work(exclusive=True)
    async def action_take_stack(self) -> None:
        """Take the rank's stack: py-spy pauses it for some milliseconds, so only when asked to."""
        self.action_tab("stack")
        row, self._taken = self._row, True
        if row is None or not row.pid or (self._snapshot and is_over(self._snapshot)):
            self.put("stack-text", Text("It does not run."))
        elif read_environ(row.pid).get("PERDURE_JOB") != self._reading.job.name:
            why = "Its process is not on this machine, or not yours: perdure diagnose there."
            self.put("stack-text", Text(why))
        else:
            self.put("stack-text", Text("It is taken by py-spy."))
            stack = await dump_stack(row.pid, nonblocking=row.state == "suspected")
            self.put("stack-text", plain_lines([(stack, "")]))
