"""Finished, dead, stalled or running: told by what a job leaves on the disk, never by its words.

A job has finished when its journal says so. Without that, a supervisor that is gone means death,
and one that lives without a sign of progress for long enough means a stall. Signs of progress are
files that ranks write and the beats of their loops; the controller's own picture proves nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from perdure.model.events import JournalEntry, RankExited
from perdure.telemetry.vanished import find_end


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """When each kind of artifact last changed, in Unix time; 0 where there is none."""

    now_s: float
    alive: bool
    """Whether the job's lock is held."""
    outputs_s: float = 0.0
    checkpoints_s: float = 0.0
    loops_s: float = 0.0
    """The newest beat of a rank's loop."""


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a job."""

    state: Literal["finished", "dead", "stalled", "running"]
    reason: str
    newest_s: float = 0.0
    """Age of the newest sign of progress; 0 where there is none."""


def tell_fate(entries: Sequence[JournalEntry], signs: Signs, allowance_s: float) -> Fate:
    """Return what became of a job; one that gave no sign for `allowance_s` has stalled."""
    ended = find_end(entries)
    kinds = {
        "a checkpoint": signs.checkpoints_s,
        "output of a rank": signs.outputs_s,
        "a beat of a rank's loop": signs.loops_s,
    }
    newest = max(kinds, key=lambda name: kinds[name])
    age_s = max(0.0, signs.now_s - kinds[newest]) if kinds[newest] else 0.0
    if ended is not None:
        text = f"its journal ends with {ended.status}, exit code {ended.exit_code}"
        return Fate(state="finished", reason=text, newest_s=age_s)
    sign = f"the newest sign is {newest}, {age_s:.0f} s ago" if kinds[newest] else "no sign at all"
    if not signs.alive:
        text = f"nobody holds its lock, and its journal has no end of its own; {sign}"
        return Fate(state="dead", reason=text, newest_s=age_s)
    if kinds[newest] and age_s > allowance_s:
        text = f"it lives, and has shown nothing for {allowance_s:.0f} s: {sign}"
        return Fate(state="stalled", reason=text, newest_s=age_s)
    return Fate(state="running", reason=sign, newest_s=age_s)


def collect_last_words(entries: Iterable[JournalEntry]) -> list[str]:
    """Return what ranks that failed have left: errors, tracebacks, last lines."""
    words: list[str] = []
    for entry in entries:
        if isinstance(entry.body, RankExited) and entry.body.record.failed:
            record = entry.body.record
            words += [*record.last_output, *record.traceback.splitlines(), record.error]
    return [line for line in words if line]
