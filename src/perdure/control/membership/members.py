"""Who can be a member, and where: slots, the nodes that they are on, spares, new processes.

A slot is a place for one process. Those beyond the world's size are spare: their members are
started once the world is there, get as far as training would begin, and are held. Whoever is
ready while the world has all its members is held in the same way, so that a process that takes
the slot of a lost one becomes the next spare where a spare has taken its part meanwhile.
"""

from collections.abc import Collection

from msgspec import structs

from perdure.control.job import JobState
from perdure.model.events import RankExited, SlotLeftEmpty
from perdure.model.orders import AnyAction, AssignNodes, FollowWorld, InjectFault, RecordEvent
from perdure.policy import SlotEnd, decide_slot, trim_ends

DIRECT_BYTES_MAX = 16 << 20
"""Up to this much state is sent within the join."""


def node_of_member(state: JobState, member: int) -> int:
    """Return the node that runs `member`."""
    home = state.world.elastic.homes.get(member)
    if home is not None or not state.world.placement:
        return home if home is not None else state.the_spec().node_of(member)
    spec = state.the_spec()
    others = sorted(set(range(spec.num_nodes)) - set(state.world.placement))
    return (*state.world.placement, *others)[spec.node_of(member)]


def list_living_members(state: JobState) -> tuple[int, ...]:
    """Return the members of the newest epoch that are neither lost nor done."""
    elastic = state.world.elastic
    gone = elastic.lost | elastic.left | elastic.finished | set(state.world.exits)
    return tuple(rank for rank in elastic.members if rank not in gone)


def list_orphaned(state: JobState) -> tuple[int, ...]:
    """Return the members that were ended with their keeper, whose loss is not told yet."""
    elastic, exits = state.world.elastic, state.world.exits
    known = elastic.lost | elastic.left
    ended = [rank for rank in elastic.members if rank in exits and rank not in known]
    return tuple(rank for rank in ended if exits[rank].asked and exits[rank].failed)


def have_state(state: JobState, ranks: Collection[int]) -> bool:
    """Return whether one of `ranks` has been in the world: who is only called in has no state."""
    return not (state.world.elastic.formed | set(state.ranks)).isdisjoint(ranks)


def stay_able(state: JobState, nodes: Collection[int]) -> bool:
    """Return whether somebody who has the state would be left without `nodes`."""
    return have_state(state, _list_staying(state, nodes))


def list_leavers(state: JobState, nodes: Collection[int]) -> tuple[int, ...]:
    """Return the members that `nodes` run."""
    return tuple(
        rank for rank in list_living_members(state) if node_of_member(state, rank) in nodes
    )


def find_objection(state: JobState, nodes: Collection[int]) -> str:
    """Return why members cannot leave `nodes`; empty where they can."""
    if not _list_staying(state, nodes):
        return "no member of the world would be left: the state would be lost"
    return ""


def _list_staying(state: JobState, nodes: Collection[int]) -> set[int]:
    return set(list_living_members(state)).difference(list_leavers(state, nodes))


def have_left(state: JobState, ranks: Collection[int]) -> bool:
    """Return whether all of `ranks` have left at an agreed step."""
    return state.world.elastic.left.issuperset(ranks)


def list_spare_members(
    state: JobState, far_from: Collection[int] = (), beside: Collection[int] = ()
) -> list[int]:
    """Return who is ready and not a member, in the order in which they are called upon.

    First those on nodes other than `far_from`, where somebody was just lost, and then those on the
    least blamed ones; none on `beside`.
    """
    elastic, world = state.world.elastic, set(state.ranks)
    gone = elastic.lost | set(state.world.exits) | set(elastic.members) | world
    away = {*state.cordoned, *state.leaving, *beside}
    ready = [m for m in elastic.ready if m not in gone and node_of_member(state, m) not in away]

    def rank_spare(member: int) -> tuple[bool, int, int]:
        home = node_of_member(state, member)
        return home in far_from, state.blames.get(home, 0), member

    return sorted(ready, key=rank_spare)


def is_closed(state: JobState) -> bool:
    """Return whether nobody may come in now.

    Between the decision and the doing of what all members do together at one step: who came in
    then would not know of it. Changes and pauses come with the order that makes it a member.
    """
    boundary = state.boundary
    together = boundary is not None and boundary.kind not in ("set", "pause")
    if together and boundary is not None and boundary.move == "commit":
        return True
    return any(c.kind == "stop" and "at_step" in c.settled for c in state.commands.values())


def call_spares(state: JobState, far_from: Collection[int] = ()) -> tuple[int, ...]:
    """Return the spares that fill the world up to its size; none where it is only observed."""
    if is_closed(state) or state.the_spec().observe:
        return ()
    room = state.the_spec().world_size_max - len(list_living_members(state))
    return tuple(sorted(list_spare_members(state, far_from)[: max(0, room)]))


def split_called(
    state: JobState, called: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return who of `called` comes in at once, and who has to follow the world first.

    A small state is had within the join for less than a second join would cost.
    """
    elastic = state.world.elastic
    told = elastic.ready.values()
    small = all(e.state_bytes <= DIRECT_BYTES_MAX for e in told) or not any(e.feed for e in told)
    now = tuple(m for m in called if small or m in elastic.caught_up)
    return now, tuple(m for m in called if m not in now)


def order_following(state: JobState, ranks: tuple[int, ...]) -> list[AnyAction]:
    """Have `ranks` follow the members of the newest epoch, unless they do already."""
    elastic, members = state.world.elastic, list_living_members(state)
    donors = {m: elastic.ready[m].feed for m in members if elastic.ready[m].feed}
    told = [m for m in ranks if elastic.following.get(m) != state.world.epoch]
    out = elastic.lost | set(state.world.exits) | {*members, *told}
    before = [m for m, e in elastic.following.items() if e == state.world.epoch and m not in out]
    elastic.following |= dict.fromkeys(told, state.world.epoch)
    return [
        FollowWorld(
            generation=state.world.generation,
            epoch=state.world.epoch,
            rank=rank,
            donors=donors,
            ahead=(*before, *told[:turn]),
            reason=f"rank {rank} catches up while the others train on",
        )
        for turn, rank in enumerate(told)
    ]


def fill_slots(state: JobState, reason: str) -> list[AnyAction]:
    """Return the order that starts a new member in each slot that has nobody.

    Nobody waits for them. Whoever takes a slot over has the next number that is the slot's modulo
    the number of slots. A slot whose node is gone stays empty until the node is back.
    """
    elastic, spec = state.world.elastic, state.the_spec()
    if state.world.assignment is None or elastic.given_up or elastic.finished or spec.observe:
        return []
    new: dict[int, int] = {}
    newest_of = {spec.slot_of(member): member for member in sorted(elastic.homes)}
    out = {*state.lost, *state.cordoned, *state.leaving}
    for slot in range(spec.slots):
        newest = newest_of.get(slot)
        if newest is None and slot < spec.world_size:
            newest = slot
        member = slot if newest is None else newest + spec.slots
        home = node_of_member(state, slot)
        away = home in out or home not in state.nodes
        waits = slot in elastic.resting or slot in elastic.empty_slots
        if away or waits or (newest is not None and not _is_empty(state, newest)):
            continue
        if newest is None or spec.restart.replace:
            new[member] = home
    if not new:
        return []
    elastic.homes |= new
    state.number += 1
    why = f"ranks {list(new)} are started beside the others: {reason}"
    state.world.assignment = structs.replace(
        state.world.assignment,
        number=state.number,
        extra=tuple(elastic.homes),
        homes=dict(elastic.homes),
        gone=list_gone(state),
        reason=why,
    )
    return [
        AssignNodes(nodes=tuple(sorted(state.nodes)), assignment=state.world.assignment, reason=why)
    ]


def note_trained(state: JobState, event: RankExited) -> bool:
    """Note a member that trained until its end; return whether the end counts for its slot."""
    record, elastic, account = event.record, state.world.elastic, event.account
    if record.asked or record.rank in elastic.lost:
        return False
    unknown = account.step < 0  # Its ring is lost.
    if record.rank in elastic.formed and (unknown or account.step > account.start_step):
        elastic.trained.add(record.rank)
    return True


def count_slot_end(state: JobState, now: float, member: int, cause: str) -> list[AnyAction]:
    """Count the end of a process against its slot; return the record if the slot stays empty."""
    elastic, spec, config = state.world.elastic, state.the_spec(), state.the_spec().restart
    if spec.observe or not config.replace:
        return []
    slot = spec.slot_of(member)
    newest = SlotEnd(now, cause, member in elastic.trained)
    ends = elastic.ends[slot] = trim_ends([*elastic.ends.get(slot, ()), newest], config)
    decision = decide_slot(ends, config)
    if not decision.empty:
        if decision.pause_s:
            elastic.resting[slot] = now + decision.pause_s
        return []
    elastic.empty_slots[slot] = decision.empty
    home = node_of_member(state, slot)
    left = SlotLeftEmpty(
        generation=state.world.generation, at_s=now, slot=slot, node=home, reason=decision.empty
    )
    return [RecordEvent(event=left, reason=f"slot {slot} stays empty: {decision.empty}")]


def list_empty_slots(state: JobState, node: int) -> list[int]:
    """Return the slots of `node` that stay empty."""
    slots = sorted(state.world.elastic.empty_slots)
    return [slot for slot in slots if node_of_member(state, slot) == node]


def forget_ends(state: JobState, node: int) -> None:
    """Hold nothing against the slots of `node` any more."""
    elastic = state.world.elastic
    for slot in list(elastic.ends):
        if node_of_member(state, slot) == node:
            for memory in (elastic.ends, elastic.resting, elastic.empty_slots):
                memory.pop(slot, None)


def list_gone(state: JobState) -> tuple[int, ...]:
    """Return the ranks of the first world that are not started again."""
    return tuple(sorted((state.world.elastic.lost | set(state.world.exits)) & set(state.ranks)))


def lose_node(state: JobState, node: int, begun: Collection[int] | None = None) -> bool:
    """Count what `node` ran as lost; return whether a member is newly lost by it.

    A member that has applied the last step is still one: how its script ends is not known. Those
    that were ended with their keeper are told of one by one before.
    With `begun`, members that were not even started by then are not lost: they will be.
    """
    elastic = state.world.elastic
    exits = state.world.exits.items()
    ended = {m for m, end in exits if m in elastic.left or not (end.failed and end.asked)}
    known = {*elastic.members, *state.ranks, *elastic.ready}
    known |= set(elastic.homes) if begun is None else set(elastic.homes) & set(begun)
    known -= ended | elastic.lost
    newly = {m for m in known if node_of_member(state, m) == node}
    elastic.lost |= newly
    return not newly.isdisjoint(elastic.members)


def end_strays(state: JobState, node: int, running: Collection[int]) -> list[AnyAction]:
    """Return the orders that end what a node still runs that was counted as lost.

    The others have gone on without it. Its slot is filled once it has ended.
    """
    elastic = state.world.elastic
    return [
        end_rank(state, rank, f"node {node} was counted as lost, and the world goes on without it")
        for rank in sorted(running)
        if rank in elastic.lost and rank not in state.world.exits
    ]


def end_doomed(state: JobState) -> list[AnyAction]:
    """Return the orders that may have been lost with the last controller: who lives still."""
    doomed = state.world.elastic.doomed.items()
    return [end_rank(state, r, why) for r, why in sorted(doomed) if r not in state.world.exits]


def end_rank(state: JobState, rank: int, reason: str) -> InjectFault:
    """Return the order that ends one process; a later controller gives it again until it has."""
    state.world.elastic.doomed[rank] = reason
    id_ = f"end-g{state.world.generation}-r{rank}"
    return InjectFault(
        id=id_, generation=state.world.generation, rank=rank, kind="crash", reason=reason
    )


def _is_empty(state: JobState, member: int) -> bool:
    """Return whether the process of `member` is gone, and was needed to the end."""
    record = state.world.exits.get(member)
    if record is not None:
        return record.failed or member in state.world.elastic.left
    node = state.nodes.get(node_of_member(state, member))
    return member in state.world.elastic.lost and node is not None and member not in node.running
