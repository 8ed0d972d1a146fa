"""What a job's journal tells for a report, read once from end to end and never held in memory."""

from typing import NamedTuple

from perdure.cli.jobs import Job
from perdure.model.chain import Tally
from perdure.model.events import JournalEntry, LinksNoted, MetricsLogged
from perdure.model.report import Report
from perdure.telemetry import (
    DelayMatrix,
    LedgerFold,
    Series,
    SeriesFold,
    read_delay_matrix,
)

AGREEMENTS = ("RanksAgreed", "BoundaryAnswered", "BoundaryReached")
"""Entries that nothing is shown of but by `events`: each agreement has some of all ranks."""


class Story(NamedTuple):
    """What the journal of a job tells, and what lies beside it."""

    report: Report
    series: Series
    matrix: DelayMatrix
    tally: Tally
    first_s: float
    """When its first entry was written."""


def tell_story(job: Job, *, page: bool) -> Story:
    """Read a job's journal for a report; what only a `page` shows is else left out."""
    ledger, links, first_s, last_s = LedgerFold(), list[JournalEntry](), 0.0, 0.0
    series = SeriesFold(ledger)
    reader = job.read(without=AGREEMENTS if page else (*AGREEMENTS, "LinksNoted"))
    for entry in job.complete(reader):
        ledger.add(entry)
        if page or isinstance(entry.body, MetricsLogged):
            series.add(entry)
        first_s, last_s = first_s or entry.at_s, entry.at_s
        if isinstance(entry.body, LinksNoted):
            links[:] = [entry]
    newest, now = job.read_newest(), job.now(last_s)
    ledger.take_newest(newest.progress)
    return Story(
        ledger.report(now),
        series.series(now, job.read_curves(), drawn=page),
        read_delay_matrix(links, newest.links),
        reader.tally,
        first_s,
    )
