"""What each rank's time went to, as a drawing: of very many, some side by side share a row."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from perdure.dash.svg import Bar, Mark, render_legend, render_timeline
from perdure.model.report import ACCOUNTS
from perdure.telemetry.accounting.segments import Segment

ROWS_MAX = 48
"""With more ranks, a row stands for several."""
COLUMNS = 160
"""Stretches of time of a row of several ranks, each in one colour."""
LOOKED_AT = 8
"""Ranks of a row, evenly spread, by which its colours are chosen."""


class Span(NamedTuple):
    """A stretch of the job's time, in seconds since its start."""

    begin_s: float
    end_s: float


def render_rank_time(
    segments: Iterable[Segment], ranks: int, start_s: float, span: Span, marks: Sequence[Mark] = ()
) -> str:
    """Return a legend and a row a rank over `span`, as HTML; empty where nothing is known.

    `start_s` is the job's first instant in its own time; `marks` lie in seconds since then.
    """
    segments = tuple(segments)
    each = max(1, -(-ranks // ROWS_MAX))
    members: dict[int, set[int]] = {}
    for s in segments if each == 1 else ():
        members.setdefault(s.rank, {s.rank}).add(s.rank if s.member is None else s.member)
    stride = max(1, each // LOOKED_AT)
    chosen = (s for s in segments if s.rank % each % stride == 0)
    bars = [
        bar
        for bar in _make_bars(chosen, start_s)
        if bar.begin_s < span.end_s and bar.end_s > span.begin_s
    ]
    if not bars or span.end_s <= span.begin_s:
        return ""
    names = [
        _name_row(first, members) if each == 1 else f"{first}-{min(first + each, ranks) - 1}"
        for first in range(0, ranks, each)
    ]
    if each > 1:
        bars = _merge(bars, each, span)
    used = {bar.account for bar in bars}
    note = (
        "Within a stretch of training, useful, lost, checkpoint and overhead are drawn as shares."
        if each == 1
        else f"A row is {each} ranks, in the colour of what most of their time went to"
        f"{f', by every {stride}th of them' if stride > 1 else ''}."
    )
    plot = render_timeline(
        [bar for bar in bars if bar.row < len(names)],
        names, begin_s=span.begin_s, end_s=span.end_s, marks=marks, together=each > 1,
    )  # fmt: skip
    legend = render_legend(account for account in ACCOUNTS if account in used)
    return f'{legend}{plot}<p class="soft">{note}</p>'


def _name_row(slot: int, members: Mapping[int, set[int]]) -> str:
    """Return who has had a slot, in an elastic world one after another; of very many the last."""
    ranks = sorted(members.get(slot, {slot}))
    return f"rank {', '.join(map(str, ranks))}" if len(ranks) <= 2 else f"rank {slot} … {ranks[-1]}"


def _make_bars(segments: Iterable[Segment], start_s: float) -> Iterable[Bar]:
    for segment in segments:
        # Inside a stretch of training its accounts are drawn one after the other: their share
        # is right, their place is not (a checkpoint every few steps would be a hairline).
        at_s = segment.begin_s - start_s
        for account, seconds in segment.seconds:
            rank = segment.rank if segment.member is None else segment.member
            label = f"rank {rank}, generation {segment.generation}: {account}"
            yield Bar(segment.rank, at_s, at_s + seconds, account, label)
            at_s += seconds


def _merge(bars: Sequence[Bar], each: int, span: Span) -> list[Bar]:
    """Return rows of `each` ranks: in every column the account that took most of it."""
    column_s = (span.end_s - span.begin_s) / COLUMNS
    spent: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for bar in bars:
        begin_s, end_s = max(bar.begin_s, span.begin_s), min(bar.end_s, span.end_s)
        first = int((begin_s - span.begin_s) / column_s)
        last = min(COLUMNS - 1, int((end_s - span.begin_s) / column_s))
        for column in range(first, last + 1):
            at_s = span.begin_s + column * column_s
            inside_s = min(end_s, at_s + column_s) - max(begin_s, at_s)
            if inside_s > 0:
                spent[bar.row // each, column][bar.account] += inside_s
    most = {place: max(seconds, key=lambda a: seconds[a]) for place, seconds in spent.items()}
    merged = []
    for (row, account), run in _list_runs(most):
        begin_s = span.begin_s + run[0] * column_s
        end_s = span.begin_s + (run[-1] + 1) * column_s
        merged.append(Bar(row, begin_s, end_s, account, f"mostly {account}"))
    return merged


def _list_runs(most: dict[tuple[int, int], str]) -> Iterable[tuple[tuple[int, str], list[int]]]:
    """Yield (row, account) and the columns that follow one another with it."""
    run: list[int] = []
    before: tuple[int, str] | None = None
    for row, column in sorted(most):
        here = (row, most[row, column])
        if here != before or column != run[-1] + 1:
            if before is not None:
                yield before, run
            before, run = here, []
        run.append(column)
    if before is not None:
        yield before, run
