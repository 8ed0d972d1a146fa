"""Where a script that declares no steps began after a restart, told by what it printed.

Such a script keeps its own checkpoints, or none, and no part of perdure sees which. Most print how
far they are (`iter 100: loss 2.31`, `Epoch 3, step 40`, a bar `12/500`), so that the first such
line of a life, beside those of the life before, says whether it began where that one had begun, or
further on. Nothing is acted upon by it, and where the lines leave it open nothing is said.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from perdure.model.input.plain import show_controls

_MARK = re.compile(
    r"\b(?P<word>epoch|global[ _]?step|steps?|iter(?:ation)?s?|batch|update)\b[\s:=#'\"\[(]{0,4}"
    r"(?P<number>\d{1,12})\b(?!\.\d)|(?P<bar>\b\d{1,12})/\d{1,12}\b",
    re.IGNORECASE,
)
"""A counter with its name, or how far a bar has come."""
_LINE_MAX = 400
_SHOWN_MAX = 3


class Mark(NamedTuple):
    """How far a line says that a script is."""

    words: tuple[str, ...]
    """Names of its counters, in their order: only lines with the same ones are compared."""
    numbers: tuple[int, ...]
    said: str
    """The counters as they were printed, such as `epoch 1, step 40`."""


class Began(NamedTuple):
    """Where a life of a script began, beside the life before it."""

    where: Literal["again", "further"]
    """Where that one had begun, or further on."""
    first: str
    """What this life printed first, such as `iter 0`."""
    before: str
    """How far the life before had come."""

    def describe(self) -> str:
        """Return it in a sentence."""
        if self.where == "again":
            return f"the script began again from its start: `{self.first}` after `{self.before}`"
        return f"the script went on by itself: `{self.first}` after `{self.before}`"


def list_marks(lines: Sequence[str]) -> list[Mark]:
    """Return the marks in `lines`, in their order.

    >>> [mark.numbers for mark in list_marks(["lr 0.1", "epoch 1 step 40: loss 2", " 3/10 [00:01"])]
    [(1, 40), (3,)]
    """
    found = []
    for line in lines:
        text = line[:_LINE_MAX].strip()
        hits = list(_MARK.finditer(text))
        if hits:
            words = tuple((hit["word"] or "of").lower() for hit in hits)
            numbers = tuple(int(hit["number"] or hit["bar"]) for hit in hits)
            said = ", ".join(show_controls(hit[0]) for hit in hits[:_SHOWN_MAX])
            found.append(Mark(words, numbers, said))
    return found


def judge_restart(
    before_head: Sequence[str], before_tail: Sequence[str], after_head: Sequence[str]
) -> Began | None:
    """Return where a life began; None where its lines do not say it.

    `before_head` and `before_tail` are the first and the last lines of the life before on one
    rank, `after_head` the first ones of this life. The counters that are compared are those that
    the life before printed most often. It must have come further than it began: else nothing is
    lost, and nothing can be told.
    """
    heads, tails, again = (list_marks(lines) for lines in (before_head, before_tail, after_head))
    counted = Counter(mark.words for mark in [*heads, *tails])
    for words, _ in counted.most_common():
        old = [mark for mark in [*heads, *tails] if mark.words == words]
        new = [mark for mark in again if mark.words == words]
        furthest = max(old, key=lambda mark: mark.numbers)
        if not new or furthest.numbers <= old[0].numbers:
            continue
        where: Literal["again", "further"]
        where = "again" if new[0].numbers <= old[0].numbers else "further"
        return Began(where, new[0].said, furthest.said)
    return None
