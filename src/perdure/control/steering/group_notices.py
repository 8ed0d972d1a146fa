"""Notices in a torchft job: a group whose machine goes away leaves the quorum before it does.

Nothing is lost by leaving early, and a group is a node of its own, so that nothing is gained by
waiting for what comes with it.
"""

from perdure.control.job import JobState, OpenMove
from perdure.control.observing import is_observed, note_withheld
from perdure.control.steering.group_moves import count_left, take_back
from perdure.model.actions import AnyAction, NoteDraining
from perdure.model.events import PreemptionNoticed, PreemptionWithdrawn
from perdure.policy import Outlook, decide_hand_over

_MARGIN_S_MAX = 2.0


def take_group_notice(
    state: JobState, now: float, event: PreemptionNoticed | PreemptionWithdrawn
) -> list[AnyAction]:
    """Have the group of a noticed node leave, or stay after all."""
    if isinstance(event, PreemptionWithdrawn):
        return _withdraw(state, now, event)
    return _note(state, now, event)


def _note(state: JobState, now: float, event: PreemptionNoticed) -> list[AnyAction]:
    """Have the group of a noticed node leave, where others go on without it."""
    gone_s = event.at_s + event.grace_s
    group, id_ = state.worlds.get(event.node), f"preemption-{event.node}"
    if group is None or not group.alive or state.phase != "running" or group.leaving:
        return []
    if any(event.node in move.nodes for move in state.moves.values()):
        return []
    members, left = count_left(state, {event.node})
    outlook = Outlook(
        depth="torchft",
        nodes=(event.node,),
        grace_s=max(0.0, gone_s - now),
        certain=event.certain,
        spares=max(0, left - members),
        short=1,
        left=members,
    )
    decided = decide_hand_over(outlook, state.the_spec().preemption)
    if decided.way not in ("drain", "evict"):
        return []  # The groups save by themselves, as often as pays.
    source = f"{event.source}: {event.reason}" if event.reason else event.source
    why = f"node {event.node} goes away ({source}); {decided.reason}"
    if is_observed(state):
        would, node = "had its group leave the quorum", f"node {event.node}"
        return note_withheld(
            state,
            group,
            now,
            cause="Preemption",
            culprit=node,
            reason=why,
            would=would,
            first_seen_s=event.at_s,
        )
    state.moves[id_] = OpenMove(
        id=id_,
        kind="drain" if decided.way == "drain" else "evict",
        nodes=[event.node],
        who=event.source,
        why=why,
        at_s=now,
        deadline_s=max(now, gone_s - min(_MARGIN_S_MAX, 0.1 * (gone_s - now))),
    )
    return [NoteDraining(node=event.node, who=event.source, reason=why)]


def _withdraw(state: JobState, now: float, event: PreemptionWithdrawn) -> list[AnyAction]:
    """Take the leaving back, as far as its processes are not being ended yet.

    After that an operator's `restore` starts the group again.
    """
    move = state.moves.get(f"preemption-{event.node}")
    if move is None or move.stage == "ending":
        return []
    return take_back(state, now, move, f"{event.source}: withdrawn")
