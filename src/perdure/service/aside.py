"""Counts what was set aside, and says so in the journal at a bounded rate.

A peer that sends nonsense for a month costs the journal one entry a minute, whatever it sends.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from perdure.model.events import MessagesSetAside
from perdure.model.plain import make_plain

log = logging.getLogger("perdure.aside")

EVERY_S = 60.0
"""Between two entries about the same door and source; the first comes at once."""
TOLD_APART_MAX = 64
"""Sources told apart; what comes from more of them is counted together."""
_OTHERS = "others"


@dataclass(slots=True)
class _Count:
    count: int = 0
    """Not yet said."""
    reason: str = ""
    example: str = ""
    said_at_s: float = -EVERY_S


class Asides:
    """Counts what one process has set aside."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Begin with nothing; `now` is job time."""
        self.now = now
        self._counts: dict[tuple[str, str], _Count] = {}
        self.total = 0
        """Messages set aside so far."""

    def note(self, door: str, source: str, reason: object, data: str | bytes = b"") -> None:
        """Count one message from `source`; the first is logged, with the beginning of `data`."""
        self.total += 1
        key = (door, make_plain(source, 64))
        if key not in self._counts and len(self._counts) >= TOLD_APART_MAX:
            key = (door, _OTHERS)
        entry = self._counts.setdefault(key, _Count())
        entry.count += 1
        if entry.count == 1:
            entry.reason, entry.example = make_plain(str(reason)), make_plain(data)
            if self.now() - entry.said_at_s >= EVERY_S:
                log.error("set aside (%s of %s): %s", *key, entry.reason)

    def take(self, *, all: bool = False) -> list[MessagesSetAside]:
        """Return what is to be journaled now; with `all`, what would be due later too."""
        now = self.now()
        events = []
        for (door, source), entry in self._counts.items():
            if entry.count and (all or now - entry.said_at_s >= EVERY_S):
                events.append(
                    MessagesSetAside(
                        at_s=now,
                        door=door,
                        source=source,
                        count=entry.count,
                        reason=entry.reason,
                        example=entry.example,
                    )
                )
                entry.count, entry.said_at_s = 0, now
        return events
