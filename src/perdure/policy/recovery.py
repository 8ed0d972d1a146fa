"""Which rung of the ladder a failure gets: restart the world, or give up loudly.

Looks only at what the script achieved between failures. How the failure was found, and how a
world is restarted, are other rooms' business.

An elastic world outlives the failure of a member. So the failure counts for the member's slot:
`decide_slot` fills the slot again, later after each try, or leaves it empty. The job's own count
has such a failure only while the world achieves nothing after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from perdure.model.errors import UnfitError
from perdure.model.job import RestartConfig

_USERS_ERRORS = (
    "ModuleNotFoundError",
    "ImportError",
    "SyntaxError",
    "IndentationError",
    "ConfigError",
)
_UNFIT = UnfitError.__name__
_EXIT_USAGE = 2
_SIGINT = 2
_PAUSE_S_MAX = 60.0


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of the world, as the controller saw it."""

    at_s: float
    cause: str
    """In words, such as `signal 9 (SIGKILL)`; equal causes count as the same fault."""
    culprit: str
    generation: int
    step: int
    """Committed steps at that time; -1 where the script declares none."""
    progress_max: int
    """What was achieved so far: committed steps, or collectives of this generation."""
    error: str = ""
    """Last line of the exception, where there was one."""
    code: int = 0
    signal: int = 0
    torn: tuple[str, str] = ("", "")
    """Path of the torn checkpoint that the script failed to load, and what to do about it."""
    preempted: bool = False
    """The platform had said that it takes the machine away."""
    outlived: bool = False
    """The others of an elastic world went on without the culprit."""


@dataclass(slots=True)
class FailureLog:
    """The failures of a job or of a world: those that a decision can yet depend on, and counts."""

    kept: list[Failure] = field(default_factory=list)
    """Oldest first; the newest is always among them."""
    total: int = 0
    counted: int = 0
    """Of all: those that no platform had announced."""

    def add(self, failure: Failure, config: RestartConfig) -> None:
        """Take the newest; a month of them costs no more than a day.

        What counts is a row of the newest, those of the window, and how far the best had come.
        """
        self.total += 1
        self.counted += not failure.preempted
        known = _list_counted(failure, self.kept)
        since_s = failure.at_s - config.window_s
        recent = min(config.window_max, sum(one.at_s >= since_s for one in known))
        count = max(recent, config.same_fault_max, config.max_restarts + 1)
        best = max(known[:-count], key=lambda one: one.progress_max, default=None)
        self.kept = [*([] if best is None else [best]), *known[-count:], failure]

    def clear(self) -> None:
        """Forgive all of them."""
        self.kept, self.total, self.counted = [], 0, 0


class Decision(msgspec.Struct, frozen=True):
    """A rung and why it was taken."""

    rung: Literal["restart", "give up"]
    reason: str


def decide_recovery(failure: Failure, past: FailureLog, config: RestartConfig) -> Decision:
    """Return what to do about `failure`, given the failures before it.

    A failure counts against `max_restarts` only while nothing is achieved in between: a job that
    makes progress may be killed for ever, up to `window_max` within `window_s`. The same fault
    at the same step is counted apart, because a script that dies on the same batch makes progress
    up to that batch every time. What a platform takes away is nobody's fault, and counts for
    nothing.
    """
    if failure.preempted:
        return Decision("restart", f"{failure.culprit}: {failure.cause}; it counts as no failure")
    earlier = _list_counted(failure, past.kept)
    error = failure.error.split(":")[0].split(".")[-1]
    same = 1 + _count_same(failure, earlier)
    recent = 1 + sum(failure.at_s - one.at_s <= config.window_s for one in earlier)
    against = (
        (failure.signal == _SIGINT, f"{failure.culprit} was interrupted (SIGINT)"),
        (
            failure.progress_max <= 0 and error in _USERS_ERRORS,
            f"{failure.culprit}: {failure.error}: a restart would meet it again",
        ),
        (
            error == _UNFIT and not failure.outlived,
            f"{failure.culprit}: {failure.error.partition(': ')[2]}",
        ),
        (
            any(failure.torn) and any(one.torn[0] == failure.torn[0] for one in earlier[-1:]),
            f"{failure.culprit} cannot load a torn checkpoint: {failure.torn[1]}",
        ),
        (
            failure.progress_max <= 0 and failure.code == _EXIT_USAGE and not failure.error,
            f"{failure.culprit} ended with exit code 2 (usage) at its start",
        ),
        (
            same >= config.same_fault_max and failure.step >= 0,
            f"the same fault {same} times at step {failure.step}: {failure.culprit}, "
            f"{failure.cause}",
        ),
        (
            _count_fruitless(failure, earlier) > config.max_restarts,
            f"{failure.culprit}: {failure.cause}; {config.max_restarts} restarts in a row "
            "without progress are used up",
        ),
        (
            recent > config.window_max,
            f"{recent} failures within {config.window_s:g} s: {failure.cause}",
        ),
    )
    for holds, why in against:
        if holds:
            return Decision("give up", why)
    return Decision("restart", f"{failure.culprit}: {failure.cause}; restart {past.counted + 1}")


def _list_counted(failure: Failure, past: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the `past` failures that count beside `failure`."""
    return tuple(
        one
        for one in past
        if not one.preempted and not (one.outlived and one.progress_max < failure.progress_max)
    )


def _count_same(failure: Failure, earlier: tuple[Failure, ...]) -> int:
    """Return how many failures directly before this one had its cause, culprit and step.

    SIGKILL and SIGSTOP come from outside, so they are never the script's own fault.
    """
    if "SIGKILL" in failure.cause or "stopped" in failure.cause:
        return 0
    count = 0
    for one in reversed(earlier):
        if (one.cause, one.culprit, one.step) != (failure.cause, failure.culprit, failure.step):
            break
        count += 1
    return count


def _count_fruitless(failure: Failure, earlier: tuple[Failure, ...]) -> int:
    """Return how many failures in a row, this one included, came without progress before them."""
    best, row = 0, 0
    for one in (*earlier, failure):
        row = 1 if one.progress_max > best else row + 1
        best = max(best, one.progress_max)
    return row


class SlotEnd(msgspec.Struct, frozen=True):
    """The end of one process of a slot in an elastic world."""

    at_s: float
    cause: str
    trained: bool
    """It had committed a step."""


class SlotDecision(msgspec.Struct, frozen=True):
    """When the next process of a slot is started."""

    pause_s: float = 0.0
    empty: str = ""
    """Why the slot stays empty; empty if it is filled again."""


def decide_slot(ends: Sequence[SlotEnd], config: RestartConfig) -> SlotDecision:
    """Return what follows the newest of a slot's `ends`.

    The first try after a process that trained has no pause.
    """
    newest, row, same = ends[-1], 0, 0
    for end in reversed(ends):
        if end.trained:
            break
        row += 1
        same += same == row - 1 and end.cause == newest.cause and "SIGKILL" not in end.cause
    if same >= config.same_fault_max or row > config.max_restarts:
        why = f"{row} process{'es' if row > 1 else ''} in a row ended before a step was committed"
        return SlotDecision(empty=f"{why}: {newest.cause}")
    recent = sum(newest.at_s - end.at_s <= config.window_s for end in ends)
    if recent > config.window_max:
        why = f"{recent} processes ended within {config.window_s:g} s"
        return SlotDecision(empty=f"{why}: {newest.cause}")
    return SlotDecision(pause_s=min(2.0 ** (row - 2), _PAUSE_S_MAX) if row > 1 else 0.0)


def trim_ends(ends: Sequence[SlotEnd], config: RestartConfig) -> list[SlotEnd]:
    """Return those of a slot's `ends` that a later decision can depend on."""
    newest = ends[-1]
    if not newest.trained:
        return list(ends)
    return [end for end in ends if newest.at_s - end.at_s <= config.window_s]
