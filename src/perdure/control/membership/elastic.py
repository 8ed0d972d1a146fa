"""Re-formation in place: a lost rank leaves, the others form the next epoch of the same world.

No process is ended and no generation begins. The controller says who is in; how far each member is,
and what is redone, the members find out among themselves (`plan.elastic.commit`). Each rung of the
ladder is bounded: a world that broke without a loss is formed again a few times, a re-formation
that does not end in time becomes a restart.
"""

from collections.abc import Collection

from msgspec import structs

from perdure.control.job import JobState
from perdure.control.membership.fixed import GONE, Fixed, Outcome
from perdure.control.membership.members import (
    call_spares,
    end_doomed,
    end_rank,
    end_strays,
    fill_slots,
    have_state,
    list_gone,
    list_leavers,
    list_living_members,
    list_orphaned,
    lose_node,
    node_of_member,
    order_following,
    split_called,
)
from perdure.control.promises import OpenBoundary, make_steering
from perdure.model.events import (
    MemberReady,
    NodeRegistered,
    RankExited,
    RankJoined,
    WorldBroken,
    WorldReformed,
)
from perdure.model.failures import Cause, explain_break
from perdure.model.orders import AnyAction, ReformWorld
from perdure.model.verdicts import Verdict

REFORM_TIMEOUT_S = 30.0
"""From the first order until every member has formed the world, a running micro-batch included."""
RETRY_S = 0.3
"""How long a rank's death may take to be known, before a broken world is formed again as it was."""
RETRIES_MAX = 3
_SURE_S = 1.5
"""Beyond `detect.node_doubt_s` a silent node is known as lost, or none is."""


def is_elastic(state: JobState) -> bool:
    """Return whether this generation can be formed again in place."""
    elastic = state.world.elastic
    return bool(elastic.members) and not elastic.given_up and state.world.phase == "running"


def note_joined(state: JobState, now: float, event: RankJoined) -> list[AnyAction]:
    """Take in a rank that has called `perdure.init`.

    It may be ready to be a member: of the first world, or of one that exists already.
    """
    state.world.joined.add(event.rank)
    if event.depth != "elastic":
        return []
    elastic, world = state.world.elastic, state.ranks
    elastic.ready[event.rank] = event
    started: list[AnyAction] = []
    if not elastic.members and elastic.ready.keys() >= set(world) and _has_stores(state):
        elastic.members = world
        started = fill_slots(state, "spare slots")
    return [*started, *admit(state, now)]


def note_world(
    state: JobState, now: float, event: WorldBroken | WorldReformed | MemberReady
) -> list[AnyAction]:
    """A member has left its world, or has come into the newest one, or could do so."""
    elastic = state.world.elastic
    if event.generation != state.world.generation:
        return []
    if isinstance(event, MemberReady):
        elastic.caught_up.add(event.rank)
        return admit(state, now)
    if isinstance(event, WorldBroken):
        known = event.epoch < state.world.epoch
        if is_elastic(state) and not known and event.rank in elastic.members:
            elastic.retry_s = elastic.retry_s or now + _choose_patience_s(state)
            elastic.broken_s = elastic.broken_s or event.at_s
        return []
    if event.finished:
        elastic.finished.add(event.rank)
        order = elastic.order
        waited = order is not None and event.rank in order.ranks
        if is_elastic(state) and waited and event.rank not in elastic.answered:
            return [order_world(state, now, f"rank {event.rank} has finished")]
        return []
    elastic.formed.add(event.rank)
    state.book.close(event.generation, event.epoch)
    if event.epoch:  # The first waits for processes to start, which no later one does.
        took_s = event.formed_s - max(event.began_s, event.ordered_s)
        elastic.slowest_s = max(elastic.slowest_s, took_s)
    if event.epoch == state.world.epoch:
        elastic.answered.add(event.rank)
        if event.step > elastic.step >= 0:
            elastic.retries = 0
        elastic.step = max(elastic.step, event.step)
        if elastic.answered >= set(elastic.members):
            elastic.order = elastic.deadline_s = None
            state.world.failed_s = None
            return admit(state, now)
    return []


def _choose_patience_s(state: JobState) -> float:
    """Return how long a broken world waits for word of a loss.

    A world that meets at the store of a node that has vanished breaks at once and again. It is
    not given up for that: before the last try is counted, the node's silence has become a loss.
    """
    if state.world.elastic.retries < RETRIES_MAX:
        return RETRY_S
    return state.the_spec().detect.node_doubt_s + _SURE_S


def free_slot(state: JobState, verdict: Verdict) -> bool:
    """Have the slot of a member that ended early filled again; return whether it was one."""
    elastic, rank = state.world.elastic, verdict.culprit.rank
    if not is_elastic(state) or verdict.kind != "EarlyExit" or rank not in state.world.exits:
        return False
    elastic.finished.discard(rank)
    elastic.left.add(rank)
    return True


def is_outside(state: JobState, rank: int) -> bool:
    """Return whether `rank` runs beside an elastic world and is no member of it."""
    return bool(state.world.elastic.members) and rank not in state.world.elastic.members


def leave_outside(state: JobState, now: float, rank: int) -> list[AnyAction]:
    """Note the end of a rank that is no member, and that nobody misses."""
    return [*fill_slots(state, f"rank {rank} has ended"), *admit(state, now)]


def _give_up(state: JobState, why: str) -> Outcome:
    """Form this generation no more in place."""
    elastic = state.world.elastic
    elastic.given_up = why
    elastic.deadline_s = elastic.retry_s = None
    return Outcome(broken=why)


def admit(state: JobState, now: float) -> list[AnyAction]:
    """Take in who is ready, up to the world's size: it joins between two micro-batches.

    Not while a member's keeper is known to be dead by the member's end alone. Its loss is about to
    be told, and leaves the member out: a world formed before would be taken for a mere join.
    """
    elastic = state.world.elastic
    if not is_elastic(state) or elastic.order is not None or elastic.finished:
        return []
    if list_orphaned(state):
        return []
    new, followers = split_called(state, call_spares(state))
    if not new:
        return order_following(state, followers)
    order = order_world(state, now, f"ranks {list(new)} join", new=new, urgent=False)
    return [order, *order_following(state, followers)]


def order_world(
    state: JobState,
    now: float,
    reason: str,
    *,
    new: tuple[int, ...] = (),
    urgent: bool = True,
) -> ReformWorld:
    """Return the order of the next epoch: who is left, and `new`.

    They meet at the store of a member, so that no loss but the last member's is the end of the
    world: a store that is lost with its member is followed by another one's in the next epoch.
    """
    elastic = state.world.elastic
    elastic.members = (*list_living_members(state), *new)
    state.world.epoch += 1
    if elastic.broken_s is not None and not state.book.is_open(state.world.generation):
        cause, world = explain_break(elastic.broken_s), state.world
        state.book.decide(
            cause, "retry", world.generation, world.placement, epoch=state.world.epoch
        )
    elastic.answered.clear()
    elastic.retry_s = elastic.broken_s = None
    elastic.deadline_s = now + REFORM_TIMEOUT_S
    elastic.excused.clear()
    stores = [elastic.ready[m].store for m in elastic.members if elastic.ready[m].store]
    elastic.order = ReformWorld(
        generation=state.world.generation,
        epoch=state.world.epoch,
        ranks=elastic.members,
        urgent=urgent,
        store=stores[elastic.retries % len(stores)] if stores else "",
        steering=make_steering(state.steering),
        reason=reason,
    )
    return elastic.order


def leave_together(state: JobState, now: float, done: OpenBoundary) -> list[AnyAction]:
    """Let those of a drain leave at its step, to which all have come; the others go on."""
    elastic = state.world.elastic
    gone = {rank for rank in done.leaves if rank in elastic.members}
    state.step = max(state.step, done.step)
    if not gone or not is_elastic(state):
        return []
    if not set(list_living_members(state)) - gone:
        elastic.leaving |= gone
        return []
    elastic.left |= gone
    new, followers = split_called(state, call_spares(state))
    why = f"ranks {[rank for rank in done.leaves if rank in gone]} leave at step {done.step}"
    order = order_world(state, now, why, new=new, urgent=False)
    return [order, *order_following(state, followers)]


def put_out(state: JobState, now: float, ranks: tuple[int, ...], reason: str) -> list[AnyAction]:
    """Leave `ranks` out at once, and end them."""
    state.world.elastic.lost |= set(ranks)
    order = order_world(state, now, reason)
    return [order, *(end_rank(state, rank, reason) for rank in ranks)]


def end_spares(state: JobState, nodes: Collection[int], why: str) -> list[AnyAction]:
    """Return the orders that end the spares on `nodes`, which have no part in the world yet."""
    return [end_rank(state, rank, why) for rank in _list_held_spares(state, nodes)]


def _list_held_spares(state: JobState, nodes: Collection[int]) -> list[int]:
    elastic = state.world.elastic
    gone = {*state.world.exits, *elastic.members, *elastic.left, *elastic.lost}
    ready = sorted(elastic.ready.keys() - gone)
    return [rank for rank in ready if node_of_member(state, rank) in nodes]


def _has_stores(state: JobState) -> bool:
    """Return whether the members have a store to meet at that is not a rank's only one."""
    apart = state.world.store is not None and state.world.store.agent_store
    if not apart and not any(e.store for e in state.world.elastic.ready.values()):
        state.world.elastic.given_up = "rank 0 serves the store"
    return not state.world.elastic.given_up


def _note_reform(state: JobState, found: Cause, epochs: int = 0) -> None:
    """Keep that the world failed and goes on, as the newest epoch or one so many later."""
    world, epoch = state.world, state.world.epoch + epochs
    state.book.decide(found, "reform", world.generation, world.placement, epoch=epoch)


class Elastic(Fixed):
    """Members come in, are lost, and leave; the others go on."""

    promised = ("set", "pause", "checkpoint")
    """The first member saves for all."""

    def list_asked(self, state: JobState) -> tuple[int, ...]:
        """Return who is in the world, those who have applied the last step among them."""
        elastic = state.world.elastic
        gone = elastic.lost | elastic.left | set(state.world.exits)
        return tuple(rank for rank in elastic.members if rank not in gone)

    def list_fleeting(self, state: JobState) -> tuple[int, ...]:
        """Return all members."""
        return self.list_asked(state)

    def has_joined(self, state: JobState) -> bool:
        """Return whether anybody is in the world."""
        return bool(self.list_asked(state))

    def goes_on(self, state: JobState) -> bool:
        """Return whether this generation can be formed again in place."""
        return is_elastic(state)

    def begins_saves(self, state: JobState) -> bool:
        """Return False: the first member saves at the same intervals, and needs nobody for it."""
        return False

    def goes_on_without(self, state: JobState, verdict: Verdict) -> bool:
        """Return whether a member is concerned, where the others can go on."""
        return not state.world.elastic.given_up and verdict.culprit.rank is not None

    def moving_s(self, state: JobState) -> float:
        """Return how long it took whoever was slowest."""
        return state.world.elastic.slowest_s

    def runs(self, state: JobState, node: int) -> bool:
        """Return whether a member is there, or a spare: of nodes that were left, neither."""
        if not is_elastic(state):
            return super().runs(state, node)
        return bool(list_leavers(state, (node,)) or _list_held_spares(state, (node,)))

    def can_leave(self, state: JobState) -> bool:
        """Return whether members train, none of them on its way into the world."""
        return self.agrees(state) and state.world.elastic.order is None

    def fill(self, state: JobState, reason: str) -> list[AnyAction]:
        """Return the order that starts a member in each slot that has nobody."""
        return fill_slots(state, reason) if is_elastic(state) else []

    def deadline(self, state: JobState) -> float | None:
        """Return when something of this is due."""
        if state.world.phase != "running":
            return None
        elastic = state.world.elastic
        times = [t for t in (elastic.deadline_s, elastic.retry_s) if t is not None]
        return min([*times, *elastic.resting.values()], default=None)

    def stand_in(
        self, state: JobState, now: float, found: Cause, reason: str, *, freed: bool = False
    ) -> Outcome:
        """Return the order that leaves out who is lost, where that can be done in place.

        Spares come in with it, so that the world is at its full strength at once. With `freed`, the
        others have gone on already without a member that ended early: its slot is filled.
        """
        elastic = state.world.elastic
        if not is_elastic(state):
            return super().stand_in(state, now, found, reason)
        left = list_living_members(state)
        if left == elastic.members:
            if not freed:
                return Outcome(broken="no member of it is lost")
            actions = [*fill_slots(state, reason), *admit(state, now)]
            _note_reform(state, found)
            return Outcome(actions)
        if not have_state(state, left):
            elastic.given_up = "no member that has the state is left"
            return Outcome(broken=elastic.given_up)
        elastic.retries = 0  # It is the loss that had broken the world.
        nodes = {node_of_member(state, rank) for rank in elastic.members if rank not in left}
        called = call_spares(state, nodes) if not elastic.finished else ()
        spares, followers = split_called(state, called)
        why = f"{reason}; ranks {list(spares)} stand in" if spares else reason
        order = order_world(state, now, why, new=spares)
        _note_reform(state, found)
        return Outcome([order, *order_following(state, followers), *fill_slots(state, reason)])

    def leave(self, state: JobState, now: float, event: RankExited) -> Outcome:
        """Let go of a member that has ended well: nobody waits for it any more.

        The world is broken where the others died while it left. One that was ended is no such
        member: why it was, such as that its keeper has died, is told besides.
        """
        elastic, rank = state.world.elastic, event.record.rank
        order = elastic.order
        leaves = state.boundary.leaves if state.boundary is not None else ()
        if rank in leaves or rank in elastic.leaving:
            elastic.left.add(rank)
            alone = (
                "" if list_living_members(state) else "the last member that had the state has left"
            )
            return Outcome(broken=alone)
        if event.record.failed:
            return Outcome()
        elastic.finished.add(rank)
        if not is_elastic(state) or order is None or rank not in order.ranks:
            return Outcome()
        if rank in elastic.answered or not list_living_members(state):
            return Outcome()
        return Outcome([order_world(state, now, f"rank {rank} has ended")])

    def has_ended(self, state: JobState) -> bool:
        """Return whether every member has ended well."""
        ends = [state.world.exits.get(rank) for rank in state.world.elastic.members]
        return all(end is not None and not end.failed for end in ends)

    def lose(
        self, state: JobState, node: int, why: str, begun: Collection[int] | None = None
    ) -> Outcome:
        """Count what a node ran as lost; where a member was among it, the world is broken: `why`.

        The same loss may be told twice: by the keeper's end, and by a node that registers anew.
        """
        if not is_elastic(state) or lose_node(state, node, begun):
            return Outcome(broken=why)
        return Outcome(fill_slots(state, f"node {node} lost its processes"))

    def come_back(self, state: JobState, event: NodeRegistered) -> Outcome:
        """Return what follows where a node registers: ranks of the world may be gone with it.

        An elastic world has new members started on a node that was away. Those whom it had in the
        place of the first ones are lost with it like these, wherever they run.
        """
        if not is_elastic(state):
            return super().come_back(state, event)
        lost = Outcome()
        if state.world.phase == "running" and event.generation < state.world.generation:
            lost = self.lose(state, event.node, GONE, ())
        if lost.broken:
            return lost
        if state.world.assignment is not None:
            state.world.assignment = structs.replace(state.world.assignment, gone=list_gone(state))
        strays = end_strays(state, event.node, event.running)
        return Outcome([*lost.actions, *strays, *fill_slots(state, f"node {event.node} is back")])

    def fire(self, state: JobState, now: float, busy: Collection[int] = ()) -> Outcome:
        """Return what is due; the world may have to be restarted after all.

        Members that are `busy`, as they have declared, are waited for: so long, and then for as
        long as any other.
        """
        elastic = state.world.elastic
        if elastic.deadline_s is not None and now >= elastic.deadline_s:
            silent = sorted(set(elastic.members) - elastic.answered)
            excused, elastic.excused = elastic.excused, set(silent).intersection(busy)
            if excused or elastic.excused:
                elastic.deadline_s = now + REFORM_TIMEOUT_S
                return Outcome()
            return _give_up(state, f"ranks {silent} did not form epoch {state.world.epoch} in time")
        if elastic.retry_s is not None and now >= elastic.retry_s:
            return self.try_again(state, now)
        rested = [slot for slot, due_s in sorted(elastic.resting.items()) if now >= due_s]
        for slot in rested:
            del elastic.resting[slot]
        return Outcome(fill_slots(state, f"slots {rested} are tried again") if rested else [])

    def try_again(self, state: JobState, now: float) -> Outcome:
        """Form a world again that broke although nobody is known to be lost."""
        elastic = state.world.elastic
        elastic.retries += 1
        if elastic.retries > RETRIES_MAX:
            times = f"{elastic.retries} times at step {elastic.step}"
            return _give_up(state, f"the world broke {times}")
        why = f"the world broke, and nobody is lost: try {elastic.retries}"
        return Outcome([order_world(state, now, why)])

    def again(self, state: JobState, reason: str) -> list[AnyAction]:
        """Return the open order again: a controller has just taken over."""
        order, elastic = state.world.elastic.order, state.world.elastic
        again = end_doomed(state)
        again += [] if order is None else [structs.replace(order, reason=reason)]
        open_ = [
            m
            for m in elastic.following
            if m not in elastic.caught_up and m not in state.world.exits
        ]
        for member in open_:
            del elastic.following[member]
        return [*again, *order_following(state, tuple(open_))]

    def end_one(self, state: JobState, rank: int | None, found: Cause, why: str) -> list[AnyAction]:
        """Return the order that ends a process, if there is one without which others go on."""
        if not is_elastic(state) or rank is None:
            return []
        left = list_living_members(state)
        alone = rank in left and len(left) < 2
        if alone or rank in state.world.exits or rank not in {*left, *state.world.elastic.homes}:
            return []
        if rank in state.world.elastic.members:
            _note_reform(state, found, 1)
        return [end_rank(state, rank, f"{why}: the others go on without it")]
