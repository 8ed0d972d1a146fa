"""Who did not arrive: from the sequence numbers of a stuck communicator to one culprit.

In a hang every rank is silent, so silence accuses nobody. Order of arrival does, and it needs
no majority: where others have entered collective n and one is still at n-1, it is that one,
also of two. A rank that is absent here because it waits in another communicator passes the
blame on (`waitfor`). Where everybody has entered and nobody leaves, communication hangs, and the
links tell where.
"""

from collections.abc import Iterable, Mapping

import msgspec

from perdure.detect.slowness.links import LinkWatch, Place
from perdure.detect.waitfor import (
    InFlight,
    WaitGraph,
    build_wait_graph,
    find_current,
    gather,
    is_inside,
    is_point_to_point,
)
from perdure.detect.watch import RankWatch
from perdure.model.signals.progress import CommProgress
from perdure.model.verdicts import INSIDE, VerdictKind

UNHEARD_S = 1.0
"""Without a heartbeat for so long, five of them."""
WAITED = 0.5
"""Share of `detect.hang_floor_s` for which somebody has waited, beyond what ranks of the job wait
for one another, before anybody is blamed for it."""
SHOWN = 16
"""Ranks listed in evidence."""


class Finding(msgspec.Struct, frozen=True):
    """A reason why training stands still, as far as it can be told."""

    kind: VerdictKind
    rank: int | None
    """None: nobody in particular."""
    confidence: float
    reason: str
    evidence: dict[str, object]
    link: tuple[int, int] | None = None
    node: int | None = None
    waiting: tuple[int, ...] = ()
    """Ranks whose progress would end it, where nobody in particular is blamed; empty: any."""


class Stuck(msgspec.Struct, frozen=True):
    """A communicator in which some have entered a collective that others have not."""

    name: str
    op: str
    seq: int
    arrived: tuple[int, ...]
    missing: tuple[int, ...]
    recorded: bool
    """The record of one that waits can tell ends, and says that it is inside."""


def list_stuck_comms(
    watches: Mapping[int, RankWatch],
    world_size: int,
    exited: Mapping[int, tuple[CommProgress, ...]],
) -> tuple[Stuck, ...]:
    """Return the communicators in which somebody is missing, by name.

    `exited` are ranks that left with exit code 0 and their last collectives.
    """
    seen = {rank: w.comms for rank, w in sorted(watches.items())} | dict(sorted(exited.items()))
    groups = gather(
        ((comm.name, comm.size, comm.ranks), rank, comm)
        for rank, comms in seen.items()
        for comm in comms
        if comm.size > 1 and not is_point_to_point(comm.op)
    )
    stuck = []
    for (name, size, ranks), members in sorted(groups.items()):
        top = max(c.started_seq for c in members.values())
        everybody: Iterable[int] = ranks or (range(world_size) if size == world_size else members)
        missing = tuple(
            r
            for r in everybody
            if (r in watches or r in exited) and (r not in members or members[r].started_seq < top)
        )
        arrived = tuple(r for r, c in sorted(members.items()) if c.started_seq == top)
        inside = any(is_inside(members[r]) for r in arrived if r in watches)
        left = any(r in exited for r in missing)  # Who is out of it again has failed.
        if missing and (inside or left):
            living = [members[r] for r in arrived if r in watches]  # The others' records are old.
            recorded = any(0 <= c.ended_seq < top for c in living)
            stuck.append(Stuck(name, members[arrived[0]].op, top, arrived, missing, recorded))
    return tuple(stuck)


def find_culprit(
    now: float,
    watches: Mapping[int, RankWatch],
    silent: Mapping[int, RankWatch],
    world_size: int,
    exited: Mapping[int, tuple[CommProgress, ...]],
    links: LinkWatch,
) -> Finding | None:
    """Return why the `silent` of the live `watches` stand still; None if it is too early.

    Too early is: somebody is missing, but has not been silent for longer than it may be itself.
    """
    if not silent:
        return None
    stuck = list_stuck_comms(watches, world_size, exited)
    stopped = [w for w in silent.values() if w.stopped]
    if stopped:
        culprit = min(stopped, key=lambda w: (w.progress_s, w.rank))
        reason = f"rank {culprit.rank} is stopped (state T){_describe(stuck, culprit.rank)}"
        return _blame("ComputeHang", culprit.rank, 0.98, reason, stuck)
    unheard = _blame_unheard(now, watches, silent, links)
    if unheard is not None:
        return unheard
    for s in stuck:
        left = [r for r in s.missing if r in exited]
        if left and any(r in silent for r in s.arrived):
            reason = f"rank {left[0]} ended with exit code 0{_describe((s,), left[0])}"
            return _blame("EarlyExit", left[0], 0.9, reason, (s,))
    graph = build_wait_graph(watches, world_size)
    if graph.absent:
        return _blame_absent(graph, watches, silent, stuck)
    if graph.edges or graph.in_flight:
        return _blame_communication(now, graph, watches, silent, links)
    leaving = bool(exited) or any(w.newest.phase == "finished" for w in watches.values())
    return _blame_without_arrival(now, watches, silent, links, leaving=leaving)


def _blame_unheard(
    now: float,
    watches: Mapping[int, RankWatch],
    silent: Mapping[int, RankWatch],
    links: LinkWatch,
) -> Finding | None:
    """A node that sends no heartbeat, and whose kernel answers nobody: its network, or all of it.

    What its ranks do is unknown, so arrival says nothing; that others get no answer is enough.
    """
    missed = {w.node for w in watches.values() if now - w.received_s > UNHEARD_S}
    if not missed or len(missed) == len({w.node for w in watches.values()}):
        return None
    for link in links.list_stuck_links(now):
        there = watches.get(link.dst)
        here = watches.get(link.src)
        if there is None or here is None or there.node not in missed or here.node in missed:
            continue
        reason = (
            f"node {there.node} is not heard of for {now - there.received_s:.1f} s, and link "
            f"{link.src}->{link.dst} gets no answer for {link.newest.last_ack_s:.1f} s"
        )
        evidence: dict[str, object] = {"links": [link.show()], "unheard": sorted(missed)}
        waiting = tuple(sorted(silent))
        return Finding("CommHang", None, 0.85, reason, evidence, node=there.node, waiting=waiting)
    return None


def _blame_absent(
    graph: WaitGraph,
    watches: Mapping[int, RankWatch],
    silent: Mapping[int, RankWatch],
    stuck: tuple[Stuck, ...],
) -> Finding | None:
    """Some are waited for and are in no collective themselves.

    After a pause of all, who comes back last has been silent for long, and waited for but a moment:
    no longer than ranks of this job wait for one another.
    """
    guilty = [silent[r] for r in graph.absent if r in silent]
    if not guilty:
        return None
    culprit = min(guilty, key=lambda w: (w.position, w.progress_s, w.rank))
    waiters = [watches[r] for r in {e.waiter for e in graph.edges}]
    waits_s = [w.waits_s(c) for w in waiters if (c := find_current(w)) is not None]
    if waits_s and max(waits_s) < WAITED * culprit.config.hang_floor_s + culprit.room_s:
        return None
    rank = culprit.rank
    reason = f"rank {rank}{_describe(stuck, rank, first=True)}"
    edge = next((e for e in graph.edges if e.holder == rank), None)
    if edge is not None and all(rank not in s.missing for s in stuck):
        reason = f"rank {rank} has not entered {edge.op} of {edge.communicator}, where rank "
        reason += f"{edge.waiter} waits for it"
    finding = _blame("ComputeHang", rank, 0.95, reason, stuck)
    if any(e.holder != rank for e in graph.edges):
        finding.evidence["waits"] = graph.show()
    return finding


def _blame_communication(
    now: float,
    graph: WaitGraph,
    watches: Mapping[int, RankWatch],
    silent: Mapping[int, RankWatch],
    links: LinkWatch,
) -> Finding | None:
    """All have entered a collective that does not end, or wait for one another in a circle."""
    if graph.circle and not graph.in_flight:
        return _blame_circle(now, graph, silent, links)
    whole = [f for f in graph.in_flight if all(r in silent for r in f.ranks)]
    waits = {e.waiter for e in graph.edges}
    if not whole or len(whole) < len(graph.in_flight):
        return None
    if not graph.edges and len({r for f in whole for r in f.ranks}) < len(watches):
        busy = [r for r in watches if r not in waits and r not in silent]
        if busy and not any(f.left for f in whole):
            return None  # Somebody still moves elsewhere, and nobody waits for these.
    first = min(whole, key=lambda f: (not f.left, min(f.ranks)))
    num = len(first.ranks) + len(first.left)
    reason = (
        f"all {num} ranks have entered {first.op or 'collective'} #{first.seq} of "
        f"{first.communicator}, and {'one does' if first.left else 'none'} "
        f"{'not leave' if first.left else 'leaves'} it"
    )
    evidence: dict[str, object] = {
        "communicator": first.communicator,
        "collective": first.seq,
        "op": first.op,
        "inside": list(first.ranks[:SHOWN]),
        "left": list(first.left[:SHOWN]),
        "waits": graph.show(),
    }
    if len(whole) > 1:
        evidence["communicators"] = [f.communicator for f in whole[:SHOWN]]
    waiting = tuple(sorted({r for f in whole for r in f.ranks}))
    return _place_hang(now, reason, evidence, links, whole, waiting, silent)


def _place_hang(
    now: float,
    reason: str,
    evidence: dict[str, object],
    links: LinkWatch,
    whole: list[InFlight],
    waiting: tuple[int, ...],
    silent: Mapping[int, RankWatch],
) -> Finding:
    """Say where communication hangs: by the links, else by who is left inside."""
    place = links.place(now, links.list_stuck_links(now), "stuck")
    if place is not None:
        return _at_place(place, reason, evidence, waiting)
    pair = next((f.link for f in whole if f.link is not None), None)
    if pair is not None and len(whole) == 1:
        reason += f"; rank {pair[0]} sends and rank {pair[1]} receives"
        return Finding("CommHang", None, 0.7, reason, evidence, link=pair, waiting=waiting)
    laggards = [f.ranks[0] for f in whole if f.left and len(f.ranks) == 1]
    if len(set(laggards)) == 1:
        reason += f" (rank {laggards[0]})"
        return Finding("CommHang", laggards[0], 0.65, reason, evidence, waiting=waiting)
    nodes = sorted({silent[r].node for r in waiting if r in silent})
    if len(nodes) > 1:
        evidence["probe"] = nodes[:SHOWN]
    return Finding("CommHang", None, 0.6, reason, evidence, waiting=waiting)


def _at_place(
    place: Place, reason: str, evidence: dict[str, object], waiting: tuple[int, ...]
) -> Finding:
    evidence = {**evidence, **place.evidence}
    if place.probe:
        evidence["probe"] = list(place.probe)
    return Finding(
        "CommHang",
        None,
        place.confidence,
        f"{place.reason}; {reason}",
        evidence,
        link=place.link,
        node=place.node,
        waiting=waiting,
    )


def _blame_circle(
    now: float, graph: WaitGraph, silent: Mapping[int, RankWatch], links: LinkWatch
) -> Finding | None:
    """Ranks wait for one another: a message was lost, or they entered in different orders."""
    if not all(r in silent for r in graph.circle):
        return None
    evidence: dict[str, object] = {"waits": graph.show(), "inside": list(graph.circle[:SHOWN])}
    if len(graph.circle) <= SHOWN:
        evidence["circle"] = list(graph.circle)
    reason = f"ranks {', '.join(str(r) for r in graph.circle[:4])} wait for one another"
    place = links.place(now, links.list_stuck_links(now), "stuck")
    if place is not None:
        return _at_place(place, reason, evidence, graph.circle)
    reason += " in different communicators"
    return Finding("CommHang", None, 0.6, reason, evidence, waiting=graph.circle)


def _blame_without_arrival(
    now: float,
    watches: Mapping[int, RankWatch],
    silent: Mapping[int, RankWatch],
    links: LinkWatch,
    *,
    leaving: bool,
) -> Finding | None:
    """Nothing is known of collectives, or not whether they have ended.

    Who is silent may then be waiting for somebody who is in a declared busy phase; and once some
    are `leaving`, who is left may have its own last work to do.
    """
    if leaving and all(w.silence_s <= w.config.phase_allowance_s for w in silent.values()):
        return None
    if any(watch.declared_busy for watch in watches.values()):
        return None
    moved_s = max(watch.moved_s for watch in watches.values())
    if len(silent) < len(watches) and all(w.received_s < moved_s for w in silent.values()):
        return None  # Others went on since these were heard of: so may they have.
    inside = {r: c for r, w in sorted(watches.items()) if (c := find_current(w)) is not None}
    if len(watches) > 1 and len(inside) == len(watches):
        if len(silent) < len(watches):
            return None
        comm = inside[min(inside)]
        evidence: dict[str, object] = {"communicator": comm.name, "collective": comm.started_seq}
        reason = (
            f"all {len(inside)} ranks have entered {comm.op or 'collective'} "
            f"#{comm.started_seq} of {comm.name}, and none leaves it"
        )
        return _place_hang(now, reason, evidence, links, [], tuple(inside), silent)
    if len(silent) == 1:
        (alone,) = silent.values()
        confidence = 0.9 if len(watches) == 1 else 0.7
        return _alone(alone, confidence)
    behind = min(w.position for w in silent.values())
    late = [w for w in silent.values() if w.position == behind]
    if 0 <= behind < max(w.position for w in watches.values()) and len(late) == 1:
        return _alone(late[0], 0.7)
    busy = [w for w in silent.values() if w.activity == "busy"]
    if len(busy) == 1:
        return _alone(busy[0], 0.5)
    return _alone(min(silent.values(), key=lambda w: (w.progress_s, w.rank)), 0.3)


def _alone(watch: RankWatch, confidence: float) -> Finding:
    where = f"since step {watch.account.step}" if watch.account.step >= 0 else "any more"
    reason = f"rank {watch.rank} makes no progress {where} ({watch.activity})"
    return Finding("ComputeHang", watch.rank, confidence, reason, {})


def _blame(
    kind: VerdictKind,
    rank: int | None,
    confidence: float,
    reason: str,
    stuck: tuple[Stuck, ...],
) -> Finding:
    evidence: dict[str, object] = {}
    named = next((s for s in stuck if rank in s.missing), stuck[0] if stuck else None)
    if named is not None:
        evidence = {
            "communicator": named.name,
            "collective": named.seq,
            "op": named.op,
            "missing": list(named.missing[:SHOWN]),
            "arrived": list(named.arrived[:SHOWN]),
            "num_arrived": len(named.arrived),
            INSIDE: named.recorded,
        }
    return Finding(kind, rank, confidence, reason, evidence)


def _describe(stuck: tuple[Stuck, ...], rank: int, *, first: bool = False) -> str:
    s = next((s for s in stuck if rank in s.missing), None)
    if s is None:
        return ""
    ranks = "1 rank waits" if len(s.arrived) == 1 else f"{len(s.arrived)} ranks wait"
    joint = " has" if first else ", and has"
    return f"{joint} not entered {s.op or 'collective'} #{s.seq} of {s.name}, where {ranks}"
