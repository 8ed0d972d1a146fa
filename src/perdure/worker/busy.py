"""Busy phases: a script says that it will be silent for a while, and for how long at most.

    with run.busy("evaluate", at_most_s=600):
        evaluate(model)

An evaluation on rank 0 looks like a hang from outside: no step, no collective, and all others
wait for it. A declared phase is shown in the rank's ring, and until it ends, or `at_most_s` have
passed, neither the silence of the rank nor of those that wait for it is a verdict. What is
certain (a process that ended or is stopped, collectives that differ) is acted upon all the same.

Phases nest: the one that ends last is the one that counts. Other threads may declare them as
well; their silence and that of the rank are one. Without perdure nothing is done.
"""

import contextlib
import itertools
import math
import threading
import time
from types import TracebackType
from typing import Any

from perdure.model.errors import ConfigError
from perdure.worker.attach import Attachment, attach_ring
from perdure.worker.system.forking import free_in_child

FIRST_S = 3600.0
"""At most so long is the first evaluation, or save, of which nothing is known."""
LEAST_S = 600.0
LONGER = 10.0
"""Later ones are at most so many times as long as the longest so far, and `LEAST_S` at least."""
AT_MOST_S_MAX = 7 * 86400.0
"""A phase that may take longer is a loop, and hangs in it would never be found."""


_lock = free_in_child(threading.RLock())  # A signal's handler may come in the middle.
_numbers = itertools.count()
_open: dict[int, tuple[int, int, bytes]] = {}
"""The phases that this process is in: number -> (until, since, name)."""


class Busy:
    """A declared phase as a context manager; made by `declare_busy`."""

    def __init__(self, name: bytes, at_most_s: float) -> None:
        """Declare nothing before it is entered."""
        self._name, self._at_most_s = name, at_most_s
        self._entered: list[tuple[Attachment | None, int]] = []

    def __enter__(self) -> None:
        """Begin the phase; nothing happens where perdure does not watch this process."""
        attachment, number = attach_ring(), next(_numbers)
        self._entered.append((attachment, number))
        if attachment is None:
            return
        now = time.monotonic_ns()
        with _lock:
            if attachment.stages is not None:
                attachment.stages.suspend()
            _open[number] = (now + int(self._at_most_s * 1e9), now, self._name)
            _show(attachment)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it, however the body has ended."""
        attachment, number = self._entered.pop()
        if attachment is None:
            return
        with _lock:
            _open.pop(number, None)
            _show(attachment)
            if attachment.stages is not None:
                attachment.stages.resume()


def compute_allowance_s(longest_s: float) -> float:
    """Return how long a phase may take whose longest took `longest_s`; 0: none was seen."""
    return min(FIRST_S * 24, max(LEAST_S, LONGER * longest_s)) if longest_s else FIRST_S


def _show(attachment: Attachment) -> None:
    until, since, name = max(_open.values(), default=(0, 0, b""))
    attachment.ring.set_busy(name, since, until)


def declare_busy(name: str, *, at_most_s: float) -> Busy:
    """Return a context manager within which this process is busy with `name`.

    Raises:
        ConfigError: `name` is no text, or `at_most_s` no time between 0 and `AT_MOST_S_MAX`.
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(
            f"busy: the name of a phase is a word, not {_shorten(name)}",
            hint='with run.busy("evaluate", at_most_s=600): ...',
        )
    seconds = math.nan
    if not isinstance(at_most_s, bool | str | bytes):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            seconds = float(at_most_s)
    if not 0 < seconds <= AT_MOST_S_MAX:
        raise ConfigError(
            f"busy: at_most_s is a number of seconds above 0 and at most {AT_MOST_S_MAX:.0f}, "
            f"not {_shorten(at_most_s)}",
            hint="give the longest time that the phase may take in good health",
        )
    printable = "".join(c if c.isprintable() else "?" for c in name.strip()[:60])
    return Busy(printable.encode("utf-8", "replace"), seconds)


def _shorten(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
