"""The list of all jobs."""

import contextlib
import time
from typing import TYPE_CHECKING, Any

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.events import Print
from textual.widgets import DataTable, Footer, Static

from perdure.cli.jobs import find_here, list_jobs_elsewhere, list_local_jobs
from perdure.cli.page.runs import Snapshots
from perdure.cli.watching.asking import Asks
from perdure.cli.watching.job import JobScreen
from perdure.cli.watching.looking import LookingScreen, make_find_field, make_trouble
from perdure.cli.watching.table import Row, Rows, plain
from perdure.cli.watching.views import JOBS, NUMBERS, list_job_rows
from perdure.dash.live import render_count
from perdure.model.errors import PerdureError
from perdure.model.report import Snapshot
from perdure.service.jobfolders import resolve_home

if TYPE_CHECKING:
    from perdure.model.platforms.launching import LaunchRecord


class JobsScreen(LookingScreen):
    """All jobs of this machine, the newest first, and those it has launched elsewhere."""

    def __init__(self, every: float, asks: Asks) -> None:
        """Look each `every` seconds, and at most once a second."""
        super().__init__(max(1.0, every))
        self._job_every, self._asks = every, asks
        self._heard: dict[str, float] = {}
        """What reading has said beside the jobs -> when it was heard last."""
        self._snapshots = Snapshots()

    def compose(self) -> ComposeResult:
        """Compose a table of jobs."""
        yield Static("", id="head", markup=False)
        yield make_trouble()
        yield Rows(*JOBS, right=NUMBERS, id="jobs")
        yield make_find_field("a part of any column")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Hear which jobs cannot be read."""
        self.app.begin_capture_print(self)
        super().on_mount()

    def on_print(self, event: Print) -> None:
        """Keep what was said."""
        if text := event.text.strip():
            self._heard[text] = time.monotonic()

    def read(self) -> "tuple[list[tuple[str, Snapshot]], list[LaunchRecord]]":
        """Return each job's newest picture, and who is elsewhere."""
        found = []
        for job in reversed(list_local_jobs()):
            with contextlib.suppress(PerdureError, OSError):
                found.append((job.name, self._snapshots.take(job)))
        return found, list_jobs_elsewhere()

    def show(self, found: Any) -> None:
        """Show them."""
        jobs, elsewhere = found
        rows = list_job_rows(jobs)
        known = {row.key for row in rows}
        for record in elsewhere:
            if record.job not in known:
                where = f"on {record.profile.platform}: Enter looks there"
                cells = (record.job, "elsewhere", "-", "-", "-", "-", "-", where)
                rows.append(Row(record.job, cells, "", record))
        running = sum(not row.item and row.cells[1] == "running" for row in rows)
        none = "There are no jobs yet: perdure run SCRIPT starts one. "
        said = f"{render_count(len(rows), 'job')}, {running} running, " if rows else none
        since_s = time.monotonic() - 3 * self._every
        self._heard = {text: at_s for text, at_s in self._heard.items() if at_s > since_s}
        lines = [plain(f"{said}under {resolve_home()}", "bold")]
        lines += [plain(text, "yellow") for text in list(self._heard)[:4]]
        self.put("head", Text("\n").join(lines))
        self.query_one(Rows).tell(rows)

    @on(DataTable.RowSelected)
    def _enter(self, event: DataTable.RowSelected) -> None:
        row = self.query_one(Rows).find(event.row_key.value)
        if row is None:
            return
        if row.item is not None:
            self.app.exit(row.key)
            return
        try:
            job = find_here(row.key, resolve_home())
        except PerdureError as error:
            self.notify(error.message, severity="error", markup=False)
            return
        self.app.push_screen(JobScreen(job, self._job_every, self._asks))

    def leave(self) -> None:
        """Leave nothing: there is nothing above; q ends."""
