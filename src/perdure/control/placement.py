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
    none does it stays: a world that cannot be formed is no better than one that may fail again.
    """
    if not state.placement:
        ready = [node for node in sorted(state.nodes) if node not in state.cordoned]
        nodes = (ready + sorted(state.cordoned))[: state.the_spec().nodes]
        state.placement = tuple(sorted(nodes))
        return ""
    placement, spares, words = list(state.placement), list(state.spares), []
    for group, node in enumerate(placement):
        if (node in state.lost or node in state.cordoned or node == without) and spares:
            placement[group] = spares.pop(0)
            words.append(f"node {placement[group]} stands in for node {node}")
    state.placement = tuple(placement)
    return ", ".join(words)


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
    else:
        state.cordons_noted.discard(event.node)
        state.cordoned.pop(event.node, None)
        state.blames.pop(event.node, None)
