"""The commit rule of the elastic depth: where survivors go on after one of them was lost.

While all is well no extra round is needed: the all-reduce of a step is the agreement on it. A
rank applies step s (its optimizer's step) only when every gradient of s has been reduced, and
keeps the reduced result until all have applied s. It cannot finish reducing s+1 before every
member has begun to, and a member begins s+1 only after it has applied s. Hence two facts:

1. two members are never more than one step apart;
2. whoever is ahead can give the others what they lack: the reduced result of s lies in one of
   two buffers, and only a finished reduction of s+1, which proves that all have applied s, lets
   the buffer be used again.

On re-formation each survivor reports how far it is, and all decide alike, from the same reports:
those behind roll forward with the result of those ahead. Nobody ahead: all stand before the same
step, whose parameters nobody has touched, and redo only what the lost rank had not delivered.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from perdure.plan.elastic.microbatches import reassign

FRESH = -1
"""Steps applied by a rank that has no state yet: it has just joined."""


NO_LINE = -1


class Progress(msgspec.Struct, frozen=True):
    """How far one member of a world whose state is in parts is, while nothing is under way."""

    node: str
    applied: int
    """Steps that its state contains; `FRESH` where it has none."""
    line: int = NO_LINE
    done: tuple[int, ...] = ()
    """Micro-batches, or tasks, of step number `applied` whose gradients it holds."""
    ready: int = NO_LINE
    """The line in which it has reduced step number `applied`, without knowing that all have."""
    plan: str = ""
    """Digest of its training plan."""
    met: bool = False
    settings: str = ""
    """These two as in `MemberProgress`."""


class MemberProgress(msgspec.Struct, frozen=True):
    """How far one rank is, at a moment when it computes and reduces nothing."""

    applied: int
    """Steps that its parameters contain; `FRESH` where it has none."""
    done: tuple[int, ...] = ()
    """Micro-batches of step number `applied` whose gradients it holds."""
    holds: bool = False
    """It keeps the reduced result of the step before, number `applied - 1`."""
    plan: str = ""
    """Digest of its training plan."""
    met: bool = False
    """It has compared its state with all members of the new epoch before."""
    settings: str = ""
    """Hash of all else that a step depends on, if a rank joins that may have followed."""


class CommittedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Where the members of a new epoch go on. The same on every one of them."""

    step: int
    """Steps that every member's state contains afterwards: the number of the next one."""
    forward: tuple[int, ...]
    """Members one step behind, which first apply what was reduced: `holder` knows that all have."""
    holder: int
    """Who has applied it, and sends the result or tells the losses; -1 where nobody needs it."""
    todo: dict[int, tuple[int, ...]]
    """Member -> micro-batches, or tasks, of step `step` that it has to compute."""
    redone: int
    """How many micro-batches were assigned to somebody before, and are not done."""
    reason: str


class Reformation(CommittedStep, frozen=True, kw_only=True):
    """What the members of a new epoch do before they go on, where each has the whole state."""

    donors: tuple[int, ...]
    """Members that have this state."""
    fresh: tuple[int, ...]
    """Members that receive the whole state from the donors."""


class DividedReformation(CommittedStep, frozen=True, kw_only=True):
    """What they do where each has a part of the state; they may have to go back."""

    line: int
    back: int
    """Steps that were applied and are taken again."""


def decide_reformation(count: int, progress: Mapping[int, MemberProgress]) -> Reformation:
    """Return how members with this `progress` are brought together; `count` micro-batches a step.

    Members in order of rank decide ties, so that all decide alike. A member that is ahead but
    does not hold the reduced result (it joined a moment ago) sends its whole state instead.
    """
    members = sorted(progress)
    step = max(s.applied for s in progress.values())
    if step == FRESH:
        first, *others = members
        return Reformation(
            step=0,
            donors=(first,),
            forward=(),
            fresh=tuple(others),
            holder=-1,
            todo=reassign(count, members, {}),
            redone=0,
            reason=f"nobody has a state: rank {first}'s is everyone's",
        )
    donors = tuple(r for r in members if progress[r].applied == step)
    holder = next((r for r in donors if progress[r].holds), -1)
    behind = [r for r in members if progress[r].applied == step - 1 != FRESH]
    forward = tuple(behind) if holder >= 0 else ()
    fresh = tuple(r for r in members if r not in donors and r not in forward)
    kept = {r: progress[r].done for r in donors}
    todo = reassign(count, members, kept)
    left = sum(len(mine) for mine in todo.values())
    return Reformation(
        step=step,
        donors=donors,
        forward=forward,
        fresh=fresh,
        holder=holder if forward else -1,
        todo=todo,
        redone=left if any(kept.values()) else 0,
        reason=_explain(step, count - left, count, forward, fresh, holder),
    )


def _explain(
    step: int, kept: int, count: int, forward: Sequence[int], fresh: Sequence[int], holder: int
) -> str:
    parts = [f"step {step}: {kept} of {count} micro-batches are kept"]
    if forward:
        parts.append(f"ranks {list(forward)} roll forward with rank {holder}'s result")
    if fresh:
        parts.append(f"ranks {list(fresh)} receive the state")
    return "; ".join(parts)


def tell_apart(
    progress: Mapping[int, Progress], holding: Collection[int], state: tuple[int, int]
) -> tuple[list[int], tuple[int, ...]]:
    """Return who of those that are `holding` anything has (step, line) `state`, and who goes to it.

    The latter have reduced its last step, and somebody lives who knows that all have.
    """
    having = {member: progress[member] for member in sorted(holding)}
    live = [m for m, one in having.items() if (one.applied, one.line) == state]
    behind = [m for m, one in having.items() if (one.applied + 1, one.ready) == state]
    return live, tuple(behind) if live else ()
