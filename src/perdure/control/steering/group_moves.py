"""Leaving replica groups (drain, evict): from an accepted command to its one answer.

    waiting --drain--> leaving --a quorum without them--> ending --no process left--> answered
       └-----evict: forgotten by the lighthouse at once------^

A drained group is held at the lighthouse, which forms the next quorum without it and with a spare
in its place: every step that it has made is one that the others have made as well, so nothing is
lost and nothing made again. Until that quorum is formed the drain can be taken back.

As in `moves`, levels only are looked at after every event; a replay leads to the same.
"""

from typing import Any

from perdure.control.job import JobState, OpenMove
from perdure.control.membership.quorum import (
    count_left,
    describe_lack,
    hold_groups,
    list_spare_groups,
    promote,
)
from perdure.control.recovery.elsewhere import park_elsewhere
from perdure.control.recovery.groups import park_group
from perdure.control.recovery.placement import bar, keep_nodes
from perdure.control.targets import name_all
from perdure.control.world import WorldState
from perdure.model.orders import AnyAction

_AFTER = {
    "drain": "what it runs lives on, and is held until it is restored",
    "evict": "its next life is held until it is restored",
}
"""What an operator has to know of a group that others have started."""


def take_back(
    state: JobState, now: float, move: OpenMove, why: str, *, keep: bool = True
) -> list[AnyAction]:
    """Leave everything as it was, as far as nothing is ended yet, and say why."""
    for group in _groups(state, move):
        if group.replica.leaving:
            group.replica.leaving, group.replica.active = "", group.number in move.actives
    for number in move.stand_ins if keep else []:
        state.worlds[number].replica.active = False
    kept = keep_nodes(state, now, move, why, replicas=move.nodes)
    return [hold_groups(state, why), *kept] if move.stage == "leaving" else kept


# --- one move -----------------------------------------------------------------------------------


def _groups(state: JobState, move: OpenMove) -> list[WorldState]:
    return [state.worlds[number] for number in move.nodes]


def advance_group_move(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    """Do what has become possible for groups that are being left."""
    match move.stage:
        case "waiting":
            return _begin(state, now, move)
        case "leaving":
            if _is_left(state, move):
                return _end(state, now, move, grace_s=state.the_spec().restart.grace_s)
            if now < move.deadline_s:
                return []
            return take_back(state, now, move, "the others formed no quorum without it in time")
        case _:
            stopped = state.stopped
            if all(stopped.get(g.number, -1) >= g.generation for g in _groups(state, move)):
                return _finish(state, now, move, "")
            if now < move.deadline_s:
                return []
            return _finish(state, now, move, "not all of its processes have ended yet")


def _begin(state: JobState, now: float, move: OpenMove) -> list[AnyAction]:
    """Begin what was accepted, once enough would be left."""
    members, left = count_left(state, set(move.nodes))
    training = any(_trains(state, group) for group in _groups(state, move))
    spares = [g for g in list_spare_groups(state) if g.number not in move.nodes]
    short = training and (not members or describe_lack(state, left, "would train"))
    if short or (move.wait and training and not spares):
        if now < move.deadline_s:
            return []
        return take_back(state, now, move, "no spare replica stood ready in time")
    move.step = state.step
    actives = {g.number for g in state.worlds.values() if g.replica.active}
    if move.kind == "evict" or not training:
        ended = _end(state, now, move)
        move.stand_ins = _list_stand_ins(state, actives)
        return ended
    move.actives = [n for n in move.nodes if n in actives]
    for group in _groups(state, move):
        group.replica.leaving, group.replica.active = move.why, False
    promote(state, move.why)  # One order says all of it.
    move.stage, move.stand_ins = "leaving", _list_stand_ins(state, actives)
    return [hold_groups(state, move.why)]


def _list_stand_ins(state: JobState, before: set[int]) -> list[int]:
    return sorted(n for n, g in state.worlds.items() if g.replica.active and n not in before)


def _trains(state: JobState, group: WorldState) -> bool:
    if not state.quorum.members:
        return group.replica.active and group.alive
    return group.alive and group.replica.name in state.quorum.members


def _is_left(state: JobState, move: OpenMove) -> bool:
    """Whether the others go on without it: in their quorum, or, in a pause, once it stands."""
    there = [group for group in _groups(state, move) if group.alive]
    members = [group for group in there if group.replica.name in state.quorum.members]
    paused = state.steering.pause is not None
    return all(paused and group.replica.stands is not None for group in members)


def _end(state: JobState, now: float, move: OpenMove, *, grace_s: float = 0.0) -> list[AnyAction]:
    """End the processes of all that are left, and cordon their nodes."""
    actions: list[AnyAction] = []
    move.stage = "ending"
    move.step = max(move.step, state.step)
    for group in _groups(state, move):
        actions += bar(state, group.number, move.who, move.why)
        if state.the_spec().served:
            actions += _end_elsewhere(state, move, group)
        elif group.phase not in ("parked", "done", "ended"):
            actions += park_group(state, now, group, move.why, grace_s=grace_s)
    return actions


def _end_elsewhere(state: JobState, move: OpenMove, group: WorldState) -> list[AnyAction]:
    """Leave a group that others have started: a drained one lives on, and is held."""
    if move.kind == "drain" or group.replica.absent:
        group.replica.leaving, group.replica.active = "", False
        state.stopped[group.number] = group.generation
        return []
    return park_elsewhere(state, group, move.why) if group.alive else []


def _finish(state: JobState, now: float, move: OpenMove, but: str) -> list[AnyAction]:
    """Answer: the groups were left."""
    del state.moves[move.id]
    result: dict[str, Any] = {
        "verb": move.kind,
        "replicas": move.nodes,
        "nodes": move.nodes,
        "stand_ins": move.stand_ins,
        "step": move.step,
        "steps_lost": 0,
        "took_s": move.took_s(now),
    }
    where = f" at step {move.step}" if move.step >= 0 else ""
    elsewhere = state.the_spec().served
    unended = [g.replica.unended for g in _groups(state, move) if g.replica.unended]
    parts = (
        f"{name_all('replica', move.nodes)} left in {move.took_s(now):.2f} s{where}",
        f"{name_all('replica', move.stand_ins)} stood in" if move.stand_ins else "",
        "the step in flight was made again" if move.kind == "evict" and not elsewhere else "",
        _AFTER[move.kind] if elsewhere else "",
        but,
        *unended,
    )
    return state.answer_open(move.id, True, "; ".join(filter(None, parts)), result)
