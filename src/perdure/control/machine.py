"""The controller's door: one event in, a list of actions out, each with its reason.

It does not look at heartbeats (the detector does) and it starts nothing (its shell does). It is
replayed from the journal after a crash; `ControllerStarted` then issues again what is open.
"""

from collections.abc import Callable
from typing import Any

from msgspec import structs

from perdure.control import preemption
from perdure.control.agreement.boundary import (
    advance_agreement,
    drop_boundary,
    expire_boundary,
    note_pace,
    send_boundary,
    send_boundary_again,
)
from perdure.control.agreement.changes import note_high
from perdure.control.agreement.pauses import answer_pause, send_resume
from perdure.control.job import JobState, OpenNotice
from perdure.control.joining import note_invitation
from perdure.control.membership import membership_of
from perdure.control.membership.elastic import (
    free_slot,
    is_outside,
    leave_outside,
    note_world,
)
from perdure.control.membership.members import count_slot_end, note_trained
from perdure.control.membership.observed import describe_withheld, note_withheld
from perdure.control.progress import (
    after_boundary,
    note_answer,
    note_keys,
    note_progress,
    reach,
    settle_members,
)
from perdure.control.recovery.devices import note_sticky_error
from perdure.control.recovery.formation import (
    REGISTER_TIMEOUT_S,
    advance_end,
    assign_again,
    check_again,
    close_job,
    end_job,
    form_world,
    has_enough,
    note_checked,
    note_end,
    note_started,
    note_stopped,
    note_store,
    note_submission,
    release_world,
    wait_for_nodes,
)
from perdure.control.recovery.groups import OF_GROUPS
from perdure.control.recovery.notices import note_device
from perdure.control.recovery.placement import cordon_again, find_notice, note_cordon
from perdure.control.recovery.probing import (
    probe_again,
    probe_overdue,
    probe_verdict,
    take_probe,
)
from perdure.control.recovery.response import (
    ACTED_UPON,
    SLOW,
    STACKS_FOR,
    ask_stacks,
    ask_stacks_again,
    blame,
    blame_device,
    correct_culprit,
    hold_action,
    note_stacks,
    weigh_verdict,
    withdraw,
)
from perdure.control.steering.commands import (
    find_reached_stop,
    finish_job,
    give_up_stop,
    inject_again,
    note_fault,
    receive_command,
    start_waiting_command,
    stop_deadline,
)
from perdure.control.steering.moves import (
    advance_moves,
    moves_again,
    moves_deadline,
    note_left,
)
from perdure.control.steering.saving import (
    next_save_deadline,
    note_checkpoint,
    open_due_checkpoint,
    plan_checkpoint,
    reopen_lost,
    save_if_due,
)
from perdure.model.events import (
    ActionWithheld,
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    CommandReceived,
    ControllerStarted,
    DeviceReported,
    FailureDecided,
    FaultInjected,
    GenerationStepping,
    GenerationStopped,
    InvitationMade,
    InvitationRevoked,
    InvitationUsed,
    JobEnded,
    JobSubmitted,
    KeeperLost,
    KeysDeclared,
    MemberReady,
    NodeAsked,
    NodeCordoned,
    NodeLost,
    NodeRegistered,
    NodeRestored,
    OwnChecked,
    PreemptionNoticed,
    PreemptionWithdrawn,
    ProbeEnded,
    ProgressNoted,
    RankExited,
    RankJoined,
    RanksStarted,
    StacksTaken,
    StoreReady,
    TimerFired,
    VerdictReached,
    VerdictWithdrawn,
    WorldBroken,
    WorldReformed,
)
from perdure.model.failures import (
    Cause,
    explain_exit,
    explain_node,
    explain_verdict,
    find_early,
    name_preemption,
)
from perdure.model.orders import AnyAction, AssignNodes, InterruptCollectives
from perdure.model.verdicts import Verdict
from perdure.policy import Failure, decide_recovery

_CHANGES = (NodeRegistered, NodeRestored, CheckpointSaved, ProgressNoted)
"""Events that may change what is worth doing about a slowness that stands."""


class Controller:
    """The state machine of one job."""

    def __init__(self, state: JobState | None = None) -> None:
        """Know what is remembered, or nothing: the journal's first event brings the job."""
        self.state = state or JobState()

    def next_deadline(self) -> float | None:
        """Return the job time at which `TimerFired` is wanted."""
        state, worlds = self.state, self.state.worlds.values()
        if state.over:  # A probe, or an epoch that was to be formed, is waited for no longer.
            return state.deadline_s
        times = [
            state.deadline_s,
            stop_deadline(state),
            moves_deadline(state),
            next_save_deadline(state),
            state.notices_due_s,
            membership_of(state).deadline(state),
            *(world.deadline_s for world in worlds),
        ]
        if state.boundary is not None:
            times.append(state.boundary.deadline_s)
        else:
            times += [world.checkpoint_due_s for world in worlds]
        stacks = (world.stacks for world in worlds if world.stacks is not None)
        times += [request.due_s for request in stacks if request.held is not None]
        if state.probe is not None:
            times.append(state.probe.due_s)
        return min((time for time in times if time is not None), default=None)

    def handle(self, now: float, event: AnyEvent) -> list[AnyAction]:
        """Return what to do about `event`, which is in the journal already."""
        if isinstance(event, JobSubmitted):
            return note_submission(self.state, now, event)
        if isinstance(event, FailureDecided):  # It says what has been decided.
            self.state.book.take(event)
            return []
        state, membership = self.state, membership_of(self.state)
        if state.unwritten:
            state.note_written(event)
        kind, before = membership.kind, membership.list_fleeting(state)
        handler = HANDLERS[kind].get(type(event))
        actions = handler(state, now, event) if handler is not None else []
        if kind == "replica groups":
            actions += _advance_groups(state, now)
        else:
            actions += _advance(state, now, event, before)
        if actions:
            state.note_unwritten(actions)
        return actions

    def facts(self, now: float) -> list[AnyEvent]:
        """Return what has been decided about failures and is not in the journal yet."""
        return list(self.state.book.pending(now))


def _advance(
    state: JobState, now: float, event: AnyEvent, before: tuple[int, ...]
) -> list[AnyAction]:
    """Do what has become possible, after any event."""
    actions = preemption.advance_notices(state, now)
    if isinstance(event, _CHANGES) and state.world.pending_verdicts:
        actions += _weigh_again(state, now)
    while True:  # An eviction takes members away as well.
        actions += settle_members(state, now, before) if before else []
        before = membership_of(state).list_fleeting(state)
        actions += advance_moves(state, now)
        if membership_of(state).list_fleeting(state) == before:
            return actions


def _advance_groups(state: JobState, now: float) -> list[AnyAction]:
    """Do what has become possible, after any event."""
    actions = advance_agreement(state, now)
    open_due_checkpoint(state, now)
    reopen_lost(state)
    actions += start_waiting_command(state, now)
    return [*actions, *advance_moves(state, now), *answer_pause(state)]


def _issue_again(state: JobState, now: float, event: ControllerStarted) -> list[AnyAction]:
    """Return all that may have been lost with the last controller, once more.

    Everything here is a level, so that whoever has heard it before does nothing.
    """
    reason = f"controller {event.incarnation} took over"
    if state.phase == "ended":
        return close_job(state)
    if state.over:  # No rank is to do anything any more, and not all of them have a place.
        records = [*cordon_again(state), *send_resume(state), *state.record_again(reason)]
        return [*assign_again(state, reason), *records]
    actions = [*assign_again(state, reason), *send_boundary_again(state, reason)]
    actions += [*ask_stacks_again(state, reason), *cordon_again(state), *moves_again(state)]
    actions += [*send_resume(state), *probe_again(state)]
    actions += [*membership_of(state).again(state, reason), *check_again(state, reason)]
    return [*actions, *inject_again(state, reason), *state.record_again(reason)]


# --- nodes and ranks ---------------------------------------------------------------------


def _register(state: JobState, now: float, event: NodeRegistered) -> list[AnyAction]:
    taken = find_notice(state, now, event.node)
    freed = preemption.note_return(state, now, event)
    state.nodes[event.node] = event
    state.lost.pop(event.node, None)
    if state.phase == "pending":
        if not has_enough(state):
            return freed
        return form_world(state, now, f"{len(state.nodes)} nodes are there")
    returned = membership_of(state).come_back(state, event)
    if returned.broken:
        why = returned.broken
        found = explain_node(event.node, "keeper lost", -1, now, now, why)
        return _fail(state, now, f"node {event.node}", why, code=1, taken=taken, found=found)
    actions = [*freed, *returned.actions]
    if state.assignment is None:
        return actions
    reason = f"node {event.node} registered"
    again = AssignNodes(nodes=(event.node,), assignment=state.assignment, reason=reason)
    actions.append(again)
    if state.boundary is not None:
        actions += send_boundary(state, reason)
    return actions


def _note_exit(state: JobState, now: float, event: RankExited) -> list[AnyAction]:
    record = event.record
    note_high(state, event.account.step)
    note_left(state, event)
    note_sticky_error(state, event)
    found = explain_exit(
        record, event.detected_s, event.account.step,
        find_early(state.world.exits.values(), record),
    )  # fmt: skip
    if state.phase == "ending" or state.world.phase == "forming":
        correct_culprit(state, event)
        if record.failed and not record.asked:
            state.book.correct(found, record.generation)
    if record.generation != state.world.generation or record.rank in state.world.exits:
        return []
    if not state.world.has_ranks:
        return []
    state.world.exits[record.rank] = record
    state.step = max(state.step, event.account.step)
    state.progress_max = max(state.progress_max, event.account.step)
    actions = _count_end(state, now, event)
    if is_outside(state, record.rank):
        return [*actions, *leave_outside(state, now, record.rank)]
    if record.failed and not record.asked:
        culprit, cause = f"rank {record.rank}", record.cause
        left = [r for r, e in sorted(state.world.exits.items()) if not e.failed and not e.asked]
        if record.differs:
            culprit, cause = found.culprit, found.cause
        elif left and record.lost_peer:
            culprit, cause = f"rank {left[0]}", f"left early; then {culprit}: {cause}"
        taken = preemption.find_taken(state, event.node, record)
        blamed, without, why = blame_device(state, event)
        if record.sticky_error and why:
            found = structs.replace(found, reason=f"{found.reason}; {why}")
        return (
            actions
            + blamed
            + _fail(
                state,
                now,
                culprit,
                cause,
                error=record.error,
                torn=(record.torn, record.torn_why),
                code=record.code or 128 + record.signal,
                signal=state.world.read_signal(record, len(state.ranks)),
                step=event.account.step,
                exit_s=record.at_s,
                without=without,
                why=why,
                taken=taken,
                found=found,
            )
        )
    left_well = membership_of(state).leave(state, now, event)
    if left_well.broken:
        return _fail(state, now, f"rank {record.rank}", left_well.broken)
    if not membership_of(state).has_ended(state):
        return left_well.actions
    return finish_job(state, now)


def _count_end(state: JobState, now: float, event: RankExited) -> list[AnyAction]:
    """Count the end of a member's process, or of one that was to be a member, for its slot."""
    record = event.record
    if not membership_of(state).goes_on(state) or not note_trained(state, event):
        return []
    if (
        not record.failed
        or record.differs
        or preemption.find_taken(state, event.node, record) is not None
    ):
        return []
    return count_slot_end(state, now, record.rank, record.cause)


def _lose_keeper(state: JobState, now: float, event: KeeperLost) -> list[AnyAction]:
    reason = "its keeper died, and its ranks with it"
    reason += f": it {event.cause}" if event.cause else ""
    found = explain_node(event.node, "keeper lost", -1, event.at_s, now, reason)
    state.book.correct(found, event.generation)
    if event.generation != state.world.generation or not state.world.has_ranks:
        return []
    why = f"keeper died: it {event.cause}" if event.cause else "keeper died"
    lost = membership_of(state).lose(state, event.node, why, event.begun)
    if not lost.broken:
        return lost.actions
    taken, node = find_notice(state, now, event.node), f"node {event.node}"
    return _fail(state, now, node, lost.broken, code=1, taken=taken, found=found)


def _lose_node(state: JobState, now: float, event: NodeLost) -> list[AnyAction]:
    seen_s = event.last_seen_s or event.at_s
    found = explain_node(event.node, "NodeLost", -1, seen_s, now, event.reason)
    late = state.phase == "ending" or state.world.phase == "forming"
    if event.node in state.book.nodes and late:
        state.book.correct(found, state.world.generation - (state.world.phase == "forming"))
    state.lost.setdefault(event.node, event.at_s)
    if state.phase == "ending":
        return advance_end(state, now)
    why = f"node lost: {event.reason}"
    lost = membership_of(state).miss(state, now, event, why)
    if not lost.broken:
        return lost.actions
    if event.node not in state.world.placement and not membership_of(state).goes_on(state):
        return []
    taken = find_notice(state, now, event.node)
    if taken is None:
        state.blames[event.node] = state.blames.get(event.node, 0) + 1
    if state.world.phase == "forming" and state.spares:
        return form_world(state, now, f"node {event.node} was lost meanwhile")
    if not state.world.has_ranks:
        return []
    return _fail(state, now, f"node {event.node}", why, code=1, taken=taken, found=found)


def _judge(state: JobState, now: float, event: VerdictReached) -> list[AnyAction]:
    """Take stacks at a verdict's first word; act once it is actionable."""
    verdict = event.verdict
    if verdict.actionable and verdict.kind in STACKS_FOR:
        state.book.correct(explain_verdict(verdict), verdict.generation)
    if verdict.generation != state.world.generation or state.world.phase != "running":
        return []
    if verdict.kind not in ACTED_UPON:
        return []
    if not verdict.actionable:
        stacks = ask_stacks(state, now, verdict) if verdict.kind in STACKS_FOR else []
        return [*stacks, *probe_verdict(state, now, verdict)]
    if verdict.kind in SLOW:
        state.world.pending_verdicts[f"{verdict.kind} {verdict.culprit}"] = verdict
    reaction = weigh_verdict(state, verdict, now)
    if reaction.rung == "none":
        nothing = describe_withheld(now, verdict, reaction.reason)
        return note_withheld(state.world, nothing, reaction.ground)
    if verdict.kind in STACKS_FOR:
        asked = [] if state.world.stacks is not None else ask_stacks(state, now, verdict)
        if hold_action(state, now, verdict):
            return asked
    return _act_upon(state, now, verdict)


def _weigh_again(state: JobState, now: float) -> list[AnyAction]:
    """Slowness stands: a spare node may have come, its cost grown, or a checkpoint been saved.

    An agreement or a move that is under way is waited for.
    """
    if state.world.phase != "running" or state.boundary is not None or state.moves:
        return []
    actions: list[AnyAction] = []
    for verdict in list(state.world.pending_verdicts.values()):
        reaction = weigh_verdict(state, verdict, now)
        if reaction.rung != "none":
            return [*actions, *_act_upon(state, now, verdict)]
        nothing = describe_withheld(now, verdict, reaction.reason)
        actions += note_withheld(state.world, nothing, reaction.ground)
    return actions


def _act_upon(state: JobState, now: float, verdict: Verdict) -> list[AnyAction]:
    """Do what the policy makes of `verdict`: the next world, or the end."""
    state.world.pending_verdicts.pop(f"{verdict.kind} {verdict.culprit}", None)
    if verdict.kind in STACKS_FOR:
        state.world.stacks = None  # Acted upon once; the next one's are taken anew.
    reaction = weigh_verdict(state, verdict, now)
    would = "stopped the job" if reaction.rung == "stop" else "restarted the world"
    event = describe_withheld(now, verdict, reaction.reason, would=would)
    held = membership_of(state).withhold(state.world, event)
    if held is not None:
        return held
    if reaction.rung == "stop":
        found, world = explain_verdict(verdict), state.world
        state.book.decide(found, "give up", world.generation, world.placement)
        return end_job(state, now, "failed", 1, reaction.reason)
    actions, node = blame(state, now, verdict, reaction)
    cause = f"{verdict.kind} ({verdict.activity})"
    found, rank = explain_verdict(verdict), verdict.culprit.rank
    ended = membership_of(state).end_one(state, rank, found, cause)
    if ended:
        return [*actions, *ended]
    freed = free_slot(state, verdict)
    if freed and rank is not None:
        actions += count_slot_end(state, now, rank, cause)
    hangs = verdict.kind in STACKS_FOR and not freed
    interrupt_s = state.the_spec().policy.interrupt_s if hangs else 0.0
    if interrupt_s:
        waiting = tuple(
            r for r in membership_of(state).list_asked(state) if r not in state.world.exits
        )
        actions.append(
            InterruptCollectives(generation=state.world.generation, ranks=waiting, reason=cause)
        )
    return actions + _fail(
        state,
        now,
        str(verdict.culprit),
        cause,
        code=1,
        step=verdict.step,
        without=node,
        why=reaction.reason,
        grace_s=interrupt_s,
        freed=freed,
        found=found,
    )


def _fail(
    state: JobState,
    now: float,
    culprit: str,
    cause: str,
    *,
    error: str = "",
    torn: tuple[str, str] = ("", ""),
    code: int = 0,
    signal: int = 0,
    step: int | None = None,
    exit_s: float | None = None,
    without: int | None = None,
    why: str = "",
    grace_s: float = 0.0,
    taken: OpenNotice | None = None,
    freed: bool = False,
    found: Cause | None = None,
) -> list[AnyAction]:
    """Decide on one failure of the world: the next generation, or the end."""
    found = found or Cause(
        cause=cause, culprit=culprit, at_step=state.step,
        failure_s=now, detected_s=now, reason=f"{culprit}: {cause}",
    )  # fmt: skip
    if taken is not None:
        found = name_preemption(found, taken.node, taken.words)
        culprit, cause = f"node {taken.node}", f"Preemption ({taken.words}); {culprit}: {cause}"
    failure = Failure(
        at_s=now,
        cause=cause,
        culprit=culprit,
        generation=state.world.generation,
        step=state.step if step is None else step,
        progress_max=state.progress_max,
        error=error,
        torn=torn,
        code=code,
        signal=signal,
        preempted=taken is not None,
    )
    stopped = find_reached_stop(state)
    world, nodes = state.world.generation, state.world.placement
    if stopped is not None:
        state.book.decide(found, "give up", world, nodes)
        why = f"stopped by {stopped.who or 'an operator'}; then {culprit}: {cause}"
        done = state.answer(stopped.id, True, why, {"step": state.step})
        return [*done, *end_job(state, now, "stopped", 0, why)]
    decision = decide_recovery(failure, state.failures, state.the_spec().restart)
    state.world.first_exit_s = exit_s
    reason = f"{decision.reason}; {why}" if why else decision.reason
    withheld = _describe_loss(failure, decision.rung, reason, exit_s)
    held = membership_of(state).withhold(state.world, withheld)
    if held is not None:  # It cannot go on: it ends, as it would without perdure.
        state.note_failure(state.world, failure)
        state.book.decide(found, "give up", world, nodes)
        why = f"{culprit}: {cause}; observed only: nothing is restarted"
        return [*held, *end_job(state, now, "failed", code or 1, why)]
    goes_on = f"{culprit}: {cause}" if decision.rung == "give up" else reason
    in_place = membership_of(state).stand_in(state, now, found, goes_on, freed=freed)
    outlived = not in_place.broken
    state.note_failure(state.world, structs.replace(failure, outlived=outlived))
    if outlived or decision.rung != "give up":  # Nobody stands still for a slot.
        state.world.failed_s = state.world.failed_s if freed else now
    if outlived:
        return in_place.actions
    state.book.decide(found, decision.rung, world, nodes)
    actions = drop_boundary(state, decision.reason)
    if decision.rung == "give up":
        return [*actions, *end_job(state, now, "failed", code or 1, decision.reason)]
    return [*actions, *form_world(state, now, reason, without=without, grace_s=grace_s)]


def _describe_loss(
    failure: Failure, rung: str, reason: str, exit_s: float | None
) -> ActionWithheld:
    """Return what would have been done about a failure, which nothing is."""
    return ActionWithheld(
        at_s=failure.at_s,
        generation=failure.generation,
        cause=failure.cause if exit_s is None else "Crash",
        culprit=failure.culprit,
        reason=reason,
        would="restarted the world" if rung == "restart" else "ended the job as well",
        step=failure.step,
        first_seen_s=exit_s or 0.0,
    )


# --- time --------------------------------------------------------------------------------


def _fire(state: JobState, now: float, event: TimerFired) -> list[AnyAction]:
    """Do what is due; the machine's own deadline and nothing else brings it here."""
    note_pace(state, event.pace)
    if state.over:
        return advance_end(state, now)
    due_s = state.deadline_s if state.phase == "pending" else state.world.deadline_s
    if due_s is not None and now >= due_s:
        return _phase_overdue(state, now)
    due_elastic = membership_of(state).fire(state, now, event.busy)
    if due_elastic.broken:
        return _fail(state, now, "the job", due_elastic.broken, code=1)
    if due_elastic.actions:
        return due_elastic.actions
    stacks = state.world.stacks
    if stacks is not None and stacks.held is not None and now >= stacks.due_s:
        return _act_upon(state, now, stacks.held)
    if state.probe is not None and state.probe.due_s is not None and now >= state.probe.due_s:
        return probe_overdue(state, now)
    overdue_s = stop_deadline(state)
    if overdue_s is not None and now >= overdue_s:
        return give_up_stop(state, now)
    if state.boundary is None:
        return save_if_due(state, now)
    if now < state.boundary.deadline_s:
        return []
    actions = expire_boundary(state, now)
    if not actions:  # The step itself was overdue.
        plan_checkpoint(state, now)
    return after_boundary(state, now, actions)


def _phase_overdue(state: JobState, now: float) -> list[AnyAction]:
    if state.phase == "pending":
        spec = state.the_spec()
        if len(state.nodes) >= spec.nodes:
            return form_world(state, now, f"{len(state.nodes)} nodes are there, spares are not")
        missing = [node for node in range(spec.num_nodes) if node not in state.nodes]
        why = f"nodes {missing} did not register within {REGISTER_TIMEOUT_S:g} s"
        return end_job(state, now, "failed", 1, why)
    missing = [node for node in state.world.placement if node in state.lost]
    if state.world.phase == "forming" and missing:
        return wait_for_nodes(state, now, missing)
    if state.world.phase == "forming" and state.world.held_s:
        return release_world(state, now)
    why = f"{state.world.phase} the world took too long"
    if state.world.phase == "starting":
        withheld = ActionWithheld(
            at_s=now,
            generation=state.world.generation,
            cause=why,
            culprit="the job",
            reason=why,
            would="restarted the world",
            step=state.step,
        )
        held = membership_of(state).withhold(state.world, withheld)
        if held is not None:  # Its ranks may train, untold of.
            state.world.deadline_s = None
            return held
    return _fail(state, now, "the job", why, code=1)


def _take_stacks(state: JobState, now: float, event: StacksTaken) -> list[AnyAction]:
    """Act upon what has waited for the last of them."""
    held = note_stacks(state, event)
    return [] if held is None else _act_upon(state, now, held)


# --- what follows from which event ---------------------------------------------------------------

Handler = Callable[[JobState, float, Any], list[AnyAction]]
_ALIKE: dict[type[AnyEvent], Handler] = {
    ControllerStarted: _issue_again,
    StoreReady: note_store,
    GenerationStopped: note_stopped,
    OwnChecked: note_checked,
    RanksStarted: note_started,
    CommandReceived: receive_command,
    NodeAsked: receive_command,
    FaultInjected: note_fault,
    JobEnded: note_end,
    NodeCordoned: note_cordon,
    NodeRestored: note_cordon,
    InvitationMade: note_invitation,
    InvitationUsed: note_invitation,
    InvitationRevoked: note_invitation,
    PreemptionNoticed: preemption.take_notice,
    PreemptionWithdrawn: preemption.take_notice,
    CheckpointSaved: note_checkpoint,
    CheckpointFailed: note_checkpoint,
}
_OF_ONE_WORLD: dict[type[AnyEvent], Handler] = {
    NodeRegistered: _register,
    RankExited: _note_exit,
    KeeperLost: _lose_keeper,
    NodeLost: _lose_node,
    VerdictReached: _judge,
    VerdictWithdrawn: withdraw,
    StacksTaken: _take_stacks,
    RankJoined: note_progress,
    CheckpointRestored: note_progress,
    ProgressNoted: note_progress,
    GenerationStepping: note_progress,
    BoundaryAnswered: note_answer,
    BoundaryReached: reach,
    KeysDeclared: note_keys,
    TimerFired: _fire,
    ProbeEnded: take_probe,
    DeviceReported: note_device,
    WorldBroken: note_world,
    WorldReformed: note_world,
    MemberReady: note_world,
}
HANDLERS = {"one world": _ALIKE | _OF_ONE_WORLD, "replica groups": _ALIKE | OF_GROUPS}
"""What reacts to an event, by the kind of a job's worlds; from any other event nothing follows."""
