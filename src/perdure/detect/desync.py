"""Ranks that are out of step: another operation, size or type at the same sequence number.

Also another *number* of collectives: nobody may have entered more of them in step k than another
shows in step k+1. That needs records in which step and sequence belong together, so a recorder
that polls (status) is not asked. The culprit is the minority; of two, the one that does what was
never done here before. A user's bug, so it is said only when it was seen twice.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from perdure.detect.arrival import Finding
from perdure.detect.waitfor import gather, is_point_to_point
from perdure.detect.watch import RankWatch
from perdure.model.signals.progress import CollectiveSpan, CommProgress

SEEN_S = 0.3
"""Between the first and the deciding sight of it."""
COUNT_STEPS = 3
"""A wrong number must show in so many steps..."""
COUNT_WITHIN = 20
"""... of so many: a ring that was read between two of its words shows one now and then."""
KNOWN_MAX = 256
PASSED_KEPT = 64
BOUND = "compiled"
"""The recorder that writes sequence, operation and size as one."""
POLLED_S = 1.2
"""Any other is believed about the operation only of a rank that has been silent for so long."""

_EVEN = (
    "allreduce",
    "all_reduce",
    "broadcast",
    "allgather_into",
    "all_gather_into",
    "reduce_scatter_tensor",
    "_allgather_base",
    "_reduce_scatter_base",
)
"""Operations in which every rank has equally many bytes."""

Signature = tuple[str, int, str]
Key = tuple[str, int, int]


@dataclass(slots=True)
class _Comm:
    known: dict[Signature, None] = field(default_factory=dict)
    """What at least two ranks did at the same sequence."""
    first_s: dict[int, float] = field(default_factory=dict)
    """Sequence -> when a disagreement in it was first seen."""
    top: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Step -> (largest sequence seen in it, by which rank)."""
    at: dict[int, tuple[Signature, int]] = field(default_factory=dict)
    """Sequence -> what the first rank seen in it did, and which it was."""
    passed: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Sequence -> (rank, operation) of those that were ended, or behind which others were begun,
    as the first two ranks tell."""
    wrong: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """(ahead, behind) -> the steps in which it showed."""


class DesyncWatch:
    """Finds ranks that run different collectives in a communicator of one generation."""

    def __init__(self) -> None:
        """Begin a generation."""
        self._comms = defaultdict[Key, _Comm](_Comm)
        self._doubtful: set[Key] = set()
        self._miscounted: set[Key] = set()

    def take(self, watch: RankWatch, spans: Sequence[CollectiveSpan] = ()) -> None:
        """Learn from a rank whose record binds step, sequence and operation together."""
        if watch.newest.recorder != BOUND:
            return
        if spans:
            self._take_passed(watch, spans)
        step, rank = watch.account.step, watch.rank
        for c in watch.comms:
            if c.size < 2 or c.started_seq <= 0 or c.peer >= 0 or is_point_to_point(c.op):
                continue
            key = _key(c)
            comm = self._comms[key]
            if c.op:
                self._sign_in(key, comm, c, rank)
            if step < 0:
                continue
            top = comm.top.get(step)
            if top is None or c.started_seq > top[0]:
                comm.top[step] = (c.started_seq, rank)
                while len(comm.top) > 8:
                    del comm.top[min(comm.top)]
            before = comm.top.get(step - 1)
            if before is not None and before[0] > c.started_seq and before[1] != rank:
                self._miscounted.add(key)
                steps = comm.wrong.setdefault((before[1], rank), set())
                steps.add(step)
                steps -= {s for s in steps if s < step - COUNT_WITHIN}

    def _take_passed(self, watch: RankWatch, spans: Sequence[CollectiveSpan]) -> None:
        """Keep which operations a rank has been through: it may be in the next one already."""
        for span in spans:
            if span.comm >= len(watch.comms):
                continue
            c = watch.comms[span.comm]
            if c.size < 2 or watch.rank not in c.ranks[:2] or is_point_to_point(span.op):
                continue
            passed = self._comms[_key(c)].passed
            passed[span.seq] = (watch.rank, span.op)
            if len(passed) > PASSED_KEPT:
                del passed[next(iter(passed))]

    def _sign_in(self, key: Key, comm: _Comm, c: CommProgress, rank: int) -> None:
        signature = _sign(c)
        first = comm.at.get(c.started_seq)
        if first is None:
            comm.at[c.started_seq] = (signature, rank)
            if len(comm.at) > 8:
                del comm.at[min(comm.at)]
        elif first[0] == signature:
            if rank != first[1] and signature not in comm.known and len(comm.known) < KNOWN_MAX:
                comm.known[signature] = None
        elif _disagree([first[0], signature]):
            self._doubtful.add(key)

    def find_disagreement(
        self, now: float, watches: Mapping[int, RankWatch], *, thorough: bool
    ) -> Finding | None:
        """Return a disagreement that is beyond doubt; `thorough` asks polled records as well."""
        doubtful, self._doubtful = self._doubtful, set()
        # A record that is polled names its operation late, once it stays pending.
        groups = gather(
            ((*_key(c), c.started_seq), rank, c)
            for rank, watch in sorted(watches.items() if doubtful or thorough else ())
            if watch.newest.recorder == BOUND or (thorough and watch.silence_s >= POLLED_S)
            for c in watch.comms
            if c.size > 1 and c.op and c.started_seq > 0 and not is_point_to_point(c.op)
            if thorough or _key(c) in doubtful
        )
        for (name, _, _, seq), members in sorted(groups.items()):
            found = self._compare(now, name, seq, members)
            if found is not None:
                return found
        return (self._find_overtaken(watches) if thorough else None) or self._find_number()

    def _find_overtaken(self, watches: Mapping[int, RankWatch]) -> Finding | None:
        """Return who was in another operation where some have begun theirs and gone on.

        One that is left alone is the odd one; of several, the one that went on.
        """
        left = gather(
            ((*_key(c), c.started_seq), rank, c)
            for rank, watch in sorted(watches.items())
            if watch.newest.recorder == BOUND
            for c in watch.comms
            if c.size > 1 and c.started_seq > c.ended_seq and not is_point_to_point(c.op)
        )
        for (name, _, _, seq), inside in left.items():
            rank, c = next(iter(inside.items()))
            other, op = self._comms[_key(c)].passed.get(seq, (rank, c.op))
            if other in inside or not c.op or op == c.op:
                continue
            guilty = rank if len(inside) == 1 else other
            reason = (
                f"rank {rank} is in {_show(_sign(c))} as collective #{seq} of {name}, where "
                f"rank {other} has begun {op} and gone on"
            )
            evidence: dict[str, object] = {
                "communicator": name,
                "collective": seq,
                "signatures": {str(rank): list(_sign(c)), str(other): [op, 0, ""]},
                "ranks": [guilty],
            }
            return Finding("Desync", guilty, 0.8, reason, evidence)
        return None

    def _compare(
        self, now: float, name: str, seq: int, members: dict[int, CommProgress]
    ) -> Finding | None:
        key = _key(next(iter(members.values())))
        comm = self._comms[key]
        signatures = {rank: _sign(c) for rank, c in members.items()}
        if not _disagree(list(signatures.values())):
            comm.first_s.pop(seq, None)
            return None
        self._doubtful.add(key)
        first_s = comm.first_s.setdefault(seq, now)
        while len(comm.first_s) > 16:
            del comm.first_s[next(iter(comm.first_s))]
        if now - first_s < SEEN_S:
            return None
        counts = Counter(signatures.values())
        ordered = sorted(counts, key=lambda s: (s in comm.known, counts[s], s))
        odd = ordered[0]
        if len(members) > 2:
            odd = min(counts, key=lambda s: (counts[s], s in comm.known, s))
        guilty = [r for r, s in signatures.items() if s == odd]
        usual = max((s for s in counts if s != odd), key=lambda s: (counts[s], s))
        settled = counts[odd] * 2 < len(members) or (odd in comm.known) != (usual in comm.known)
        others = len(members) - len(guilty)
        reason = (
            f"rank {guilty[0]} is in {_show(odd)} as collective #{seq} of {name}, "
            f"where {others} other{'s are' if others > 1 else ' is'} in {_show(usual)}"
        )
        evidence: dict[str, object] = {
            "communicator": name,
            "collective": seq,
            "signatures": {str(r): list(s) for r, s in list(signatures.items())[:16]},
            "ranks": guilty[:16],
        }
        return Finding("Desync", guilty[0], 0.95 if settled else 0.7, reason, evidence)

    def _find_number(self) -> Finding | None:
        for key in sorted(self._miscounted):
            name, comm = key[0], self._comms[key]
            wrong = {pair: steps for pair, steps in comm.wrong.items() if steps}
            steps = set().union(*wrong.values()) if wrong else set()
            if len(steps) < COUNT_STEPS:
                continue
            ahead = Counter(pair[0] for pair in wrong)
            behind = Counter(pair[1] for pair in wrong)
            # One rank ahead of all is an extra collective of it; one behind all left one out.
            more, fewer = ahead.most_common(1)[0][0], behind.most_common(1)[0][0]
            rank, word = (more, "more") if len(ahead) <= len(behind) else (fewer, "fewer")
            other = fewer if rank == more else more
            confidence = 0.8 if len(ahead) != len(behind) else 0.5
            reason = (
                f"rank {rank} takes part in {word} collectives of {name} than rank {other}, "
                f"step for step, seen in {len(steps)} steps"
            )
            evidence: dict[str, object] = {
                "communicator": name,
                "ahead": sorted(ahead)[:16],
                "behind": sorted(behind)[:16],
                "steps": sorted(steps)[:8],
            }
            return Finding("Desync", rank, confidence, reason, evidence)
        return None


def _key(c: CommProgress) -> Key:
    return (c.name, c.size, c.ranks[0] if c.ranks else -1)


@lru_cache(maxsize=1024)
def _is_even(op: str) -> bool:
    low = op.lower()
    return any(word in low for word in _EVEN)


def _sign(c: CommProgress) -> Signature:
    even = _is_even(c.op)
    return (c.op, c.bytes if even else 0, c.dtype if even else "")


def _disagree(signatures: list[Signature]) -> bool:
    """What a record does not know (0 bytes, no type) disagrees with nothing."""
    return any(len(set(filter(None, values))) > 1 for values in zip(*signatures, strict=True))


def _show(s: Signature) -> str:
    parts = [s[0], f"of {s[1]} bytes" if s[1] else "", s[2]]
    return " ".join(part for part in parts if part)
