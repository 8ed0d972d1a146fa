"""Checkpoints: how often to save, how much room they will need, and what may go first.

The interval that loses least follows from the cost of a save and from failures that come at random
(exponentially). Of room, bytes and inodes are two limits, and the second is the one that is not
looked at. Large periodic checkpoints go first; the best and the newest stay, and so does everything
that is none.
"""

import math
from collections.abc import Sequence

import msgspec

from perdure.model.events import Grade
from perdure.model.job import CheckpointConfig


def young(cost_s: float, mtbf_s: float) -> float:
    """Return Young's first-order optimum sqrt(2 C M), seconds of training between saves.

    Source: J. W. Young, Communications of the ACM 17(9), 1974.

    >>> round(young(30.0, 10800.0))
    805
    """
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order optimum, seconds of training between saves.

    It corrects Young's where a save is not short against the time between failures, and is the
    latter itself once a save costs twice that.
    Source: J. T. Daly, Future Generation Computer Systems 22(3), 2006, equation 37.

    >>> round(daly(30.0, 10800.0))
    785
    """
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return young(cost_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


RESERVE_BYTES = 1 << 30
"""For the journal, logs, and others on the disk."""
RESERVE_INODES = 2_000


class FreeSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The space that is free where checkpoints land."""

    bytes: int
    inodes: int
    """-1 where the file system has no fixed number."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, as the newest one or an estimate says."""

    bytes: int
    files: int


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the checkpoints that will be kept find room."""

    grade: Grade
    more: int
    """How many more checkpoints fit."""
    needed: int
    """How many more there will be at once before retention removes any."""
    reason: str


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A finished checkpoint on the disk."""

    step: int
    bytes: int
    files: int
    best: bool = False
    whole: bool = True
    """Its manifest's roster is there in full."""


def count_kept(config: CheckpointConfig) -> int:
    """Return how many checkpoints there are at once, at least: the kept ones and one in writing.

    Those of `keep_every_steps` grow without bound and are not in it.
    """
    return config.keep_last + 1 + bool(config.keep_best)


def plan_budget(room: FreeSpace, load: Load, config: CheckpointConfig, held: int = 0) -> Budget:
    """Return whether the checkpoints to come fit beside the `held` ones that are there."""
    free = max(0, room.bytes - RESERVE_BYTES)
    more = free // load.bytes if load.bytes else 1 << 30
    limit = "bytes"
    if room.inodes >= 0 and load.files:
        by_inodes = max(0, room.inodes - RESERVE_INODES) // load.files
        if by_inodes < more:
            more, limit = by_inodes, "inodes"
    needed = max(1, count_kept(config) - held)
    size = f"{load.bytes / 1e9:.2f} GB in {load.files} files each"
    text = f"{more} more checkpoints fit ({size}; {limit} are the limit), {needed} are needed"
    if config.keep_every_steps:
        text += f", and one for ever every {config.keep_every_steps} steps"
    grade: Grade = "short" if more < 1 else "low" if more < needed else "ok"
    return Budget(grade=grade, more=more, needed=needed, reason=text)


def plan_pruning(stored: Sequence[Stored], free: int, wanted: int) -> tuple[list[Stored], str]:
    """Return what to remove so that `wanted` bytes are free, and why no more than that.

    Damaged ones go first, since they can be used for nothing, then whole ones from the oldest on.
    The newest whole one and the best one always stay.
    """
    whole = [one for one in stored if one.whole]
    newest = max((one.step for one in whole), default=-1)
    spare = [one for one in stored if not (one.best or (one.whole and one.step == newest))]
    spare.sort(key=lambda one: (one.whole, one.step))
    chosen: list[Stored] = []
    for one in spare:
        if free >= wanted:
            break
        chosen.append(one)
        free += one.bytes
    short = max(0, wanted - free)
    why = f"{short / 1e9:.2f} GB are still missing: what is left is the newest and the best"
    return chosen, why if short else ""
