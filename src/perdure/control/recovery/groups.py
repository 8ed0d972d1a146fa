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

from perdure.control.agreement.boundary import answer_boundary, reach_boundary
from perdure.control.agreement.changes import declare_keys, note_high, reach_change
from perdure.control.job import JobState
from perdure.control.membership import membership_of
from perdure.control.membership.quorum import (
    hold_groups,
    least_groups,
    let_go,
    promote,
    wanted_groups,
)
from perdure.control.recovery.elsewhere import note_elsewhere
from perdure.control.recovery.formation import (
    REGISTER_TIMEOUT_S,
    advance_end,
    assign,
    begin_generation,
    end_job,
)
from perdure.control.world import ReplicaState, WorldState
from perdure.detect.certainty import STOPPED_S, TIMEOUT_S
from perdure.model.events import (
    ActionWithheld,
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CheckpointRestored,
    KeeperLost,
    KeysDeclared,
    NodeLost,
    NodeRegistered,
    QuorumFormed,
    RankAttached,
    RankExited,
    ReplicaSeen,
    TimerFired,
)
from perdure.model.failures import Cause, Rung, explain_exit, explain_node
from perdure.model.orders import AnyAction, AssignNodes
from perdure.policy import Failure, decide_recovery


def fail_group(
    state: JobState,
    now: float,
    group: WorldState,
    cause: str,
    *,
    who: str = "",
    error: str = "",
    code: int = 1,
    signal: int = 0,
    silent: bool = False,
    found: Cause | None = None,
) -> list[AnyAction]:
    """End what is left of a group and start it again; the others go on without it.

    It is `silent` where it may live: nothing of it is known to have ended.
    """
    if state.phase != "running" or not group.alive:
        return []
    failure = Failure(
        at_s=now,
        cause=cause,
        culprit=f"group {group.number}" + (f", {who}" if who else ""),
        generation=group.generation,
        step=state.step if group.replica.trained else -1,
        progress_max=state.progress_max if group.replica.trained else 0,
        error=error,
        code=code,
        signal=signal,
    )
    decision = decide_recovery(failure, group.failures, state.the_spec().restart)
    withheld = ActionWithheld(
        at_s=now,
        generation=group.generation,
        cause=failure.cause,
        culprit=failure.culprit,
        reason=decision.reason,
        would="restarted the group" if decision.rung == "restart" else "given the group up",
        step=state.step,
        first_seen_s=now,
    )
    held = membership_of(state).withhold(group, withheld)
    if held is not None:
        return [*held, *_stay_away(state, now, group, failure, found, silent=silent)]
    actions = let_go(state, group, f"{failure.culprit}: {cause}")
    done = any(other.phase == "done" for other in state.worlds.values())
    rung: Rung = "give up" if done else decision.rung
    state.book.decide(_name_group(found, failure), rung, group.generation, group=group.number)
    state.note_failure(group, failure)
    group.replica.absent, group.store = group.replica.absent or cause, None
    if group.replica.leaving or group.number in state.barred:
        return [*actions, *park_group(state, now, group, group.replica.leaving or "it is cordoned")]
    actions += promote(state, decision.reason)
    actions += [] if done else _note_outage(state, now, group)
    if done or decision.rung == "give up":
        why = "others have finished" if done else decision.reason
        group.enter("it is given up")
        group.deadline_s, group.replica.active = None, False
        actions += [assign(state, group, "stop", why), hold_groups(state, why)]
        return [*actions, *finish_if_over(state, now)]
    return [*actions, *begin_generation(state, now, group, decision.reason)]


def _name_group(found: Cause | None, failure: Failure) -> Cause:
    """Return the cause of a group's failure: what is known of it, or what was decided upon."""
    if found is not None:
        return structs.replace(found, culprit=failure.culprit)
    return Cause(
        cause=failure.cause, culprit=failure.culprit, at_step=failure.step,
        failure_s=failure.at_s, detected_s=failure.at_s, reason="the others train on",
    )  # fmt: skip


def _stay_away(
    state: JobState,
    now: float,
    group: WorldState,
    failure: Failure,
    found: Cause | None,
    *,
    silent: bool,
) -> list[AnyAction]:
    """A group of a job that is only observed stays away: what torchrun would do is all there is.

    One that is merely silent is left alone; what is left of one that has ended is ended as well.
    """
    if silent and group.phase == "forming":
        return []  # It still has until its deadline.
    group.deadline_s = None
    if silent:
        return []
    state.book.decide(_name_group(found, failure), "give up", group.generation, group=group.number)
    state.note_failure(group, failure)
    group.enter("it is given up")
    group.replica.active, group.replica.absent = False, failure.cause
    stop = assign(state, group, "stop", f"{failure.culprit}: {failure.cause}")
    return [stop, *finish_if_over(state, now)]


def _note_outage(state: JobState, now: float, group: WorldState) -> list[AnyAction]:
    """Count it where `group` was the last that is known to have the state.

    Where there is a checkpoint, who waits to heal (a spare, too) is started again and goes on from
    it: it has loaded none, or an older one. Should it have healed this very moment, the steps
    since the checkpoint are lost.
    """
    others = [g for _, g in sorted(state.worlds.items()) if g is not group and g.alive]
    if not group.replica.trained or any(g.replica.trained and not g.replica.absent for g in others):
        return []
    state.quorum.outages += 1
    if state.saved_step <= 0:
        return []
    started = [g for g in others if g.has_ranks]
    why = "nobody is left to heal from: it goes on from the newest checkpoint"
    return [a for other in started for a in begin_generation(state, now, other, why)]


def park_group(
    state: JobState, now: float, group: WorldState, reason: str, *, grace_s: float = 0.0
) -> list[AnyAction]:
    """End what a group runs, and start it no more until it is restored."""
    actions = let_go(state, group, reason) if group.alive else []
    group.enter("it is left, or lost while cordoned")
    group.deadline_s, group.replica.active = None, False
    group.replica.leaving, group.replica.absent = "", reason
    group.store = group.replica.stands = None
    actions += promote(state, reason)
    stop = assign(state, group, "stop", reason, grace_s=grace_s)
    return [*actions, stop, hold_groups(state, reason), *finish_if_over(state, now)]


def finish_if_over(state: JobState, now: float) -> list[AnyAction]:
    """End the job once no group trains any more that has trained."""
    groups = state.worlds.values()
    done = sum(g.phase == "done" for g in groups)
    if any(g.alive and g.replica.trained and g.replica.active for g in groups):
        return []
    if done:
        return end_job(state, now, "done", 0, f"{done} replica groups ended with exit code 0")
    if sum(g.alive for g in groups) >= least_groups(state):
        return []
    last = state.failures.kept[-1] if state.failures.kept else None
    why = f"{last.culprit}: {last.cause}" if last else "no replica group is left"
    return end_job(state, now, "failed", (last.code if last else 0) or 1, why)


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
    state.enter("enough nodes are there")
    state.deadline_s = None
    actions: list[AnyAction] = []
    for node in sorted(state.nodes):
        group = WorldState(
            node, placement=(node,), replica=ReplicaState(active=node < wanted_groups(state))
        )
        state.worlds[node] = group
        actions += begin_generation(state, now, group, reason)
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
    group.replica.trained |= account.step > account.start_step
    state.step, state.progress_max = (
        max(state.step, account.step),
        max(state.progress_max, account.step),
    )
    if record.failed and not record.asked:
        code = record.code or 128 + record.signal
        who = f"rank {record.rank}"
        signal = group.read_signal(record, state.the_spec().nproc)
        return fail_group(
            state, now, group, record.cause,
            who=who, error=record.error, code=code, signal=signal, found=found,
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


def _attach(state: JobState, now: float, event: RankAttached) -> list[AnyAction]:
    """A rank of a group that others have started can be asked."""
    group = state.find_world(event.generation)
    if group is not None:
        group.joined.add(event.rank)
        group.replica.places.setdefault(event.rank, event.place)
    return []


def _reach(state: JobState, now: float, event: BoundaryReached) -> list[AnyAction]:
    state.step = max(state.step, event.step)
    reach_boundary(state, event)
    return reach_change(state, event)


def _note_restored(state: JobState, now: float, event: CheckpointRestored) -> list[AnyAction]:
    state.saved_step = max(state.saved_step, event.step)  # There is one.
    return []


def _note_quorum(state: JobState, now: float, event: QuorumFormed) -> list[AnyAction]:
    if state.the_spec().served and not set(event.members) & set(state.quorum.members):
        state.step = state.steering.high = -1  # Nobody is there who was: they have begun anew.
    state.quorum.quorum_id, state.quorum.members = event.quorum_id, event.members
    state.step = max(state.step, event.step)
    state.progress_max = max(state.progress_max, event.step)
    for group in state.worlds.values():
        if group.replica.name in event.members:
            group.replica.trained, group.replica.absent = True, ""
            group.replica.stands = None
            if group.phase == "running":
                group.deadline_s = None
    return []


def _note_replica(state: JobState, now: float, event: ReplicaSeen) -> list[AnyAction]:
    if state.the_spec().served:
        return note_elsewhere(state, now, event)
    group = state.worlds.get(event.group)
    if group is None or not group.has_ranks:
        return []
    pause = state.steering.pause
    if event.held and pause is not None and event.hold >= pause.hold:
        group.replica.stands = event.step
    if not event.gone:
        group.replica.name, group.replica.absent = event.replica, ""
        if group.phase == "running":
            group.deadline_s = None
        return promote(state, f"group {group.number} stands ready")
    if event.replica != group.replica.name or group.exits or group.replica.absent == event.reason:
        return []
    state.step = max(state.step, event.step)
    group.replica.absent, group.replica.absent_s = event.reason, event.at_s
    withheld = ActionWithheld(
        at_s=now,
        generation=group.generation,
        cause=group.replica.absent,
        culprit=f"group {group.number}",
        reason="perdure's own lighthouse would form the next quorum without it",
        would="left the group out of the quorum",
        step=state.step,
        first_seen_s=now,
    )
    noted = membership_of(state).withhold(group, withheld) or []
    # It may validate or save for long: it costs the others nothing any more, and heals once back.
    patience_s = state.the_spec().detect.quiet_action_s or TIMEOUT_S
    group.deadline_s = now + (STOPPED_S if event.stopped else patience_s)
    return [*noted, *promote(state, f"group {group.number} was left out: {event.reason}")]


def _declare(state: JobState, now: float, event: KeysDeclared) -> list[AnyAction]:
    """Take over the keys of the newest group that has trained."""
    for group in state.worlds.values():
        group.replica.trained |= group.generation == event.generation
    declare_keys(state, event)
    note_high(state, event.step)
    state.step, state.progress_max = (
        max(state.step, event.step),
        max(state.progress_max, event.step),
    )
    return []


# --- time ----------------------------------------------------------------------------------------


def _fire(state: JobState, now: float, event: TimerFired) -> list[AnyAction]:
    if state.over:
        return advance_end(state, now)
    if state.phase == "pending" and state.deadline_s is not None:
        if now < state.deadline_s:
            return []
        if len(state.nodes) >= wanted_groups(state):
            return _begin(state, now, f"{len(state.nodes)} nodes are there")
        why = f"not all nodes registered within {REGISTER_TIMEOUT_S:g} s"
        return end_job(state, now, "failed", 1, why)
    actions: list[AnyAction] = []
    for number in sorted(state.worlds):
        group = state.worlds[number]
        if group.deadline_s is None or now < group.deadline_s:
            continue
        cause = group.replica.absent or f"{group.phase} took too long"
        silent = group.phase != "forming"  # Of one that is being formed, nothing trains.
        since_s = group.replica.absent_s if group.replica.absent else now
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
    RankAttached: _attach,
    CheckpointRestored: _note_restored,
}
"""What reacts to an event that concerns replica groups in a way of their own."""
