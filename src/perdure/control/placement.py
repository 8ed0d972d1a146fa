"""Which nodes run the world, and which are left out: blame, cordon, spare nodes.

A node that is left out keeps its place in the order of group ranks for the one that stands in:
every other node keeps its ranks, and what it has warm.
"""

from perdure.control.state import ControllerState
from perdure.model.actions import AnyAction, CordonNode
from perdure.model.events import NodeCordoned, NodeRestored
from perdure.model.verdicts import Verdict


def place_nodes(state: ControllerState, without: int | None = None) -> str:
    """Set the placement of the next world; return who stands in for whom, in words.

    A node that is lost, cordoned or `without` is replaced where a spare one stands ready. Where
    none does it stays, but for a lost one: a world that cannot be formed is no better than one
    that may fail again, so a node that the policy cordoned stands in for it.
    """
    if not state.placement:
        ready = [node for node in sorted(state.nodes) if node not in state.cordoned]
        nodes = (ready + sorted(state.cordoned))[: state.the_spec().nodes]
        state.placement = tuple(sorted(nodes))
        return ""
    placement, spares, words = list(state.placement), list(state.spares), []
    last = [node for node in find_cordoned_ready(state) if node != without]
    order = sorted(range(len(placement)), key=lambda group: placement[group] not in state.lost)
    for group in order:
        node = placement[group]
        if not (node in state.lost or node in state.cordoned or node == without):
            continue
        if spares or (last and node in state.lost):
            placement[group] = spares.pop(0) if spares else last.pop(0)
            words.append(f"node {placement[group]} stands in for node {node}")
    state.placement = tuple(placement)
    return ", ".join(words)


def find_cordoned_ready(state: ControllerState) -> list[int]:
    """Return the nodes that only the policy's own cordon keeps idle, the least blamed first."""
    out = {*state.placement, *state.lost, *state.barred}
    ready = [node for node in state.cordoned if node in state.nodes and node not in out]
    return sorted(ready, key=lambda node: (state.blames.get(node, 0), node))


def find_blamed_node(state: ControllerState, verdict: Verdict) -> int | None:
    """Return the node behind a verdict's culprit; None where it cannot be told.

    Of a link, the evidence may name one end (a probe's result does); else it is the end that was
    blamed more often before, and nobody where that settles nothing.
    """
    culprit, spec = verdict.culprit, state.the_spec()
    if culprit.node is not None:
        return culprit.node
    if culprit.rank is not None:
        return state.placement[spec.node_of(culprit.rank)] if state.placement else None
    if culprit.link is None:
        return None
    ends = [state.placement[spec.node_of(rank)] for rank in culprit.link]
    named = verdict.evidence.get("node")
    if named in ends:
        return int(named)
    blames = [state.blames.get(node, 0) for node in ends]
    if blames[0] == blames[1]:
        return None
    return ends[0] if blames[0] > blames[1] else ends[1]


def cordon(state: ControllerState, node: int, reason: str) -> list[AnyAction]:
    """Leave `node` out from now on."""
    if node in state.cordoned:
        return []
    state.cordoned[node] = reason
    return [CordonNode(node=node, reason=reason)]


def cordon_again(state: ControllerState) -> list[AnyAction]:
    """Return the cordons whose record did not reach the journal."""
    return [
        CordonNode(node=node, reason=reason)
        for node, reason in sorted(state.cordoned.items())
        if node not in state.cordons_noted
    ]


def note_cordon(state: ControllerState, event: NodeCordoned | NodeRestored) -> None:
    """Take an operator's word, or the record of our own."""
    if isinstance(event, NodeCordoned):
        state.cordoned.setdefault(event.node, event.reason)
        state.cordons_noted.add(event.node)
        if event.who:
            state.barred.add(event.node)
    else:
        state.barred.discard(event.node)
        state.cordons_noted.discard(event.node)
        state.cordoned.pop(event.node, None)
        state.blames.pop(event.node, None)
