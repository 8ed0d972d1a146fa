"""Replica groups of a torchft job: each fails, restarts and heals on its own.

Beside `machine`, which forms one world of all nodes: here every node runs a replica group with a
store and a generation of its own, and what happens to one touches no other. Who trains together
is the lighthouse's decision (`quorum`); it is told which group's store is whose, which groups
are held, and which replica is dead.

A spare group runs the script up to its first quorum and is held there. When a group that trains
is lost, the spare is released in its place, and the lost one becomes the spare once it is back.
"""

from collections.abc import Callable
from typing import Any

from msgspec import structs

from perdure.control.agreement.boundary import (
    advance_agreement,
    answer_boundary,
    reach_boundary,
)
from perdure.control.agreement.changes import declare_keys, note_high, reach_change
from perdure.control.agreement.pauses import answer_pause
from perdure.control.job import JobState
from perdure.control.observing import is_observed
from perdure.control.recovery.formation import (
    REGISTER_TIMEOUT_S,
    advance_end,
    end_job,
)
from perdure.control.recovery.groups import (
    fail_group,
    finish_if_over,
    promote,
    start_group,
    withhold_eviction,
)
from perdure.control.steering.commands import start_waiting_command
from perdure.control.steering.moves import advance_moves
from perdure.control.steering.saving import (
    open_due_checkpoint,
    reopen_lost,
)
from perdure.control.world import WorldState
from perdure.detect.certainty import TIMEOUT_S
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CheckpointRestored,
    KeeperLost,
    KeysDeclared,
    NodeLost,
    NodeRegistered,
    QuorumFormed,
    RankExited,
    ReplicaSeen,
    TimerFired,
)
from perdure.model.failures import explain_exit, explain_node
from perdure.model.orders import AnyAction, AssignNodes


def advance_groups(state: JobState, now: float) -> list[AnyAction]:
    """Do what has become possible, after any event."""
    actions = advance_agreement(state, now)
    open_due_checkpoint(state, now)
    reopen_lost(state)
    actions += start_waiting_command(state, now)
    return [*actions, *advance_moves(state, now), *answer_pause(state)]


# --- starting ------------------------------------------------------------------------------------


def _register(state: JobState, now: float, event: NodeRegistered) -> list[AnyAction]:
    state.nodes[event.node] = event
    if state.phase == "pending":
        if len(state.nodes) < state.the_spec().num_nodes:
            return []
        return _begin(state, now, f"all {len(state.nodes)} nodes are there")
    group = state.worlds.get(event.node)
    if state.phase != "running" or group is None:
        assignment = state.farewell
    elif group.phase == "running" and event.generation < group.generation:
        return fail_group(state, now, group, "its ranks are gone, keeper and all")
    else:
        assignment = group.assignment
    if assignment is None:
        return []
    reason = f"node {event.node} registered"
    return [AssignNodes(nodes=(event.node,), assignment=assignment, reason=reason)]


def _begin(state: JobState, now: float, reason: str) -> list[AnyAction]:
    spec = state.the_spec()
    state.enter("enough nodes are there")
    state.deadline_s = None
    actions: list[AnyAction] = []
    for node in sorted(state.nodes):
        group = WorldState(node, placement=(node,), active=node < spec.torchft.replicas)
        state.worlds[node] = group
        actions += start_group(state, now, group, reason)
    return actions


# --- what groups do ------------------------------------------------------------------------------


def _note_exit(state: JobState, now: float, event: RankExited) -> list[AnyAction]:
    record, account = event.record, event.account
    number = record.rank // state.the_spec().nproc
    found = explain_exit(record, event.detected_s, account.step, None)
    if record.failed and not record.asked:
        named = structs.replace(found, culprit=f"group {number}, {found.culprit}")
        state.book.correct(named, record.generation)
    group = state.find_world(record.generation)
    if group is None or record.rank in group.exits or not group.has_ranks:
        return []
    group.exits[record.rank] = record
    group.trained |= account.step > account.start_step
    state.step, state.mark = max(state.step, account.step), max(state.mark, account.step)
    if record.failed and not record.asked:
        code = record.code or 128 + record.signal
        who = f"rank {record.rank}"
        return fail_group(
            state, now, group, record.cause,
            who=who, error=record.error, code=code, signal=record.signal, found=found,
        )  # fmt: skip
    spec = state.the_spec()
    if len(group.exits) < spec.nproc or any(e.failed for e in group.exits.values()):
        return []
    group.enter("all its ranks ended with 0")
    group.deadline_s = None
    return finish_if_over(state, now)


def _lose_keeper(state: JobState, now: float, event: KeeperLost) -> list[AnyAction]:
    cause = "its keeper died" + (f": it {event.cause}" if event.cause else "")
    found = explain_node(event.node, "its keeper died", -1, event.at_s, event.at_s, cause)
    state.book.correct(structs.replace(found, culprit=f"group {event.node}"), event.generation)
    group = state.find_world(event.generation)
    return [] if group is None else fail_group(state, now, group, cause, found=found)


def _lose_node(state: JobState, now: float, event: NodeLost) -> list[AnyAction]:
    group = state.worlds.get(event.node)
    return [] if group is None else fail_group(state, now, group, event.reason, silent=True)


def _reach(state: JobState, now: float, event: BoundaryReached) -> list[AnyAction]:
    state.step = max(state.step, event.step)
    reach_boundary(state, event)
    return reach_change(state, event)


def _note_restored(state: JobState, now: float, event: CheckpointRestored) -> list[AnyAction]:
    state.saved_step = max(state.saved_step, event.step)  # There is one.
    return []


def _note_quorum(state: JobState, now: float, event: QuorumFormed) -> list[AnyAction]:
    state.quorum.quorum_id, state.quorum.members = event.quorum_id, event.members
    state.step = max(state.step, event.step)
    state.mark = max(state.mark, event.step)
    for group in state.worlds.values():
        if group.replica in event.members:
            group.trained, group.absent = True, ""
            group.stands = None
            if group.phase == "running":
                group.deadline_s = None
    return []


def _note_replica(state: JobState, now: float, event: ReplicaSeen) -> list[AnyAction]:
    group = state.worlds.get(event.group)
    if group is None or not group.has_ranks:
        return []
    pause = state.steering.pause
    if event.held and pause is not None and event.hold >= pause.hold:
        group.stands = event.step
    if not event.gone:
        group.replica, group.absent = event.replica, ""
        if group.phase == "running":
            group.deadline_s = None
        return promote(state, f"group {group.number} stands ready")
    if event.replica != group.replica or group.exits or group.absent == event.reason:
        return []
    detect = state.the_spec().detect
    state.step = max(state.step, event.step)
    group.absent, group.absent_s = event.reason, event.at_s
    noted = withhold_eviction(state, now, group) if is_observed(state) else []
    # It may validate or save for long: it costs the others nothing any more, and heals once back.
    patience_s = detect.quiet_action_s or TIMEOUT_S
    group.deadline_s = now + (detect.stopped_action_s if event.stopped else patience_s)
    return [*noted, *promote(state, f"group {group.number} was left out: {event.reason}")]


def _declare(state: JobState, now: float, event: KeysDeclared) -> list[AnyAction]:
    """Take over the keys of the newest group that has trained."""
    for group in state.worlds.values():
        group.trained |= group.generation == event.generation
    declare_keys(state, event)
    note_high(state, event.step)
    state.step, state.mark = max(state.step, event.step), max(state.mark, event.step)
    return []


# --- time ----------------------------------------------------------------------------------------


def _fire(state: JobState, now: float, event: TimerFired) -> list[AnyAction]:
    if state.phase == "ending":
        return advance_end(state, now)
    if state.phase == "pending" and state.deadline_s is not None:
        if now < state.deadline_s:
            return []
        if len(state.nodes) >= state.the_spec().torchft.replicas:
            return _begin(state, now, f"{len(state.nodes)} nodes are there")
        why = f"not all nodes registered within {REGISTER_TIMEOUT_S:g} s"
        return end_job(state, now, "failed", 1, why)
    actions: list[AnyAction] = []
    for number in sorted(state.worlds):
        group = state.worlds[number]
        if group.deadline_s is None or now < group.deadline_s:
            continue
        cause = group.absent or f"{group.phase} took too long"
        silent = group.phase != "forming"  # Of one that is being formed, nothing trains.
        since_s = group.absent_s if group.absent else now
        found = explain_node(number, cause, state.step, since_s, since_s, cause)
        actions += fail_group(state, now, group, cause, silent=silent, found=found)
    return actions


OF_GROUPS: dict[type[AnyEvent], Callable[[JobState, float, Any], list[AnyAction]]] = {
    NodeRegistered: _register,
    RankExited: _note_exit,
    KeeperLost: _lose_keeper,
    NodeLost: _lose_node,
    QuorumFormed: _note_quorum,
    ReplicaSeen: _note_replica,
    TimerFired: _fire,
    BoundaryAnswered: answer_boundary,
    BoundaryReached: _reach,
    KeysDeclared: _declare,
    CheckpointRestored: _note_restored,
}
"""What reacts to an event that concerns replica groups in a way of their own."""
