"""What the lighthouse knows of relays on other machines: whose lines each of them holds.

A relay says it again and again (`replica_relay.py`), so nothing of it is kept on disk. A relay that
has fallen silent holds no lines: what is ordered of its ranks is then done as to groups without a
line.
"""

import math
from collections.abc import Callable

from perdure.model.bus.wire import LinesHeld

SILENT_S = 5.0
"""A relay that has said nothing for so long holds no lines."""
TOLD_S = 2.0
"""Given to the controller to hear of a replica before its ranks speak by another way."""


class Relays:
    """Those that have said anything, by their places."""

    def __init__(self, clock: Callable[[], float], nproc: int = 1) -> None:
        """Know of none, of groups of `nproc` ranks."""
        self._clock, self._nproc = clock, nproc
        self._began_s = clock()
        self._said: dict[str, tuple[float, LinesHeld]] = {}
        self._heard: dict[tuple[int, int], float] = {}
        """When a rank of a life was held by any last, of the newest seconds."""

    @property
    def places(self) -> tuple[str, ...]:
        """Where relays are, or were."""
        return tuple(self._said)

    def take(self, place: str, said: LinesHeld, own: dict[int, int]) -> dict[int, str]:
        """Take what the relay of a place says; return which lives have ended, and how it knows.

        No relay speaks of the end of a life whose ranks are heard elsewhere, but where it holds
        another rank of that group: `own` are the lines of this machine, by rank.
        """
        before, now = self._said.get(place), self._clock()
        others = set(own.items())
        for where, (_, each) in self._said.items():
            others |= set(each.lines.items()) if where != place else set()
        groups = {life: rank // self._nproc for rank, life in others}
        mine = {
            life
            for rank, life in (before[1].lines.items() if before else ())
            if (rank, life) not in others and groups.get(life) == rank // self._nproc
        }
        self._said[place] = (now, said)
        self._heard = {held: at_s for held, at_s in self._heard.items() if at_s > now - SILENT_S}
        self._heard |= dict.fromkeys(said.lines.items(), now)
        return {life: why for life, why in said.ended.items() if life in mine or life not in groups}

    def has_lost(self, rank: int, life: int) -> bool:
        """Return whether none has held a rank of this life for as long as a relay may be silent."""
        since_s = self._clock() - SILENT_S
        return max(self._began_s, self._heard.get((rank, life), -math.inf)) < since_s

    def holds(self, rank: int, life: int, place: str = "") -> bool:
        """Return whether a rank of this life has a line to the relay at `place`, or to any."""
        since_s = self._clock() - SILENT_S
        return any(
            said.lines.get(rank) == life
            for where, (at_s, said) in self._said.items()
            if at_s > since_s and (not place or where == place)
        )
