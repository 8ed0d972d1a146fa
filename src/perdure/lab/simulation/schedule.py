"""From a trace to what is done when: which place is emptied, filled, or told of its end.

A place is room for one machine, numbered from 0. A node that comes takes the place that has been
empty for longest, so that what its predecessor has left there is over.
"""

from typing import Literal, NamedTuple

from perdure.lab.traces import AvailabilityTrace, find_changes, find_intervals

_ORDER = ("leave", "come", "notice")
"""At one instant."""


class Act(NamedTuple):
    """Done to `places` together."""

    at_s: float
    kind: Literal["notice", "leave", "come"]
    places: tuple[int, ...]
    notice_s: float = 0.0
    """Of a notice: how long until they leave."""


class Schedule(NamedTuple):
    """All of a trace, by places."""

    first: tuple[int, ...]
    """Places that are taken at 0."""
    acts: tuple[Act, ...]
    """In order of time; those of one instant as in `_ORDER`."""


def plan_schedule(trace: AvailabilityTrace) -> Schedule:
    """Return what a replay of `trace` does; places are as many as it ever has nodes at once."""
    changes = find_changes(trace)
    size = max(len(interval.living) for interval in find_intervals(trace))
    places: dict[str, int] = {}
    empty_since_s = dict.fromkeys(range(size), -1.0)
    first: tuple[int, ...] = ()
    acts: list[Act] = []
    for change in changes:
        notices: dict[float, list[int]] = {}
        gone: list[int] = []
        for departure in change.left:
            place = places.pop(departure.node)
            gone.append(place)
            empty_since_s[place] = change.at_s
            if departure.notice_s > 0:
                notices.setdefault(departure.notice_s, []).append(place)
        for notice_s, told in notices.items():
            at_s = max(0.0, change.at_s - notice_s)
            acts.append(Act(at_s, "notice", tuple(sorted(told)), change.at_s - at_s))
        if gone:
            acts.append(Act(change.at_s, "leave", tuple(sorted(gone))))
        for node in change.joined:
            place = min(empty_since_s, key=lambda p: (empty_since_s[p], p))
            del empty_since_s[place]
            places[node] = place
        new = tuple(sorted(places[node] for node in change.joined))
        if change.at_s == 0:
            first = new
        elif new:
            acts.append(Act(change.at_s, "come", new))
    acts.sort(key=lambda act: (act.at_s, _ORDER.index(act.kind)))
    return Schedule(first, tuple(acts))
