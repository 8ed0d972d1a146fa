"""Machines that platforms take away: from a notice to the nodes being left, or to their death.

    noticed --a moment, for others that come with it--> decided (policy) --> a move, or a cordon
       └-----------------withdrawn: what was decided is taken back-----------------> as before

Notices are kept by node, source and id, so that one that comes again changes nothing, unless the
end has come nearer. What is decided is one move of all nodes that are noticed together
(`steering.moves`), which ends at the smallest deadline. A node that dies with a notice was taken
away: that is no failure, and counts against nobody.

A replica group whose machine goes away leaves the quorum before it does: nothing is lost by that,
and a group is a node of its own, so that nothing is gained by waiting for what comes with it.
"""

import math

from perdure.control.agreement.boundary import open_boundary
from perdure.control.job import JobState, OpenMove, OpenNotice
from perdure.control.membership import membership_of
from perdure.control.membership.elastic import end_spares
from perdure.control.membership.members import list_leavers, list_living_members, list_spare_members
from perdure.control.membership.quorum import count_left
from perdure.control.recovery.formation import form_world, hold_world, release_world
from perdure.control.steering.group_moves import take_back
from perdure.control.steering.moves import restore_move
from perdure.model.events import (
    ActionWithheld,
    NodeRegistered,
    PreemptionNoticed,
    PreemptionWithdrawn,
)
from perdure.model.failures import Cause, ExitRecord, is_explained
from perdure.model.orders import AnyAction, NoteDraining
from perdure.model.steering import LEAVE_DEADLINE_S
from perdure.policy import HandOver, Outlook, decide_hand_over

_WOULD = {
    "drain": "left it at a step that all agree on",
    "evict": "left it at once",
    "checkpoint": "saved a checkpoint",
    "end": "ended its ranks, so that the script saves itself",
    "mark": "noted it",
}
_MARGIN = 0.1
_MARGIN_S_MAX = 2.0
"""A platform's grace is not used up to its end: the ranks have to be gone before the machine."""
_LATE = 0.25
_LATE_S_MAX = 10.0
"""Where nobody can stand in, the last save begins so long before the end."""
_SELF_S = 150.0
"""Seconds before its end at which a script that saves itself is told: all of a spot notice."""
_EARLIER_S = 0.5
"""A deadline that has come nearer by less is the same one."""
_RESERVE_S = 1.0
"""Seconds, and twice those of the slowest change, that an elastic world that no spares fill up
leaves between its last step on a node and the node's end."""
_COALESCE_S = 0.25
"""Notices within these seconds, or a tenth of the shortest grace, are acted upon as one."""
_STEPS = 2.0
"""Members agree on the step that they leave at, and come to it, within so many."""


def take_notice(
    state: JobState, now: float, event: PreemptionNoticed | PreemptionWithdrawn
) -> list[AnyAction]:
    """Keep a notice, to be acted upon in its time, or forget it."""
    groups = membership_of(state).kind == "replica groups"
    if isinstance(event, PreemptionWithdrawn):
        return (_withdraw_group if groups else _withdraw)(state, now, event)
    return (_note_group if groups else _note)(state, now, event)


def _note(state: JobState, now: float, event: PreemptionNoticed) -> list[AnyAction]:
    if state.over or not 0 <= event.node < state.the_spec().num_nodes:
        return []
    key, gone_s = f"{event.node} {event.source} {event.id}", event.at_s + event.grace_s
    known = state.notices.get(key)
    if known is not None and gone_s > known.gone_s - _EARLIER_S:
        return []
    there = state.nodes.get(event.node)
    state.notices[key] = OpenNotice(
        node=event.node,
        source=event.source,
        id=event.id,
        reason=event.reason,
        certain=event.certain,
        at_s=event.at_s if known is None else known.at_s,
        gone_s=gone_s,
        boot_id=there.boot_id if there is not None else "",
        waits=event.waits,
        handled=event.handled,
    )
    if event.certain and gone_s - state.the_spec().preemption.lead_s <= now:
        state.going.add(event.node)  # From this moment on, and not from the decision on.
    _plan(state, now)
    return []


def _withdraw(state: JobState, now: float, event: PreemptionWithdrawn) -> list[AnyAction]:
    """Forget a notice, and undo what was done for it and can be undone."""
    notice = state.notices.pop(f"{event.node} {event.source} {event.id}", None)
    if notice is None:
        return []
    if any(other.node == event.node for other in state.notices.values()):
        return _hold(state, now)
    actions: list[AnyAction] = []
    why = f"{notice.words}: withdrawn"
    together = {n for m in state.moves.values() if event.node in m.nodes for n in m.nodes}
    if any(not m.who and event.node in m.nodes for m in state.moves.values()):
        actions += restore_move(state, now, event.node, why)
        for other in state.notices.values():  # What was one move is decided once more without it.
            other.acted = other.acted and other.node not in together
        _plan(state, now)
    return actions + _free(state, now, event.node, notice.source, why)


def note_return(state: JobState, now: float, event: NodeRegistered) -> list[AnyAction]:
    """Note that a node is there: after a notice it is another machine, or the one that was away.

    A place that was asked for after the notice is of somebody who has come to stay.
    """
    before = state.nodes.get(event.node)
    mine = [n for n in state.notices.values() if n.node == event.node]
    was_away = event.node in state.lost
    _, claimed_s = state.claims.get(event.node, ("", -math.inf))
    over = [
        n
        for n in mine
        if (n.boot_id and n.boot_id != event.boot_id)
        or (was_away and now >= n.gone_s)
        or n.at_s < claimed_s
    ]
    if not mine or len(over) < len(mine) or before is None:
        return []
    state.notices = {k: n for k, n in state.notices.items() if n.node != event.node}
    return _free(state, now, event.node, over[0].source, f"node {event.node} is back")


def advance_notices(state: JobState, now: float) -> list[AnyAction]:
    """Decide on all notices that are open together, once it is time."""
    if state.notices_due_s is None or now < state.notices_due_s:
        return []
    state.notices_due_s = None
    if state.over:
        return []
    ready = [n for n in state.notices.values() if not n.acted and _opens(state, n) <= now]
    for notice in ready:
        notice.acted = True
    actions: list[AnyAction] = []
    for certain in (True, False):
        alike = [n for n in ready if n.certain is certain]
        if alike:
            actions += _hand_over(state, now, alike)
    _plan(state, now)
    return actions


def find_taken(state: JobState, node: int, record: ExitRecord) -> OpenNotice | None:
    """Return the notice that explains a rank's end: of its own node, or of a peer's."""
    for notice in sorted(state.notices.values(), key=lambda n: (n.node != node, n.gone_s)):
        here = notice.node == node
        if notice.certain and is_explained(record, notice.gone_s, here=here):
            return notice
    return None


# --- when, and what ------------------------------------------------------------------------------


def _opens(state: JobState, notice: OpenNotice) -> float:
    """Return when a notice is acted upon at the earliest: a far one leaves time to train."""
    if not notice.certain:
        return notice.at_s
    return max(notice.at_s, notice.gone_s - _compute_lead_s(state, notice))


def _compute_lead_s(state: JobState, notice: OpenNotice) -> float:
    """Return how long before its end a node's leaving begins."""
    config, pace = state.the_spec().preemption, state.steering.pace
    if notice.handled and _is_supervised(state):
        return max(config.lead_s, _SELF_S)
    if pace is None or not _serves_to_the_end(state, [notice]):
        return config.lead_s
    return min(config.lead_s, _compute_reserve_s(state) + _STEPS * pace.step_s)


def _compute_reserve_s(state: JobState) -> float:
    return _RESERVE_S + 2 * membership_of(state).moving_s(state)


def _serves_to_the_end(state: JobState, notices: list[OpenNotice]) -> bool:
    """Return whether noticed nodes are of use for as long as they are there.

    An elastic world that becomes smaller without them has nothing of leaving them early, and being
    late costs it no more than a loss without notice. Where spares stand in, where nobody is left
    and the state has to be saved, or where somebody waits for the nodes, they are left at once.
    """
    if not membership_of(state).goes_on(state) or any(n.waits for n in notices):
        return False
    nodes = {n.node for n in notices}
    noticed = {n.node for n in state.notices.values() if n.certain} | nodes
    spared = len(list_spare_members(state, beside=noticed)) >= len(list_leavers(state, nodes))
    return not spared and set(list_living_members(state)) > set(list_leavers(state, noticed))


def _plan(state: JobState, now: float) -> None:
    """Wait a moment for what comes with it, bounded by the smallest grace that is left."""
    due_s = state.notices_due_s
    for notice in state.notices.values():
        if notice.acted:
            continue
        opens_s = _opens(state, notice)
        wait_s = _COALESCE_S
        if notice.certain:
            wait_s = min(wait_s, _MARGIN * max(0.0, notice.gone_s - max(now, opens_s)))
        soon_s = max(now, opens_s) + wait_s
        due_s = soon_s if due_s is None else min(due_s, soon_s)
    state.notices_due_s = due_s


def _hand_over(state: JobState, now: float, notices: list[OpenNotice]) -> list[AnyAction]:
    """Decide on `notices`, and begin what was decided."""
    actions: list[AnyAction] = []
    busy: list[OpenNotice] = []
    nodes, decided, why = _decide(state, now, notices)
    withheld = ActionWithheld(
        at_s=now,
        generation=state.world.generation,
        cause="Preemption",
        culprit=", ".join(f"node {node}" for node in nodes),
        reason=why,
        would=_WOULD[decided.way],
        step=state.step,
        first_seen_s=notices[0].at_s,
    )
    held = membership_of(state).withhold(state.world, withheld)
    if held is not None:
        return held
    for notice in notices:
        if not _runs(state, notice.node):
            actions += _cordon(state, notice.node, _describe(state, now, [notice]))
        elif not _hasten(state, now, notice):
            busy.append(notice)
    if not busy:
        return actions
    if state.world.held_s and busy[0].certain:  # Its ranks have saved already, or do so now.
        for node in sorted({n.node for n in busy}):
            actions += _cordon(state, node, _describe(state, now, busy))
        return actions + _hold(state, now)
    nodes, decided, why = _decide(state, now, busy)
    if decided.way == "mark":
        for node in nodes if busy[0].certain else ():
            actions += _cordon(state, node, why)
        return actions
    if decided.way == "end":
        return actions + _end_ranks(state, now, nodes, busy, why)
    if decided.way == "checkpoint" and not busy[0].certain:
        joined = membership_of(state).has_joined(state)
        can = state.boundary is None and state.world.phase == "running" and joined
        return actions + (open_boundary(state, now, "checkpoint", reason=why) if can else [])
    return actions + _begin_move(state, now, nodes, busy, decided, why)


def _decide(
    state: JobState, now: float, notices: list[OpenNotice]
) -> tuple[list[int], HandOver, str]:
    """Return the nodes that go away, what the policy has to say, and both in words."""
    nodes = sorted({n.node for n in notices})
    decided = decide_hand_over(_look(state, now, nodes, notices), state.the_spec().preemption)
    return nodes, decided, f"{_describe(state, now, notices)}; {decided.reason}"


def _begin_move(
    state: JobState,
    now: float,
    nodes: list[int],
    notices: list[OpenNotice],
    decided: HandOver,
    why: str,
) -> list[AnyAction]:
    certain, gone_s = notices[0].certain, min(n.gone_s for n in notices)
    left_s = max(0.0, gone_s - now)
    deadline_s = gone_s - min(_MARGIN_S_MAX, _MARGIN * left_s)
    serves = _serves_to_the_end(state, notices)
    id_ = f"preemption-{'-'.join(map(str, nodes))}"
    state.going |= set(nodes)
    state.moves[id_] = OpenMove(
        id=id_,
        kind="evict" if decided.way == "evict" else "drain",
        nodes=nodes,
        groups={n: group for group, n in enumerate(state.world.placement) if n in nodes},
        who="",
        why=why,
        at_s=now,
        deadline_s=deadline_s if certain else now + LEAVE_DEADLINE_S,
        force=certain,
        wait=True,
        late_s=gone_s - min(_LATE_S_MAX, _LATE * left_s) if certain else None,
        until_s=gone_s - _compute_reserve_s(state) if certain and serves else 0.0,
    )
    return [NoteDraining(node=node, reason=why) for node in nodes]


def _end_ranks(
    state: JobState, now: float, nodes: list[int], notices: list[OpenNotice], why: str
) -> list[AnyAction]:
    """Give the script's own handlers of SIGTERM what is left, and hold its ranks until the end."""
    gone_s = min(n.gone_s for n in notices)
    left_s = gone_s - now
    cause = Cause(
        cause=f"Preemption ({notices[0].words})", culprit=f"node {nodes[0]}",
        at_step=-1, failure_s=now, detected_s=now, reason=why,
    )  # fmt: skip
    state.book.decide(cause, "move", state.world.generation)
    state.world.failed_s = now
    actions = [action for node in nodes for action in _cordon(state, node, why)]
    grace_s = left_s - min(_MARGIN_S_MAX, _MARGIN * left_s)
    actions += form_world(state, now, why, grace_s=grace_s)
    hold_world(state, gone_s)
    return actions + _hold(state, now)


def _hold(state: JobState, now: float) -> list[AnyAction]:
    """Hold a world that is held until the last of its machines is gone by the notices of now."""
    if not state.world.held_s:
        return []
    until_s = max(
        (
            n.gone_s
            for n in state.notices.values()
            if n.acted and n.certain and n.node in state.world.placement
        ),
        default=now,
    )
    if until_s <= now:
        return release_world(state, now)
    hold_world(state, until_s)
    return []


def _hasten(state: JobState, now: float, notice: OpenNotice) -> bool:
    """Have a move that leaves the node already do so in time; return whether there is one."""
    for move in state.moves.values():
        if notice.node in move.nodes and move.stage != "moved":
            left_s = max(0.0, notice.gone_s - now)
            if notice.certain:
                deadline_s = notice.gone_s - min(_MARGIN_S_MAX, _MARGIN * left_s)
                move.deadline_s, move.force = min(move.deadline_s, deadline_s), True
            return True
    return False


def _look(state: JobState, now: float, nodes: list[int], notices: list[OpenNotice]) -> Outlook:
    """Return what the policy has to know."""
    certain = notices[0].certain
    left = None
    if membership_of(state).goes_on(state):
        leavers = list_leavers(state, nodes)
        spares, short = (
            len([m for m in list_spare_members(state) if m not in leavers]),
            len(leavers),
        )
        left = len(list_living_members(state)) - short
    else:
        spares = len([node for node in state.spares if node not in nodes])
        short = sum(node in nodes for node in state.world.placement)
    return Outlook(
        saves=left is not None or not _is_supervised(state),
        handles=all(notice.handled for notice in notices),
        grace_s=max(0.0, min(n.gone_s for n in notices) - now),
        certain=certain,
        spares=spares,
        short=short,
        left=left,
    )


def _is_supervised(state: JobState) -> bool:
    """Return whether the script trains and does not call `perdure.init`."""
    return state.world.stepping and not state.world.joined


def _runs(state: JobState, node: int) -> bool:
    """Return whether `node` runs ranks of the world, or members of it."""
    if membership_of(state).goes_on(state):
        return bool(list_leavers(state, (node,)))
    return node in state.world.placement


def _describe(state: JobState, now: float, notices: list[OpenNotice]) -> str:
    words = []
    for notice in sorted(notices, key=lambda n: (n.node, n.gone_s)):
        when = f"in {max(0.0, notice.gone_s - now):.1f} s" if notice.certain else "perhaps"
        words.append(f"node {notice.node} goes away {when} ({notice.words})")
    return ", ".join(words)


def _cordon(state: JobState, node: int, why: str) -> list[AnyAction]:
    if node in state.cordoned:
        return []
    state.going.add(node)
    spares = end_spares(state, (node,), why) if membership_of(state).goes_on(state) else []
    return membership_of(state).cordon(state, node, why) + spares


def _free(state: JobState, now: float, node: int, source: str, why: str) -> list[AnyAction]:
    """Let a node run ranks again that did not for a notice alone."""
    if node not in state.going:
        return []
    state.going.discard(node)
    membership = membership_of(state)
    freed = [*membership.free(state, node, source, why), *membership.fill(state, why)]
    return freed + _hold(state, now)


# --- replica groups ------------------------------------------------------------------------------


def _note_group(state: JobState, now: float, event: PreemptionNoticed) -> list[AnyAction]:
    """Have the group of a noticed node leave, where others go on without it."""
    gone_s = event.at_s + event.grace_s
    group, id_ = state.worlds.get(event.node), f"preemption-{event.node}"
    if group is None or not group.alive or state.phase != "running" or group.replica.leaving:
        return []
    if any(event.node in move.nodes for move in state.moves.values()):
        return []
    members, left = count_left(state, {event.node})
    outlook = Outlook(
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
    withheld = ActionWithheld(
        at_s=now,
        generation=group.generation,
        cause="Preemption",
        culprit=f"node {event.node}",
        reason=why,
        would="had its group leave the quorum",
        step=state.step,
        first_seen_s=event.at_s,
    )
    held = membership_of(state).withhold(group, withheld)
    if held is not None:
        return held
    state.moves[id_] = OpenMove(
        id=id_,
        kind="drain" if decided.way == "drain" else "evict",
        nodes=[event.node],
        who=event.source,
        why=why,
        at_s=now,
        deadline_s=max(now, gone_s - min(_MARGIN_S_MAX, _MARGIN * (gone_s - now))),
    )
    return [NoteDraining(node=event.node, who=event.source, reason=why)]


def _withdraw_group(state: JobState, now: float, event: PreemptionWithdrawn) -> list[AnyAction]:
    """Take the leaving back, as far as its processes are not being ended yet.

    After that an operator's `restore` starts the group again.
    """
    move = state.moves.get(f"preemption-{event.node}")
    if move is None or move.stage == "ending":
        return []
    return take_back(state, now, move, f"{event.source}: withdrawn")
