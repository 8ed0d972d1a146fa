"""Replica groups of a torchft job: each fails, restarts and heals on its own.

Beside `machine`, which forms one world of all nodes: here every node runs a replica group with a
store and a generation of its own, and what happens to one touches no other. Who trains together
is the lighthouse's decision (`quorum`); it is told which group's store is whose, which groups
are held, and which replica is dead.

A spare group runs the script up to its first quorum and is held there. When a group that trains
is lost, the spare is released in its place, and the lost one becomes the spare once it is back.
"""

from perdure.control.answers import answer_open
from perdure.control.groups.agreement import (
    advance_agreement,
    agreement_again,
    answer_group_boundary,
    declare_group_keys,
    reach_group_change,
)
from perdure.control.groups.commands import receive_group_command, start_waiting
from perdure.control.groups.holds import hold_groups
from perdure.control.groups.lifecycle import (
    FORM_TIMEOUT_S,
    assign_group,
    fail_group,
    finish_if_over,
    promote,
    start_group,
    withhold_eviction,
)
from perdure.control.groups.moves import advance_group_moves, group_moves_deadline
from perdure.control.groups.notices import take_group_notice
from perdure.control.groups.pauses import advance_pause, note_group_pause, pauses_again
from perdure.control.groups.saving import (
    find_save_deadline,
    note_group_checkpoint,
    open_due_checkpoint,
)
from perdure.control.groups.state import GroupState
from perdure.control.observing import is_observed
from perdure.control.recovery.formation import REGISTER_TIMEOUT_S, advance_end, close_job, end_job
from perdure.control.recovery.placement import cordon_again, note_cordon
from perdure.control.state import ControllerState
from perdure.control.steering.changes import changes_again, note_change
from perdure.detect.certainty import TIMEOUT_S
from perdure.model.actions import AnyAction, AssignNodes, NoteDraining
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    CommandReceived,
    ControllerStarted,
    FaultInjected,
    GenerationStopped,
    JobEnded,
    JobPaused,
    JobResumed,
    KeeperLost,
    KeysDeclared,
    NodeAsked,
    NodeCordoned,
    NodeLost,
    NodeRegistered,
    NodeRestored,
    PreemptionNoticed,
    PreemptionWithdrawn,
    QuorumFormed,
    RankExited,
    RanksStarted,
    ReplicaSeen,
    SettingsChanged,
    StoreReady,
    TimerFired,
)
from perdure.model.failures import explain_exit, explain_node


def handle_replicas(state: ControllerState, now: float, event: AnyEvent) -> list[AnyAction]:
    """Return what to do about `event` in a job of replica groups."""
    actions = _react(state, now, event) + advance_agreement(state, now)
    open_due_checkpoint(state, now)
    actions += start_waiting(state, now)
    if state.quorum.moves:
        actions += advance_group_moves(state, now)
    return actions + advance_pause(state) if state.quorum.paused else actions


def _react(state: ControllerState, now: float, event: AnyEvent) -> list[AnyAction]:
    match event:
        case ControllerStarted():
            state.book.begin(event)
            return _issue_again(state, now, f"controller {event.incarnation} took over")
        case NodeRegistered():
            return _register(state, now, event)
        case StoreReady():
            group = _of_generation(state, event.generation)
            if group is not None and group.phase == "forming":
                group.store = event
            return _advance(state, now)
        case GenerationStopped():
            known = state.stopped.get(event.node, -1)
            state.stopped[event.node] = max(known, event.generation)
            return [*_advance(state, now), *advance_end(state, now)]
        case RanksStarted():
            group = _of_generation(state, event.generation)
            if group is not None and group.phase == "starting":
                group.phase, group.deadline_s = "running", None
            return []
        case RankExited():
            return _note_exit(state, now, event)
        case KeeperLost():
            return _lose_keeper(state, now, event)
        case NodeLost():
            group = state.groups.get(event.node)
            return [] if group is None else fail_group(state, now, group, event.reason, silent=True)
        case QuorumFormed():
            return _note_quorum(state, event)
        case ReplicaSeen():
            return _note_replica(state, now, event)
        case CommandReceived() | NodeAsked():
            return receive_group_command(state, now, event)
        case FaultInjected():
            state.injects.pop(event.id, None)
            result = {"rank": event.rank, "kind": event.kind}
            return answer_open(state, event.id, not event.error, event.error or "done", result)
        case TimerFired():
            return _fire(state, now)
        case BoundaryAnswered():
            return answer_group_boundary(state, now, event)
        case BoundaryReached():
            reach_group_change(state, event)
            return []
        case KeysDeclared():
            declare_group_keys(state, event)
            return []
        case CheckpointRestored():
            state.resumed_step = max(state.resumed_step, event.step)
            return []
        case CheckpointSaved() | CheckpointFailed():
            return note_group_checkpoint(state, now, event)
        case SettingsChanged():
            note_change(state, event)
            return []
        case NodeCordoned() | NodeRestored():
            return note_cordon(state, event)
        case PreemptionNoticed() | PreemptionWithdrawn():
            return take_group_notice(state, now, event)
        case JobPaused() | JobResumed():
            note_group_pause(state, event)
            return []
        case JobEnded():
            state.phase, state.closed = "ended", True
            state.phase_deadline_s = None
            return []
        case _:
            return []


def find_group_deadline(state: ControllerState) -> float | None:
    """Return the job time at which `TimerFired` is wanted."""
    times = [group.deadline_s for group in state.groups.values()]
    times += [state.phase_deadline_s, group_moves_deadline(state), find_save_deadline(state)]
    if state.boundary is not None and state.boundary.move == "prepare":
        times.append(state.boundary.deadline_s)
    return min((time for time in times if time is not None), default=None)


# --- starting ------------------------------------------------------------------------------------


def _register(state: ControllerState, now: float, event: NodeRegistered) -> list[AnyAction]:
    state.nodes[event.node] = event
    if state.phase == "pending":
        if len(state.nodes) < state.the_spec().num_nodes:
            return []
        return _begin(state, now, f"all {len(state.nodes)} nodes are there")
    group = state.groups.get(event.node)
    if state.phase != "running" or group is None:
        assignment = state.assignment
    elif group.phase == "running" and event.generation < group.generation:
        return fail_group(state, now, group, "its ranks are gone, keeper and all")
    else:
        assignment = group.assignment
    if assignment is None:
        return []
    reason = f"node {event.node} registered"
    return [AssignNodes(nodes=(event.node,), assignment=assignment, reason=reason)]


def _begin(state: ControllerState, now: float, reason: str) -> list[AnyAction]:
    spec = state.the_spec()
    state.phase, state.phase_deadline_s = "running", None
    actions: list[AnyAction] = []
    for node in sorted(state.nodes):
        group = GroupState(node, active=node < spec.torchft.replicas)
        state.groups[node] = group
        actions += start_group(state, now, group, reason)
    return actions


def _advance(state: ControllerState, now: float) -> list[AnyAction]:
    """Start the ranks of each group whose older ones are gone and whose store is served."""
    actions: list[AnyAction] = []
    for number in sorted(state.groups):
        group = state.groups[number]
        if group.phase != "forming" or group.store is None or state.phase != "running":
            continue
        if state.stopped.get(number, -1) < group.generation - 1:
            continue
        group.phase, group.deadline_s = "starting", now + FORM_TIMEOUT_S
        reason = f"generation {group.generation} of group {number}: its older ranks are gone"
        actions += [hold_groups(state, reason), assign_group(state, group, "run", reason)]
    return actions


# --- what groups do ------------------------------------------------------------------------------


def _note_exit(state: ControllerState, now: float, event: RankExited) -> list[AnyAction]:
    record = event.record
    group = _of_generation(state, record.generation)
    if group is None or record.rank in group.exits or group.phase not in ("starting", "running"):
        return []
    group.exits[record.rank] = record
    account = event.account
    group.trained |= account.step > account.start_step
    state.step, state.mark = max(state.step, account.step), max(state.mark, account.step)
    if record.failed and not record.asked:
        found = explain_exit(record, event.detected_s, account.step, None)
        code = record.code or 128 + record.signal
        who = f"rank {record.rank}"
        return fail_group(
            state, now, group, record.cause,
            who=who, error=record.error, code=code, signal=record.signal, found=found,
        )  # fmt: skip
    spec = state.the_spec()
    if len(group.exits) < spec.nproc or any(e.failed for e in group.exits.values()):
        return []
    group.phase, group.deadline_s = "done", None
    return finish_if_over(state, now)


def _lose_keeper(state: ControllerState, now: float, event: KeeperLost) -> list[AnyAction]:
    group = _of_generation(state, event.generation)
    if group is None:
        return []
    cause = "its keeper died" + (f": it {event.cause}" if event.cause else "")
    found = explain_node(event.node, "its keeper died", -1, event.at_s, event.at_s, cause)
    return fail_group(state, now, group, cause, found=found)


def _note_quorum(state: ControllerState, event: QuorumFormed) -> list[AnyAction]:
    state.quorum.quorum_id, state.quorum.members = event.quorum_id, event.members
    state.step = max(state.step, event.step)
    state.mark = max(state.mark, event.step)
    for group in state.groups.values():
        if group.replica in event.members:
            group.trained, group.absent = True, ""
            group.stands = None
            if group.phase == "running":
                group.deadline_s = None
    return []


def _note_replica(state: ControllerState, now: float, event: ReplicaSeen) -> list[AnyAction]:
    group = state.groups.get(event.group)
    if group is None or group.phase not in ("starting", "running"):
        return []
    if event.held and event.hold >= state.quorum.pause_hold:
        group.stands = event.step
    if not event.gone:
        group.replica, group.absent = event.replica, ""
        if group.phase == "running":
            group.deadline_s = None
        return promote(state, f"group {group.group} stands ready")
    if event.replica != group.replica or group.exits or group.absent == event.reason:
        return []
    detect = state.the_spec().detect
    state.step = max(state.step, event.step)
    group.absent, group.absent_s = event.reason, event.at_s
    noted = withhold_eviction(state, now, group) if is_observed(state) else []
    # It may validate or save for long: it costs the others nothing any more, and heals once back.
    patience_s = detect.quiet_action_s or TIMEOUT_S
    group.deadline_s = now + (detect.stopped_action_s if event.stopped else patience_s)
    return [*noted, *promote(state, f"group {group.group} was left out: {event.reason}")]


# --- time ----------------------------------------------------------------------------------------


def _fire(state: ControllerState, now: float) -> list[AnyAction]:
    if state.phase == "ending":
        return advance_end(state, now)
    if state.phase == "pending" and state.phase_deadline_s is not None:
        if now < state.phase_deadline_s:
            return []
        if len(state.nodes) >= state.the_spec().torchft.replicas:
            return _begin(state, now, f"{len(state.nodes)} nodes are there")
        why = f"not all nodes registered within {REGISTER_TIMEOUT_S:g} s"
        return end_job(state, now, "failed", 1, why)
    actions: list[AnyAction] = []
    for number in sorted(state.groups):
        group = state.groups[number]
        if group.deadline_s is None or now < group.deadline_s:
            continue
        cause = group.absent or f"{group.phase} took too long"
        silent = group.phase != "forming"  # Of one that is being formed, nothing trains.
        since_s = group.absent_s if group.absent else now
        found = explain_node(number, cause, state.step, since_s, since_s, cause)
        actions += fail_group(state, now, group, cause, silent=silent, found=found)
    return actions


def _issue_again(state: ControllerState, now: float, reason: str) -> list[AnyAction]:
    """Return everything that is outstanding, once more."""
    if state.phase == "ended":
        return close_job(state)
    if state.phase == "ending" and state.assignment is not None:
        nodes = tuple(sorted(state.nodes))
        return [AssignNodes(nodes=nodes, assignment=state.assignment, reason=reason)]
    actions: list[AnyAction] = []
    for number, group in sorted(state.groups.items()):
        if group.assignment is not None:
            told = AssignNodes(nodes=(number,), assignment=group.assignment, reason=reason)
            actions.append(told)
    for move in state.quorum.moves.values():
        if move.stage != "ending":
            noted = [NoteDraining(node=n, who=move.who, reason=move.why) for n in move.groups]
            actions += noted
    actions += [*cordon_again(state), *pauses_again(state, now), *changes_again(state)]
    actions += agreement_again(state, reason)
    return [*actions, hold_groups(state, reason)] if state.groups else actions


def _of_generation(state: ControllerState, generation: int) -> GroupState | None:
    return next((g for g in state.groups.values() if g.generation == generation), None)
