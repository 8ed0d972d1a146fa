"""Sharded state: who holds which part of it, what survives a loss, and from which step to go on.

Every parameter, and with it its optimizer's moments, is cut along its first dimension, as
`torch.chunk` does. A *copy* is a row of members whose shards together are the whole state; copies
may be of different sizes, so that no member is left over. One rule finds where to go on after a
loss: the newest step of which every row is held by somebody who lives, in its own state or in a
snapshot of the peer checkpoint. Copies that are whole lose nothing by it; a sole shard that is
lost takes all back to the newest snapshot that is whole.

States are told apart by (step, line). The line is the epoch in which the step was applied, so
that a step that was taken a second time, after all went back, is not mixed with its first version.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from perdure.plan.elastic.commit import NO_LINE, DividedReformation, Progress, tell_apart
from perdure.plan.elastic.microbatches import reassign


class Shard(msgspec.Struct, frozen=True, order=True):
    """Part `number` of `count` of every parameter."""

    number: int
    count: int

    def rows(self, length: int) -> range:
        """Return which of a parameter's `length` rows it has; none where there are too few.

        >>> [Shard(i, 4).rows(5) for i in range(4)]
        [range(0, 2), range(2, 4), range(4, 5), range(5, 5)]
        """
        size = -(-length // self.count)
        first = min(self.number * size, length)
        return range(first, min(first + size, length))


WHOLE = Shard(0, 1)


class Snapshot(msgspec.Struct, frozen=True, order=True):
    """A shard's state in memory, which outlives the process that has written it."""

    step: int
    line: int
    shard: Shard
    owner: int
    """The member that has written it."""


class ShardProgress(Progress, frozen=True):
    """What one member holds, at a moment when it computes and reduces nothing."""

    shards: tuple[Shard, ...] = ()
    """Held live, the newest world's last; two while a state is passed on to a new world."""
    snapshots: tuple[Snapshot, ...] = ()
    """What it can read of the peer checkpoint."""


class Source(msgspec.Struct, frozen=True):
    """A shard of the chosen step, where it lies."""

    member: int
    shard: Shard
    owner: int = -1
    """The snapshot's writer; -1 where the member's own state is meant."""


class Transfer(msgspec.Struct, frozen=True):
    """Rows of a parameter with `length` of them, from a source to a member, perhaps the same."""

    length: int
    source: Source
    to: int
    first: int
    end: int


class ShardReformation(DividedReformation, frozen=True, kw_only=True):
    """What the members of a new epoch do before they go on. The same on every one of them."""

    layout: dict[int, Shard]
    copies: tuple[tuple[int, ...], ...]
    sources: tuple[Source, ...]
    """Empty where nobody has a state: then the first member's model is everyone's."""

    @property
    def fresh(self) -> bool:
        """Whether nobody has a state: the first member's model is everyone's."""
        return not self.sources


def plan_copies(members: Sequence[int], minimum: int) -> tuple[tuple[int, ...], ...]:
    """Return the members of each copy: as many copies as can have `minimum` members.

    A minimum of 0 makes one copy of all. Neighbours are together, so that a copy lies on few
    nodes, and the same shard of two copies on different ones.

    >>> plan_copies([0, 1, 2, 4, 5], 2)
    ((0, 1), (2, 4, 5))
    """
    count = max(1, len(members) // minimum) if minimum else 1
    bounds = [i * len(members) // count for i in range(count + 1)]
    return tuple(tuple(members[a:b]) for a, b in pairwise(bounds))


def decide_shards(
    count: int,
    lengths: Sequence[int],
    minimum: int,
    progress: Mapping[int, ShardProgress],
) -> ShardReformation | None:
    """Return how the members go on with `count` micro-batches a step; None where no step is whole.

    `lengths` are the numbers of rows that parameters have.
    """
    members = sorted(progress)
    copies = plan_copies(members, minimum)
    layout = {m: Shard(i, len(copy)) for copy in copies for i, m in enumerate(copy)}
    fresh = not any(s.shards or s.snapshots for s in progress.values())
    newest = max(s.applied for s in progress.values())
    step, line, sources = 0, NO_LINE, tuple[Source, ...]()
    if not fresh:
        found = _find_whole(lengths, progress)
        if found is None:
            return None
        step, line, sources = found
    holding = [m for m, s in progress.items() if s.shards]
    live, forward = tell_apart(progress, holding, (step, line))
    kept = {m: progress[m].done for m in live}
    todo = reassign(count, members, kept)
    left = sum(len(mine) for mine in todo.values())
    back = max(0, newest - step)
    return ShardReformation(
        step=step,
        line=line,
        layout=layout,
        copies=copies,
        forward=forward,
        holder=live[0] if forward else -1,
        sources=sources,
        back=back,
        todo=todo,
        redone=left if any(kept.values()) else 0,
        reason=_explain(step, count - left, count, copies, forward, sources, back),
    )


def plan_transfers(plan: ShardReformation, length: int) -> tuple[Transfer, ...]:
    """Return where each member's rows of a parameter of `length` rows come from.

    What a member holds itself is not sent; other sources take turns.
    """
    sources = plan.sources or (Source(min(plan.layout), WHOLE),)
    edges = {0, length}
    for shard in (*plan.layout.values(), *(s.shard for s in sources)):
        rows = shard.rows(length)
        edges |= {rows.start, rows.stop}
    cuts = sorted(edges)
    transfers: list[Transfer] = []
    for turn, (member, shard) in enumerate(sorted(plan.layout.items())):
        mine = shard.rows(length)
        for first, end in pairwise(cuts):
            if first not in mine:
                continue
            having = [s for s in sources if first in s.shard.rows(length)]
            own = [s for s in having if s.member == member]
            whole = [s for s in own if s.shard == shard]
            source = min(whole or own, key=_preference) if own else having[turn % len(having)]
            last = transfers[-1] if transfers else None
            if last is not None and (last.source, last.to, last.end) == (source, member, first):
                transfers[-1] = Transfer(length, source, member, last.first, end)
            else:
                transfers.append(Transfer(length, source, member, first, end))
    return tuple(transfers)


def plan_mirrors(nodes: Mapping[int, str]) -> dict[int, int]:
    """Return member -> who keeps its snapshots on another node; nobody where there is one node.

    The next node's members take turns, so that the loss of one node costs no shard both its
    owner and its mirror, and no member keeps many.

    >>> plan_mirrors({0: "a", 1: "a", 2: "b"})
    {0: 2, 1: 2, 2: 0}
    """
    names = sorted(set(nodes.values()))
    on = {name: sorted(m for m, node in nodes.items() if node == name) for name in names}
    mirrors: dict[int, int] = {}
    if len(names) > 1:
        for at, name in enumerate(names):
            keepers = on[names[(at + 1) % len(names)]]
            for turn, member in enumerate(on[name]):
                mirrors[member] = keepers[turn % len(keepers)]
    return mirrors


def _find_whole(
    lengths: Sequence[int], progress: Mapping[int, ShardProgress]
) -> tuple[int, int, tuple[Source, ...]] | None:
    """Return the newest (step, line) of which every row is held, and who holds it."""
    held: dict[tuple[int, int], list[Source]] = {}
    applied = {(s.applied, s.line) for s in progress.values()}
    for member in sorted(progress):
        member_progress = progress[member]
        after = (member_progress.applied + 1, member_progress.ready)
        for shard in member_progress.shards:
            own = Source(member, shard)
            held.setdefault((member_progress.applied, member_progress.line), []).append(own)
            if after in applied and shard == member_progress.shards[-1]:
                held.setdefault(after, []).append(own)
        for one in member_progress.snapshots:
            source = Source(member, one.shard, one.owner)
            held.setdefault((one.step, one.line), []).append(source)
    for state in sorted(held, reverse=True):
        if all(_covers(held[state], length) for length in lengths):
            return (*state, tuple(held[state]))
    return None


def _covers(sources: Sequence[Source], length: int) -> bool:
    reached = 0
    for shard in sorted({s.shard for s in sources}, key=lambda s: s.rows(length).start):
        rows = shard.rows(length)
        if rows.start > reached:
            return False
        reached = max(reached, rows.stop)
    return reached >= length


def _preference(source: Source) -> tuple[bool, int, Shard]:
    """A live state before a snapshot."""
    return source.owner != -1, source.owner, source.shard


def _explain(
    step: int,
    kept: int,
    count: int,
    copies: Sequence[Sequence[int]],
    forward: Sequence[int],
    sources: Sequence[Source],
    back: int,
) -> str:
    sizes = Counter(len(copy) for copy in copies)
    shape = " and ".join(f"{n} x {size} shards" for size, n in sorted(sizes.items()))
    parts = [f"step {step} in {shape}: {kept} of {count} micro-batches are kept"]
    if forward:
        parts.append(f"ranks {list(forward)} apply what they have reduced")
    owners = sorted({s.owner for s in sources} - {-1})
    if not sources:
        parts.append("nobody has a state: the first rank's is everyone's")
    if back:
        parts.append(f"a shard's last copy is lost: {back} steps back, snapshots of {owners}")
    return "; ".join(parts)
