"""Where the members of a pipelined world go on after a loss: at which step, and who holds what.

The counts of a step are reduced last, over all members, once each has the reduced gradients of
its own blocks. So whoever has applied a step proves that all others can, by themselves; and the
newest step of which every block is held by somebody who lives, in its own state or in a snapshot
of the peer checkpoint, is where all go on. States are told apart by (step, line), as those of
shards are (`shards`).

A micro-batch that a member has wholly finished for its section is kept while the member's section
stays what it is. A micro-batch that is not kept everywhere passes through all stages once more:
where it is kept its gradients are not taken again.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from perdure.plan.elastic.commit import DividedReformation, Progress, tell_apart
from perdure.plan.elastic.stage_orders import Passes, StageSchedule, plan_passes
from perdure.plan.elastic.stages import Choose, Layout, Runs, list_blocks, place, remaining_layout
from perdure.plan.worlds.measures import StageTimes


class StageSnapshot(msgspec.Struct, frozen=True, order=True):
    """The state of some blocks in memory, which outlives the process that has written it."""

    step: int
    line: int
    runs: Runs
    owner: int
    """The member that has written it."""


class StageProgress(Progress, frozen=True):
    """What one member holds, at a moment when it computes and reduces nothing.

    What it has `done` are tasks (`stage_orders`).
    """

    runs: Runs = ()
    """Its sections in the newest world that it was in; none before the first."""
    held: tuple[int, ...] = ()
    """Blocks that it has live; more than its sections' while they are passed on."""
    snapshots: tuple[StageSnapshot, ...] = ()
    """What it can read of the peer checkpoint."""
    times: tuple[StageTimes, ...] = ()
    """How long its newest micro-batches took."""


class Holder(NamedTuple):
    """The member or snapshot that has a block of the chosen step."""

    member: int
    owner: int = -1
    """The snapshot's writer; -1 where the member's own state is meant."""


class Move(NamedTuple):
    """A block that a member lacks."""

    block: int
    to: int
    holders: tuple[Holder, ...]
    """Each sends its share; the member itself, where it has a snapshot."""


class StageReformation(DividedReformation, frozen=True, kw_only=True):
    """What the members of a new epoch do before they go on. The same on every one of them."""

    layout: Layout
    changed: bool
    """The model is cut or placed otherwise than before."""
    plain: Holder
    """Who tells what all members have alike."""
    fresh: bool
    """Nobody has a state: the first member's model is everyone's."""
    moves: tuple[Move, ...]
    kept: dict[int, tuple[int, ...]]
    """Member -> tasks of step `step` that it need not do again."""
    passes: Passes


def decide_stages(
    count: int,
    sizes: Sequence[int],
    choose: Choose,
    progress: Mapping[int, StageProgress],
    line: int = 0,
    schedule: StageSchedule = "1f1b",
) -> StageReformation | None:
    """Return how the members go on with `count` micro-batches a step; None where no step is whole.

    `sizes` are the bytes of each block's state. An initial model that is handed out is of `line`:
    where that breaks half-way, the next one is not mixed with it.
    """
    members, blocks = sorted(progress), len(sizes)
    fresh = not any(s.held or s.snapshots for s in progress.values())
    found = None if fresh else find_whole(blocks, progress)
    if found is None and max(s.applied for s in progress.values()) > 0:
        return None
    if found is None:  # Nobody has trained anything: who has the whole initial model gives it.
        whole = [m for m in members if not progress[m].runs]
        if not whole:
            return None
        fresh, found = True, (0, line, {b: (Holder(whole[0]),) for b in range(blocks)})
    step, line, holders = found
    holding = [m for m in members if progress[m].held]
    live, forward = tell_apart(progress, holding, (step, line))
    layout, why = _choose_layout(blocks, sizes, choose, progress, holders)
    kept = _map_kept(layout, {m: progress[m] for m in live})
    passes = plan_passes(layout, count, kept, schedule=schedule)
    moves = tuple(plan_moves(layout, holders))
    newest = max(s.applied for s in progress.values())
    old = {progress[m].runs for m in holding}
    began = any(s.done for s in progress.values())
    plan = StageReformation(
        step=step,
        line=line,
        layout=layout,
        changed=not fresh
        and (not old <= set(layout.runs) or any(progress[m.to].held for m in moves)),
        forward=forward,
        holder=live[0] if forward else -1,
        plain=min((h for hs in holders.values() for h in hs), key=_preference),
        fresh=fresh,
        moves=moves,
        kept=kept,
        passes=passes,
        todo={m: passes.list_todo(m, kept.get(m, ())) for m in members},
        back=0 if fresh else max(0, newest - step),
        redone=len(passes.numbers) if began else 0,
        reason="",
    )
    return msgspec.structs.replace(plan, reason=_explain(plan, count, sizes, why))


def find_whole(
    blocks: int, progress: Mapping[int, StageProgress]
) -> tuple[int, int, dict[int, tuple[Holder, ...]]] | None:
    """Return the newest (step, line) of which every block is held, and who holds it."""
    held: dict[tuple[int, int], dict[int, list[Holder]]] = {}

    def note(step: int, line: int, having: Iterable[int], holder: Holder) -> None:
        at = held.setdefault((step, line), {})
        for block in having:
            at.setdefault(block, []).append(holder)

    applied = {(s.applied, s.line) for s in progress.values() if s.held}
    for member in sorted(progress):
        one = progress[member]
        if one.held:
            note(one.applied, one.line, one.held, Holder(member))
            if (one.applied + 1, one.ready) in applied:
                own = [b for b in one.held if b in list_blocks(one.runs)]
                note(one.applied + 1, one.ready, own, Holder(member))
        for snapshot in one.snapshots:
            source = Holder(member, snapshot.owner)
            note(snapshot.step, snapshot.line, list_blocks(snapshot.runs), source)
    for (step, line), having in sorted(held.items(), reverse=True):
        if len(having) == blocks:
            return step, line, {b: tuple(sorted(having[b], key=_preference)) for b in having}
    return None


def plan_moves(layout: Layout, holders: Mapping[int, Sequence[Holder]]) -> Iterable[Move]:
    """Yield what each member has to get: nothing that it has live, and over links no block twice.

    All who have a block live send a share of it; snapshots are read where nobody has it live.
    A member's own snapshot comes before all that others have.
    """
    for runs, members in zip(layout.runs, layout.copies, strict=True):
        for block in list_blocks(runs):
            having = holders[block]
            for turn, member in enumerate(members):
                own = [h for h in having if h.member == member]
                if own and own[0].owner < 0:
                    continue
                live = [h for h in having if h.owner < 0]
                chosen = own[:1] or live or having
                at = (turn + block) % len(chosen)
                yield Move(block, member, (*chosen[at:], *chosen[:at]))


def _choose_layout(
    blocks: int,
    sizes: Sequence[int],
    choose: Choose,
    progress: Mapping[int, StageProgress],
    holders: Mapping[int, Sequence[Holder]],
) -> tuple[Layout, str]:
    members = sorted(progress)
    runs = {m: s.runs for m, s in progress.items() if s.runs and s.held}
    nodes = {m: progress[m].node for m in members}
    observed = [times for m in members for times in progress[m].times]
    choice = choose(members, nodes, remaining_layout(blocks, members, runs), observed)
    if choice.stays is not None:
        return choice.stays, choice.reason
    held: dict[int, set[int]] = {m: set() for m in members}
    for block, having in holders.items():
        for holder in having:
            held[holder.member].add(block)
    return place(choice, members, held, sizes), choice.reason


def _map_kept(layout: Layout, progress: Mapping[int, StageProgress]) -> dict[int, tuple[int, ...]]:
    """Return what each member keeps: what it has done for the sections that it goes on with.

    Two members have done the same task where a change of the layout was left half-way:
    then the later one of them keeps nothing, because sums cannot be taken apart.
    """
    kept: dict[int, tuple[int, ...]] = {}
    for runs, members in zip(layout.runs, layout.copies, strict=True):
        taken: set[int] = set()
        for member in members:
            one = progress.get(member)
            if one is not None and one.runs == runs and not taken & set(one.done):
                kept[member] = one.done
                taken |= set(one.done)
    return kept


def _preference(holder: Holder) -> tuple[bool, int, int]:
    """A live state before a snapshot."""
    return holder.owner != -1, holder.member, holder.owner


def _explain(plan: StageReformation, count: int, sizes: Sequence[int], why: str) -> str:
    kept = count - len(plan.passes.numbers)
    parts = [f"step {plan.step} in {plan.layout.shape}: {why}", f"{kept} of {count} micro-batches"]
    parts[1] += " are kept"
    if plan.forward:
        parts.append(f"ranks {list(plan.forward)} apply what they have reduced")
    if plan.fresh:
        parts.append("nobody has a state: the first rank's is everyone's")
    elif plan.moves:
        size = sum(sizes[move.block] for move in plan.moves)
        parts.append(f"{len(plan.moves)} blocks move ({size} bytes)")
    owners = sorted({h.owner for move in plan.moves for h in move.holders} - {-1})
    if plan.back:
        parts.append(f"a stage's last copy is lost: {plan.back} steps back, snapshots of {owners}")
    return "; ".join(parts)
