"""Results that were kept, as pages list and show them: of traces, plays, plans and drills."""

import logging
import time
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from perdure.cli.page.runs import identify
from perdure.cli.plugins import list_plugins
from perdure.dash.page import Document
from perdure.drill.card import KeptDrill
from perdure.drill.screens import make_card_document, render_counts
from perdure.model.codec import make_encodable
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.input.plain import shorten_line
from perdure.service.results import SIZE_MAX, Kept, list_results, locate_results, read_result

OTHERS_MAX = 20
"""Files that are no results, and are named."""
PAGE_MAX = SIZE_MAX
"""Characters of a result's page: one that says more is nobody's reading.

A file with more bytes is refused before it is read; a page is only made of those below.
"""
_TITLE_MAX, _SAID_MAX, _TOLD_MAX = 120, 300, 4000


class Kind(NamedTuple):
    """How one kind of results is shown."""

    heading: str
    type_: type[Kept]
    tell: Callable[[Any], tuple[str, str, str]]
    """Returns the title of a result, its figures, and its state as in `ResultRow`."""
    render: Callable[[Any], Document]


def tell_card(kept: KeptDrill) -> tuple[str, str, str]:
    """Return what a card is of, what it has shown, and how it went."""
    card = kept.card
    said = "; ".join(text for text in (render_counts(card), card.reason) if text)
    return card.job, said, "passed" if card.passed else "failed"


DRILL = Kind("Drills", KeptDrill, tell_card, lambda kept: make_card_document(kept.card))


class ResultRow(NamedTuple):
    """One result in the list."""

    name: str
    title: str
    said: str
    """What it has shown, its ratios first."""
    state: str
    """passed, failed, interrupted or nothing."""
    when: str
    """When it was finished, by this machine's clock."""


class Listing(NamedTuple):
    """All results, and what lies among them that is none."""

    rows: dict[str, list[ResultRow]]
    """By kind, the newest first."""
    faults: list[tuple[str, str]]
    """(file, why it cannot be shown); the first `OTHERS_MAX`."""
    more: int
    """So many others."""
    surplus: int
    """So many results are too old to be shown, and about to be removed."""


class Results:
    """The results below a state directory; a file is read again when it is another."""

    def __init__(self, home: str) -> None:
        """Begin with none."""
        self.folder = locate_results(home)
        lab = list_plugins().get("results")
        self.kinds = {"drill": DRILL, **(lab.load() if lab else {})}
        self._any: Any = reduce(or_, (kind.type_ for kind in self.kinds.values()))
        self._known: dict[str, tuple[tuple[int, int], ResultRow | str]] = {}

    def look(self) -> Listing:
        """Return what there is.

        Raises:
            PlatformError: the folder cannot be read.
        """
        try:
            found = list_results(self.folder)
        except OSError as error:
            raise PlatformError(f"cannot read {self.folder}: {error.strerror}") from None
        rows: dict[str, list[ResultRow]] = {kind: [] for kind in self.kinds}
        faults = [(make_encodable(name), "not one of perdure's") for name in found.others]
        known = {}
        for name in (*found.names, *found.unlike):
            identity = identify(str(self.folder / f"{name}.json"))
            seen = self._known.get(name)
            if seen is None or seen[0] != identity:
                seen = (identity, self._summarise(name))
            known[name] = seen
            if isinstance(seen[1], str):
                faults.append((f"{name}.json", seen[1]))
            else:
                rows[name.partition("-")[0]].append(seen[1])
        self._known = known
        more = max(0, len(faults) - OTHERS_MAX)
        shown = {kind: those for kind, those in rows.items() if those}
        return Listing(shown, faults[:OTHERS_MAX], more, len(found.surplus))

    def open(self, name: str) -> tuple[ResultRow, Document]:
        """Return a result.

        Raises:
            FileNotFoundError: there is none of this name.
            ProtocolError: it cannot be shown.
        """
        try:
            kind, result = self._read(name)
            row, document = _make_row(kind, name, result), kind.render(result)
            size = sum(len(html) for _, html in document.sections)
            if size > PAGE_MAX:
                raise ProtocolError(f"its page would have {size:,} characters")
        except FileNotFoundError:
            raise
        except Exception as error:
            # Fields of the right types may tell of what cannot be, if nobody but a person made it.
            if not isinstance(error, ProtocolError):
                logging.getLogger(__name__).exception("result %s", name)
            raise ProtocolError(f"{name} cannot be shown: {_describe(error)}") from error
        told = tuple(shorten_line(text, _TOLD_MAX) for text in document.told)
        return row, Document(shorten_line(document.title, _TITLE_MAX), told, document.sections)

    def _summarise(self, name: str) -> ResultRow | str:
        """Return a result's line, or why it has none."""
        try:
            kind, result = self._read(name)
            return _make_row(kind, name, result)
        except FileNotFoundError:
            return "it was just removed"
        except Exception as error:
            return _describe(error)

    def _read(self, name: str) -> tuple[Kind, Kept]:
        kind = self.kinds.get(name.partition("-")[0])
        if kind is None:
            raise ProtocolError("its kind is unknown here; perdure-lab shows plans and traces")
        try:
            return kind, read_result(self.folder, name, self._any)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ProtocolError(f"it cannot be read: {error.strerror}") from None


def _describe(error: Exception) -> str:
    what = str(error) if isinstance(error, ProtocolError) else f"{type(error).__name__}: {error}"
    return shorten_line(make_encodable(what), _SAID_MAX)


def _make_row(kind: Kind, name: str, result: Kept) -> ResultRow:
    title, said, state = kind.tell(result)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(result.at_s))
    return ResultRow(
        name, shorten_line(title, _TITLE_MAX), shorten_line(said, _SAID_MAX), state, when
    )
