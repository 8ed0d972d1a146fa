"""What the lighthouse is told of the groups: a level, numbered and repeated."""

from perdure.control.job import JobState
from perdure.control.lighthouse.outputs import make_quorum_config
from perdure.model.orders import HoldReplicas, ReplicaGroup


def hold_groups(state: JobState, reason: str) -> HoldReplicas:
    """Return the newest word: which store is whose, and who gets no quorum for now.

    Its patience, of which `perdure set` may have changed a part, goes with it.
    """
    state.quorum.holds += 1
    paused = state.steering.pause is not None
    groups = []
    for number, group in sorted(state.worlds.items()):
        if group.store is None or not group.alive:
            continue
        held = not group.active or bool(group.leaving) or paused
        store = f"{group.store.host}:{group.store.port}"
        ready = not group.active and not group.leaving and number not in state.barred
        spare = ready and not paused
        groups.append(ReplicaGroup(number, group.generation, store, held, spare))
    held_names = tuple(
        g.replica
        for _, g in sorted(state.worlds.items())
        if g.replica and (not g.active or g.leaving or paused)
    )
    patience = make_quorum_config(state.the_spec())
    return HoldReplicas(
        replicas=held_names,
        number=state.quorum.holds,
        groups=tuple(groups),
        startup_s=patience.startup_s,
        alone_s=patience.alone_s,
        reason=reason,
    )
