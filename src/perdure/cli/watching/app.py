"""The screen of `perdure watch`: jobs, one of them, one of its ranks, each above the other.

Textual draws, asks the terminal and takes the keys; it is imported by nothing else of perdure.
"""

import asyncio
import contextlib
import signal
from typing import Any, ClassVar

from textual.app import App
from textual.binding import Binding

from perdure.cli.jobs import ENDED, LOST, ElsewhereError, Job, list_jobs_elsewhere
from perdure.cli.page.acts import ask
from perdure.cli.speech.say import note
from perdure.cli.watching.asking import Asks
from perdure.cli.watching.job import JobScreen
from perdure.cli.watching.jobs import JobsScreen
from perdure.cli.watching.looking import KeysScreen, LookingScreen
from perdure.dash.colours import print_painted
from perdure.dash.live import render_status
from perdure.model.errors import PerdureError


class WatchApp(App[str]):
    """Begins with the jobs, or with one of them; Escape leads from there to the jobs."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "perdure watch"
    CSS = """
    #head { height: auto; max-height: 6; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #trouble { height: auto; max-height: 2; padding: 0 1; }
    #find { dock: bottom; height: 3; margin-bottom: 1; }
    TabbedContent { height: 1fr; }
    Tab { padding: 0 0 0 1; }
    TabPane { padding: 0; }
    Rows { height: 1fr; }
    #incidents-table { height: auto; max-height: 50%; }
    #incident { height: 1fr; border-top: solid $primary; padding: 0 1; }
    LogTail { height: 1fr; padding: 0 1; }
    TabPane VerticalScroll { padding: 0 1; }
    AskScreen, KeysScreen { align: center middle; }
    #ask, #keys { width: 90%; max-width: 80; height: auto; max-height: 90%; padding: 1 2;
           border: thick $primary; background: $surface; }
    #ask-said { margin: 1 0; height: auto; max-height: 10; }
    #ask-answers { height: auto; align-horizontal: right; }
    #ask-answers Button { margin-left: 2; }
    """
    BINDINGS: ClassVar[Any] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("question_mark", "list_keys", "keys"),
    ]

    def __init__(self, job: Job | None, every: float, tab: str = "", *, asks: Asks = ask) -> None:
        """Show `job`, at first a tab of it; or all jobs."""
        super().__init__()
        self._asks = asks
        self._job, self._every, self._tab = job, every, tab

    def on_mount(self) -> None:
        """Lay one screen above the other."""
        self.push_screen(JobsScreen(self._every, self._asks))
        if self._job is not None:
            self.push_screen(JobScreen(self._job, self._every, self._asks, self._tab))

    def action_list_keys(self) -> None:
        """Show the keys of the screen that is seen."""
        if isinstance(self.screen, LookingScreen):
            self.push_screen(KeysScreen(self.screen.list_keys()))


def run_screen(job: Job | None, every: float, tab: str = "") -> int:
    """Show the screen until it is left; return the exit code: 128 and more where a signal ended it.

    Raises:
        ElsewhereError: a job of another machine was chosen.
    """
    app = WatchApp(job, every, tab)
    asyncio.run(_run(app))
    for record in list_jobs_elsewhere() if app.return_value else ():
        if record.job == app.return_value:
            raise ElsewhereError(record)
    if job is not None and not app.return_code:
        with contextlib.suppress(PerdureError, OSError):
            _say_last(job)
    return app.return_code or 0


async def _run(app: WatchApp) -> None:
    """Run it; a signal that ends the command gives the terminal back first."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, app.exit, None, 128 + number)
    await app.run_async()


def _say_last(job: Job) -> None:
    """Leave the job's last line where the screen was, and where more is to be had."""
    snapshot = job.snapshot()
    print_painted(render_status(snapshot))
    if snapshot.state in ("failed", LOST):
        note(f"why: perdure diagnose {job.name}")
    elif snapshot.state in ENDED:
        note(f"where the time went: perdure report {job.name}")
