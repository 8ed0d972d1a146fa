"""The report as one HTML file: everything is inside it, so that it can be mailed and kept."""

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from perdure.dash.sections import Picture, make_ink_style, render, render_section
from perdure.model.report import Report, Snapshot
from perdure.telemetry.links import DelayMatrix
from perdure.telemetry.series import Series

_SECTIONS = (
    ("Where the time went", "ledger"),
    ("Curves", "curves"),
    ("Ranks over time", "ranktime"),
    ("Incidents", "incidents"),
    ("Remarks", "notes"),
    ("Journal", "journal"),
    ("Checkpoints not used", "skipped"),
    ("Verdicts and their evidence", "verdicts"),
    ("Links between ranks", "links"),
    ("Checkpoints", "checkpoints"),
)


class Document(NamedTuple):
    """What is shown of a result: as a file of its own, or by `perdure dash`."""

    title: str
    told: tuple[str, ...]
    """What is to be said first, a paragraph each."""
    sections: tuple[tuple[str, str], ...]
    """(title, HTML); an empty one is left out."""

    def render_file(self) -> str:
        """Return it as one HTML file."""
        head = render("told_head.html", title=self.title, told=self.told)
        return render_document(self.title, head, self.sections)


def render_html_table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    numbers: Iterable[int] = (),
    told: Iterable[str] = (),
) -> str:
    """Return a table as HTML, of which the columns `numbers` lean to the right; none without rows.

    `told` is a sentence below each row, where there are any.
    """
    filled = [[str(cell) for cell in row] for row in rows]
    below = [*told] or [""] * len(filled)
    if not filled:
        return ""
    return render(
        "sections/table.html",
        head=head,
        rows=list(zip(filled, below, strict=True)),
        numbers=frozenset(numbers),
    )


def render_html_paragraphs(texts: Iterable[str]) -> str:
    """Return texts as HTML, a paragraph each."""
    return render("sections/paragraphs.html", texts=[text for text in texts if text])


def render_html(
    report: Report,
    snapshot: Snapshot | None,
    series: Series,
    matrix: DelayMatrix | None = None,
    own: str = "",
) -> str:
    """Return the whole page."""
    picture = Picture(report, snapshot, series, matrix, own=own)
    sections = ((title, render_section(name, picture)) for title, name in _SECTIONS)
    head = render("head.html", report=report, snapshot=snapshot)
    return render_document(report.job, head, sections)


def render_document(title: str, head: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return a page of perdure's with everything inside it; an empty section is left out.

    `head` and the sections' contents are HTML.
    """
    from markupsafe import Markup

    return render(
        "document.html",
        title=title,
        head=Markup(head),
        sections=[(name, Markup(content)) for name, content in sections],
        style=Markup(read_style()),
    )


@cache
def read_style() -> str:
    """Return the style of all pages."""
    style = files("perdure.dash").joinpath("static/style.css").read_text()
    return style + make_ink_style()
