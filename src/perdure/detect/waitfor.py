"""Who waits for whom, across all communicators: from ranks that wait to those that do not.

A rank inside a collective waits for the members that have not entered it; one inside a send or
receive waits for the other end. Where an edge leads to a rank that itself waits elsewhere, the
blame goes on. What is left at the end of all paths is a root: a rank that is in no collective
(its own work hangs), one that has left, or a collective that all of its members have entered and
that does not end (communication hangs). A circle means that ranks entered in different orders.
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from functools import lru_cache
from typing import TypeVar

import msgspec

from perdure.detect.watch import RankWatch
from perdure.model.signals.progress import CommProgress

EDGES_MAX = 48
"""Edges shown as evidence."""
HOLDERS_MAX = 4
"""Edges kept of one waiter: of a thousand that are missing, a few say as much."""


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Edge(msgspec.Struct, frozen=True, array_like=True):
    """One rank waits for another."""

    waiter: int
    holder: int
    communicator: str
    op: str
    seq: int


class InFlight(msgspec.Struct, frozen=True):
    """A collective that all of its members have entered, and some are still inside."""

    communicator: str
    op: str
    seq: int
    ranks: tuple[int, ...]
    """Still inside."""
    size: int
    link: tuple[int, int] | None = None
    """Of a send and its receive: from sender to receiver."""
    left: tuple[int, ...] = ()
    """Members that have ended it."""


class WaitGraph(msgspec.Struct, frozen=True):
    """Edges and where they lead."""

    edges: tuple[Edge, ...]
    in_flight: tuple[InFlight, ...]
    absent: tuple[int, ...]
    """Ranks waited for that wait for nobody and are in no collective."""
    circle: tuple[int, ...]
    """Ranks that wait for one another, where nobody else is waited for."""

    def show(self) -> list[list[object]]:
        """Return the edges as evidence: waiter, holder, communicator, op, sequence."""
        return [[e.waiter, e.holder, e.communicator, e.op, e.seq] for e in self.edges[:EDGES_MAX]]


@lru_cache(maxsize=1024)
def is_point_to_point(op: str) -> bool:
    """Return whether `op` is a send or a receive."""
    low = op.lower()
    return "send" in low or "recv" in low


def find_current(watch: RankWatch) -> CommProgress | None:
    """Return the communicator in which the rank may be waiting for others; None if in none."""
    inside = [c for c in watch.comms if c.size > 1 and is_inside(c)]
    return max((*inside, *watch.awaited), key=lambda c: (c.since_s, c.name), default=None)


def is_inside(comm: CommProgress) -> bool:
    """Return whether a rank is in a collective; a record without ends (-1) counts as inside."""
    return comm.started_seq > max(comm.ended_seq, 0)


def gather(rows: Iterable[tuple[Key, int, Value]]) -> dict[Key, dict[int, Value]]:
    """Return for each key (a communicator, mostly) what is told of each rank in it."""
    found: dict[Key, dict[int, Value]] = {}
    for key, rank, value in rows:
        found.setdefault(key, {})[rank] = value
    return found


def build_wait_graph(watches: Mapping[int, RankWatch], world_size: int) -> WaitGraph:
    """Return who waits for whom now among the live `watches`."""
    current = {r: c for r, w in sorted(watches.items()) if (c := find_current(w)) is not None}
    entered = gather(
        (_key(c), rank, c.started_seq)
        for rank, watch in sorted(watches.items())
        for c in watch.comms
        if c.size > 1
    )
    edges: list[Edge] = []
    whole: dict[tuple[str, int, int], list[int]] = {}
    pairs: dict[tuple[str, int, int], InFlight] = {}
    missing_in: dict[tuple[str, int, int], list[int]] = {}
    held: set[int] = set()
    for rank, c in current.items():
        if is_point_to_point(c.op):
            _match_other_end(rank, c, watches, current, edges, pairs)
            continue
        key = (*_key(c), c.started_seq)
        missing = missing_in.get(key)
        if missing is None:
            members = entered[_key(c)]
            everybody = tuple(range(world_size)) if c.size == world_size else tuple(members)
            missing = missing_in[key] = [
                r
                for r in (c.ranks or everybody)
                if r in watches and members.get(r, 0) < c.started_seq
            ]
        held.update(missing)
        edges += [Edge(rank, r, c.name, c.op, c.started_seq) for r in missing[:HOLDERS_MAX]]
        if not missing:
            whole.setdefault(key, []).append(rank)
    in_flight = [*pairs.values(), *_list_in_flight(watches, current, whole)]
    held |= {e.holder for e in edges}
    waiters = {e.waiter for e in edges}
    inside = {r for f in in_flight for r in f.ranks}
    absent = tuple(sorted(held - waiters - inside))
    circle: tuple[int, ...] = ()
    if edges and not absent and not in_flight:
        circle = tuple(sorted(held & waiters))
    ordered = sorted(edges, key=lambda e: (e.holder not in absent, e.waiter, e.holder))
    return WaitGraph(tuple(ordered), tuple(in_flight), absent, circle)


def _list_in_flight(
    watches: Mapping[int, RankWatch],
    current: Mapping[int, CommProgress],
    whole: Mapping[tuple[str, int, int], list[int]],
) -> list[InFlight]:
    """Return the collectives that all have entered and that surely have not ended everywhere.

    A record that cannot tell ends proves nothing, nor does one that is polled where others have
    ended the same collective: it names the bucket that ended last, in whatever order they do. Who
    was not heard of since others had ended it may have ended it as well.
    """
    found = []
    for (name, first, seq), inside in sorted(whole.items()):
        left = tuple(
            r
            for r, w in sorted(watches.items())
            if any(_key(m) == (name, first) and m.ended_seq >= seq for m in w.comms)
        )
        left_s = max((watches[r].ends[name][1] for r in left), default=-math.inf)
        sure = [
            r
            for r in inside
            if current[r].ended_seq >= 0
            and not (left and watches[r].newest.recorder == "status")
            and watches[r].received_s > left_s
        ]
        if sure:
            c = current[sure[0]]
            found.append(InFlight(name, c.op, seq, tuple(sure), c.size, None, left))
    return found


def _key(c: CommProgress) -> tuple[str, int]:
    return (c.name, c.ranks[0] if c.ranks else -1)


def _match_other_end(
    rank: int,
    c: CommProgress,
    watches: Mapping[int, RankWatch],
    current: Mapping[int, CommProgress],
    edges: list[Edge],
    pairs: dict[tuple[str, int, int], InFlight],
) -> None:
    """A send or receive: in flight where the other end is in its counterpart, else an edge."""
    peer = _find_other_end(rank, c)
    if peer not in watches:
        return
    sends = "send" in c.op.lower()
    other = current.get(peer)
    if (
        other is not None
        and other.name == c.name
        and is_point_to_point(other.op)
        and _find_other_end(peer, other) == rank
        and ("send" in other.op.lower()) != sends
    ):
        src, dst = (rank, peer) if sends else (peer, rank)
        ranks = (min(src, dst), max(src, dst))
        pairs[c.name, src, dst] = InFlight(c.name, c.op, c.started_seq, ranks, c.size, (src, dst))
        return
    edges.append(Edge(rank, peer, c.name, c.op, c.started_seq))


def _find_other_end(rank: int, c: CommProgress) -> int:
    """Return with whom a rank's send or receive is; -1 where that is unknown."""
    if c.peer < 0 and c.size == 2:
        return next((r for r in c.ranks if r != rank), -1)
    return c.peer
