"""Ranks that do the same at the moment, as one row: how screens show thousands."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from perdure.dash.shape import render_span
from perdure.model.report import RankRow

TROUBLE = ("failed", "suspected", "waiting")
"""States of ranks that somebody should look at, the worst first."""


def group_ranks(ranks: Sequence[RankRow], most: int) -> list[tuple[RankRow, ...]]:
    """Return at most `most` groups: each rank alone where all fit.

    Else whoever is in trouble comes first, and alone as long as they take no more than half.
    """
    if len(ranks) <= most:
        return [(row,) for row in ranks]
    alone = [row for row in ranks if row.state in TROUBLE]
    groups = [(row,) for row in alone] if len(alone) <= (most + 1) // 2 else []
    rest = [row for row in ranks if not groups or row.state not in TROUBLE]
    return [*groups, *_fold(rest, max(1, most - len(groups)))]


def _fold(ranks: Sequence[RankRow], most: int) -> list[tuple[RankRow, ...]]:
    """Return at most `most` groups: by node where those fit, else by what ranks do."""
    by_doing = _group(ranks, lambda r: (_severity(r.state), r.state, r.phase))
    by_node = _group(ranks, lambda r: (_severity(r.state), r.state, r.phase, r.node))
    groups = by_node if len(by_node) <= most else by_doing
    if len(groups) <= most:
        return groups
    last = tuple(row for group in groups[most - 1 :] for row in group)
    return [*groups[: most - 1], last]


def _group(ranks: Iterable[RankRow], key: Any) -> list[tuple[RankRow, ...]]:
    return [tuple(group) for _, group in groupby(sorted(ranks, key=key), key)]


def _severity(state: str) -> int:
    return TROUBLE.index(state) if state in TROUBLE else len(TROUBLE)


def describe_group(group: Sequence[RankRow]) -> tuple[str, ...]:
    """Return ranks, nodes, state, phase, step, steps a second and newest collective of a group."""
    first = group[0]
    steps = [row.step for row in group if row.step >= 0]
    low, high = (min(steps), max(steps)) if steps else (-1, -1)
    step = "-" if low < 0 else str(low) if low == high else f"{low}-{high}"
    states = {row.state for row in group}
    phases = {row.phase for row in group}
    waits = next((row.collective for row in group if "waiting" in row.collective), "")
    return (
        render_span([row.rank for row in group]),
        render_span(sorted({row.node for row in group})),
        first.state if len(states) == 1 else "several",
        first.phase if len(phases) == 1 else "several",
        step,
        f"{min(row.steps_per_s for row in group):.1f}",
        waits or first.collective,
    )
