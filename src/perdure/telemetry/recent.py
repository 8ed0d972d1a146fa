"""The last few incidents for a screen: told while they last, kept once they are over.

A ledger needs every stamp of every generation; a screen needs a line. What is kept here is that
line, so that the picture's cost does not grow with the length of the past.
"""

from dataclasses import dataclass, field

from perdure.model.events import (
    ControllerLost,
    GenerationStepping,
    JobEnded,
    JournalEntry,
    RanksStarted,
)
from perdure.model.report import IncidentRow, Recovery
from perdure.telemetry.history import History
from perdure.telemetry.incidents import find_recovery

KEPT = 20


@dataclass(slots=True)
class RecentFold:
    """The newest incidents that are over, oldest first."""

    closed: list[IncidentRow] = field(default_factory=list)
    told: int = -1
    """The newest generation whose incident is among `closed`, or had none."""

    def add(self, entry: JournalEntry, history: History) -> None:
        """Take an entry that `history` has just taken."""
        match entry.body:
            case ControllerLost() as lost:
                row = IncidentRow(lost.at_s, lost.cause, lost.part, "none", 0.0)
                self.closed.append(row)
            case GenerationStepping() as event:
                self._close(history, event.generation, entry.at_s)
            case RanksStarted() as event:  # The one before it has failed as well.
                self._close(history, event.generation - 1, entry.at_s)
            case JobEnded() as ended:
                newest = history.newest
                if newest is not None:
                    self._close(history, newest.number + 1, ended.at_s)
            case _:
                return
        del self.closed[:-KEPT]

    def _close(self, history: History, before: int, now: float) -> None:
        """Put down the incidents of the generations before `before`: they are over."""
        for number in sorted(history.generations):
            if self.told < number < before:
                self.told = number
                recovery = find_recovery(history, number, now)
                if recovery is not None:
                    self.closed.append(_make_row(recovery, recovery.total_s))

    def find_rows(self, history: History, now: float) -> tuple[IncidentRow, ...]:
        """Return the newest incidents, those that are not over last."""
        rows = list(self.closed)
        for number in sorted(history.generations):
            if number > self.told:
                recovery = find_recovery(history, number, now)
                if recovery is not None:
                    rows.append(_make_row(recovery, None))
        return tuple(sorted(rows, key=lambda row: row.at_s)[-KEPT:])


def _make_row(recovery: Recovery, total_s: float | None) -> IncidentRow:
    return IncidentRow(
        at_s=recovery.at_s,
        cause=recovery.cause,
        culprit=recovery.culprit,
        rung=recovery.rung,
        total_s=total_s,
    )
