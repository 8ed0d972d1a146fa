"""Curves and marks for the screens, from the journal."""

import msgspec

from perdure.model.events import (
    CheckpointFailed,
    CheckpointSaved,
    JournalEntry,
    MetricsLogged,
    ProgressNoted,
)
from perdure.model.verdicts import Verdict
from perdure.telemetry.ledger import LedgerFold
from perdure.telemetry.segments import Segment
from perdure.telemetry.verdicts import VerdictFold


class Series(msgspec.Struct, frozen=True):
    """All the series that a report draws."""

    start_s: float = 0.0
    metrics: dict[str, tuple[tuple[int, float], ...]] = {}
    """Metric -> (step, value), by step. A step logged again after a restart counts once."""
    progress: tuple[tuple[float, int], ...] = ()
    """(job time, steps committed by every rank)."""
    segments: tuple[Segment, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    checkpoints: tuple[CheckpointSaved, ...] = ()
    checkpoints_failed: tuple[CheckpointFailed, ...] = ()


class SeriesFold:
    """Folds a journal into a `Series`."""

    def __init__(self) -> None:
        """Begin before the first entry."""
        self._ledger = LedgerFold()
        self._verdicts = VerdictFold()
        self._metrics: dict[str, dict[int, float]] = {}
        self._progress: list[tuple[float, int]] = []
        self._saved: list[CheckpointSaved] = []
        self._failed: list[CheckpointFailed] = []

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry."""
        self._ledger.add(entry)
        self._verdicts.add(entry)
        match entry.body:
            case MetricsLogged() as event:
                for step, values in event.rows:
                    for name, value in values.items():
                        self._metrics.setdefault(name, {})[step] = value
            case ProgressNoted() as event if event.step >= 0:
                self._progress.append((event.at_s, event.step))
            case CheckpointSaved() as event:
                self._saved.append(event)
            case CheckpointFailed() as event:
                self._failed.append(event)

    def series(self, now: float) -> Series:
        """Return what the entries so far show."""
        return Series(
            start_s=self._ledger.history.start_s,
            metrics={n: tuple(sorted(rows.items())) for n, rows in sorted(self._metrics.items())},
            progress=tuple(self._progress),
            segments=self._ledger.segments(now),
            verdicts=self._verdicts.verdicts(),
            checkpoints=tuple(self._saved),
            checkpoints_failed=tuple(self._failed),
        )


def make_series(entries: list[JournalEntry], now: float) -> Series:
    """Return the series of a whole journal."""
    fold = SeriesFold()
    for entry in entries:
        fold.add(entry)
    return fold.series(now)
