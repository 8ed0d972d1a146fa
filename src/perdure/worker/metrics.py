"""`run.log`: values of rank 0, sent in batches so that a fast loop does not flood the journal.

What is logged is bounded here, where it is made: in bytes a batch, in names, and by being numbers.
Whatever else a script logs costs it a line on standard error, and never its life.
"""

import os
import time
import traceback
from collections.abc import Callable, Mapping

from perdure.model.events import AnyEvent, MetricsLogged
from perdure.model.input.plain import make_plain
from perdure.worker.system.stderr import say

INTERVAL_S = 0.5
BATCH_BYTES_MAX = 48_000
"""About, of a batch: it passes through any server, with what is put around it."""
NAMES_MAX = 512
NAME_MAX = 200
"""Characters of a name."""
_VALUE_BYTES = 34
_ROW_BYTES = 26
_COMPLAINTS_MAX = 10
_LINE_MAX = 400


class MetricsBuffer:
    """Rows not yet sent: (step, values)."""

    def __init__(self, generation: int, emit: Callable[[AnyEvent], object]) -> None:
        """Send rows of `generation` through `emit`."""
        self._generation = generation
        self._emit = emit
        self._pid = os.getpid()
        self._rows: dict[int, dict[str, float]] = {}
        self._bytes = self._dropped = 0
        self._names: dict[str, str] = {}
        """What a script calls a metric, and what it is called here."""
        self._complaints = 0
        self._sent_at = 0.0
        self.last: dict[str, float] = {}
        """The newest value of each metric."""

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Keep `values` of `step`, and send if the last batch is long enough ago."""
        row = self._rows.setdefault(step, {})
        for name, value in values.items():
            known = self._register_name(str.__str__(name))  # Not what a subclass takes itself for.
            number = None if known is None else self._read(known, value)
            if known is None or number is None:
                self._dropped += 1
                continue
            if known not in row:
                self._bytes += _count_bytes(known) + (0 if row else _ROW_BYTES)
            row[known] = self.last[known] = number
        while self._bytes > BATCH_BYTES_MAX:
            self._thin()
        if time.monotonic() - self._sent_at >= INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Send what there is."""
        rows = tuple((step, values) for step, values in self._rows.items() if values)
        if not (rows or self._dropped) or os.getpid() != self._pid:
            return
        dropped, self._dropped = self._dropped, 0
        self._rows, self._bytes = {}, 0
        self._sent_at = time.monotonic()
        self._emit(MetricsLogged(generation=self._generation, rows=rows, dropped=dropped))

    def _register_name(self, name: str) -> str | None:
        if name not in self._names:
            if len(self._names) >= NAMES_MAX:
                if self._may_complain():
                    self._complain(f"more than {NAMES_MAX} names: {make_plain(name)} is left out")
                return None
            self._names[name] = make_plain(name, NAME_MAX)
        return self._names[name]

    def _read(self, name: str, value: object) -> float | None:
        """Return `value` as a float; None where it is no number, whatever it does instead."""
        try:
            return float(value)  # type: ignore[arg-type]
        except Exception as error:
            fault = error
        if self._may_complain():
            why = "".join(traceback.format_exception_only(fault)).strip()
            self._complain(f"{make_plain(name)} is no number but {_name_type(value)}: {why}")
        return None

    def _may_complain(self) -> bool:
        """Return whether anything more is said: to word it costs more than the value does."""
        return self._complaints < _COMPLAINTS_MAX

    def _complain(self, what: str) -> None:
        self._complaints += 1
        more = "" if self._may_complain() else ", and nothing more is said of it"
        say(f"run.log: {make_plain(what, _LINE_MAX)}{more}")

    def _thin(self) -> None:
        """Leave out every other row; of a single one, every other value."""
        steps = list(self._rows)
        if len(steps) > 1:
            for step in steps[-2::-2]:  # The newest stays.
                self._dropped += len(self._rows.pop(step))
        else:
            row = self._rows[steps[0]]
            for name in list(row)[1::2]:
                del row[name]
                self._dropped += 1
        self._bytes = sum(_ROW_BYTES + sum(map(_count_bytes, row)) for row in self._rows.values())


def _name_type(value: object) -> str:
    """Return what `value` is, which its class may not want to say."""
    return str(type.__dict__["__name__"].__get__(type(value)))


def _count_bytes(name: str) -> int:
    """Return at least how many bytes a value called `name` takes as JSON."""
    return len(name.encode()) + name.count('"') + name.count("\\") + _VALUE_BYTES
