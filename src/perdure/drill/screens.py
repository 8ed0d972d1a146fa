"""The card of a drill as text, and as a page."""

from textwrap import wrap

from perdure.dash.page import Document, render_html_paragraphs, render_html_table
from perdure.dash.shape import align
from perdure.drill.card import Card, FaultRow
from perdure.drill.planning import FAULTS

_HEAD = ("fault", "verdict", "at step", "found after", "culprit", "back after", "redone", "losses")
_NUMBERS = (2, 3, 5, 6)
_INDENT = 4


def render_card(card: Card, width: int) -> str:
    """Return the card as a table, and below it what is to be said of each fault."""
    rows = [_HEAD, *(list_cells(row) for row in card.rows)]
    head = [line for text in render_headline(card).split("\n") for line in _wrap(text, width)]
    lines = [*head, "", *align(rows, _NUMBERS), ""]
    for row in card.rows:
        lines += _wrap(f"{row.fault}: {explain(row)}", width)
    for title, texts in (("otherwise than in your job", card.changed), ("also seen", card.notes)):
        if texts:
            lines += ["", f"{title}:"]
            lines += [line for text in texts for line in _wrap(f"  {text}", width)]
    return "\n".join(lines)


def render_headline(card: Card) -> str:
    """Return the card in a sentence."""
    told = render_counts(card)
    verdict = "passed" if card.passed else "FAILED"
    spent = f"{card.drilled_s:.0f} s of {card.budget_s:.0f}"
    if card.undisturbed_s:
        spent += f", and {card.undisturbed_s:.0f} s undisturbed"
    nodes = f" on {card.nodes} emulated nodes" if card.nodes > 1 else ""
    nodes = f" on {card.place}" if card.place else nodes
    text = (
        f"{card.job}: {verdict} ({told}); {card.ranks} rank{'s' * (card.ranks != 1)}{nodes}, "
        f"{'' if card.declares_steps else 'no steps declared, '}seed {card.seed}, {spent}"
    )
    return f"{text}\n{card.reason}" if card.reason else text


def render_counts(card: Card) -> str:
    """Return how many faults were passed, failed and not tried."""
    counts = {word: sum(row.verdict == word for row in card.rows) for word in
              ("passed", "failed", "not tried")}  # fmt: skip
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def list_cells(row: FaultRow) -> tuple[str, ...]:
    """Return the cells of a fault's line, by the columns of the table."""
    culprit = {True: "right", False: "WRONG", None: "-"}[row.culprit_right]
    if row.verdict == "not tried":
        return (row.fault, row.verdict, *["-"] * 6)
    back = _seconds(row.back_s)
    if row.back_s is None and row.verdict == "passed":
        back = "no stop"
    return (
        row.fault,
        row.verdict if row.verdict == "passed" else row.verdict.upper(),
        str(row.step) if row.step >= 0 else "-",
        _seconds(row.found_s),
        culprit,
        back,
        "unknown" if row.steps_redone is None else str(row.steps_redone),
        row.losses if row.losses != "differ" else "DIFFER",
    )


def explain(row: FaultRow) -> str:
    """Return what was done, what was found, and what else is to be said."""
    if row.verdict == "not tried":
        return f"{FAULTS.get(row.fault, '')}; not tried: {row.why}"
    found = f"found: {row.found_as}" if row.found_as else ""
    losses = f"losses {row.losses}: {row.losses_why}" if row.losses_why else ""
    return "; ".join(text for text in (row.what, found, row.why, losses) if text)


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f} s"


def _wrap(text: str, width: int) -> list[str]:
    return wrap(text, width, subsequent_indent=" " * _INDENT, drop_whitespace=True)


def make_card_document(card: Card) -> Document:
    """Return the card, with what is to be said of each fault below it."""
    cells, told = [list_cells(row) for row in card.rows], [explain(row) for row in card.rows]
    sections = (
        ("Faults", render_html_table(_HEAD, cells, _NUMBERS, told)),
        ("Otherwise than in your job", render_html_paragraphs(card.changed)),
        ("Also seen", render_html_paragraphs(card.notes)),
    )
    return Document(f"drill of {card.job}", tuple(render_headline(card).split("\n")), sections)
