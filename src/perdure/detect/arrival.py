"""Who did not arrive: from the sequence numbers of a stuck communicator to one culprit.

In a hang every rank is silent, so silence accuses nobody. Order of arrival does, and it needs
no majority: where others have entered collective n and one is still at n-1, it is that one,
also of two. A rank that is absent here because it waits in another communicator passes the
blame on. Point-to-point operations are not looked at: their numbers differ by design.
"""

from collections.abc import Iterable, Mapping

import msgspec

from perdure.detect.watch import RankWatch
from perdure.model.progress import CommProgress
from perdure.model.verdicts import VerdictKind

SHOWN = 16
"""Ranks listed in evidence."""


class Finding(msgspec.Struct, frozen=True):
    """Why training stands still, as far as it can be told."""

    kind: VerdictKind
    rank: int | None
    """None: nobody in particular."""
    confidence: float
    reason: str
    evidence: dict[str, object]


class Stuck(msgspec.Struct, frozen=True):
    """A communicator in which some have entered a collective that others have not."""

    name: str
    op: str
    seq: int
    arrived: tuple[int, ...]
    missing: tuple[int, ...]
    certain: bool
    """The record of one that waits can tell ends, and says that it is inside."""


def find_current(watch: RankWatch) -> CommProgress | None:
    """Return the communicator in which the rank may be waiting for others; None if in none."""
    inside = [c for c in watch.comms if c.size > 1 and _is_inside(c)]
    return max(inside, key=lambda c: (c.since_s, c.name), default=None)


def _is_inside(comm: CommProgress) -> bool:
    """A record that cannot tell ends (-1) is taken to be inside."""
    return comm.started_seq > max(comm.ended_seq, 0)


def find_stuck(
    watches: Mapping[int, RankWatch],
    world_size: int,
    exited: Mapping[int, tuple[CommProgress, ...]],
) -> tuple[Stuck, ...]:
    """Return the communicators in which somebody is missing, by name.

    `exited` are ranks that left with exit code 0 and their last collectives.
    """
    groups: dict[tuple[str, int, tuple[int, ...]], dict[int, CommProgress]] = {}
    seen = {rank: w.comms for rank, w in sorted(watches.items())} | dict(sorted(exited.items()))
    for rank, comms in seen.items():
        for comm in comms:
            if comm.size > 1 and not any(word in comm.op.lower() for word in ("send", "recv")):
                groups.setdefault((comm.name, comm.size, comm.ranks), {})[rank] = comm
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
        if missing and any(_is_inside(members[r]) for r in arrived if r in watches):
            certain = any(0 <= members[r].ended_seq < top for r in arrived)
            stuck.append(Stuck(name, members[arrived[0]].op, top, arrived, missing, certain))
    return tuple(stuck)


def find_culprit(
    watches: Mapping[int, RankWatch],
    silent: Mapping[int, RankWatch],
    world_size: int,
    exited: Mapping[int, tuple[CommProgress, ...]],
) -> Finding | None:
    """Return why the `silent` of the live `watches` stand still; None if it is too early.

    Too early is: somebody is missing, but has not been silent for longer than it may be itself.
    """
    if not silent:
        return None
    stuck = find_stuck(watches, world_size, exited)
    stopped = [w for w in silent.values() if w.stopped]
    if stopped:
        culprit = min(stopped, key=lambda w: (w.progress_s, w.rank))
        reason = f"rank {culprit.rank} is stopped (state T){_describe(stuck, culprit.rank)}"
        return _blame("ComputeHang", culprit.rank, 0.98, reason, stuck)
    waiting = {
        r
        for s in stuck
        for r in s.arrived
        if r in watches and (c := find_current(watches[r])) is not None and c.name == s.name
    }
    for s in stuck:
        left = [r for r in s.missing if r in exited]
        if left and any(r in silent for r in s.arrived):
            reason = f"rank {left[0]} ended with exit code 0{_describe((s,), left[0])}"
            return _blame("EarlyExit", left[0], 0.9, reason, (s,))
    absent = sorted({r for s in stuck for r in s.missing if r in watches} - waiting)
    if absent:
        guilty = [silent[r] for r in absent if r in silent]
        if not guilty:
            return None
        culprit = min(guilty, key=lambda w: (w.position, w.progress_s, w.rank))
        reason = f"rank {culprit.rank}{_describe(stuck, culprit.rank, first=True)}"
        return _blame("ComputeHang", culprit.rank, 0.95, reason, stuck)
    if stuck:
        reason = "ranks wait for one another in different communicators"
        return _blame("CommHang", None, 0.6, reason, stuck) if waiting <= set(silent) else None
    return _blame_without_arrival(watches, silent)


def _blame_without_arrival(
    watches: Mapping[int, RankWatch], silent: Mapping[int, RankWatch]
) -> Finding | None:
    """Everybody has entered, or nothing is known of collectives."""
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
        return Finding("CommHang", None, 0.6, reason, evidence)
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
            "certain": named.certain,
        }
    return Finding(kind, rank, confidence, reason, evidence)


def _describe(stuck: tuple[Stuck, ...], rank: int, *, first: bool = False) -> str:
    s = next((s for s in stuck if rank in s.missing), None)
    if s is None:
        return ""
    ranks = "1 rank waits" if len(s.arrived) == 1 else f"{len(s.arrived)} ranks wait"
    joint = " has" if first else ", and has"
    return f"{joint} not entered {s.op or 'collective'} #{s.seq} of {s.name}, where {ranks}"
