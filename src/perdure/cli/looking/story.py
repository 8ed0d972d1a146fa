"""What a job's journal tells for a report, read once from end to end and never held in memory."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from perdure.cli.jobs import ENDED, LOST, LOST_REASON, Job
from perdure.model.chain import Tally
from perdure.model.events import JournalEntry, LinksNoted, Newest
from perdure.model.report import Report
from perdure.telemetry.accounting.ledger import LedgerFold
from perdure.telemetry.curves import Curves
from perdure.telemetry.links import DelayMatrix, read_delay_matrix
from perdure.telemetry.series import Series, SeriesFold

AGREEMENTS = ("RanksAgreed", "BoundaryAnswered", "BoundaryReached")
"""Entries that nothing is shown of but by `events`: each agreement has some of all ranks."""


_TOLD_EVERY = 1000
"""Entries between two words of how many were read."""


class Story(NamedTuple):
    """What the journal of a job tells, and what lies beside it."""

    report: Report
    series: Series
    matrix: DelayMatrix
    tally: Tally
    first_s: float
    """When its first entry was written."""


class StoryFold:
    """Folds a job's journal into what a report shows; it can be asked after any entry."""

    def __init__(self, *, page: bool = True) -> None:
        """Begin before the first entry; what only a `page` shows is else left out."""
        self._page = page
        self._ledger = LedgerFold()
        self.series = SeriesFold(self._ledger)
        self._links: JournalEntry | None = None
        self.first_s = self.last_s = 0.0

    @property
    def start_s(self) -> float:
        """Return the job's first instant."""
        return self._ledger.history.start_s

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry."""
        self._ledger.add(entry)
        if self._page:
            self.series.add(entry)
        if isinstance(entry.body, LinksNoted):
            self._links = entry
        self.first_s, self.last_s = self.first_s or entry.at_s, entry.at_s

    def tell(self, job: Job, now: float, tally: Tally, newest: Newest, curves: Curves) -> Story:
        """Return what the entries so far tell, beside what is told the journal seldom."""
        self._ledger.take_newest(newest.progress)
        self._ledger.history.lost = not job.alive
        segments = self._ledger.segments(now)
        report = _say_where_it_began(job, self._ledger.report(now, segments))
        if report.state not in ENDED and not job.alive:
            report = msgspec.structs.replace(report, state=LOST, reason=LOST_REASON)
        return Story(
            report,
            self.series.series(segments if self._page else (), curves),
            read_delay_matrix([self._links] if self._links else [], newest.links),
            tally,
            self.first_s,
        )


def tell_story(
    job: Job, *, page: bool, tell: Callable[[float, float], None] = lambda done, total: None
) -> Story:
    """Read a job's journal for a report; what only a `page` shows is else left out.

    `tell` hears how many entries were read, of how many.
    """
    from perdure.service.jobfiles import read_last_entries

    last = read_last_entries(job.paths)
    fold, total = StoryFold(page=page), last[-1].seq if last else 0
    reader = job.read(without=AGREEMENTS if page else (*AGREEMENTS, "LinksNoted"))
    for entry in job.complete(reader):
        fold.add(entry)
        if entry.seq % _TOLD_EVERY == 0:
            tell(entry.seq, total)
    newest, now = job.read_newest(), job.now(fold.last_s)
    return fold.tell(job, now, reader.tally, newest, job.read_curves())


def _say_where_it_began(job: Job, report: Report) -> Report:
    """Return the report with what the output of a script without steps says of its restarts."""
    from perdure.service.restarts import read_began

    told = []
    for recovery in report.recoveries:
        if recovery.lost_steps is None and recovery.rung == "restart" and recovery.generation >= 0:
            began = read_began(job.paths, job.spec, recovery.generation + 1)
            if began is not None:
                recovery = msgspec.structs.replace(recovery, began=began.describe())
        told.append(recovery)
    return msgspec.structs.replace(report, recoveries=tuple(told))
