"""Drain, cordon, evict, restore: what a verb would do, and its beginning.

`plan_verb` looks at the controller's state and says what would happen, or why it must not; a dry
run is its answer and nothing else. `receive_verb` begins exactly what the plan says. Each command
is all or nothing: one node that cannot be left refuses it for the others, too.
"""

from typing import Any, ClassVar, Literal

import msgspec

from perdure.control.job import Answer, JobState, OpenCommand, OpenMove
from perdure.control.membership import membership_of
from perdure.control.membership.members import (
    find_objection,
    forget_ends,
    list_empty_slots,
    list_leavers,
)
from perdure.control.membership.quorum import (
    count_left,
    count_missing,
    describe_lack,
    list_spare_groups,
    refuse_drain,
)
from perdure.control.recovery.elsewhere import admit_elsewhere, refuse_holds
from perdure.control.recovery.formation import begin_generation
from perdure.control.recovery.placement import bar, count_shortage
from perdure.control.steering.group_moves import take_back
from perdure.control.steering.moves import restore_move
from perdure.control.targets import UnknownTargetError, name_all, resolve_nodes
from perdure.model.input.values import refuse_value
from perdure.model.orders import AnyAction, NoteDraining
from perdure.model.steering import LEAVE_DEADLINE_S, PlaceVerb
from perdure.policy import estimate_restart_cost_s


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


class WorldPlan(Plan, frozen=True, kw_only=True):
    """A plan of what a verb would do to the nodes of the only world."""

    noun: ClassVar[str] = "node"

    moves: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """Node, the one that stands `to` be in its place or None where none is ready, ranks."""
    restart_s: float = 0.0
    """About how long nothing is trained; 0 where training goes on."""


class GroupPlan(Plan, frozen=True, kw_only=True):
    """A plan of what a verb would do to replica groups."""

    noun: ClassVar[str] = "replica"

    replicas: list[int] = msgspec.field(default_factory=list)
    """The same as `nodes`."""
    stand_ins: list[int] = msgspec.field(default_factory=list)
    """Spare groups that stand ready to take their places."""
    left: int = 0
    """How many would train afterwards."""


def plan_verb(state: JobState, verb: PlaceVerb, args: dict[str, Any]) -> Plan:
    """Return what `verb` would do as things stand. Changes nothing."""
    of_groups = membership_of(state).kind == "replica groups"
    plan = GroupPlan if of_groups else WorldPlan
    try:
        nodes = resolve_nodes(state, [str(target) for target in args.get("targets", ())])
    except UnknownTargetError as error:
        return plan(verb=verb, refusal=str(error))
    if not state.worlds:
        return plan(verb=verb, refusal="no replica group was started yet")
    if verb == "restore":
        return (_plan_restore_groups if of_groups else _plan_restore)(state, nodes)
    todo, already = _split_targets(state, verb, nodes, plan.noun)
    if verb == "cordon":
        return (_plan_cordon_groups if of_groups else _plan_cordon)(state, todo, already)
    if not todo:
        return plan(verb=verb, already=already, words="; ".join(already))
    leave = _plan_leave_groups if of_groups else _plan_leave
    return leave(state, verb, todo, already, args)


def _split_targets(
    state: JobState, verb: PlaceVerb, nodes: tuple[int, ...], noun: str
) -> tuple[list[int], list[str]]:
    """Return where something is left to do, and why nothing is elsewhere."""
    todo, already = [], []
    for node in nodes:
        under_way = _find_move(state, verb, node) if verb != "cordon" else None
        if under_way is not None:
            word = "drained" if under_way.kind == "drain" else "evicted"
            already.append(f"{noun} {node} is being {word} already ({under_way.why})")
        elif node in state.barred and (
            verb == "cordon" or not membership_of(state).runs(state, node)
        ):
            left = "" if verb == "cordon" else "left and "
            already.append(f"{noun} {node} is {left}cordoned already")
        else:
            todo.append(node)
    return todo, already


def preview_verb(state: JobState, kind: str, args: dict[str, Any]) -> Answer | None:
    """Return the answer to a dry run; None where the command is none."""
    verbs: dict[str, PlaceVerb] = {v: v for v in ("drain", "cordon", "evict", "restore")}
    if not args.get("dry_run") or kind not in verbs or state.spec is None:
        return None
    if state.over:
        return Answer(False, "the job is ending", {})
    try:
        plan = plan_verb(state, verbs[kind], args)
    except (TypeError, ValueError) as error:
        return Answer(False, f"malformed arguments: {error}", {})
    result = {"dry_run": True, **_render(plan)}
    return Answer(not plan.refusal, plan.refusal or plan.words, result)


def _render(plan: Plan) -> dict[str, Any]:
    """Return a plan as an answer carries it."""
    told = msgspec.structs.asdict(plan)
    return {name: value for name, value in told.items() if name not in ("refusal", "words")}


def receive_verb(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Begin a verb, refuse it, or say that it is done already."""
    verb: PlaceVerb = command.kind  # type: ignore[assignment]
    if command.args.get("dry_run"):
        told = preview_verb(state, verb, command.args) or Answer(False, "", {})
        return state.answer(command.id, *told)
    plan = plan_verb(state, verb, command.args)
    if plan.refusal:
        return state.answer(command.id, False, plan.refusal, _render(plan))
    who = command.who or "an operator"
    why = str(command.args.get("why", ""))
    reason = f"{verb} asked for by {who}{f': {why}' if why else ''}"
    if plan.way in ("drain", "evict"):
        return _begin_move(state, command, plan, reason)
    restore = _restore_group if isinstance(plan, GroupPlan) else _restore
    actions: list[AnyAction] = []
    for node in plan.nodes:
        if plan.way == "restore":
            actions += restore(state, now, node, who, reason)
        else:
            actions += bar(state, node, who, reason)
    result = _render(plan) | {"took_s": round(now - command.at_s, 3)}
    return [*actions, *state.answer(command.id, True, plan.words, result)]


def _begin_move(state: JobState, command: OpenCommand, plan: Plan, reason: str) -> list[AnyAction]:
    args, of_groups = command.args, isinstance(plan, GroupPlan)
    patience_s = float(args.get("deadline_s") or LEAVE_DEADLINE_S)
    if why := refuse_value(patience_s):
        raise ValueError(f"deadline_s: {why}")
    actions: list[AnyAction] = []
    for move in list(state.moves.values()) if of_groups else []:  # It may be less urgent.
        if set(move.nodes) & set(plan.nodes):
            why = f"overtaken: {reason}"
            actions += take_back(state, command.at_s, move, why, keep=False)
    placement = () if of_groups else state.world.placement
    state.commands[command.id] = command
    state.moves[command.id] = OpenMove(
        id=command.id,
        kind="drain" if plan.way == "drain" else "evict",
        nodes=list(plan.nodes),
        groups={node: group for group, node in enumerate(placement) if node in plan.nodes},
        who=command.who or "an operator",
        why=reason,
        at_s=command.at_s,
        deadline_s=command.at_s + patience_s,
        force=bool(args.get("force")),
        wait=bool(args.get("wait")),
        instead=plan.words if plan.way != plan.verb else "",
    )
    noted = [NoteDraining(node=n, who=command.who, reason=reason) for n in plan.nodes]
    return [*actions, *noted]


def _restore(state: JobState, now: float, node: int, who: str, reason: str) -> list[AnyAction]:
    actions = restore_move(state, now, node, reason)
    if node in state.cordoned or list_empty_slots(state, node):
        actions += state.release(node, who, reason)
    forget_ends(state, node)
    return actions + membership_of(state).fill(state, reason)


def _plan_restore(state: JobState, nodes: tuple[int, ...]) -> WorldPlan:
    held = {node for move in state.moves.values() for node in move.nodes}
    empty = {node: list_empty_slots(state, node) for node in nodes}
    todo = [node for node in nodes if node in state.cordoned or node in held or empty[node]]
    already = [f"node {n} may run ranks already" for n in nodes if n not in todo]
    parts = []
    for node in todo:
        kept = node in state.world.placement
        what = "keeps its ranks" if kept else "stands ready as a spare node"
        if empty[node]:
            what = f"gets new processes in {name_all('slot', empty[node])}"
        elif membership_of(state).goes_on(state) and not list_leavers(state, (node,)):
            what = "is filled with new members"
        parts.append(f"node {node} {what}")
    return WorldPlan(
        verb="restore", way="restore" if todo else "nothing", nodes=todo, already=already,
        words="; ".join([*parts, *already]),
    )  # fmt: skip


def _plan_cordon(state: JobState, todo: list[int], already: list[str]) -> WorldPlan:
    refusal = "" if membership_of(state).goes_on(state) else _find_refusal(state, set(todo))
    moves = _plan_moves(state, todo)
    parts = []
    for node in todo:
        ranks = next((move["ranks"] for move in moves if move["node"] == node), ())
        stay = f"; {name_all('rank', ranks)} stay until the next world" if ranks else ""
        parts.append(f"node {node} takes no new ranks{stay}")
    return WorldPlan(
        verb="cordon", way="cordon" if todo else "nothing", nodes=todo, moves=moves,
        already=already, refusal=refusal, words="; ".join([*parts, *already]),
    )  # fmt: skip


def _plan_leave(
    state: JobState,
    verb: Literal["drain", "evict"],
    todo: list[int],
    already: list[str],
    args: dict[str, Any],
) -> WorldPlan:
    if membership_of(state).goes_on(state):
        return _plan_elastic_leave(state, verb, todo, already)
    moves = _plan_moves(state, todo)
    if not moves:
        refusal = _find_refusal(state, set(todo))
        words = [f"nothing runs on node {n}; it takes no new ranks" for n in todo]
        return WorldPlan(
            verb=verb, way="cordon", nodes=todo, already=already, refusal=refusal,
            words="; ".join([*words, *already]),
        )  # fmt: skip
    supervised = state.world.stepping and not state.world.joined
    way: Literal["drain", "evict"] = "evict" if supervised else verb
    short = count_shortage(state, set(todo))
    refusal = _describe_shortage(state, set(todo)) if short and not args.get("wait") else ""
    if verb == "drain" and supervised and not args.get("force"):
        refusal = (
            "the script does not call perdure.init(), so perdure cannot save its state: what it "
            "has not saved itself would be lost; --force does that, as evict"
        )
    return WorldPlan(
        verb=verb, way=way, nodes=todo, moves=moves, already=already,
        steps_lost=_count_steps_lost(state, way),
        restart_s=round(estimate_restart_cost_s(tuple(state.restarts_s)), 3),
        refusal=refusal, words=_describe_leave(state, way, verb, moves, already),
    )  # fmt: skip


def _plan_elastic_leave(
    state: JobState, verb: Literal["drain", "evict"], nodes: list[int], already: list[str]
) -> WorldPlan:
    """Members leave, and the others go on; nobody has to stand in."""
    there = [(node, list(list_leavers(state, (node,)))) for node in nodes]
    moves = [{"node": node, "to": None, "ranks": ranks} for node, ranks in there if ranks]
    leavers = [rank for _, ranks in there for rank in ranks]
    left = len(membership_of(state).list_asked(state)) - len(leavers)
    one = len(leavers) == 1
    if verb == "drain":
        how = f"{'leaves' if one else 'leave'} at a step that all agree on; nothing is made again"
    else:
        was = "is ended at once; what it was" if one else "are ended at once; what they were"
        how = f"{was} computing is made again"
    way = f"{name_all('rank', leavers)} {how}"
    words = f"{way}; {left} go on"
    if not leavers:
        words = "; ".join(f"no member runs on node {n}; it takes no new ranks" for n in nodes)
    return WorldPlan(
        verb=verb, way=verb, nodes=nodes, moves=moves, already=already,
        refusal=find_objection(state, nodes), words="; ".join([words, *already]),
    )  # fmt: skip


def _describe_leave(
    state: JobState,
    way: str,
    verb: str,
    moves: list[dict[str, Any]],
    already: list[str],
) -> str:
    parts = [
        f"{name_all('rank', move['ranks'])} {'move' if len(move['ranks']) > 1 else 'moves'} "
        f"from node {move['node']} to "
        + ("the next spare node that is ready" if move["to"] is None else f"node {move['to']}")
        for move in moves
    ]
    begin = "after a checkpoint at a step that all ranks agree on"
    if way == "evict":
        begin = "the world is ended at once"
    if way != verb:
        begin += ", because the script does not call perdure.init()"
    lost = _count_steps_lost(state, way)
    cost = "no step is lost" if lost == 0 else f"about {lost} steps are made again"
    if lost is None:
        cost = "what the script has not saved itself is lost"
    seen = len(state.restarts_s)
    basis = f"median of {seen} so far" if seen else "none was measured yet"
    restart_s = estimate_restart_cost_s(tuple(state.restarts_s))
    text = f"{begin}, {', '.join(parts)}; {cost}; a restart takes about {restart_s:.1f} s ({basis})"
    return "; ".join([text, *already])


def _plan_moves(state: JobState, nodes: list[int]) -> list[dict[str, Any]]:
    """Return who would stand in for whom: the rules are `place_nodes`'s."""
    spares = (node for node in state.spares if node not in nodes)
    return [
        {"node": node, "to": next(spares, None), "ranks": list(state.the_spec().ranks_of(group))}
        for group, node in enumerate(state.world.placement)
        if node in nodes
    ]


def _find_refusal(state: JobState, nodes: set[int]) -> str:
    """Return why fewer than the nodes of a world would be left; empty where enough would be."""
    worse = count_shortage(state, nodes) > count_shortage(state, set())
    return _describe_shortage(state, nodes) if worse else ""


def _describe_shortage(state: JobState, nodes: set[int]) -> str:
    spec = state.the_spec()
    short = count_shortage(state, nodes)
    spares = [node for node in state.spares if node not in nodes]
    ready = f"node {', '.join(map(str, spares))} stands ready"
    have = ready if spares else "no spare node is ready"
    return (
        f"the world needs {spec.nodes} node{'s' if spec.nodes > 1 else ''} and would be {short} "
        f"short: {have}"
    )


def _count_steps_lost(state: JobState, way: str) -> int | None:
    if way == "drain":
        return 0
    if not state.world.joined or state.step < 0:
        return None
    return max(0, state.step - max(state.saved_step, 0))


# --- replica groups -----------------------------------------------------------------------------


def _restore_group(
    state: JobState, now: float, number: int, who: str, reason: str
) -> list[AnyAction]:
    """Let a group train again; one that has ended is started."""
    group, actions = state.worlds[number], list[AnyAction]()
    for move in list(state.moves.values()):
        if number in move.nodes and move.stage != "ending":
            actions += take_back(state, now, move, reason)
    if number in state.cordoned:
        actions += state.release(number, who, reason)
    if state.the_spec().served:
        actions += admit_elsewhere(state, group, reason)
    elif group.phase in ("parked", "failed"):
        group.replica.active = count_missing(state) > 0
        group.failures.clear()
        actions += begin_generation(state, now, group, reason)
    return actions


def _plan_restore_groups(state: JobState, groups: tuple[int, ...]) -> GroupPlan:
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
            if state.the_spec().served:
                what = "is let in again, once others have started it"
            parts.append(f"replica {number} {what if away else 'stays'}")
        else:
            already.append(f"replica {number} may train already")
    left = count_left(state, set())[1]
    return GroupPlan(
        verb="restore", way="restore", nodes=todo, replicas=todo, already=already, left=left,
        words="; ".join([*parts, *already]),
    )  # fmt: skip


def _plan_cordon_groups(state: JobState, todo: list[int], already: list[str]) -> GroupPlan:
    free = [n for n, g in state.worlds.items() if g.alive and n not in {*todo, *state.barred}]
    refusal = describe_lack(state, len(free), "could be started again") if todo else ""
    refusal = refuse_holds(state, todo) or refusal
    elsewhere = state.the_spec().served
    after = "its next life is held" if elsewhere else "is not started again once it ends"
    parts = [f"replica {n} trains on, and {after}" for n in todo]
    left = count_left(state, set())[1]
    return GroupPlan(
        verb="cordon", way="cordon", nodes=todo, replicas=todo, already=already, left=left,
        refusal=refusal, words="; ".join([*parts, *already]),
    )  # fmt: skip


def _plan_leave_groups(
    state: JobState,
    verb: Literal["drain", "evict"],
    todo: list[int],
    already: list[str],
    args: dict[str, Any],
) -> GroupPlan:
    before = count_left(state, set())[1]
    members, left = count_left(state, set(todo))
    spares = [g.number for g in list_spare_groups(state) if g.number not in todo]
    lost = sum(state.worlds[n].replica.active and state.worlds[n].alive for n in todo)
    stand_ins = spares[:lost]
    refusal = refuse_holds(state, todo)
    refusal = refusal or _refuse_leaving(state, verb, members, left, before, bool(args.get("wait")))
    ready = f"{name_all('replica', stand_ins)} stand{'' if len(stand_ins) > 1 else 's'} in"
    how = "after their step" if verb == "drain" else "at once; the step in flight is made again"
    words = [
        f"{name_all('replica', todo)} leave{'' if len(todo) > 1 else 's'} {how}",
        ready if stand_ins else "no spare stands ready",
        f"{left} train on",
        *already,
    ]
    return GroupPlan(
        verb=verb, way=verb, nodes=todo, replicas=todo, stand_ins=stand_ins, left=left,
        already=already, refusal=refusal, words="; ".join(words),
    )  # fmt: skip


def _refuse_leaving(
    state: JobState, verb: str, members: int, left: int, before: int, wait: bool
) -> str:
    """Return why it must not be; empty where it may."""
    if verb == "drain" and (why := refuse_drain(state)):
        return why
    if left >= before and members:
        return ""  # It trains nothing now.
    if not members:
        return "nobody else trains who has the state: it would be lost"
    return "" if wait else describe_lack(state, left, "would train")


def _find_move(state: JobState, verb: str, number: int) -> OpenMove | None:
    """Return the move that already leaves a group no less urgently than `verb` would."""
    for move in state.moves.values():
        urgent = verb == "drain" or move.kind == "evict" or move.stage == "ending"
        if number in move.nodes and urgent:
            return move
    return None
