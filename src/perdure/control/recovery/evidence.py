"""Stacks before harm: what a hanging rank was doing is gone once its world is ended.

They are asked for at the first verdict, which usually comes long before it is acted upon. Where
it does not, the action waits for them, but for no more than `_STACKS_TIMEOUT_S`: a rank whose
stack cannot be taken must not hold up everybody's recovery.
"""

from perdure.control.job import JobState
from perdure.control.world import StackRequest
from perdure.model.actions import AnyAction
from perdure.model.events import StacksTaken, VerdictWithdrawn
from perdure.model.orders import TakeStacks
from perdure.model.verdicts import Verdict

_STACKS_TIMEOUT_S = 2.0


def ask_stacks(state: JobState, now: float, verdict: Verdict) -> list[AnyAction]:
    """Ask for the stacks of the culprit and of one rank that waits for it.

    Of ranks that wait in a circle for the stacks of all: whether they are blocked settles it.
    """
    culprit = verdict.culprit.rank
    living = [rank for rank in state.asked if rank not in state.world.exits]
    circle = verdict.evidence.get("circle", ())
    ranks = tuple(rank for rank in living if rank in circle) or (
        *(rank for rank in living if rank == culprit),
        *[rank for rank in living if rank != culprit][:1],
    )
    if not ranks:
        return []
    if state.world.stacks is None:
        state.world.stacks = StackRequest(due_s=now + _STACKS_TIMEOUT_S)
    state.world.stacks.missing.update(ranks)
    reason = f"{verdict.kind} of {verdict.culprit}"
    return [TakeStacks(generation=state.world.generation, ranks=ranks, reason=reason)]


def hold_action(state: JobState, now: float, verdict: Verdict) -> bool:
    """Keep an actionable verdict if stacks are on their way; return whether it is kept."""
    request = state.world.stacks
    if request is None or not request.missing or now >= request.due_s:
        return False
    request.held = request.held or verdict
    return True


def ask_stacks_again(state: JobState, reason: str) -> list[AnyAction]:
    """Return the request that is open, once more."""
    if state.world.stacks is None or not state.world.stacks.missing:
        return []
    ranks = tuple(sorted(state.world.stacks.missing))
    return [TakeStacks(generation=state.world.generation, ranks=ranks, reason=reason)]


def note_stacks(state: JobState, event: StacksTaken) -> Verdict | None:
    """Take what arrived; return the verdict that need wait no longer."""
    request = state.world.stacks
    if request is None or event.generation != state.world.generation:
        return None
    request.missing.difference_update(event.stacks)
    return None if request.missing else request.held


def withdraw(state: JobState, event: VerdictWithdrawn) -> list[AnyAction]:
    """Act no more upon a suspect that has moved again; nothing else is to be done."""
    request, gone = state.world.stacks, event.verdict
    state.world.standing.pop(f"{gone.kind} {gone.culprit}", None)
    if request is not None and request.held is not None and request.held.culprit == gone.culprit:
        request.held = None
    return []
