"""Which nodes run the world, and which are left out: blame, cordon, spare nodes.

A node that is left out keeps its place in the order of group ranks for the one that stands in:
every other node keeps its ranks, and what it has warm.
"""

from typing import Any

from perdure.control.job import JobState, OpenMove, OpenNotice
from perdure.control.membership import membership_of
from perdure.control.membership.members import node_of_member
from perdure.model.events import NodeCordoned, NodeRestored
from perdure.model.failures import LATE_S
from perdure.model.orders import AnyAction, CordonNode, NoteDraining, RestoreNode
from perdure.model.verdicts import Verdict


def place_nodes(state: JobState, without: int | None = None) -> str:
    """Set the placement of the next world; return who stands in for whom, in words.

    A node that is lost, cordoned, being left or `without` is replaced where a spare one stands
    ready. Where none does it stays, but for a lost one: a world that cannot be formed is no
    better than one that may fail again, so a node that the policy cordoned stands in for it.
    """
    if not state.world.placement:
        ready = [node for node in sorted(state.nodes) if node not in state.cordoned]
        last = sorted(set(state.cordoned), key=lambda node: (node in state.barred, node))
        nodes = (ready + last)[: state.the_spec().nodes]
        state.world.placement = tuple(sorted(nodes))
        return ""
    placement, spares, words = list(state.world.placement), list(state.spares), []
    out = {*state.lost, *state.cordoned, *state.leaving, without}
    last = [node for node in list_cordoned_ready(state) if node != without]
    order = sorted(range(len(placement)), key=lambda group: placement[group] not in state.lost)
    for group in order:
        node = placement[group]
        if node not in out:
            continue
        if spares or (last and node in state.lost):
            placement[group] = spares.pop(0) if spares else last.pop(0)
            words.append(f"node {placement[group]} stands in for node {node}")
    state.world.placement = tuple(placement)
    return ", ".join(words)


def list_cordoned_ready(state: JobState) -> list[int]:
    """Return the nodes that only the policy's own cordon keeps idle, the least blamed first."""
    out = {*state.world.placement, *state.lost, *state.barred}
    ready = [node for node in state.cordoned if node in state.nodes and node not in out]
    return sorted(ready, key=lambda node: (state.blames.get(node, 0), node))


def find_notice(state: JobState, now: float, node: int) -> OpenNotice | None:
    """Return what says that `node` goes away; None where nothing does."""
    found = [
        n
        for n in state.notices.values()
        if n.node == node and n.certain and now <= n.gone_s + LATE_S
    ]
    return min(found, key=lambda n: n.gone_s, default=None)


def find_blamed_node(state: JobState, verdict: Verdict) -> int | None:
    """Return the node behind a verdict's culprit; None where it cannot be told.

    Of a link it is the end that was blamed more often before. Where that settles nothing it is
    nobody, or the later of the two if the link is dead: without one of them it is not used. A
    probe that finds one end slow makes the verdict that node's.
    """
    culprit = verdict.culprit
    if culprit.node is not None:
        return culprit.node
    if culprit.rank is not None:
        return node_of_member(state, culprit.rank) if state.world.placement else None
    if culprit.device is not None:
        named = verdict.evidence.get("node")
        return named if isinstance(named, int) else None
    if culprit.link is None:
        return None
    ends = [node_of_member(state, rank) for rank in culprit.link]
    blames = [state.blames.get(node, 0) for node in ends]
    if blames[0] == blames[1]:
        return max(ends) if verdict.ground == "link" else None
    return ends[0] if blames[0] > blames[1] else ends[1]


def count_shortage(state: JobState, leaving: set[int]) -> int:
    """Return how many nodes a world would be short of, were nodes `leaving` left out as well."""
    spares = [node for node in state.spares if node not in leaving]
    if not state.world.placement:
        return max(0, state.the_spec().nodes - len(spares))
    out = {*leaving, *state.lost, *state.cordoned, *state.leaving}
    return max(0, sum(node in out for node in state.world.placement) - len(spares))


def bar(state: JobState, node: int, who: str, reason: str) -> list[AnyAction]:
    """Leave `node` out from now on, at an operator's word."""
    if node in state.barred:
        return []
    state.cordoned[node] = reason
    state.cordoned_by[node] = who
    return [CordonNode(node=node, who=who, reason=reason)]


def bar_left(state: JobState, move: OpenMove) -> list[AnyAction]:
    """Leave out from now on the nodes that were left, at whose word it was."""
    actions: list[AnyAction] = []
    for node in move.nodes:
        if move.who:
            actions += bar(state, node, move.who, move.why)
        else:
            actions += membership_of(state).cordon(state, node, move.why)
    return actions


def keep_nodes(
    state: JobState, now: float, move: OpenMove, why: str, **more: Any
) -> list[AnyAction]:
    """Take a move back, of which nothing is done yet, and say why."""
    del state.moves[move.id]
    actions: list[AnyAction] = []
    for node in move.nodes:
        actions.append(NoteDraining(node=node, who=move.who, over=True, reason=why))
        if not move.who:
            # It goes away all the same.
            actions += membership_of(state).cordon(state, node, move.why)
    result = {"verb": move.kind, "nodes": list(move.nodes), "took_s": move.took_s(now)} | more
    return actions + state.answer_open(move.id, False, f"{why}; nothing was moved", result)


def cordon_again(state: JobState) -> list[AnyAction]:
    """Return the cordons and restorations whose record did not reach the journal."""
    actions: list[AnyAction] = [
        CordonNode(node=node, who=state.cordoned_by.get(node, ""), reason=reason)
        for node, reason in sorted(state.cordoned.items())
        if node not in state.cordons_noted
    ]
    for node, who in sorted(state.restoring.items()):
        actions.append(RestoreNode(node=node, who=who, reason=f"asked for by {who}"))
    return actions


def note_cordon(state: JobState, now: float, event: NodeCordoned | NodeRestored) -> list[AnyAction]:
    """Take an operator's word, or the record of our own."""
    if isinstance(event, NodeCordoned):
        state.cordoned.setdefault(event.node, event.reason)
        state.cordons_noted.add(event.node)
        if event.who:
            state.cordoned_by.setdefault(event.node, event.who)
    else:
        state.restoring.pop(event.node, None)
        state.forget_cordon(event.node)
    return []
