"""Replica groups of a torchft job: each fails, restarts and heals on its own.

Beside `machine`, which forms one world of all nodes: here every node runs a replica group with a
store and a generation of its own, and what happens to one touches no other. Who trains together
is the lighthouse's decision (`quorum`); it is told which group's store is whose, which groups
are held, and which replica is dead.

A spare group runs the script up to its first quorum and is held there. When a group that trains
is lost, the spare is released in its place, and the lost one becomes the spare once it is back.
"""

from typing import Literal

from perdure.control.answers import answer_open
from perdure.control.groups.commands import receive_group_command
from perdure.control.groups.holds import hold_groups
from perdure.control.groups.state import GroupState
from perdure.control.recovery.formation import REGISTER_TIMEOUT_S, advance_end, close_job, end_job
from perdure.control.state import ControllerState
from perdure.model.actions import (
    AnyAction,
    Assignment,
    AssignNodes,
    EvictReplica,
    FenceAbort,
)
from perdure.model.events import (
    AnyEvent,
    CommandReceived,
    ControllerStarted,
    FaultInjected,
    GenerationStopped,
    JobEnded,
    KeeperLost,
    NodeLost,
    NodeRegistered,
    QuorumFormed,
    RankExited,
    RanksStarted,
    ReplicaSeen,
    StoreReady,
    TimerFired,
)
from perdure.policy import Failure, decide_recovery

_FORM_TIMEOUT_S = 120.0


def handle_replicas(state: ControllerState, now: float, event: AnyEvent) -> list[AnyAction]:
    """Return what to do about `event` in a job of replica groups."""
    match event:
        case ControllerStarted():
            return _issue_again(state, f"controller {event.incarnation} took over")
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
            group = _of_generation(state, event.generation)
            why = f": it {event.cause}" if event.cause else ""
            return [] if group is None else _fail(state, now, group, f"its keeper died{why}")
        case NodeLost():
            group = state.groups.get(event.node)
            return [] if group is None else _fail(state, now, group, event.reason)
        case QuorumFormed():
            return _note_quorum(state, event)
        case ReplicaSeen():
            return _note_replica(state, now, event)
        case CommandReceived():
            return receive_group_command(state, now, event)
        case FaultInjected():
            state.injects.pop(event.id, None)
            result = {"rank": event.rank, "kind": event.kind}
            return answer_open(state, event.id, not event.error, event.error or "done", result)
        case TimerFired():
            return _fire(state, now)
        case JobEnded():
            state.phase, state.closed = "ended", True
            state.phase_deadline_s = None
            return []
        case _:
            return []


def find_group_deadline(state: ControllerState) -> float | None:
    """Return the job time at which `TimerFired` is wanted."""
    times = [group.deadline_s for group in state.groups.values()]
    times.append(state.phase_deadline_s)
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
        return _fail(state, now, group, "its ranks are gone, keeper and all")
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
        actions += _start(state, now, group, reason)
    return actions


def _start(state: ControllerState, now: float, group: GroupState, reason: str) -> list[AnyAction]:
    """Begin a group's next generation: end what is older on its node, and serve a new store."""
    state.generation += 1
    group.generation, group.phase = state.generation, "forming"
    group.store, group.replica, group.trained, group.absent = None, "", False, ""
    group.exits.clear()
    group.deadline_s = now + _FORM_TIMEOUT_S
    return [_assign(state, group, "store", reason)]


def _assign(
    state: ControllerState, group: GroupState, phase: Literal["stop", "store", "run"], reason: str
) -> AssignNodes:
    state.number += 1
    store = group.store
    group.assignment = Assignment(
        number=state.number,
        generation=group.generation + (phase == "stop"),
        phase=phase,
        master_addr=store.host if store else "",
        master_port=store.port if store else 0,
        agent_store=store.agent_store if store else False,
        restart_count=len(group.failures),
        placement=(group.group,),
        replica=group.group,
        reason=reason,
    )
    return AssignNodes(nodes=(group.group,), assignment=group.assignment, reason=reason)


def _advance(state: ControllerState, now: float) -> list[AnyAction]:
    """Start the ranks of each group whose older ones are gone and whose store is served."""
    actions: list[AnyAction] = []
    for number in sorted(state.groups):
        group = state.groups[number]
        if group.phase != "forming" or group.store is None or state.phase != "running":
            continue
        if state.stopped.get(number, -1) < group.generation - 1:
            continue
        group.phase, group.deadline_s = "starting", now + _FORM_TIMEOUT_S
        reason = f"generation {group.generation} of group {number}: its older ranks are gone"
        actions += [hold_groups(state, reason), _assign(state, group, "run", reason)]
    return actions


# --- what groups do ------------------------------------------------------------------------------


def _note_exit(state: ControllerState, now: float, event: RankExited) -> list[AnyAction]:
    record = event.record
    group = _of_generation(state, record.generation)
    if group is None or record.rank in group.exits or group.phase not in ("starting", "running"):
        return []
    group.exits[record.rank] = record
    if record.failed and not record.asked:
        code = record.code or 128 + record.signal
        who = f"rank {record.rank}"
        return _fail(
            state, now, group, record.cause,
            who=who, error=record.error, code=code, signal=record.signal,
        )  # fmt: skip
    spec = state.the_spec()
    if len(group.exits) < spec.nproc or any(e.failed for e in group.exits.values()):
        return []
    group.phase, group.deadline_s = "done", None
    return _finish_if_over(state, now)


def _note_quorum(state: ControllerState, event: QuorumFormed) -> list[AnyAction]:
    state.quorum.quorum_id, state.quorum.members = event.quorum_id, event.members
    state.step = max(state.step, event.step)
    state.mark = max(state.mark, event.step)
    for group in state.groups.values():
        if group.replica in event.members:
            group.trained, group.absent = True, ""
            if group.phase == "running":
                group.deadline_s = None
    return []


def _note_replica(state: ControllerState, now: float, event: ReplicaSeen) -> list[AnyAction]:
    group = state.groups.get(event.group)
    if group is None or group.phase not in ("starting", "running"):
        return []
    if not event.gone:
        group.replica, group.absent = event.replica, ""
        if group.phase == "running":
            group.deadline_s = None
        return _promote(state, f"group {group.group} stands ready")
    if event.replica != group.replica or group.exits:
        return []
    detect = state.the_spec().detect
    group.absent = event.reason
    wait_s = detect.stopped_action_s if event.stopped else detect.quiet_action_s
    group.deadline_s = now + wait_s
    return _promote(state, f"group {group.group} was left out: {event.reason}")


def _fail(
    state: ControllerState,
    now: float,
    group: GroupState,
    cause: str,
    *,
    who: str = "",
    error: str = "",
    code: int = 1,
    signal: int = 0,
) -> list[AnyAction]:
    """End what is left of a group and start it again; the others go on without it."""
    if state.phase != "running" or not group.alive:
        return []
    failure = Failure(
        at_s=now,
        cause=cause,
        culprit=f"group {group.group}" + (f", {who}" if who else ""),
        generation=group.generation,
        step=state.step if group.trained else -1,
        mark=state.mark if group.trained else 0,
        error=error,
        code=code,
        signal=signal,
    )
    actions = _let_go(state, group, f"{failure.culprit}: {cause}")
    done = any(other.phase == "done" for other in state.groups.values())
    decision = decide_recovery(failure, tuple(group.failures), state.the_spec().restart)
    group.failures.append(failure)
    state.failures.append(failure)
    group.absent, group.store = group.absent or cause, None
    actions += _promote(state, decision.reason)
    if done or decision.rung == "give up":
        why = "others have finished" if done else decision.reason
        group.phase, group.deadline_s, group.active = "failed", None, False
        actions += [_assign(state, group, "stop", why), hold_groups(state, why)]
        return [*actions, *_finish_if_over(state, now)]
    return [*actions, *_start(state, now, group, decision.reason)]


def _let_go(state: ControllerState, group: GroupState, reason: str) -> list[AnyAction]:
    """Have the lighthouse forget it, and those who hang on it in a collective go on."""
    name, quorum = group.replica, state.quorum
    evict = EvictReplica(replica=name, generation=group.generation, reason=reason)
    if name not in quorum.members:
        return [evict]
    others = tuple(
        g.group for g in state.groups.values() if g is not group and g.replica in quorum.members
    )
    fence = FenceAbort(quorum_id=quorum.quorum_id, groups=others, reason=reason)
    return [evict, fence] if others else [evict]


def _promote(state: ControllerState, reason: str) -> list[AnyAction]:
    """Release a spare that stands ready in the place of each active group that is away."""
    spares = [
        g
        for _, g in sorted(state.groups.items())
        if not g.active and g.phase == "running" and g.replica and not g.absent
    ]
    away = [g for _, g in sorted(state.groups.items()) if g.active and g.alive and g.absent]
    away += [g for _, g in sorted(state.groups.items()) if g.phase == "failed" and g.active]
    wanted = state.the_spec().torchft.replicas
    missing = wanted - sum(g.active and g.alive for g in state.groups.values())
    changed = False
    for spare in spares:
        if away:
            away.pop(0).active = False
        elif missing > 0:
            missing -= 1
        else:
            break
        spare.active = changed = True
    return [hold_groups(state, reason)] if changed else []


def _finish_if_over(state: ControllerState, now: float) -> list[AnyAction]:
    """End the job once no group trains any more that has trained."""
    groups = state.groups.values()
    done = sum(g.phase == "done" for g in groups)
    if any(g.alive and g.trained and g.active for g in groups):
        return []
    if done:
        return end_job(state, now, "done", 0, f"{done} replica groups ended with exit code 0")
    least = max(1, state.the_spec().torchft.min_replicas)
    if sum(g.alive for g in groups) >= least:
        return []
    last = state.failures[-1]
    return end_job(state, now, "failed", last.code or 1, f"{last.culprit}: {last.cause}")


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
        actions += _fail(state, now, group, cause)
    return actions


def _issue_again(state: ControllerState, reason: str) -> list[AnyAction]:
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
    return [*actions, hold_groups(state, reason)] if state.groups else actions


def _of_generation(state: ControllerState, generation: int) -> GroupState | None:
    return next((g for g in state.groups.values() if g.generation == generation), None)
