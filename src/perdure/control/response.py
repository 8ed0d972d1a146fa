"""From an actionable verdict to the policy's answer: what the controller knows, put before it."""

from perdure.control.placement import find_blamed_node
from perdure.control.state import ControllerState
from perdure.model.verdicts import Verdict
from perdure.policy import Reaction, Situation, find_restart_cost_s, react

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
