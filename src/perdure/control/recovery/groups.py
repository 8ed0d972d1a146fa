"""A replica group's life: started, lost, replaced by a spare, parked at an operator's word."""

from msgspec import structs

from perdure.control.job import JobState
from perdure.control.lighthouse.holds import hold_groups
from perdure.control.observing import is_observed, note_withheld
from perdure.control.recovery.formation import FORM_TIMEOUT_S, assign, end_job
from perdure.control.world import WorldState
from perdure.model.failures import Cause, Rung
from perdure.model.orders import AnyAction, EvictReplica, FenceAbort
from perdure.policy import Failure, decide_recovery


def start_group(state: JobState, now: float, group: WorldState, reason: str) -> list[AnyAction]:
    """Begin a group's next generation: end what is older on its node, and serve a new store."""
    state.generation += 1
    state.worlds[group.number] = new = group.begin(state.generation, now + FORM_TIMEOUT_S)
    return [assign(state, new, "store", reason)]


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
        step=state.step if group.trained else -1,
        mark=state.mark if group.trained else 0,
        error=error,
        code=code,
        signal=signal,
    )
    if is_observed(state):
        return _note_loss(state, now, group, failure, found, silent=silent)
    actions = let_go(state, group, f"{failure.culprit}: {cause}")
    done = any(other.phase == "done" for other in state.worlds.values())
    decision = decide_recovery(failure, tuple(group.failures), state.the_spec().restart)
    rung: Rung = "give up" if done else decision.rung
    state.book.decide(_name_group(found, failure), rung, group.generation, group=group.number)
    state.note_failure(group, failure)
    group.absent, group.store = group.absent or cause, None
    if group.leaving or group.number in state.barred:
        return [*actions, *park_group(state, now, group, group.leaving or "it is cordoned")]
    actions += promote(state, decision.reason)
    actions += [] if done else _note_outage(state, now, group)
    if done or decision.rung == "give up":
        why = "others have finished" if done else decision.reason
        group.enter("it is given up")
        group.deadline_s, group.active = None, False
        actions += [assign(state, group, "stop", why), hold_groups(state, why)]
        return [*actions, *finish_if_over(state, now)]
    return [*actions, *start_group(state, now, group, decision.reason)]


def _name_group(found: Cause | None, failure: Failure) -> Cause:
    """Return the cause of a group's failure: what is known of it, or what was decided upon."""
    if found is not None:
        return structs.replace(found, culprit=failure.culprit)
    return Cause(
        cause=failure.cause, culprit=failure.culprit, at_step=failure.step,
        failure_s=failure.at_s, detected_s=failure.at_s, reason="the others train on",
    )  # fmt: skip


def _note_loss(
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
    decision = decide_recovery(failure, tuple(group.failures), state.the_spec().restart)
    would = "restarted the group" if decision.rung == "restart" else "given the group up"
    actions = note_withheld(
        state,
        group,
        now,
        cause=failure.cause,
        culprit=failure.culprit,
        reason=decision.reason,
        would=would,
        first_seen_s=now,
    )
    if silent and group.phase == "forming":
        return actions  # It still has until its deadline.
    group.deadline_s = None
    if silent:
        return actions
    state.book.decide(_name_group(found, failure), "give up", group.generation, group=group.number)
    state.note_failure(group, failure)
    group.enter("it is given up")
    group.active, group.absent = False, failure.cause
    actions.append(assign(state, group, "stop", f"{failure.culprit}: {failure.cause}"))
    return [*actions, *finish_if_over(state, now)]


def withhold_eviction(state: JobState, now: float, group: WorldState) -> list[AnyAction]:
    """Return the record that a group which stands still is left to torchft's own lighthouse."""
    return note_withheld(
        state,
        group,
        now,
        cause=group.absent,
        culprit=f"group {group.number}",
        reason="perdure's own lighthouse would form the next quorum without it",
        would="left the group out of the quorum",
        first_seen_s=now,
    )


def _note_outage(state: JobState, now: float, group: WorldState) -> list[AnyAction]:
    """Count it where `group` was the last that is known to have the state.

    Where there is a checkpoint, who waits to heal (a spare, too) is started again and goes on from
    it: it has loaded none, or an older one. Should it have healed this very moment, the steps
    since the checkpoint are lost.
    """
    others = [g for _, g in sorted(state.worlds.items()) if g is not group and g.alive]
    if not group.trained or any(g.trained and not g.absent for g in others):
        return []
    state.quorum.outages += 1
    if state.saved_step <= 0:
        return []
    started = [g for g in others if g.has_ranks]
    why = "nobody is left to heal from: it goes on from the newest checkpoint"
    return [a for other in started for a in start_group(state, now, other, why)]


def park_group(
    state: JobState, now: float, group: WorldState, reason: str, *, grace_s: float = 0.0
) -> list[AnyAction]:
    """End what a group runs, and start it no more until it is restored."""
    actions = let_go(state, group, reason) if group.alive else []
    group.enter("it is left, or lost while cordoned")
    group.deadline_s, group.active = None, False
    group.leaving, group.absent, group.store, group.stands = "", reason, None, None
    actions += promote(state, reason)
    stop = assign(state, group, "stop", reason, grace_s=grace_s)
    return [*actions, stop, hold_groups(state, reason), *finish_if_over(state, now)]


def let_go(state: JobState, group: WorldState, reason: str) -> list[AnyAction]:
    """Have the lighthouse forget it, and those who hang on it in a collective go on."""
    name, quorum = group.replica, state.quorum
    evict = EvictReplica(replica=name, generation=group.generation, reason=reason)
    if name not in quorum.members:
        return [evict]
    others = tuple(
        g.number for g in state.worlds.values() if g is not group and g.replica in quorum.members
    )
    fence = FenceAbort(quorum_id=quorum.quorum_id, groups=others, reason=reason)
    return [evict, fence] if others else [evict]


def find_spares(state: JobState) -> list[WorldState]:
    """Return the spare groups that stand ready."""
    groups = [g for _, g in sorted(state.worlds.items()) if g.number not in state.barred]
    ready = [g for g in groups if not g.active and not g.leaving and g.phase == "running"]
    return [g for g in ready if g.replica and not g.absent]


def promote(state: JobState, reason: str) -> list[AnyAction]:
    """Release a spare that stands ready in the place of each active group that is away."""
    spares = find_spares(state)
    away = [g for _, g in sorted(state.worlds.items()) if g.active and g.alive and g.absent]
    away += [g for _, g in sorted(state.worlds.items()) if g.phase == "failed" and g.active]
    wanted = state.the_spec().torchft.replicas
    missing = wanted - sum(g.active and g.alive for g in state.worlds.values())
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


def finish_if_over(state: JobState, now: float) -> list[AnyAction]:
    """End the job once no group trains any more that has trained."""
    groups = state.worlds.values()
    done = sum(g.phase == "done" for g in groups)
    if any(g.alive and g.trained and g.active for g in groups):
        return []
    if done:
        return end_job(state, now, "done", 0, f"{done} replica groups ended with exit code 0")
    least = max(1, state.the_spec().torchft.min_replicas)
    if sum(g.alive for g in groups) >= least:
        return []
    last = state.failures[-1] if state.failures else None
    why = f"{last.culprit}: {last.cause}" if last else "no replica group is left"
    return end_job(state, now, "failed", (last.code if last else 0) or 1, why)
