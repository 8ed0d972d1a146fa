"""Replica groups that others start: they come to the lighthouse, and leave it, as they like.

What it tells of them is all that is known: nothing is ordered to start, and of what has gone
nobody can say whether it failed or had finished. A group's world is therefore what runs, from its
first request on; while nothing is heard of it, it is away, until it or its next life comes back.
"""

from perdure.control.job import JobState
from perdure.control.membership.quorum import hold_groups
from perdure.control.world import WorldState
from perdure.model.events import ReplicaSeen
from perdure.model.orders import AnyAction, EvictReplica


def note_elsewhere(state: JobState, now: float, event: ReplicaSeen) -> list[AnyAction]:
    """Take what the lighthouse tells of a group: it has come, is held, or is not waited for."""
    group = state.worlds.get(event.group)
    if state.over or event.group < 0:
        return []
    if event.gone or event.held:
        if group is None or group.replica.name != event.replica:
            return []
        if event.held:
            pause = state.steering.pause
            if pause is None or event.hold >= pause.hold:
                group.replica.stands = event.step
            return []
        state.step = max(state.step, event.step)
        group.replica.absent, group.replica.absent_s = event.reason, event.at_s
        if group.phase == "parked":  # It was ordered to end.
            group.replica.unended = "" if event.silent else event.reason
            state.stopped[group.number] = group.generation
        return []
    if group is not None and event.life <= group.generation:
        group.replica.absent = "" if group.replica.name == event.replica else group.replica.absent
        return []
    state.worlds[event.group] = new = _begin_life(state, group, event)
    return [hold_groups(state, f"{event.replica} is group {new.number}, started elsewhere")]


def park_elsewhere(state: JobState, group: WorldState, reason: str) -> list[AnyAction]:
    """End a group that others have started; its next life is held until it is restored."""
    group.enter("it is left, or lost while cordoned")
    group.replica.active, group.replica.leaving, group.replica.stands = False, "", None
    evict = EvictReplica(
        replica=group.replica.name,
        generation=group.generation,
        group=group.number,
        kill=True,
        reason=reason,
    )
    return [evict, hold_groups(state, reason)]


def admit_elsewhere(state: JobState, group: WorldState, reason: str) -> list[AnyAction]:
    """Let a group train again that others have started, or its next life."""
    group.replica.active, group.replica.leaving = True, ""
    return [hold_groups(state, reason)]


def _begin_life(state: JobState, known: WorldState | None, event: ReplicaSeen) -> WorldState:
    """Return the group's world, which runs already."""
    state.generation = max(state.generation, event.life)
    before = known or WorldState(event.group, placement=(event.group,))
    new = before.begin(event.life, 0.0)
    new.enter("its store is served, and nothing older lives")
    new.enter("all its nodes have started its ranks")
    new.deadline_s, new.started = None, {event.group}
    new.replica.name, new.replica.active = event.replica, event.group not in state.barred
    return new
