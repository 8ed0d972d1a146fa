"""Results that were kept, as pages list and show them: of traces, plays, plans and drills."""

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, assert_never

from perdure_lab.cli.plans import make_plan_document
from perdure.cli.page.runs import identify
from perdure.dash.page import Document
from perdure.drill.screens import make_card_document, render_counts
from perdure_lab.report import DriveResult, ReplayResult
from perdure_lab.results import (
    SIZE_MAX,
    KeptDrill,
    KeptDrive,
    KeptPlan,
    KeptReplay,
    KeptSimulation,
    KeptTrace,
    Result,
    list_results,
    locate_results,
    read_result,
)
from perdure_lab.screens import (
    make_replay_document,
    make_simulation_document,
    make_trace_document,
    render_time,
)
from perdure.model.codec import make_encodable
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.plain import shorten_line

KINDS = {
    "drill": "Drills",
    "drive": "Traces played against a job",
    "replay": "Replays",
    "simulation": "Simulations",
    "plan": "Plans",
    "trace": "Traces",
}
"""What each kind of result is headed by, in the order of the page."""
OTHERS_MAX = 20
"""Files that are no results, and are named."""
PAGE_MAX = SIZE_MAX
"""Characters of a result's page: one that says more is nobody's reading.

A file with more bytes is refused before it is read; a page is only made of those below.
"""
_TITLE_MAX, _SAID_MAX, _TOLD_MAX = 120, 300, 4000


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
        rows: dict[str, list[ResultRow]] = {kind: [] for kind in KINDS}
        faults = [(make_encodable(name), "not one of perdure's") for name in found.others]
        known = {}
        for name in (*found.names, *found.unlike):
            identity = identify(str(self.folder / f"{name}.json"))
            seen = self._known.get(name)
            if seen is None or seen[0] != identity:
                seen = (identity, _summarise(self.folder, name))
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
            result = _read(self.folder, name)
            row, document = _make_row(name, result), make_document(result)
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


def make_document(result: Result) -> Document:
    """Return what is shown of a result."""
    match result:
        case KeptTrace():
            return make_trace_document(result.figures, result.counts)
        case KeptSimulation():
            return make_simulation_document(result.comparison, result.counts, result.rates)
        case KeptReplay() | KeptDrive():
            return make_replay_document(result.result)
        case KeptPlan():
            return make_plan_document(result)
        case KeptDrill():
            return make_card_document(result.card)
        case _:
            assert_never(result)


def _summarise(folder: Path, name: str) -> ResultRow | str:
    """Return a result's line, or why it has none."""
    try:
        return _make_row(name, _read(folder, name))
    except FileNotFoundError:
        return "it was just removed"
    except Exception as error:
        return _describe(error)


def _read(folder: Path, name: str) -> Result:
    try:
        return read_result(folder, name)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ProtocolError(f"it cannot be read: {error.strerror}") from None


def _describe(error: Exception) -> str:
    what = str(error) if isinstance(error, ProtocolError) else f"{type(error).__name__}: {error}"
    return shorten_line(make_encodable(what), _SAID_MAX)


def _make_row(name: str, result: Result) -> ResultRow:
    title, said, state = _tell(result)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(result.at_s))
    return ResultRow(
        name, shorten_line(title, _TITLE_MAX), shorten_line(said, _SAID_MAX), state, when
    )


def _tell(result: Result) -> tuple[str, str, str]:
    """Return what a result is of, what it has shown, and how it went."""
    match result:
        case KeptTrace(figures=f):
            said = (
                f"{f.availability:.1%} of the most; {f.nodes_min} to {f.nodes_max} nodes, "
                f"{render_time(f.duration_s)}, {f.changes} changes"
            )
            return f.name, said, ""
        case KeptSimulation(comparison=c):
            best = sorted(c.policies, key=lambda row: -row.fraction_of_u2)
            return c.trace, _list_shares((r.policy, r.fraction_of_u2) for r in best[:3]), ""
        case KeptReplay(result=played) | KeptDrive(result=played):
            return _tell_play(played)
        case KeptPlan(plan=plan):
            title = f"{result.profile}, {result.devices} devices"
            if not plan.options:
                return title, "no world fits", "failed"
            best_one = plan.options[0]
            return title, f"{best_one.world.shape}: {best_one.samples_per_s:.1f} samples/s", ""
        case KeptDrill(card=card):
            said = "; ".join(text for text in (render_counts(card), card.reason) if text)
            return card.job, said, "passed" if card.passed else "failed"
        case _:
            assert_never(result)


def _tell_play(r: ReplayResult) -> tuple[str, str, str]:
    shares = _list_shares((row.system, row.fraction_of_u2) for row in r.systems)
    said = f"{shares}; {render_time(r.duration_s)} played"
    state = "" if r.complete else "interrupted"
    if not isinstance(r, DriveResult):
        return r.trace, said, state
    why = r.trouble or r.ended
    return f"{r.trace}, {r.job}", f"{said}; {why}" if why else said, "failed" if why else state


def _list_shares(shares: Iterable[tuple[str, float]]) -> str:
    told = ", ".join(f"{name} {share:.4f}" for name, share in shares)
    return f"{told} of U2" if told else "nothing was played"
