"""Places for machines from elsewhere: who is given which node of the job.

A place is one of the last `remote` nodes. It is free if no machine was given it, or if the one that
was is lost; a machine that asks again gets the place that it had. Whoever has a place registers as
that node, as any other does, and everything else follows from that.
"""

import math

from perdure.control.answers import answer
from perdure.control.invitations import refuse_use
from perdure.control.job import JobState, OpenCommand
from perdure.model.actions import AnyAction, RecordEvent
from perdure.model.events import InvitationUsed

_CLAIM_S = 30.0
"""A machine that was given a place, and has not registered within this time, has given it up."""


def receive_join(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Give a machine a place, or say why there is none."""
    machine, spec = str(command.args["machine"]), state.the_spec()
    places = range(spec.local_nodes, spec.num_nodes)
    id_ = command.args.get("invitation")  # None: of a run before invitations were told apart.
    if id_ is not None:
        proof = str(command.args["proof"])
        why, more = refuse_use(state, now, str(id_), proof, machine)
        if why:
            return answer(state, command.id, False, why, dict(more))
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
    state.hosts[host] = node
    actions = answer(state, command.id, True, f"{host} is node {node}", {"node": node})
    if id_ is None:
        return actions
    used = InvitationUsed(id=str(id_), machine=machine, host=host, node=node, at_s=now)
    return [RecordEvent(event=used, reason=f"{host} is node {node}"), *actions]


def _is_free(state: JobState, now: float, node: int) -> bool:
    """Return whether nobody is there, and nobody else was sent there a moment ago."""
    if node in state.barred or (node in state.nodes and node not in state.lost):
        return False
    _, claimed_s = state.claims.get(node, ("", -math.inf))
    promised = claimed_s >= state.lost.get(node, -math.inf)
    return not promised or now >= claimed_s + _CLAIM_S
