"""Moving ranks off nodes: from an accepted drain or evict to its one answer.

    waiting --drain--> agreeing --all ranks hold at S--> held --checkpoint of S verified--> moved
       └------evict, or a failure that ended the world anyhow-----------------------------> moved
    moved --the new world trains--> answered          any --deadline, veto, restore--> taken back

After an agreed drain no rank makes a step beyond S, so the checkpoint of S is all there is: the
next world begins there, and no committed step is lost. Until that world is ordered nothing has
been changed, so that a drain can be taken back: its ranks are released and go on at S.

Where the others go on in place (an elastic world) nobody has to stand in, and no checkpoint is
needed, for they have the state:

    waiting --> agreeing: all members come to step S --> left: the others form the next epoch

Before S nothing is begun that would have to be made again, and whoever leaves does so by itself,
once every member has come to S. An evict leaves out at once whoever is on the node, and ends its
processes.

`advance_moves` is called after every event and looks at levels only; a replay leads to the same.
"""

from typing import Any

from perdure.control.agreement.boundary import drop_boundary, open_boundary
from perdure.control.agreement.pauses import stands
from perdure.control.job import LEFT, JobState, OpenMove
from perdure.control.membership import membership_of
from perdure.control.membership.elastic import end_spares, put_out
from perdure.control.membership.members import (
    fill_slots,
    find_objection,
    have_left,
    list_leavers,
    list_living_members,
    node_of_member,
    stay_able,
)
from perdure.control.promises import OpenBoundary
from perdure.control.recovery.formation import form_world
from perdure.control.recovery.placement import bar_left, count_shortage, find_notice, keep_nodes
from perdure.control.steering.group_moves import advance_group_move
from perdure.control.targets import name_all
from perdure.model.events import BoundaryReached, CheckpointFailed, CheckpointSaved, RankExited
from perdure.model.failures import Cause
from perdure.model.orders import AnyAction, NoteDraining, ResumeRanks

_ALIVE = ("forming", "starting", "running")


def moves_deadline(state: JobState) -> float | None:
    """Return when the next move is overdue; asked only while the job is not over."""
    times = [move.deadline_s for move in state.moves.values()]
    times += [move.late_s for move in state.moves.values() if move.late_s is not None]
    return min(times, default=None)


def advance_moves(state: JobState, now: float) -> list[AnyAction]:
    """Do what has become possible for the nodes that are being left."""
    if state.over:
        state.moves.clear()  # Their commands are answered by the end.
        return []
    actions: list[AnyAction] = []
    for id_ in 3 * list(state.moves):  # As many as there are stages that need nobody's answer.
        if id_ in state.moves:
            actions += _ADVANCE[membership_of(state).kind](state, now, state.moves[id_])
    return actions


def note_held(
    state: JobState, now: float, event: BoundaryReached, done: OpenBoundary | None
) -> list[AnyAction]:
    """Take one rank's report that it holds; `done` is the agreement once all of them do."""
    for move in state.moves.values():
        if move.stage != "agreeing" or event.id != move.boundary:
            continue
        state.step = max(state.step, event.step)
        if event.error:
            return _take_back(state, now, move, f"rank {event.rank}: {event.error}")
        if done is not None:
            move.stage = "held"
    return []


def note_saved(
    state: JobState, now: float, event: CheckpointSaved | CheckpointFailed
) -> list[AnyAction]:
    """Take what became of the checkpoint that the ranks hold for."""
    if isinstance(event, CheckpointSaved):
        known = state.saved_step if state.quorum.members else -1  # Groups tell of theirs late.
        state.saved_step = max(event.step, known)
    for move in state.moves.values():
        if move.stage not in ("agreeing", "held") or event.step != move.step:
            continue
        if not event.generation == state.world.generation == move.generation:
            continue
        if isinstance(event, CheckpointFailed):
            return _take_back(state, now, move, f"the checkpoint failed: {event.error}")
        move.saved = True
    return []


def note_left(state: JobState, event: RankExited) -> None:
    """Learn from a rank that was ended how far it had come: reports of progress are older."""
    for move in state.moves.values():
        if move.stage == "moved" and event.record.generation == move.generation:
            move.from_step = max(move.from_step, event.account.step)


def restore_move(state: JobState, now: float, node: int, why: str) -> list[AnyAction]:
    """Take back what is about to leave `node`; where it was left already, say so now.

    Where the members' step is agreed upon, the node is filled anew after it.
    """
    actions: list[AnyAction] = []
    in_place, boundary = membership_of(state).goes_on(state), state.boundary
    for move in list(state.moves.values()):
        if node not in move.nodes:
            continue
        mine = boundary is not None and boundary.command == move.id
        if in_place and mine and boundary is not None and boundary.move == "commit":
            move.restored = True
        elif move.stage == "moved" and not in_place:
            actions += _finish(state, now, move, f"node {node} is free again: {why}")
        else:
            actions += _take_back(state, now, move, why)
    return actions


def moves_again(state: JobState) -> list[AnyAction]:
    """Return what may have been lost with the last controller; safe to repeat."""
    actions: list[AnyAction] = [
        NoteDraining(node=node, who=move.who, reason=move.why)
        for move in state.moves.values()
        if move.stage not in LEFT
        for node in move.nodes
    ]
    released = state.released
    if released is not None and released.generation == state.generation:
        actions.append(released)
    return actions


# --- one move -----------------------------------------------------------------------------------


def _advance_one_world(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    actions = _settle(state, now)
    if move.late_s is not None and now >= move.late_s:
        move.late_s, move.guarded = None, False  # Saved once more, so that little is lost with it.
    advance = _advance_in_place if membership_of(state).goes_on(state) else _advance
    return [*actions, *advance(state, now, move), *_settle(state, now)]


def _advance(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    if move.stage == "moved":
        trains = state.world.phase == "running" and (state.world.stepping or stands(state))
        but = "" if trains else f"the new world is {state.world.phase} and not training yet"
        return _finish(state, now, move, but) if trains or now >= move.deadline_s else []
    if move.stage in ("agreeing", "held") and move.generation != state.world.generation:
        move.stage, move.saved = "waiting", False  # That world has ended, by a failure.
    if now >= move.deadline_s:
        return _give_up(state, now, move, f"{_name_stage(move)} when its deadline passed")
    match move.stage:
        case "waiting":
            return _begin(state, now, move)
        case "agreeing":
            boundary = state.boundary
            if boundary is not None and boundary.command == move.id:
                move.step, move.boundary = boundary.step, boundary.name
                return []
            return _give_up(state, now, move, "the ranks did not agree on a step")
        case _:
            if not move.saved:
                return []
            if not count_shortage(state, set()):
                return _evict(state, now, move)
            if not move.wait:
                return _take_back(state, now, move, "the spare node is gone")
            freed = _free(state, move, "the spare node is gone: training goes on")
            move.stage, move.saved = "waiting", False
            return freed


def _begin(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    """Begin what was accepted, once there is somewhere to go."""
    if count_shortage(state, set()):
        return _guard(state, now, move)
    if move.kind == "evict":
        return _evict(state, now, move) if _can_evict(state, move) else []
    if state.world.phase != "running" or not (state.world.stepping or stands(state)):
        return []
    if not state.world.joined:
        why = "the script does not call perdure.init(), so perdure cannot save its state"
        return _give_up(state, now, move, why)
    if not membership_of(state).can_leave(state) or state.boundary is not None:
        return []
    move.stage, move.generation, move.saved = "agreeing", state.world.generation, False
    actions = open_boundary(state, now, "drain", reason=move.why, command=move.id)
    assert state.boundary is not None
    move.step, move.boundary = state.boundary.step, state.boundary.name
    return actions


def _advance_in_place(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    """Do what has become possible for nodes that members are to leave while others train on."""
    leavers, boundary, pace = list_leavers(state, move.nodes), state.boundary, state.steering.pace
    late = "the members had not agreed on a step when its deadline passed"
    if boundary is not None and boundary.command == move.id:
        move.step = boundary.step
        overdue = now >= move.deadline_s and boundary.move == "prepare"
        return _give_up(state, now, move, late) if overdue else []
    if not leavers:
        return _finish_in_place(state, now, move)
    if now >= move.deadline_s:
        return _give_up(state, now, move, late)
    if move.stage == "agreeing" and move.generation == state.world.generation:
        return _take_back(state, now, move, "the members did not agree on a step")
    objection = find_objection(state, move.nodes)
    if objection:
        return _take_back(state, now, move, objection) if move.who else _guard(state, now, move)
    if not _can_evict(state, move):
        return []  # Who stays is still on its way into the world.
    if move.kind == "evict":
        return _evict(state, now, move)
    if not membership_of(state).can_leave(state) or boundary is not None:
        return []
    move.stage, move.ranks, move.generation = "agreeing", leavers, state.world.generation
    return open_boundary(
        state, now, "drain", reason=move.why, command=move.id, leaves=leavers,
        not_before=int(pace.estimate_step(move.until_s)) if pace is not None else 0,
    )  # fmt: skip


def _guard(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    """Save while there is time: nobody can stand in for a node that the platform takes away."""
    can = membership_of(state).agrees(state)
    if move.who or state.boundary is not None or not can or move.guarded:
        return []
    move.guarded = True
    reason = f"{move.why}, and no spare node is ready"
    return open_boundary(state, now, "checkpoint", reason=reason)


def _can_evict(state: JobState, move: OpenMove) -> bool:
    """Return whether the world can do without the nodes at this moment."""
    if membership_of(state).goes_on(state):
        return stay_able(state, move.nodes)
    return state.world.phase in _ALIVE and not count_shortage(state, set())


def _evict(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    """Do without the nodes from now on: the others go on, or the next world is formed."""
    if membership_of(state).goes_on(state):
        move.ranks = list_leavers(state, move.nodes)
        out = put_out(state, now, move.ranks, move.why)
        return [*out, *_finish_in_place(state, now, move)]
    actions = drop_boundary(state, move.why)
    state.world.failed_s = now  # What it costs is what a restart costs.
    where = f", from step {move.step}" if move.stage == "held" else ""
    grace_s = 0.0
    if not state.world.joined:  # Nothing of perdure's is saved, and the script may save itself.
        announced_s = max(0.0, move.deadline_s - now)
        grace_s = announced_s if move.force else state.the_spec().restart.grace_s
    return [*actions, *form_world(state, now, f"{move.why}{where}", grace_s=grace_s)]


def _settle(state: JobState, now: float) -> list[AnyAction]:
    """Cordon the nodes that a new world was placed without, whoever has formed it."""
    actions: list[AnyAction] = []
    for move in state.moves.values():
        if (
            membership_of(state).goes_on(state)
            or move.stage == "moved"
            or set(move.nodes) & set(state.world.placement)
        ):
            continue
        agreed = move.stage == "held" and move.saved
        if move.kind == "drain" and not agreed and not move.instead:
            move.instead = "the world was ended before its ranks agreed on a step"
        move.stage, move.from_step = "moved", state.step
        move.to = {node: state.world.placement[group] for node, group in move.groups.items()}
        move.generation = state.world.generation - 1
        _note_move(state, now, move, move.generation)
        actions += bar_left(state, move)
    return actions


def _note_move(state: JobState, now: float, move: OpenMove, world: int, *, epoch: int = -1) -> None:
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


def _finish(state: JobState, now: float, move: OpenMove, but: str) -> list[AnyAction]:
    """Answer: the nodes were left, for those that stand in."""
    del state.moves[move.id]
    spec, moves, words = state.the_spec(), [], []
    for node, group in sorted(move.groups.items()):
        to, ranks = move.to[node], list(spec.ranks_of(group))
        moves.append({"node": node, "to": to, "ranks": ranks})
        words.append(f"{name_all('rank', ranks)} from node {node} to node {to}")
    resumed = state.world.resumed_step if state.world.resumed_step >= 0 else state.step
    lost = max(0, move.from_step - resumed) if state.world.joined and not but else None
    text = f"{', '.join(words)} in {move.took_s(now):.2f} s"
    if lost is not None:
        cost = "no step is" if not lost else f"{lost} step{'s are' if lost > 1 else ' is'}"
        text += f", at step {resumed}: {cost} made again"
    text = "; ".join(part for part in (text, move.instead, but) if part)
    step = resumed if lost is not None else -1
    return _answer(state, now, move, text, moves=moves, step=step, lost=lost, instead=move.instead)


def _finish_in_place(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    """Answer: nobody of the world is on the nodes any more."""
    del state.moves[move.id]  # Its nodes may be filled again.
    if move.restored:
        actions = fill_slots(state, move.why)
    else:
        _note_move(state, now, move, state.world.generation, epoch=state.world.epoch)
        actions = bar_left(state, move) + end_spares(state, move.nodes, move.why)
    agreed = move.kind == "drain" and move.step >= 0 and have_left(state, move.ranks)
    homes = [(node_of_member(state, rank), rank) for rank in move.ranks]
    moves = [
        {"node": node, "to": None, "ranks": [rank for home, rank in homes if home == node]}
        for node in move.nodes
    ]
    where = f" at step {move.step}: nothing is made again" if agreed else ""
    how = f"left in {move.took_s(now):.2f} s"
    if move.kind == "evict" or move.instead:
        how = "were ended" if len(move.ranks) > 1 else "was ended"
    left = len(list_living_members(state))
    words = f"{name_all('rank', move.ranks)} {how}{where}; {left} go on"
    instead = move.instead or ("" if agreed or move.kind == "evict" else "they ended before")
    step = move.step if agreed else -1
    return actions + _answer(
        state, now, move, words, moves=moves, step=step, lost=0, instead=instead
    )


def _answer(
    state: JobState,
    now: float,
    move: OpenMove,
    words: str,
    *,
    moves: list[dict[str, Any]],
    step: int,
    lost: int | None,
    instead: str,
) -> list[AnyAction]:
    result = {
        "verb": move.kind,
        "nodes": list(move.nodes),
        "moves": moves,
        "step": step,
        "steps_lost": lost,
        "took_s": move.took_s(now),
        "instead": instead,
    }
    return state.answer_open(move.id, True, words, result)


def _give_up(state: JobState, now: float, move: OpenMove, why: str) -> list[AnyAction]:
    """It cannot be done as asked: evict where that was allowed, else take it back."""
    if not move.force or not _can_evict(state, move):
        return _take_back(state, now, move, why)
    move.instead = f"evicted instead: {why}"
    return _free(state, move, why) + _evict(state, now, move)


def _take_back(state: JobState, now: float, move: OpenMove, why: str) -> list[AnyAction]:
    """Leave everything as it was, and say why."""
    return [*_free(state, move, why), *keep_nodes(state, now, move, why)]


def _free(state: JobState, move: OpenMove, why: str) -> list[AnyAction]:
    """End what the ranks have promised for `move`, or the wait that they are in.

    Of members that leave nobody waits: their agreement has no name here.
    """
    actions: list[AnyAction] = []
    boundary = state.boundary
    held = move.generation == state.world.generation and move.stage in ("agreeing", "held")
    if boundary is not None and boundary.command == move.id:
        held &= boundary.move == "commit"
        actions += drop_boundary(state, why)
    if held and move.boundary:
        state.released = ResumeRanks(
            generation=state.world.generation,
            ranks=membership_of(state).list_asked(state),
            id=move.boundary,
            reason=why,
        )
        actions.append(state.released)
    return actions


def _name_stage(move: OpenMove) -> str:
    match move.stage:
        case "waiting":
            return "it still waited for a spare node or for a world that trains"
        case "agreeing":
            return f"the ranks had not all come to step {move.step}"
        case _:
            return f"the checkpoint of step {move.step} was not verified yet"


_ADVANCE = {
    "one world": _advance_one_world,
    "replica groups": advance_group_move,
}
