"""Re-formation in place: a lost rank leaves, the others form the next epoch of the same world.

No process is ended and no generation begins. The controller says who is in; how far each member
is, and what is redone, the members find out among themselves (`plan.commit`). Each rung of the
ladder is bounded: a world that broke without a loss is formed again a few times, a re-formation
that does not end in time becomes a restart.
"""

from msgspec import structs

from perdure.control.state import ControllerState
from perdure.model.actions import AnyAction, AssignNodes, InjectFault, ReformWorld
from perdure.model.events import RankExited, RankJoined, WorldBroken, WorldReformed
from perdure.model.verdicts import Verdict

REFORM_TIMEOUT_S = 30.0
"""From the first order until every member has formed the world, a running micro-batch included."""
RETRY_S = 0.3
"""How long a rank's death may take to be known, before a broken world is formed again as it was."""
RETRIES_MAX = 3


def elastic_deadline(state: ControllerState) -> float | None:
    """Return when something of this is due."""
    if state.phase != "running":
        return None
    times = [t for t in (state.elastic.deadline_s, state.elastic.retry_s) if t is not None]
    return min(times, default=None)


def is_elastic(state: ControllerState) -> bool:
    """Return whether this generation can be formed again in place."""
    elastic = state.elastic
    return bool(elastic.members) and not elastic.given_up and state.phase == "running"


def note_ready(state: ControllerState, now: float, event: RankJoined) -> list[AnyAction]:
    """A rank is ready to be a member: of the first world, or of one that exists already."""
    elastic, world = state.elastic, state.world
    elastic.ready.add(event.rank)
    if not elastic.members and elastic.ready >= set(world) and _store_is_apart(state):
        elastic.members = world
    return _admit(state, now)


def note_world(
    state: ControllerState, now: float, event: WorldBroken | WorldReformed
) -> list[AnyAction]:
    """A member has left its world, or has come into the newest one."""
    elastic = state.elastic
    if event.generation != state.generation:
        return []
    if isinstance(event, WorldBroken):
        known = elastic.order is not None or event.epoch < elastic.epoch
        if is_elastic(state) and not known and event.rank in elastic.members:
            elastic.retry_s = elastic.retry_s or now + RETRY_S
        return []
    if event.finished:
        elastic.finished.add(event.rank)
        order = elastic.order
        waited = order is not None and event.rank in order.ranks
        if is_elastic(state) and waited and event.rank not in elastic.answered:
            return [_order(state, now, f"rank {event.rank} has finished")]
        return []
    if event.epoch == elastic.epoch:
        elastic.answered.add(event.rank)
        if event.step > elastic.step >= 0:
            elastic.retries = 0
        elastic.step = max(elastic.step, event.step)
        if elastic.answered >= set(elastic.members):
            elastic.order = elastic.deadline_s = None
            state.failed_s = None
            return _admit(state, now)
    return []


def reform_world(state: ControllerState, now: float, reason: str) -> list[AnyAction] | None:
    """Return the order that leaves out who is lost; None where that cannot be done in place."""
    elastic = state.elastic
    if not is_elastic(state):
        return None
    left = _find_living(state)
    if left == elastic.members:
        return None
    if not left:
        elastic.given_up = "no member is left"
        return None
    elastic.reforms += 1
    lost = [rank for rank in elastic.members if rank not in left]
    return [_order(state, now, reason), *replace_members(state, lost, reason)]


def replace_members(state: ControllerState, lost: list[int], reason: str) -> list[AnyAction]:
    """Return the order that starts a new member in the slot of each lost one.

    The others do not wait for it: it joins between two micro-batches, once it is ready. Whoever
    takes a slot over has the next number that is the slot's modulo the world's size. A slot whose
    node is gone stays empty until its node is back; one in which a new member has ended before
    it could join, for good.
    """
    elastic, spec = state.elastic, state.the_spec()
    if not spec.restart.replace or state.assignment is None:
        return []
    new = []
    for rank in lost:
        slot, node = spec.slot_of(rank), state.placement[spec.node_of(rank)]
        taken = any(m > rank and spec.slot_of(m) == slot for m in elastic.extra)
        away = node in state.lost or node in state.cordoned or rank in elastic.lost
        if not (taken or away):
            new.append(rank + spec.world_size)
    if not new:
        return []
    elastic.extra += new
    state.number += 1
    why = f"ranks {new} in the place of {lost}: {reason}"
    state.assignment = structs.replace(
        state.assignment, number=state.number, extra=tuple(elastic.extra), reason=why
    )
    return [AssignNodes(nodes=tuple(sorted(state.nodes)), assignment=state.assignment, reason=why)]


def leave_world(state: ControllerState, now: float, event: RankExited) -> list[AnyAction]:
    """A member has ended well: nobody waits for it any more."""
    elastic, rank = state.elastic, event.record.rank
    order = elastic.order
    elastic.finished.add(rank)
    if not is_elastic(state) or order is None or rank not in order.ranks:
        return []
    if rank in elastic.answered or not _find_living(state):
        return []
    return [_order(state, now, f"rank {rank} has ended")]


def has_ended(state: ControllerState) -> bool:
    """Return whether every rank has ended well; in an elastic world, every member."""
    ranks = state.elastic.members or state.world
    ends = [state.exits.get(rank) for rank in ranks]
    if state.elastic.members:
        return all(end is not None and not end.failed for end in ends)
    return all(end is not None for end in ends) and not any(
        end.failed for end in state.exits.values()
    )


def is_outside(state: ControllerState, rank: int) -> bool:
    """Return whether an exited rank had not become a member: nobody misses it."""
    elastic = state.elastic
    return bool(elastic.members) and rank not in elastic.members and rank not in state.world


def fire_elastic(state: ControllerState, now: float) -> list[AnyAction] | str:
    """Return what is due; a string says why the world has to be restarted after all."""
    elastic = state.elastic
    if elastic.deadline_s is not None and now >= elastic.deadline_s:
        silent = sorted(set(elastic.members) - elastic.answered)
        elastic.given_up = f"ranks {silent} did not form epoch {elastic.epoch} in time"
        elastic.deadline_s = elastic.retry_s = None
        return elastic.given_up
    if elastic.retry_s is not None and now >= elastic.retry_s:
        elastic.retries += 1
        if elastic.retries > RETRIES_MAX:
            elastic.given_up = f"the world broke {elastic.retries} times at step {elastic.step}"
            elastic.deadline_s = elastic.retry_s = None
            return elastic.given_up
        return [_order(state, now, f"the world broke, and nobody is lost: try {elastic.retries}")]
    return []


def reissue(state: ControllerState, reason: str) -> list[AnyAction]:
    """Return the open order again: a controller has just taken over."""
    order = state.elastic.order
    if order is None:
        return []
    return [
        ReformWorld(
            generation=order.generation,
            epoch=order.epoch,
            ranks=order.ranks,
            urgent=order.urgent,
            reason=reason,
        )
    ]


def end_hung_rank(state: ControllerState, verdict: Verdict) -> list[AnyAction] | None:
    """Return the order that ends a hung member, so that the others go on; None without one."""
    rank = verdict.culprit.rank
    left = _find_living(state)
    if not is_elastic(state) or rank not in left or len(left) < 2:
        return None
    id_ = f"end-g{state.generation}-r{rank}"
    why = f"{verdict.kind} ({verdict.activity}): the others go on without it"
    return [InjectFault(id=id_, generation=state.generation, rank=rank, kind="crash", reason=why)]


def lose_node(state: ControllerState, node: int) -> None:
    """Count the members of a node that is gone as lost; the store goes with its first node."""
    elastic, spec = state.elastic, state.the_spec()
    group = state.placement.index(node) if node in state.placement else -1
    elastic.lost |= {m for m in elastic.members if spec.node_of(m) == group}
    if group == 0 and elastic.members:
        elastic.given_up = "the store was on the lost node"


def _find_living(state: ControllerState) -> tuple[int, ...]:
    elastic = state.elastic
    gone = elastic.lost | elastic.finished | set(state.exits)
    return tuple(rank for rank in elastic.members if rank not in gone)


def _admit(state: ControllerState, now: float) -> list[AnyAction]:
    """Take in who is ready, once the world is whole: it joins between two micro-batches."""
    elastic = state.elastic
    if not is_elastic(state) or elastic.order is not None or elastic.finished:
        return []
    gone = elastic.lost | set(state.exits)
    new = tuple(sorted(elastic.ready - set(elastic.members) - gone - set(state.world)))
    if not new:
        return []
    elastic.members = (*elastic.members, *new)
    return [_order(state, now, f"ranks {list(new)} join", urgent=False)]


def _order(state: ControllerState, now: float, reason: str, *, urgent: bool = True) -> ReformWorld:
    elastic = state.elastic
    elastic.members = _find_living(state)
    elastic.epoch += 1
    elastic.answered.clear()
    elastic.retry_s = None
    elastic.deadline_s = now + REFORM_TIMEOUT_S
    elastic.order = ReformWorld(
        generation=state.generation,
        epoch=elastic.epoch,
        ranks=elastic.members,
        urgent=urgent,
        reason=reason,
    )
    return elastic.order


def _store_is_apart(state: ControllerState) -> bool:
    """Return whether the store is no rank's: it has to outlive any of them."""
    if state.store is None or not state.store.agent_store:
        state.elastic.given_up = "rank 0 serves the store"
    return not state.elastic.given_up
