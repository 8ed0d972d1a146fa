"""Curves and marks for the screens, from the journal."""

import msgspec

from perdure.model.events import (
    CheckpointFailed,
    CheckpointSaved,
    JournalEntry,
    ProgressNoted,
    QuorumFormed,
    SettingsChanged,
)
from perdure.model.steering import Change
from perdure.model.verdicts import Verdict
from perdure.telemetry.accounting.ledger import LedgerFold
from perdure.telemetry.accounting.segments import Segment
from perdure.telemetry.curves import Curves
from perdure.telemetry.verdicts import VerdictFold


class Series(msgspec.Struct, frozen=True):
    """All the series that a report draws."""

    start_s: float = 0.0
    metrics: dict[str, tuple[tuple[int, float], ...]] = {}
    """Metric -> (step, value), by step: the newest singly, of older ones the mean of some steps."""
    progress: tuple[tuple[float, int], ...] = ()
    """(job time, steps committed by every rank); of replica groups, as a quorum was formed."""
    segments: tuple[Segment, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    checkpoints: tuple[CheckpointSaved, ...] = ()
    checkpoints_failed: tuple[CheckpointFailed, ...] = ()
    changes: tuple[Change, ...] = ()
    """Of settings, the oldest first."""


class SeriesFold:
    """Folds a journal into a `Series`."""

    def __init__(self, ledger: LedgerFold | None = None) -> None:
        """Begin before the first entry, beside a `ledger` that is folded already."""
        self.ledger, self._own = ledger or LedgerFold(), ledger is None
        self.verdicts = VerdictFold()
        self._progress: list[tuple[float, int]] = []
        self._saved: list[CheckpointSaved] = []
        self._failed: list[CheckpointFailed] = []
        self._changes: list[Change] = []

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry."""
        if self._own:
            self.ledger.add(entry)
        self.verdicts.add(entry)
        match entry.body:
            case ProgressNoted() as event if event.step >= 0:
                self._progress.append((event.at_s, event.step))
            case QuorumFormed() as event if event.step >= 0:
                self._progress.append((event.at_s, event.step))
            case CheckpointSaved() as event:
                self._saved.append(event)
            case CheckpointFailed() as event:
                self._failed.append(event)
            case SettingsChanged() as event:
                self._changes.append(event.change)

    def series(self, segments: tuple[Segment, ...], curves: Curves | None = None) -> Series:
        """Return what the entries so far show, and `curves`, what `run.log` has told.

        `segments` are the ledger's, of each rank's time; none where nobody draws them.
        """
        return Series(
            start_s=self.ledger.history.start_s,
            metrics={
                name: tuple((int(bucket.step), bucket.mean) for bucket in buckets)
                for name, buckets in (curves or Curves()).list_buckets().items()
            },
            progress=tuple(self._progress),
            segments=segments,
            verdicts=self.verdicts.verdicts(),
            checkpoints=tuple(self._saved),
            checkpoints_failed=tuple(self._failed),
            changes=tuple(self._changes),
        )
