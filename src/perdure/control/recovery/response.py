"""From an actionable verdict to the policy's answer: what the controller knows, put before it."""

from perdure.control.recovery.placement import cordon, find_blamed_node
from perdure.control.state import ControllerState
from perdure.model.actions import AnyAction
from perdure.model.events import ExitRecord
from perdure.model.verdicts import Culprit, Verdict
from perdure.policy import Reaction, Situation, find_device_error, find_restart_cost_s, react

STACKS_FOR = frozenset({"CommHang", "ComputeHang", "EarlyExit", "Desync"})
"""Verdicts at which the stacks of those concerned are taken before anything is ended."""
ACTED_UPON = STACKS_FOR | {"CommSlow", "Straggler", "UnhealthyDevice"}


def weigh_verdict(state: ControllerState, verdict: Verdict) -> Reaction:
    """Return what the job's policy makes of `verdict`, as things stand."""
    node = find_blamed_node(state, verdict)
    cost_s = find_restart_cost_s(tuple(state.restarts_s))
    if state.saved_s is not None:
        cost_s += max(0.0, verdict.confirmed_s - state.saved_s)
    situation = Situation(
        node=node,
        spares=state.spares,
        blames=state.blames.get(node, 0) if node is not None else 0,
        restart_s=cost_s,
    )
    return react(verdict, state.the_spec().policy, situation)


def blame(
    state: ControllerState, verdict: Verdict, reaction: Reaction
) -> tuple[list[AnyAction], int | None]:
    """Count the blame; return the cordon it leads to, and the node to leave out."""
    node = find_blamed_node(state, verdict)
    if node is None:
        return [], None
    state.blames[node] = state.blames.get(node, 0) + 1
    actions: list[AnyAction] = []
    if reaction.cordon:
        actions = cordon(state, node, f"{verdict.kind}: {reaction.reason}")
    return actions, node if reaction.leave_out else None


def blame_device(
    state: ControllerState, record: ExitRecord
) -> tuple[list[AnyAction], int | None, str]:
    """Return what follows for its node where a rank died of its device: cordon, node, reason.

    A device that has failed fails again: restarting the same rank on it would use up the budget.
    """
    words = find_device_error(f"{record.error} {record.traceback}")
    if not words:
        return [], None, ""
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
    actions, node = blame(state, verdict, reaction)
    return actions, node, f"{verdict.reason}; {reaction.reason}"
