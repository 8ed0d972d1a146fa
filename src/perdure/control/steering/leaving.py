"""Nodes that members leave while the others train on: drain and evict of an elastic world.

    waiting --> agreeing: all members come to step S --> left: the others form the next epoch

Before S nothing is begun that would have to be made again, and whoever leaves does so by itself,
once every member has come to S. Nobody has to stand in, and no checkpoint is needed: the others
have the state. An evict leaves out at once whoever is on the node, and ends its processes.
"""

from collections.abc import Collection

from perdure.control.agreement.boundary import drop_boundary, open_boundary
from perdure.control.agreements import OpenBoundary
from perdure.control.job import JobState, OpenMove
from perdure.control.membership import membership_of
from perdure.control.membership.elastic import order_world
from perdure.control.membership.members import (
    call_spares,
    end_rank,
    fill_slots,
    have_state,
    list_living_members,
    node_of_member,
    order_following,
    split_called,
)
from perdure.control.recovery.placement import bar_left, find_notice, keep_nodes
from perdure.model.failures import Cause
from perdure.model.orders import AnyAction


def list_leavers(state: JobState, nodes: Collection[int]) -> tuple[int, ...]:
    """Return the members that `nodes` run."""
    return tuple(
        rank for rank in list_living_members(state) if node_of_member(state, rank) in nodes
    )


def find_objection(state: JobState, nodes: Collection[int]) -> str:
    """Return why `nodes` cannot be left; empty where they can."""
    if not _list_staying(state, nodes):
        return "no member of the world would be left: the state would be lost"
    return ""


def _list_staying(state: JobState, nodes: Collection[int]) -> set[int]:
    return set(list_living_members(state)).difference(list_leavers(state, nodes))


def advance_leaving(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    """Do what has become possible for nodes that members are to leave."""
    leavers = list_leavers(state, move.nodes)
    boundary = state.boundary
    if boundary is not None and boundary.command == move.id:
        move.step = boundary.step
        overdue = now >= move.deadline_s and boundary.move == "prepare"
        return _overdue(state, now, move, leavers) if overdue else []
    if not leavers:
        return _finish(state, now, move)
    if now >= move.deadline_s:
        return _overdue(state, now, move, leavers)
    if move.stage == "agreeing" and move.generation == state.world.generation:
        return _take_back(state, now, move, "the members did not agree on a step")
    objection = find_objection(state, move.nodes)
    if objection:
        return _take_back(state, now, move, objection) if move.who else guard(state, now, move)
    if not have_state(state, _list_staying(state, move.nodes)):
        return []  # Who stays is still on its way into the world.
    if move.kind == "evict":
        return _put_out(state, now, move, leavers)
    ready = membership_of(state).agrees(state)
    if not ready or boundary is not None or state.world.elastic.order is not None:
        return []
    move.stage, move.ranks, move.generation = "agreeing", leavers, state.world.generation
    pace = state.steering.pace
    return open_boundary(
        state, now, "drain", reason=move.why, command=move.id, leaves=leavers,
        not_before=int(pace.estimate_step(move.until_s)) if pace is not None else 0,
    )  # fmt: skip


def note_move(state: JobState, now: float, move: OpenMove, world: int, *, epoch: int = -1) -> None:
    """Keep that a world ended, or went on as another, so that nodes are left: no failure."""
    if state.book.is_open(world) or all(node in state.cordoned for node in move.nodes):
        return
    node = next(node for node in move.nodes if node not in state.cordoned)
    taken = find_notice(state, now, node)
    saved = state.saved_step >= state.step >= 0
    cause = Cause(
        cause=f"moved, before a preemption ({taken.words})" if taken is not None else "moved",
        culprit=f"node {node}",
        at_step=state.saved_step if saved else -1,
        failure_s=now,
        detected_s=now,
        reason=move.why,
    )
    state.book.decide(cause, "move", world, epoch=epoch, saved=saved)


def guard(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    """Save while there is time: nobody can stand in for a node that the platform takes away."""
    can = membership_of(state).agrees(state)
    if move.who or state.boundary is not None or not can or move.guarded:
        return []
    move.guarded = True
    reason = f"{move.why}, and no spare node is ready"
    return open_boundary(state, now, "checkpoint", reason=reason)


def end_spares(state: JobState, nodes: Collection[int], why: str) -> list[AnyAction]:
    """Return the orders that end the spares on `nodes`, which have no part in the world yet."""
    elastic = state.world.elastic
    gone = {*state.world.exits, *elastic.members, *elastic.left, *elastic.lost}
    ready = sorted(elastic.ready - gone)
    return [end_rank(state, rank, why) for rank in ready if node_of_member(state, rank) in nodes]


def leave_together(state: JobState, now: float, done: OpenBoundary) -> list[AnyAction]:
    """Let those of a drain leave at its step, to which all have come; the others go on."""
    elastic = state.world.elastic
    gone = [rank for rank in done.leaves if rank in elastic.members]
    state.step = max(state.step, done.step)
    if not gone or not membership_of(state).goes_on(state):
        return []
    if not set(list_living_members(state)) - set(gone):
        elastic.leaving |= set(gone)
        return []
    elastic.left |= set(gone)
    why = f"ranks {gone} leave at step {done.step}"
    new, followers = split_called(state, call_spares(state))
    order = order_world(state, now, why, new=new, urgent=False)
    return [order, *order_following(state, followers)]


def restore_leaving(state: JobState, now: float, move: OpenMove, why: str) -> list[AnyAction]:
    """Take a move back; where its step is agreed upon, its nodes are filled anew after it."""
    boundary = state.boundary
    if boundary is not None and boundary.command == move.id and boundary.move == "commit":
        move.restored = True
        return []
    return _take_back(state, now, move, why)


def _finish(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    """Nobody of the world is on the nodes any more: answer."""
    del state.moves[move.id]
    elastic = state.world.elastic
    if move.restored:
        actions = fill_slots(state, move.why)
    else:
        note_move(state, now, move, state.world.generation, epoch=state.world.epoch)
        actions = bar_left(state, move) + end_spares(state, move.nodes, move.why)
    ranks = list(move.ranks)
    agreed = move.kind == "drain" and move.step >= 0 and set(ranks) <= elastic.left
    took_s = round(now - move.at_s, 3)
    result = {
        "verb": move.kind,
        "nodes": list(move.nodes),
        "moves": [
            {
                "node": node,
                "to": None,
                "ranks": [r for r in ranks if node_of_member(state, r) == node],
            }
            for node in move.nodes
        ],
        "step": move.step if agreed else -1,
        "steps_lost": 0,
        "took_s": took_s,
        "instead": move.instead or ("" if agreed or move.kind == "evict" else "they ended before"),
    }
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks)) or 'none'}"
    where = f" at step {move.step}: nothing is made again" if agreed else ""
    how = "was ended" if move.kind == "evict" or move.instead else f"left in {took_s:.2f} s"
    how = how.replace("was", "were") if len(ranks) > 1 else how
    words = f"{names} {how}{where}; {len(list_living_members(state))} go on"
    return actions + state.answer_open(move.id, True, words, result)


def _overdue(
    state: JobState, now: float, move: OpenMove, leavers: tuple[int, ...]
) -> list[AnyAction]:
    why = "the members had not agreed on a step when its deadline passed"
    if move.force and have_state(state, _list_staying(state, move.nodes)):
        move.instead = f"evicted instead: {why}"
        return [*_drop_boundary(state, move, why), *_put_out(state, now, move, leavers)]
    return _take_back(state, now, move, why)


def _put_out(
    state: JobState, now: float, move: OpenMove, leavers: tuple[int, ...]
) -> list[AnyAction]:
    """Leave out at once whoever is on the nodes, and end it."""
    move.ranks = leavers
    state.world.elastic.lost |= set(leavers)
    order = order_world(state, now, move.why)
    ends = [end_rank(state, rank, move.why) for rank in leavers]
    return [order, *ends, *_finish(state, now, move)]


def _take_back(state: JobState, now: float, move: OpenMove, why: str) -> list[AnyAction]:
    """Leave everything as it was, and say why."""
    return [*_drop_boundary(state, move, why), *keep_nodes(state, now, move, why)]


def _drop_boundary(state: JobState, move: OpenMove, why: str) -> list[AnyAction]:
    """End what the members have promised for `move`, unless it is decided."""
    boundary = state.boundary
    if boundary is None or boundary.command != move.id or boundary.move != "prepare":
        return []
    return drop_boundary(state, why)
