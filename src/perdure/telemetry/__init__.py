"""Folds over the journal: ledger, incidents, verdicts, the live snapshot, curves.

`history` sorts the journal, `timeline` cuts each rank's time into `segments`, `ledger` adds them
up and makes the report.
"""

from perdure.telemetry.ledger import LedgerFold, make_report
from perdure.telemetry.links import DelayMatrix, LinkFold, read_delay_matrix
from perdure.telemetry.series import Series, SeriesFold, make_series
from perdure.telemetry.snapshot import SnapshotFold
from perdure.telemetry.stacks import group_stacks, render_stacks
from perdure.telemetry.verdicts import list_verdicts

__all__ = [
    "DelayMatrix",
    "LedgerFold",
    "LinkFold",
    "Series",
    "SeriesFold",
    "SnapshotFold",
    "group_stacks",
    "list_verdicts",
    "make_report",
    "make_series",
    "read_delay_matrix",
    "render_stacks",
]
