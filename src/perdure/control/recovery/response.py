"""From an actionable verdict to the policy's answer: what the controller knows, put before it.

Stacks are taken before harm: what a hanging rank was doing is gone once its world is ended. They
are asked for at the first verdict, which usually comes long before it is acted upon. Where it does
not, the action waits for them, but for no more than `_STACKS_TIMEOUT_S`: a rank whose stack cannot
be taken must not hold up everybody's recovery.
"""

import math

from msgspec import structs

from perdure.control.job import JobState
from perdure.control.membership import membership_of
from perdure.control.membership.members import list_spare_members, node_of_member
from perdure.control.recovery.devices import (
    free_wrongly_blamed,
    judge_sticky_error,
    note_blame,
)
from perdure.control.recovery.placement import find_blamed_node
from perdure.control.world import StackRequest
from perdure.model.events import RankExited, StacksTaken, VerdictWithdrawn
from perdure.model.orders import AnyAction, TakeStacks
from perdure.model.verdicts import Culprit, Verdict
from perdure.policy import Reaction, Situation, estimate_restart_cost_s, find_device_error, react

STACKS_FOR = frozenset({"CommHang", "ComputeHang", "EarlyExit", "Desync"})
"""Verdicts at which the stacks of those concerned are taken before anything is ended."""
SLOW = frozenset({"CommSlow", "Straggler", "HostBusy"})
"""Verdicts that stand while training goes on, and are weighed again as things change."""
ACTED_UPON = STACKS_FOR | SLOW | {"UnhealthyDevice"}
_STACKS_TIMEOUT_S = 2.0
_AT_ONCE_S = 120.0
"""Whoever is slow again so soon after another node has taken over is slow by its work."""


def weigh_verdict(state: JobState, verdict: Verdict, now: float | None = None) -> Reaction:
    """Return what the job's policy makes of `verdict`, as things stand `now`."""
    now = verdict.confirmed_s if now is None else now
    node = find_blamed_node(state, verdict)
    situation = Situation(
        node=node,
        spares=_list_stand_ins(state, verdict, node),
        blames=state.blames.get(node, 0) if node is not None else 0,
        restart_s=estimate_restart_cost_s(tuple(state.restarts_s)),
        lost_s=0.0
        if membership_of(state).goes_on_without(state, verdict)
        else _estimate_lost_s(state, now),
        replaced=_is_replaced(state, verdict, node),
        replaced_s=now - max((at_s for _, at_s in state.replaced.values()), default=-math.inf),
    )
    return react(verdict, state.the_spec().policy, situation)


def _list_stand_ins(state: JobState, verdict: Verdict, node: int | None) -> tuple[int, ...]:
    """Return the nodes that could stand in, in the order in which they would.

    A rank of an elastic world is followed by a member that is ready elsewhere; spare nodes run
    such members, or have become part of the world.
    """
    if not membership_of(state).goes_on_without(state, verdict) or node is None:
        return state.spares
    ready = list_spare_members(state, beside=(node,))
    return tuple(dict.fromkeys(node_of_member(state, member) for member in ready))


def _estimate_lost_s(state: JobState, now: float) -> float:
    """Return how much work a restart would lose, in seconds.

    A script that perdure knows no checkpoint of begins anew, as far as anybody can tell.
    """
    kept = [at_s for at_s in (state.saved_s, state.world.stepping_s) if at_s is not None]
    return max(0.0, now - max(kept)) if kept else 0.0


def _is_replaced(state: JobState, verdict: Verdict, node: int | None) -> bool:
    """Return whether the node runs these ranks only because another was as slow with them."""
    generation, at_s = state.replaced.get(_name_place(state, verdict, node), (-2, 0.0))
    return state.world.generation == generation + 1 and verdict.first_seen_s - at_s < _AT_ONCE_S


def _name_place(state: JobState, verdict: Verdict, node: int | None) -> str:
    if membership_of(state).goes_on_without(state, verdict):
        return f"{verdict.kind} rank {verdict.culprit.rank}"
    group = (
        state.world.placement.index(node)
        if node is not None and node in state.world.placement
        else -1
    )
    return f"{verdict.kind} {group}"


def blame(
    state: JobState, now: float, verdict: Verdict, reaction: Reaction
) -> tuple[list[AnyAction], int | None]:
    """Count the blame; return the cordon it leads to, and the node to leave out."""
    node = find_blamed_node(state, verdict)
    if node is None:
        return [], None
    blames = state.blames.get(node, 0)
    ends = {node_of_member(state, rank) for rank in verdict.culprit.link or ()}
    for each in {node, *(end for end in ends if state.blames.get(end, 0) == blames)}:
        state.blames[each] = blames + 1  # Of a link whose ends are alike it may be either.
    actions: list[AnyAction] = []
    if (
        reaction.leave_out
        and verdict.kind in SLOW
        and membership_of(state).goes_on_without(state, verdict)
    ):
        for member in list_spare_members(state, beside=(node,)):  # One of them takes its part.
            state.replaced[f"{verdict.kind} rank {member}"] = (state.world.generation - 1, now)
    elif reaction.leave_out and verdict.kind in SLOW:
        place = _name_place(state, verdict, node)
        state.replaced[place] = (state.world.generation, now)
    if reaction.cordon:
        reason = f"{verdict.kind}: {reaction.reason}"
        actions = membership_of(state).cordon(state, node, reason)
    return actions, node if reaction.leave_out else None


def blame_device(state: JobState, event: RankExited) -> tuple[list[AnyAction], int | None, str]:
    """Return what follows for its node where a rank died of its device: cordon, node, reason.

    A device that has failed fails again: restarting the same rank on it would use up the budget.
    """
    record = event.record
    words = find_device_error(f"{record.error} {record.traceback}")
    if not words:
        sure, why = judge_sticky_error(state, event)
        if not sure:
            return free_wrongly_blamed(state, event), None, why
        words = f"{record.sticky_error}; {why}"
    verdict = Verdict(
        kind="UnhealthyDevice",
        culprit=Culprit(rank=record.rank),
        generation=record.generation,
        first_seen_s=record.at_s,
        confirmed_s=record.at_s,
        confidence=0.9,
        reason=f"rank {record.rank} died of its device: {words}",
        actionable=True,
        certain=True,
        ground="platform",
        acts_s=record.at_s,
        acts_why="the device itself has failed",
    )
    reaction = weigh_verdict(state, verdict)
    actions, node = blame(state, record.at_s, verdict, reaction)
    if actions:
        note_blame(state, event)
    return actions, node, f"{verdict.reason}; {reaction.reason}"


def correct_culprit(state: JobState, event: RankExited) -> None:
    """Blame who died first, should that be heard of only now: news of others can be faster.

    The decision stands; what changes is the history that later ones are made from, and how
    the job is said to have ended.
    """
    record = event.record
    known = state.failures.kept[-1] if state.failures.kept else None
    if known is None or state.world.first_exit_s is None or known.generation != record.generation:
        return
    if not record.failed or record.asked or record.at_s >= state.world.first_exit_s:
        return
    state.world.first_exit_s = record.at_s
    code = record.code or 128 + record.signal
    state.failures.kept[-1] = state.world.failures.kept[-1] = structs.replace(
        known,
        cause=record.cause,
        culprit=f"rank {record.rank}",
        error=record.error,
        code=code,
        signal=record.signal,
    )
    ending = state.ending
    if ending is not None and ending.status == "failed":
        first = f"rank {record.rank} had ended first: {record.cause}"
        state.ending = structs.replace(ending, exit_code=code, reason=f"{ending.reason}; {first}")


# --- stacks --------------------------------------------------------------------------------------


def ask_stacks(state: JobState, now: float, verdict: Verdict) -> list[AnyAction]:
    """Ask for the stacks of the culprit and of one rank that waits for it.

    Of ranks that wait in a circle for the stacks of all: whether they are blocked settles it.
    """
    culprit = verdict.culprit.rank
    living = [
        rank for rank in membership_of(state).list_asked(state) if rank not in state.world.exits
    ]
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
    asked = ((w.generation, w.stacks.missing) for w in state.worlds.values() if w.stacks)
    return [
        TakeStacks(generation=generation, ranks=tuple(sorted(missing)), reason=reason)
        for generation, missing in asked
        if missing
    ]


def note_stacks(state: JobState, event: StacksTaken) -> Verdict | None:
    """Take what arrived; return the verdict that need wait no longer."""
    request = state.world.stacks
    if request is None or event.generation != state.world.generation:
        return None
    request.missing.difference_update(event.stacks)
    return None if request.missing else request.held


def withdraw(state: JobState, now: float, event: VerdictWithdrawn) -> list[AnyAction]:
    """Act no more upon a suspect that has moved again; nothing else is to be done."""
    request, gone = state.world.stacks, event.verdict
    state.world.pending_verdicts.pop(f"{gone.kind} {gone.culprit}", None)
    if request is not None and request.held is not None and request.held.culprit == gone.culprit:
        request.held = None
    return []
