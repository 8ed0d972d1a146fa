"""Which entries of a journal `perdure events` shows."""

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from difflib import get_close_matches
from typing import get_args

import msgspec

from perdure.model.errors import ConfigError
from perdure.model.events import AnyEvent, Decision, JournalEntry

BULK = frozenset(
    {
        "BoundaryAnswered",
        "BoundaryReached",
        "LinksNoted",
        "MachineReported",
        "ProgressNoted",
        "RanksAgreed",
        "RoomNoted",
        "TimerFired",
    }
)
"""Kinds that say how far something is, again and again; shown with --all, --kind and --json."""
KINDS = tuple(sorted(type_.__name__ for type_ in get_args(AnyEvent)))
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """What a person wants to see of a journal."""

    kinds: frozenset[str] = frozenset()
    """Only these; empty: all but `left_out`."""
    left_out: frozenset[str] = frozenset()
    decisions: bool = False
    """Only what was decided, whatever its kind."""
    since_s: float = 0.0
    """Only what is later: seconds of the wall clock, by which job time began."""

    def select(
        self, entries: Iterable[JournalEntry], passed: Counter[str]
    ) -> Iterator[JournalEntry]:
        """Yield those that are wanted; count in `passed` the kinds that are left out."""
        for entry in entries:
            kind = type(entry.body).__name__
            if entry.at_s < self.since_s:
                continue
            if self.decisions:
                if isinstance(entry.body, Decision):
                    yield entry
            elif self.kinds and kind not in self.kinds:
                continue
            elif kind in self.left_out:
                passed[kind] += 1
            else:
                yield entry


def read_kinds(names: Iterable[str]) -> frozenset[str]:
    """Return kinds of entries by their names, in any case and with any ending of `s`.

    Raises:
        ConfigError: there is no such kind; the hint names similar ones.
    """
    found, known = set(), {kind.lower(): kind for kind in (*KINDS, "Decision")}
    for name in names:
        kind = known.get(name.lower())
        if kind is None:
            near = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
            hint = ", ".join(known[one] for one in near) or "`perdure events JOB` shows kinds"
            raise ConfigError(f"--kind {name}: no kind of entry", hint=hint)
        found.add(kind)
    return frozenset(found)


def read_moment(text: str, now_s: float | None = None) -> float:
    """Return a moment of the wall clock: `10m` ago, `14:05`, or `2026-11-27 14:05:10`.

    Raises:
        ConfigError: it is none of these.
    """
    now_s = time.time() if now_s is None else now_s
    if ago := re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])", text):
        return now_s - float(ago[1]) * UNITS_S[ago[2]]
    try:
        if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
            hour, _, rest = text.partition(":")
            text = f"{datetime.fromtimestamp(now_s):%Y-%m-%d} {hour:0>2}:{rest}"
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        hint = "such as 10m, 2h, 14:05 or '2026-11-27 14:05'"
        raise ConfigError(f"--since {text}: not a time", hint=hint) from None
