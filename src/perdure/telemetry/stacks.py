"""Stacks of many ranks as a person wants them: those that stand alike together, once.

What perdure adds to every rank - its own threads, and the frames that started the script - is
left out.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from perdure.model.signals.stacks import ThreadStack, parse_threads

_STARTER = re.compile(
    r"\((?:\S*/)?perdure/(?:keeper/bootstrap|keeper/zygote|worker/start/cold)\.py:"
)
_STRING_MAIN = "<module> (<string>:1)"


class StackGroup(NamedTuple):
    """Ranks that stand at the same place."""

    ranks: tuple[str, ...]
    threads: tuple[ThreadStack, ...]
    note: str = ""
    """Instead of threads: why there is no stack."""
    shared: int = 0
    """Outermost frames of the first thread that the group before has as well."""


def group_stacks(stacks: Mapping[str, str]) -> tuple[StackGroup, ...]:
    """Return the groups of `stacks` (rank -> py-spy's text), in the order of their first rank."""
    groups: dict[tuple[tuple[ThreadStack, ...], str], list[str]] = {}
    for rank, text in stacks.items():
        threads = tuple(t._replace(frames=_strip(t.frames)) for t in parse_threads(text))
        key = (threads, "" if threads else text.strip())
        groups.setdefault(key, []).append(rank)
    made: list[StackGroup] = []
    for (threads, note), ranks in groups.items():
        shared = _count_shared(made[-1].threads, threads) if made else 0
        made.append(StackGroup(tuple(ranks), threads, note, shared))
    return tuple(made)


def render_stacks(stacks: Mapping[str, str]) -> list[str]:
    """Return the groups as lines of text."""
    lines: list[str] = []
    for group in group_stacks(stacks):
        who = f"rank{'s' if len(group.ranks) > 1 else ''} {', '.join(group.ranks)}"
        if not group.threads:
            lines.append(f"{who}: {group.note}")
        for number, thread in enumerate(group.threads):
            name = "" if thread.is_main else f", thread {thread.name}"
            lines.append(f"{who}{name} ({thread.state}):")
            shared = group.shared if number == 0 else 0
            own = thread.frames[: len(thread.frames) - shared]
            lines += [f"    {frame}" for frame in own]
            if shared:
                lines.append(f"    and {shared} outer frame{'s' * (shared > 1)} as above")
    return lines


def _strip(frames: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the outermost frames, which perdure's own starting of the script made."""
    end = len(frames)
    while end > 1 and (_STARTER.search(frames[end - 1]) or frames[end - 1] == _STRING_MAIN):
        end -= 1
    return frames[:end]


def _count_shared(before: tuple[ThreadStack, ...], now: tuple[ThreadStack, ...]) -> int:
    """Return how many outermost frames the first threads have in common; 0 for fewer than 3."""
    if not before or not now:
        return 0
    count = 0
    pairs = zip(reversed(before[0].frames), reversed(now[0].frames), strict=False)
    for one, other in pairs:
        if one != other:
            break
        count += 1
    return count if 3 <= count < len(now[0].frames) else 0
