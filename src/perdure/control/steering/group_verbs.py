"""Drain, cordon, evict, restore for torchft's replica groups: what a verb would do, its beginning.

A replica group is a world of its own, so no other group ends when one is left: the lighthouse
forms the next quorum without it, and a warm spare heals from a peer. As elsewhere `plan` says
what would happen or why it must not, a dry run is that and nothing else, and one target that
cannot be left refuses the command for the others, too.
"""

from typing import Any, Literal

import msgspec

from perdure.control.answers import answer
from perdure.control.job import Answer, GroupMove, JobState, OpenCommand
from perdure.control.recovery.groups import find_spares, start_group
from perdure.control.recovery.placement import bar, release
from perdure.control.steering.group_moves import count_left, name_replicas, take_back
from perdure.control.targets import UnknownTargetError, find_groups
from perdure.model.actions import AnyAction, NoteDraining
from perdure.model.steering import LEAVE_DEADLINE_S, PlaceVerb


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a verb would do to replica groups."""

    verb: str
    groups: tuple[int, ...] = ()
    """To which something would be done."""
    stand_ins: tuple[int, ...] = ()
    """Spare groups that stand ready to take their places."""
    left: int = 0
    """How many would train afterwards."""
    already: tuple[str, ...] = ()
    refusal: str = ""
    words: str = ""


def plan_group_verb(state: JobState, verb: PlaceVerb, args: dict[str, Any]) -> GroupPlan:
    """Return what `verb` would do as things stand. Changes nothing."""
    try:
        groups = find_groups(state, [str(target) for target in args.get("targets", ())])
    except UnknownTargetError as error:
        return GroupPlan(verb=verb, refusal=str(error))
    if not state.worlds:
        return GroupPlan(verb=verb, refusal="no replica group was started yet")
    match verb:
        case "restore":
            return _plan_restore(state, groups)
        case "cordon":
            return _plan_cordon(state, groups)
        case "drain" | "evict":
            return _plan_leave(state, verb, groups, bool(args.get("wait")))


def preview_group_verb(state: JobState, verb: PlaceVerb, args: dict[str, Any]) -> Answer:
    """Return the answer to a dry run."""
    try:
        plan = plan_group_verb(state, verb, args)
    except (TypeError, ValueError) as error:
        return Answer(False, f"malformed arguments: {error}", {})
    result = {"dry_run": True, **render_plan(plan)}
    return Answer(not plan.refusal, plan.refusal or plan.words, result)


def render_plan(plan: GroupPlan) -> dict[str, Any]:
    """Return a plan as an answer carries it."""
    return {
        "verb": plan.verb,
        "replicas": list(plan.groups),
        "nodes": list(plan.groups),
        "stand_ins": list(plan.stand_ins),
        "left": plan.left,
        "already": list(plan.already),
        "steps_lost": 0,
    }


def order_replicas(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Begin a verb, refuse it, or say that it is done already; it is answered exactly once."""
    verb: PlaceVerb = command.kind  # type: ignore[assignment]
    args = command.args
    if args.get("dry_run"):
        return answer(state, command.id, *preview_group_verb(state, verb, args))
    plan = plan_group_verb(state, verb, args)
    if plan.refusal or not plan.groups:
        text = plan.refusal or plan.words
        return answer(state, command.id, not plan.refusal, text, render_plan(plan))
    who = command.who or "an operator"
    why = str(args.get("why", ""))
    reason = f"{verb} asked for by {who}{f': {why}' if why else ''}"
    if verb in ("drain", "evict"):
        return _begin_move(state, command, plan, who, reason)
    actions: list[AnyAction] = []
    for number in plan.groups:
        if verb == "restore":
            actions += _restore(state, now, number, who, reason)
        else:
            actions += bar(state, number, who, reason)
    result = render_plan(plan) | {"took_s": round(now - command.at_s, 3)}
    return [*actions, *answer(state, command.id, True, plan.words, result)]


def _begin_move(
    state: JobState, command: OpenCommand, plan: GroupPlan, who: str, reason: str
) -> list[AnyAction]:
    args, moves = command.args, state.quorum.moves
    actions: list[AnyAction] = []
    for move in list(moves.values()):  # An evict overtakes a drain.
        if set(move.groups) & set(plan.groups):
            actions += take_back(state, command.at_s, move, f"overtaken: {reason}", keep=False)
    state.commands[command.id] = command
    moves[command.id] = GroupMove(
        id=command.id,
        kind="drain" if plan.verb == "drain" else "evict",
        groups=list(plan.groups),
        who=who,
        why=reason,
        at_s=command.at_s,
        deadline_s=command.at_s + float(args.get("deadline_s") or LEAVE_DEADLINE_S),
        wait=bool(args.get("wait")),
    )
    noted = [NoteDraining(node=n, who=command.who, reason=reason) for n in plan.groups]
    return [*actions, *noted]


def _restore(state: JobState, now: float, number: int, who: str, reason: str) -> list[AnyAction]:
    group, actions = state.worlds[number], list[AnyAction]()
    for move in list(state.quorum.moves.values()):
        if number in move.groups and move.stage != "ending":
            actions += take_back(state, now, move, reason)
    if number in state.cordoned:
        actions += release(state, number, who, reason)
    if group.phase in ("parked", "failed"):
        wanted = state.the_spec().torchft.replicas
        group.active = sum(g.active and g.alive for g in state.worlds.values()) < wanted
        group.failures.clear()
        actions += start_group(state, now, group, reason)
    return actions


# --- what would happen --------------------------------------------------------------------------


def _plan_restore(state: JobState, groups: tuple[int, ...]) -> GroupPlan:
    held = {n for m in state.quorum.moves.values() if m.stage != "ending" for n in m.groups}
    ended = {n for m in state.quorum.moves.values() if m.stage == "ending" for n in m.groups}
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
        verb="restore", groups=tuple(todo), already=tuple(already), left=left,
        words="; ".join([*parts, *already]),
    )  # fmt: skip


def _plan_cordon(state: JobState, groups: tuple[int, ...]) -> GroupPlan:
    todo = tuple(n for n in groups if n not in state.barred)
    already = tuple(f"replica {n} is cordoned already" for n in groups if n in state.barred)
    least = max(1, state.the_spec().torchft.min_replicas)
    free = [n for n, g in state.worlds.items() if g.alive and n not in {*todo, *state.barred}]
    refusal = ""
    if todo and len(free) < least:
        refusal = f"{len(free)} replicas could be started again, and at least {least} are needed"
    parts = [f"replica {n} trains on, and is not started again once it ends" for n in todo]
    left = count_left(state, set())[1]
    return GroupPlan(
        verb="cordon", groups=todo, already=already, refusal=refusal, left=left,
        words="; ".join([*parts, *already]),
    )  # fmt: skip


def _plan_leave(
    state: JobState, verb: Literal["drain", "evict"], groups: tuple[int, ...], wait: bool
) -> GroupPlan:
    todo, already = [], []
    for number in groups:
        under_way = _find_move(state, verb, number)
        if under_way is not None:
            word = "drained" if under_way.kind == "drain" else "evicted"
            already.append(f"replica {number} is being {word} already ({under_way.why})")
        elif number in state.barred and not state.worlds[number].alive:
            already.append(f"replica {number} is left and cordoned already")
        else:
            todo.append(number)
    if not todo:
        return GroupPlan(verb=verb, already=tuple(already), words="; ".join(already))
    before = count_left(state, set())[1]
    members, left = count_left(state, set(todo))
    spares = [g.number for g in find_spares(state) if g.number not in todo]
    lost = sum(state.worlds[n].active and state.worlds[n].alive for n in todo)
    stand_ins = tuple(spares[:lost])
    refusal = _find_refusal(state, verb, members, left, before, wait)
    ready = f"{name_replicas(stand_ins)} stand{'' if len(stand_ins) > 1 else 's'} in"
    how = "after their step" if verb == "drain" else "at once; the step in flight is made again"
    words = [
        f"{name_replicas(tuple(todo))} leave{'' if len(todo) > 1 else 's'} {how}",
        ready if stand_ins else "no spare stands ready",
        f"{left} train on",
        *already,
    ]
    return GroupPlan(
        verb=verb, groups=tuple(todo), stand_ins=stand_ins, left=left, already=tuple(already),
        refusal=refusal, words="; ".join(words),
    )  # fmt: skip


def _find_refusal(
    state: JobState, verb: str, members: int, left: int, before: int, wait: bool
) -> str:
    """Return why it must not be; empty where it may."""
    config = state.the_spec().torchft
    least = max(1, config.min_replicas)
    if verb == "drain" and config.lighthouse != "perdure":
        return (
            "only perdure's own lighthouse can form a quorum without a living replica "
            '(torchft.lighthouse = "perdure"); evict ends its processes'
        )
    if left >= before and members:
        return ""  # It trains nothing now.
    if not members:
        return "nobody else trains who has the state: it would be lost"
    if left < least and not wait:
        return f"{left} replicas would train, and at least {least} are needed"
    return ""


def _find_move(state: JobState, verb: str, number: int) -> GroupMove | None:
    """Return what already leaves the group no less urgently than `verb` would."""
    for move in state.quorum.moves.values():
        urgent = verb == "drain" or move.kind == "evict" or move.stage == "ending"
        if number in move.groups and urgent:
            return move
    return None
