"""Replica groups that others start: they come to the lighthouse, and leave it, as they like.

What it tells of them is all that is known: nothing is ordered to start, and of what has gone
nobody can say whether it failed or had finished. A group's world is therefore what runs, from its
first request on; while nothing is heard of it, it is away, until it or its next life comes back.
"""

from perdure.control.job import JobState
from perdure.control.membership.quorum import hold_groups
from perdure.control.recovery.placement import bar
from perdure.control.world import WorldState
from perdure.model.bus.lighthouse import ENDED_KEPT
from perdure.model.events import ReplicaSeen
from perdure.model.orders import AnyAction, EvictReplica

HELD_MAX = 256
"""Groups that are held, or whose next life is, until an operator restores them."""


def hold_known(state: JobState) -> list[AnyAction]:
    """Hold the groups that the job begins with held, though none of them has come."""
    actions: list[AnyAction] = []
    for held in state.the_spec().torchft.held:
        world = WorldState(held.number, placement=(held.number,))
        world.replica.name, world.replica.active = f"{held.name}:", False
        world.replica.absent, world.replica.absent_s = "it has not come yet", state.submitted_s
        state.worlds[held.number] = world
        actions += bar(state, held.number, held.who, held.reason)
    return [*actions, hold_groups(state, "held since the serve before")] if actions else []


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
    _forget_ended(state)
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


def refuse_holds(state: JobState, groups: list[int]) -> str:
    """Return why no more groups can be held; empty where these can: each is remembered for ever."""
    if not state.the_spec().served or len({*state.barred, *groups}) <= HELD_MAX:
        return ""
    return f"{len(state.barred)} groups are held already: restore those that do not come back"


def _forget_ended(state: JobState) -> None:
    """Forget the groups that ended before the last few did, and that nothing was ordered about."""
    moved = {number for move in state.moves.values() for number in move.nodes}
    kept = moved | state.barred
    gone = [w for n, w in state.worlds.items() if w.replica.absent and n not in kept]
    gone.sort(key=lambda world: (world.replica.absent_s, world.number))
    for world in gone[: max(0, len(gone) - ENDED_KEPT)]:
        del state.worlds[world.number]
        state.stopped.pop(world.number, None)


def _begin_life(state: JobState, known: WorldState | None, event: ReplicaSeen) -> WorldState:
    """Return the group's world, which runs already."""
    state.generation = max(state.generation, event.life)
    before = known or WorldState(event.group, placement=(event.group,))
    new = before.begin(event.life, 0.0)
    new.enter("its store is served, and nothing older lives")
    new.enter("all its nodes have started its ranks")
    new.deadline_s, new.started = None, {event.group}
    spared = any(event.replica == held.trains for held in state.the_spec().torchft.held)
    new.replica.name, new.replica.active = event.replica, spared or event.group not in state.barred
    return new
