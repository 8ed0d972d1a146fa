"""Drain, cordon, evict, restore for torchft's replica groups: what a verb would do.

A replica group is a world of its own, so no other group ends when one is left: the lighthouse
forms the next quorum without it, and a warm spare heals from a peer.
"""

from typing import Literal

import msgspec

from perdure.control.job import JobState, OpenMove
from perdure.control.membership.quorum import (
    least_groups,
    list_spare_groups,
    refuse_drain,
    wanted_groups,
)
from perdure.control.recovery.formation import begin_generation
from perdure.control.steering.group_moves import count_left, name_replicas, take_back
from perdure.model.orders import AnyAction
from perdure.model.steering import PlaceVerb


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of what a verb would do: all of it but the words is in the answer."""

    verb: str
    way: Literal["drain", "cordon", "evict", "restore", "nothing"] = "nothing"
    """As it would be carried out."""
    nodes: list[int] = msgspec.field(default_factory=list)
    """On which something would be done."""
    already: list[str] = msgspec.field(default_factory=list)
    """Where nothing is left to do, and why."""
    steps_lost: int | None = 0
    """None: unknown, because the script declares no steps."""
    refusal: str = ""
    words: str = ""


class GroupPlan(Plan, frozen=True, kw_only=True):
    """A plan of what a verb would do to replica groups."""

    replicas: list[int] = msgspec.field(default_factory=list)
    """The same as `nodes`."""
    stand_ins: list[int] = msgspec.field(default_factory=list)
    """Spare groups that stand ready to take their places."""
    left: int = 0
    """How many would train afterwards."""


def plan_groups(
    state: JobState, verb: PlaceVerb, groups: tuple[int, ...], *, wait: bool
) -> GroupPlan:
    """Return what `verb` would do as things stand. Changes nothing."""
    if not state.worlds:
        return GroupPlan(verb=verb, refusal="no replica group was started yet")
    match verb:
        case "restore":
            return _plan_restore(state, groups)
        case "cordon":
            return _plan_cordon(state, groups)
        case "drain" | "evict":
            return _plan_leave(state, verb, groups, wait)


def overtake(state: JobState, now: float, plan: Plan, reason: str) -> list[AnyAction]:
    """Take back what leaves the same groups less urgently."""
    actions: list[AnyAction] = []
    for move in list(state.moves.values()):
        if set(move.nodes) & set(plan.nodes):
            actions += take_back(state, now, move, f"overtaken: {reason}", keep=False)
    return actions


def restore_group(
    state: JobState, now: float, number: int, who: str, reason: str
) -> list[AnyAction]:
    """Let a group train again; one that has ended is started."""
    group, actions = state.worlds[number], list[AnyAction]()
    for move in list(state.moves.values()):
        if number in move.nodes and move.stage != "ending":
            actions += take_back(state, now, move, reason)
    if number in state.cordoned:
        actions += state.release(number, who, reason)
    if group.phase in ("parked", "failed"):
        wanted = wanted_groups(state)
        group.replica.active = (
            sum(g.replica.active and g.alive for g in state.worlds.values()) < wanted
        )
        group.failures.clear()
        actions += begin_generation(state, now, group, reason)
    return actions


# --- what would happen --------------------------------------------------------------------------


def _plan_restore(state: JobState, groups: tuple[int, ...]) -> GroupPlan:
    held = {n for m in state.moves.values() if m.stage != "ending" for n in m.nodes}
    ended = {n for m in state.moves.values() if m.stage == "ending" for n in m.nodes}
    todo, already, parts = [], [], []
    for number in groups:
        group = state.worlds[number]
        away = group.phase in ("parked", "failed")
        if number in ended:
            why = f"replica {number} is being ended: restore it once it has left"
            return GroupPlan(verb="restore", refusal=why)
        if away and any(g.phase == "done" for g in state.worlds.values()):
            why = f"replica {number} is not started again: others have finished"
            return GroupPlan(verb="restore", refusal=why)
        if away or number in held or number in state.cordoned:
            todo.append(number)
            what = "is started and heals from a peer, or stands by as a spare"
            parts.append(f"replica {number} {what if away else 'stays'}")
        else:
            already.append(f"replica {number} may train already")
    left = count_left(state, set())[1]
    return GroupPlan(
        verb="restore", way="restore", nodes=todo, replicas=todo, already=already, left=left,
        words="; ".join([*parts, *already]),
    )  # fmt: skip


def _plan_cordon(state: JobState, groups: tuple[int, ...]) -> GroupPlan:
    todo = [n for n in groups if n not in state.barred]
    already = [f"replica {n} is cordoned already" for n in groups if n in state.barred]
    least = least_groups(state)
    free = [n for n, g in state.worlds.items() if g.alive and n not in {*todo, *state.barred}]
    refusal = ""
    if todo and len(free) < least:
        refusal = f"{len(free)} replicas could be started again, and at least {least} are needed"
    parts = [f"replica {n} trains on, and is not started again once it ends" for n in todo]
    left = count_left(state, set())[1]
    return GroupPlan(
        verb="cordon", way="cordon", nodes=todo, replicas=todo, already=already, left=left,
        refusal=refusal, words="; ".join([*parts, *already]),
    )  # fmt: skip


def _plan_leave(
    state: JobState, verb: Literal["drain", "evict"], groups: tuple[int, ...], wait: bool
) -> GroupPlan:
    todo, already = [], []
    for number in groups:
        under_way = find_move(state, verb, number)
        if under_way is not None:
            word = "drained" if under_way.kind == "drain" else "evicted"
            already.append(f"replica {number} is being {word} already ({under_way.why})")
        elif number in state.barred and not state.worlds[number].alive:
            already.append(f"replica {number} is left and cordoned already")
        else:
            todo.append(number)
    if not todo:
        return GroupPlan(verb=verb, already=already, words="; ".join(already))
    before = count_left(state, set())[1]
    members, left = count_left(state, set(todo))
    spares = [g.number for g in list_spare_groups(state) if g.number not in todo]
    lost = sum(state.worlds[n].replica.active and state.worlds[n].alive for n in todo)
    stand_ins = spares[:lost]
    refusal = _find_refusal(state, verb, members, left, before, wait)
    ready = f"{name_replicas(stand_ins)} stand{'' if len(stand_ins) > 1 else 's'} in"
    how = "after their step" if verb == "drain" else "at once; the step in flight is made again"
    words = [
        f"{name_replicas(todo)} leave{'' if len(todo) > 1 else 's'} {how}",
        ready if stand_ins else "no spare stands ready",
        f"{left} train on",
        *already,
    ]
    return GroupPlan(
        verb=verb, way=verb, nodes=todo, replicas=todo, stand_ins=stand_ins, left=left,
        already=already, refusal=refusal, words="; ".join(words),
    )  # fmt: skip


def _find_refusal(
    state: JobState, verb: str, members: int, left: int, before: int, wait: bool
) -> str:
    """Return why it must not be; empty where it may."""
    least = least_groups(state)
    if verb == "drain" and refuse_drain(state):
        return refuse_drain(state)
    if left >= before and members:
        return ""  # It trains nothing now.
    if not members:
        return "nobody else trains who has the state: it would be lost"
    if left < least and not wait:
        return f"{left} replicas would train, and at least {least} are needed"
    return ""


def find_move(state: JobState, verb: str, number: int) -> OpenMove | None:
    """Return the move that already leaves a group no less urgently than `verb` would."""
    for move in state.moves.values():
        urgent = verb == "drain" or move.kind == "evict" or move.stage == "ending"
        if number in move.nodes and urgent:
            return move
    return None
