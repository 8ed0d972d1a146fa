"""The controller's door: one event in, a list of actions out, each with its reason.

It does not look at heartbeats (the detector does) and it starts nothing (its shell does). It is
replayed from the journal after a crash; `ControllerStarted` then issues again what is open.
"""

from typing import assert_never

from perdure.control import preemption
from perdure.control.agreement.boundary import (
    answer_boundary,
    drop_boundary,
    note_pace,
    retry_boundary,
    send_boundary,
    send_boundary_again,
)
from perdure.control.agreement.changes import changes_again, note_change, note_high
from perdure.control.agreement.pauses import note_pause, pauses_again
from perdure.control.job import JobState, OpenNotice
from perdure.control.joining import note_invitation
from perdure.control.membership import membership_of
from perdure.control.membership.elastic import (
    free_slot,
    is_elastic,
    is_outside,
    leave_outside,
    note_world,
)
from perdure.control.observing import is_observed, note_withheld, withhold_verdict
from perdure.control.progress import (
    after_boundary,
    note_checkpoint,
    note_keys,
    note_progress,
    plan_checkpoint,
    reach,
    save_if_due,
    settle_members,
)
from perdure.control.recovery.culprits import correct_culprit
from perdure.control.recovery.formation import (
    REGISTER_TIMEOUT_S,
    advance_end,
    assign_again,
    close_job,
    end_job,
    form_world,
    has_enough,
    note_end,
    note_started,
    note_stopped,
    note_store,
    note_submission,
    wait_for_nodes,
)
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
    hold_action,
    note_stacks,
    weigh_verdict,
    withdraw,
)
from perdure.control.replicas import advance_groups, find_group_deadline, react_to_groups
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
from perdure.model.actions import AnyAction, AssignNodes
from perdure.model.events import (
    ActionWithheld,
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    CollectivesInterrupted,
    CommandReceived,
    ControllerLost,
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
    JobPaused,
    JobResumed,
    JobSubmitted,
    KeeperLost,
    KeysDeclared,
    LinksNoted,
    MachineReported,
    MemberReady,
    MessagesSetAside,
    MetricsLogged,
    NodeAsked,
    NodeCordoned,
    NodeDraining,
    NodeLost,
    NodeRegistered,
    NodeRestored,
    OperatorNoted,
    PreemptionNoticed,
    PreemptionWithdrawn,
    ProbeEnded,
    ProbeJudged,
    ProgressNoted,
    QuorumFormed,
    QuorumIdsReserved,
    RankExited,
    RankJoined,
    RanksStarted,
    ReplicaLate,
    ReplicaSeen,
    ReplicaWaiting,
    RoomNoted,
    SettingsChanged,
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
from perdure.model.orders import InterruptCollectives
from perdure.model.verdicts import Verdict
from perdure.policy import Failure, decide_recovery

_CHANGES = (NodeRegistered, NodeRestored, CheckpointSaved, ProgressNoted)
"""Events that may change what is worth doing about a slowness that stands."""

_NOTHING_FOLLOWS = (
    MetricsLogged | ControllerLost | NodeDraining | LinksNoted | RoomNoted | MessagesSetAside
    | ProbeJudged | CollectivesInterrupted | MachineReported | ActionWithheld | FailureDecided
    | QuorumIdsReserved | ReplicaWaiting | ReplicaLate | OperatorNoted | JobSubmitted
)  # fmt: skip
"""Events that are told to others: the detector, the folds, whoever reads."""


class Controller:
    """The state machine of one job."""

    def __init__(self) -> None:
        """Know nothing; the journal's first event brings the job."""
        self.state = JobState()

    def next_deadline(self) -> float | None:
        """Return the job time at which `TimerFired` is wanted."""
        state = self.state
        if state.of_replicas:
            return find_group_deadline(state)
        world = state.world
        times = [state.deadline_s, world.deadline_s, world.checkpoint_due_s, stop_deadline(state)]
        times += [
            moves_deadline(state),
            preemption.notices_deadline(state),
            membership_of(state).deadline(state),
        ]
        if state.boundary is not None:
            times[2] = state.boundary.deadline_s
        if state.world.stacks is not None and state.world.stacks.held is not None:
            times.append(state.world.stacks.due_s)
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
        state, before = self.state, self._members()
        actions = self._react(now, event)
        if state.of_replicas:
            return actions + advance_groups(state, now)
        return actions + self._advance(now, event, before)

    def _advance(self, now: float, event: AnyEvent, before: tuple[int, ...]) -> list[AnyAction]:
        """Do what has become possible, after any event."""
        state, actions = self.state, preemption.advance_notices(self.state, now)
        if isinstance(event, _CHANGES) and state.world.standing:
            actions += self._weigh_again(now)
        while True:  # An eviction takes members away as well.
            actions += settle_members(state, now, before) if before else []
            before = self._members()
            actions += advance_moves(state, now) if state.moves else []
            if self._members() == before:
                return actions

    def facts(self, now: float) -> list[AnyEvent]:
        """Return what has been decided about failures and is not in the journal yet."""
        return list(self.state.book.pending(now))

    def _members(self) -> tuple[int, ...]:
        state = self.state
        return () if state.of_replicas or not state.world.elastic.members else state.asked

    def _react(self, now: float, event: AnyEvent) -> list[AnyAction]:
        if isinstance(event, _NOTHING_FOLLOWS):
            return []
        match event:
            case ControllerStarted():
                self.state.book.begin(event)
                return self._issue_again(now, f"controller {event.incarnation} took over")
            case StoreReady():
                return note_store(self.state, now, event)
            case GenerationStopped():
                return note_stopped(self.state, now, event)
            case RanksStarted():
                return note_started(self.state, now, event)
            case CommandReceived() | NodeAsked():
                return receive_command(self.state, now, event)
            case FaultInjected():
                return note_fault(self.state, event)
            case JobEnded():
                return note_end(self.state)
            case NodeCordoned() | NodeRestored():
                return note_cordon(self.state, event)
            case InvitationMade() | InvitationUsed() | InvitationRevoked():
                return note_invitation(self.state, event)
            case SettingsChanged():
                return note_change(self.state, event)
            case JobPaused() | JobResumed():
                return note_pause(self.state, event)
            case _ if self.state.of_replicas:
                return react_to_groups(self.state, now, event)
            case NodeRegistered():
                return self._register(now, event)
            case RankExited():
                return self._note_exit(now, event)
            case KeeperLost() | NodeLost():
                return self._lose_node(now, event)
            case VerdictReached():
                return self._judge(now, event.verdict)
            case StacksTaken():
                held = note_stacks(self.state, event)
                return [] if held is None else self._act_upon(now, held)
            case VerdictWithdrawn():
                return withdraw(self.state, event)
            case RankJoined() | CheckpointRestored() | ProgressNoted() | GenerationStepping():
                return note_progress(self.state, now, event)
            case CheckpointSaved() | CheckpointFailed():
                return note_checkpoint(self.state, now, event)
            case BoundaryAnswered():
                return after_boundary(self.state, now, answer_boundary(self.state, now, event))
            case BoundaryReached():
                return reach(self.state, now, event)
            case TimerFired():
                return self._fire(now, event)
            case PreemptionNoticed() | PreemptionWithdrawn():
                return preemption.take_notice(self.state, now, event)
            case ProbeEnded():
                return take_probe(self.state, now, event)
            case DeviceReported():
                return note_device(self.state, now, event)
            case KeysDeclared():
                return note_keys(self.state, now, event)
            case WorldBroken() | WorldReformed() | MemberReady():
                return note_world(self.state, now, event)
            case QuorumFormed() | ReplicaSeen():
                return []
            case _:
                assert_never(event)

    def _issue_again(self, now: float, reason: str) -> list[AnyAction]:
        """Return all that may have been lost with the last controller, once more.

        Everything here is a level, so that whoever has heard it before does nothing.
        """
        state = self.state
        if state.phase == "ended":
            return close_job(state)
        actions = assign_again(state, reason)
        if not actions and not state.of_replicas:
            return actions
        actions += send_boundary_again(state, reason)
        if not state.of_replicas:
            actions += ask_stacks_again(state, reason)
        actions += [*cordon_again(state), *moves_again(state)]
        actions += [*changes_again(state), *pauses_again(state, now), *probe_again(state)]
        actions += membership_of(state).again(state, reason)
        return actions + inject_again(state, reason)

    # --- nodes and ranks ---------------------------------------------------------------------

    def _register(self, now: float, event: NodeRegistered) -> list[AnyAction]:
        state = self.state
        taken, freed = (
            find_notice(state, now, event.node),
            preemption.note_return(state, now, event),
        )
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
            return self._fail(now, f"node {event.node}", why, code=1, taken=taken, found=found)
        actions = [*freed, *returned.actions]
        if state.assignment is None:
            return actions
        reason = f"node {event.node} registered"
        again = AssignNodes(nodes=(event.node,), assignment=state.assignment, reason=reason)
        actions.append(again)
        if state.boundary is not None:
            actions += send_boundary(state, reason)
        return actions

    def _note_exit(self, now: float, event: RankExited) -> list[AnyAction]:
        state, record = self.state, event.record
        note_high(state, event.account.step)
        note_left(state, event)
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
        state.mark = max(state.mark, event.account.step)
        if is_outside(state, record.rank):
            return leave_outside(state, now, record.rank)
        if record.failed and not record.asked:
            culprit, cause = f"rank {record.rank}", record.cause
            left = [r for r, e in sorted(state.world.exits.items()) if not e.failed and not e.asked]
            if left and record.lost_peer:
                culprit, cause = f"rank {left[0]}", f"left early; then {culprit}: {cause}"
            taken = preemption.find_taken(state, event.node, record)
            blamed, without, why = blame_device(state, record)
            return blamed + self._fail(
                now,
                culprit,
                cause,
                error=record.error,
                code=record.code or 128 + record.signal,
                signal=record.signal,
                step=event.account.step,
                exit_s=record.at_s,
                without=without,
                why=why,
                taken=taken,
                found=found,
            )
        left_well = membership_of(state).leave(state, now, event)
        if left_well.broken:
            return self._fail(now, f"rank {record.rank}", left_well.broken)
        if not membership_of(state).has_ended(state):
            return left_well.actions
        return finish_job(state, now)

    def _lose_node(self, now: float, event: KeeperLost | NodeLost) -> list[AnyAction]:
        state = self.state
        taken = find_notice(state, now, event.node)
        if isinstance(event, KeeperLost):
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
            return self._fail(
                now, f"node {event.node}", lost.broken, code=1, taken=taken, found=found
            )
        seen_s = event.last_seen_s or event.at_s
        found = explain_node(event.node, "NodeLost", -1, seen_s, now, event.reason)
        late = state.phase == "ending" or state.world.phase == "forming"
        if event.node in state.book.nodes and late:
            state.book.correct(found, state.world.generation - (state.world.phase == "forming"))
        state.lost.setdefault(event.node, event.at_s)
        if state.phase == "ending":
            return advance_end(state, now)
        why = f"node lost: {event.reason}"
        if is_observed(state):  # It may train on: none of its ranks is counted as lost.
            if event.node not in state.world.placement or not state.world.has_ranks:
                return []
            would, node = "restarted the world", f"node {event.node}"
            return note_withheld(
                state,
                state.world,
                now,
                cause="NodeLost",
                culprit=node,
                reason=why,
                would=would,
                first_seen_s=event.at_s,
            )
        lost = membership_of(state).lose(state, event.node, why)
        if not lost.broken:
            return lost.actions
        if event.node not in state.world.placement and not is_elastic(state):
            return []
        if taken is None:
            state.blames[event.node] = state.blames.get(event.node, 0) + 1
        if state.world.phase == "forming" and state.spares:
            return form_world(state, now, f"node {event.node} was lost meanwhile")
        if not state.world.has_ranks:
            return []
        return self._fail(now, f"node {event.node}", why, code=1, taken=taken, found=found)

    def _judge(self, now: float, verdict: Verdict) -> list[AnyAction]:
        """Take stacks at a verdict's first word; act once it is actionable."""
        state = self.state
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
            state.world.standing[f"{verdict.kind} {verdict.culprit}"] = verdict
        reaction = weigh_verdict(state, verdict, now)
        if reaction.rung == "none":
            return withhold_verdict(state, now, verdict, reaction.reason, ground=reaction.ground)
        if verdict.kind in STACKS_FOR:
            asked = [] if state.world.stacks is not None else ask_stacks(state, now, verdict)
            if hold_action(state, now, verdict):
                return asked
        return self._act_upon(now, verdict)

    def _weigh_again(self, now: float) -> list[AnyAction]:
        """Slowness stands: a spare node may have come, its cost grown, or a checkpoint been saved.

        An agreement or a move that is under way is waited for.
        """
        state = self.state
        if state.world.phase != "running" or state.boundary is not None or state.moves:
            return []
        actions: list[AnyAction] = []
        for verdict in list(state.world.standing.values()):
            reaction = weigh_verdict(state, verdict, now)
            if reaction.rung != "none":
                return [*actions, *self._act_upon(now, verdict)]
            actions += withhold_verdict(
                state, now, verdict, reaction.reason, ground=reaction.ground
            )
        return actions

    def _act_upon(self, now: float, verdict: Verdict) -> list[AnyAction]:
        """Do what the policy makes of `verdict`: the next world, or the end."""
        state = self.state
        state.world.standing.pop(f"{verdict.kind} {verdict.culprit}", None)
        if verdict.kind in STACKS_FOR:
            state.world.stacks = None  # Acted upon once; the next one's are taken anew.
        reaction = weigh_verdict(state, verdict, now)
        if is_observed(state):
            would = "stopped the job" if reaction.rung == "stop" else "restarted the world"
            return withhold_verdict(state, now, verdict, reaction.reason, would=would)
        if reaction.rung == "stop":
            found, world = explain_verdict(verdict), state.world
            state.book.decide(found, "give up", world.generation, world.placement)
            return end_job(state, now, "failed", 1, reaction.reason)
        actions, node = blame(state, now, verdict, reaction)
        cause = f"{verdict.kind} ({verdict.activity})"
        ended = membership_of(state).end_hung(state, verdict)
        if ended:
            if verdict.culprit.rank in state.world.elastic.members:
                found, epoch = explain_verdict(verdict), state.world.elastic.epoch + 1
                state.book.decide(
                    found, "reform", state.world.generation, state.world.placement, epoch=epoch
                )
            return [*actions, *ended]
        freed = free_slot(state, verdict)
        hangs = verdict.kind in STACKS_FOR and not freed
        interrupt_s = state.the_spec().policy.interrupt_s if hangs else 0.0
        if interrupt_s:
            waiting = tuple(r for r in state.asked if r not in state.world.exits)
            actions.append(
                InterruptCollectives(generation=state.world.generation, ranks=waiting, reason=cause)
            )
        return actions + self._fail(
            now,
            str(verdict.culprit),
            cause,
            code=1,
            step=verdict.step,
            without=node,
            why=reaction.reason,
            grace_s=interrupt_s,
            freed=freed,
            found=explain_verdict(verdict),
        )

    def _fail(
        self,
        now: float,
        culprit: str,
        cause: str,
        *,
        error: str = "",
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
        state = self.state
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
            mark=state.mark,
            error=error,
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
        decision = decide_recovery(failure, tuple(state.failures), state.the_spec().restart)
        state.note_failure(state.world, failure)
        state.world.first_exit_s = exit_s
        reason = f"{decision.reason}; {why}" if why else decision.reason
        if is_observed(state):
            state.book.decide(found, "give up", world, nodes)
            return self._end_observed(now, failure, decision.rung, reason, code or 1, exit_s)
        if decision.rung != "give up":
            in_place = membership_of(state).stand_in(state, now, reason, freed=freed)
            state.world.failed_s = (
                state.world.failed_s if freed else now
            )  # Nobody stands still for a slot.
            if not in_place.broken:
                state.book.decide(found, "reform", world, nodes, epoch=state.world.elastic.epoch)
                return in_place.actions
        state.book.decide(found, decision.rung, world, nodes)
        actions = drop_boundary(state, decision.reason)
        if decision.rung == "give up":
            return [*actions, *end_job(state, now, "failed", code or 1, decision.reason)]
        return [*actions, *form_world(state, now, reason, without=without, grace_s=grace_s)]

    def _end_observed(
        self, now: float, failure: Failure, rung: str, reason: str, code: int, exit_s: float | None
    ) -> list[AnyAction]:
        """A world that is only observed cannot go on: it ends, as it would without perdure."""
        noted = note_withheld(
            self.state,
            self.state.world,
            now,
            cause=failure.cause if exit_s is None else "Crash",
            culprit=failure.culprit,
            reason=reason,
            would="restarted the world" if rung == "restart" else "ended the job as well",
            step=failure.step,
            first_seen_s=exit_s or 0.0,
        )
        why = f"{failure.culprit}: {failure.cause}; observed only: nothing is restarted"
        return [*noted, *end_job(self.state, now, "failed", code, why)]

    # --- time --------------------------------------------------------------------------------

    def _fire(self, now: float, event: TimerFired) -> list[AnyAction]:
        """Do what is due; the machine's own deadline and nothing else brings it here."""
        state = self.state
        note_pace(state, event.pace)
        if state.phase == "ending":
            return advance_end(state, now)
        due_s = state.deadline_s if state.phase == "pending" else state.world.deadline_s
        if due_s is not None and now >= due_s:
            return self._phase_overdue(now)
        due_elastic = membership_of(state).fire(state, now, event.busy)
        if due_elastic.broken:
            return self._fail(now, "the job", due_elastic.broken, code=1)
        if due_elastic.actions:
            return due_elastic.actions
        stacks = state.world.stacks
        if stacks is not None and stacks.held is not None and now >= stacks.due_s:
            return self._act_upon(now, stacks.held)
        if state.probe is not None and state.probe.due_s is not None and now >= state.probe.due_s:
            return probe_overdue(state, now)
        overdue_s = stop_deadline(state)
        if overdue_s is not None and now >= overdue_s:
            return give_up_stop(state, now)
        boundary = state.boundary
        if boundary is not None:
            return self._boundary_overdue(now) if now >= boundary.deadline_s else []
        return save_if_due(state, now)

    def _phase_overdue(self, now: float) -> list[AnyAction]:
        state = self.state
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
        why = f"{state.world.phase} the world took too long"
        if state.world.phase == "starting" and is_observed(
            state
        ):  # Its ranks may train, untold of.
            state.world.deadline_s = None
            return note_withheld(
                state,
                state.world,
                now,
                cause=why,
                culprit="the job",
                reason=why,
                would="restarted the world",
            )
        return self._fail(now, "the job", why, code=1)

    def _boundary_overdue(self, now: float) -> list[AnyAction]:
        state, boundary = self.state, self.state.boundary
        assert boundary is not None
        if boundary.move == "prepare":
            silent = sorted(set(boundary.ranks) - boundary.yes)
            actions = retry_boundary(state, now, f"ranks {silent} did not answer")
            return after_boundary(self.state, now, actions)
        state.boundary = None
        plan_checkpoint(self.state, now)
        return start_waiting_command(state, now)
