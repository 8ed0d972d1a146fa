"""`run.log`: values of rank 0, sent in batches so that a fast loop does not flood the journal."""

import os
import time
from collections.abc import Callable

from perdure.model.events import AnyEvent, MetricsLogged

INTERVAL_S = 0.5


class MetricsBuffer:
    """Rows not yet sent: (step, values)."""

    def __init__(self, generation: int, emit: Callable[[AnyEvent], object]) -> None:
        """Send rows of `generation` through `emit`."""
        self._generation = generation
        self._emit = emit
        self._pid = os.getpid()
        self._rows: dict[int, dict[str, float]] = {}
        self._sent_at = 0.0
        self.last: dict[str, float] = {}
        """The newest value of each metric."""

    def add(self, step: int, values: dict[str, float]) -> None:
        """Keep `values` of `step`, and send if the last batch is long enough ago."""
        self._rows.setdefault(step, {}).update(values)
        self.last.update(values)
        if time.monotonic() - self._sent_at >= INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Send what there is."""
        if not self._rows or os.getpid() != self._pid:
            return
        rows, self._rows = tuple(self._rows.items()), {}
        self._sent_at = time.monotonic()
        self._emit(MetricsLogged(generation=self._generation, rows=rows))
