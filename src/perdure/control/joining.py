"""Places for machines from elsewhere: who is given which node of the job.

A place is one of the last `remote` nodes. It is free if no machine was given it, or if the one that
was is lost; a machine that asks again gets the place that it had. Whoever has a place registers as
that node, as any other does, and everything else follows from that.
"""

from perdure.control.answers import answer
from perdure.control.state import ControllerState, OpenCommand
from perdure.model.actions import AnyAction

_CLAIM_S = 30.0
"""A machine that was given a place, and has not registered within this time, has given it up."""


def receive_join(state: ControllerState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Give a machine a place, or say why there is none."""
    machine, spec = str(command.args["machine"]), state.the_spec()
    places = range(spec.local_nodes, spec.num_nodes)
    if not places:
        why = "no node of this job comes from elsewhere: perdure run --remote K"
        return answer(state, command.id, False, why, {})
    mine = next((n for n in places if state.claims.get(n, ("", 0.0))[0] == machine), None)
    free = [node for node in places if _is_free(state, now, node)]
    node = mine if mine is not None else min(free, default=None)
    if node is None:
        names = ", ".join(map(str, places))
        verb = "s {} are" if len(places) > 1 else " {} is"
        why = f"no place is free: node{verb.format(names)} taken"
        return answer(state, command.id, False, why, {})
    state.claims[node] = (machine, now)
    host = str(command.args.get("host") or "a machine")
    return answer(state, command.id, True, f"{host} is node {node}", {"node": node})


def _is_free(state: ControllerState, now: float, node: int) -> bool:
    if node in state.barred:
        return False
    if node in state.lost:
        return now >= state.claims.get(node, ("", 0.0))[1] + _CLAIM_S or not _is_claimed(
            state, node
        )
    claim = state.claims.get(node)
    return node not in state.nodes and (claim is None or now >= claim[1] + _CLAIM_S)


def _is_claimed(state: ControllerState, node: int) -> bool:
    """Return whether somebody was given the place of `node` after it was lost."""
    claim = state.claims.get(node)
    return claim is not None and claim[1] >= state.lost.get(node, 0.0)
