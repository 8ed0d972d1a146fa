"""Generations: how a world is ended and the next one formed.

Each phase is one `Assignment` to all nodes. Assignments are levels: they may be repeated, and a
node that registers late gets the newest.
"""

from typing import Literal

from msgspec import structs

from perdure.control.agreement.changes import note_high
from perdure.control.job import JobState
from perdure.control.membership import membership_of
from perdure.control.promises import make_steering
from perdure.control.recovery.elsewhere import hold_known
from perdure.control.recovery.placement import place_nodes
from perdure.control.world import WorldState
from perdure.model.errors import PlatformError
from perdure.model.events import (
    GenerationStopped,
    JobEnded,
    JobSubmitted,
    OwnChecked,
    RanksStarted,
    StoreReady,
)
from perdure.model.orders import (
    FETCH_S,
    AnyAction,
    Assignment,
    AssignNodes,
    CheckOwn,
    EndJob,
)
from perdure.model.steering import Steering

REGISTER_TIMEOUT_S = 180.0
"""From the job's first event until the last node's first hello, its keeper's start included."""
FORM_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 20.0


def note_submission(state: JobState, now: float, event: JobSubmitted) -> list[AnyAction]:
    """Learn what the job is; its nodes have to register in time."""
    state.spec, state.submitted_s = event.spec, event.at_s
    config = event.spec.checkpoint
    state.saves_end = bool(config.every_steps or config.every_s or config.url)
    state.worlds = membership_of(state).make_worlds()
    if event.spec.served:
        state.enter("enough nodes are there")
        return hold_known(state)
    patience_s = event.spec.restart.node_wait_s if event.spec.remote else 0.0
    state.deadline_s = now + max(REGISTER_TIMEOUT_S, patience_s)
    return []


def has_enough(state: JobState) -> bool:
    """Return whether the first world can be formed: spare nodes from elsewhere may come later."""
    spec = state.the_spec()
    local = set(range(spec.local_nodes)) <= set(state.nodes)
    return local and len(state.nodes) >= spec.nodes


def form_world(
    state: JobState,
    now: float,
    reason: str,
    *,
    grace_s: float = 0.0,
    without: int | None = None,
) -> list[AnyAction]:
    """Begin the next generation: end everything older everywhere, and serve a new store.

    Node `without` is left out where a spare one can stand in for it.
    """
    changed = place_nodes(state, without)
    if changed and changed not in reason:
        reason = f"{reason}; {changed}"
    if state.phase == "pending":
        state.enter("enough nodes are there")
        state.deadline_s = None
    state.boundary = None
    note_high(state, state.step)
    state.steering.begin_generation()
    for command in state.commands.values():
        if command.kind == "checkpoint":
            command.settled.pop("at_step", None)  # What it agreed on died with the older world.
    return begin_generation(state, now, state.world, reason, grace_s=grace_s)


def begin_generation(
    state: JobState, now: float, world: WorldState, reason: str, *, grace_s: float = 0.0
) -> list[AnyAction]:
    """End what is older on the nodes of a world, or of a group, and serve a new store."""
    state.generation += 1
    state.worlds[world.number] = new = world.begin(state.generation, now + FORM_TIMEOUT_S + grace_s)
    return [assign(state, new, "store", reason, grace_s=grace_s)]


def assign(
    state: JobState,
    world: WorldState,
    phase: Literal["stop", "store", "run"],
    reason: str,
    *,
    grace_s: float = 0.0,
) -> AssignNodes:
    """Number a new assignment of `world`, and send it to every node that may have a part in it."""
    membership = membership_of(state)
    assignment = membership.complete(_number(state, world, phase, reason, grace_s), world)
    world.assignment = assignment
    nodes = membership.list_told_nodes(state, world)
    return AssignNodes(nodes=nodes, assignment=assignment, reason=reason)


def assign_again(state: JobState, reason: str) -> list[AnyAction]:
    """Return what every node was told last, once more."""
    everybody = tuple(sorted(state.nodes))
    if state.farewell is not None:
        return [AssignNodes(nodes=everybody, assignment=state.farewell, reason=reason)]
    return [
        AssignNodes(
            nodes=membership_of(state).list_told_nodes(state, world),
            assignment=world.assignment,
            reason=reason,
        )
        for _, world in sorted(state.worlds.items())
        if world.assignment is not None
    ]


def _number(
    state: JobState,
    world: WorldState,
    phase: Literal["stop", "store", "run", "end"],
    reason: str,
    grace_s: float,
) -> Assignment:
    state.number += 1
    store = world.store
    return Assignment(
        number=state.number,
        generation=world.generation + (phase in ("stop", "end")),
        phase=phase,
        grace_s=grace_s,
        master_addr=store.host if store else "",
        master_port=store.port if store else 0,
        agent_store=store.agent_store if store else False,
        restart_count=max(0, world.generation),
        placement=world.placement,
        steering=_make_steering(state, world) if phase == "run" else Steering(),
        reason=reason,
    )


def _make_steering(state: JobState, world: WorldState) -> Steering:
    """Return what its ranks have to know before their first step."""
    others = (
        w for w in state.worlds.values() if w is not world and w.alive and not w.replica.absent
    )
    heals = any(w.replica.name in state.quorum.members for w in others if w.replica.name)
    return structs.replace(make_steering(state.steering), heals=heals)


def note_store(state: JobState, now: float, event: StoreReady) -> list[AnyAction]:
    """Take that a generation's store is served."""
    world = state.find_world(event.generation)
    if world is not None and world.phase == "forming":
        world.store = event
    return advance_formation(state, now)


def note_stopped(state: JobState, now: float, event: GenerationStopped) -> list[AnyAction]:
    """Nothing of a generation, or of an older one, lives on a node."""
    known = state.stopped.get(event.node, -1)
    state.stopped[event.node] = max(known, event.generation)
    return [*advance_formation(state, now), *advance_end(state, now)]


def note_checked(state: JobState, now: float, event: OwnChecked) -> list[AnyAction]:
    """Take what a node has found of the script's own checkpoints."""
    world = state.find_world(event.generation)
    if world is not None:
        world.checked.add(event.node)
    return advance_formation(state, now)


def check_again(state: JobState, reason: str) -> list[AnyAction]:
    """Return the open question for own checkpoints: the last controller may have died."""
    open_ = [w.checking for w in state.worlds.values() if w.phase == "forming" and w.checking]
    return [structs.replace(order, reason=reason) for order in open_]


def _ask_own(state: JobState, world: WorldState, nodes: set[int]) -> list[AnyAction]:
    """Ask for the script's own checkpoints, once all that could write one has ended everywhere.

    Replica groups live on beside one another, and what is observed is not touched. While a lost
    node may still write, a node that stands in for it only fetches a copy.
    """
    spec = state.the_spec()
    if not (spec.checkpoint.own and spec.unordered.mends) or spec.groups:
        return []
    if world.checking or (state.lost and not spec.checkpoint.url):
        return []
    why = f"generation {world.generation}: all older ranks are gone"
    if (spec.checkpoint.url or spec.checkpoint.own_copy) and world.deadline_s is not None:
        world.deadline_s += FETCH_S * len(spec.checkpoint.own)
    world.checking = CheckOwn(
        generation=world.generation, nodes=tuple(sorted(nodes)), move=not state.lost, reason=why
    )
    return [world.checking]


def advance_formation(state: JobState, now: float) -> list[AnyAction]:
    """Start the ranks of each world whose store is served and of which nothing older lives."""
    actions: list[AnyAction] = []
    membership = membership_of(state)
    for _, world in sorted(state.worlds.items()):
        if world.phase != "forming" or world.store is None:
            continue
        waited = membership.list_awaited_nodes(state, world)
        if any(state.stopped.get(node, -1) < world.generation - 1 for node in waited):
            continue
        if now < world.held_s:
            continue
        actions += _ask_own(state, world, waited)
        asked = world.checking.nodes if world.checking is not None else ()
        if not waited.intersection(asked) <= world.checked:
            continue
        world.enter("its store is served, and nothing older lives")
        world.deadline_s = now + FORM_TIMEOUT_S
        said, reason = membership.announce(state, world)
        actions += said
        actions.append(assign(state, world, "run", reason))
    return actions


def hold_world(state: JobState, until_s: float) -> None:
    """Start no ranks of the world that is being formed before `until_s`."""
    state.world.held_s = state.world.deadline_s = until_s


def release_world(state: JobState, now: float) -> list[AnyAction]:
    """Start the ranks of a world that was held."""
    world = state.world
    if world.phase != "forming" or not world.held_s:
        return []
    world.held_s, world.deadline_s = 0.0, now + FORM_TIMEOUT_S
    return advance_formation(state, now)


def wait_for_nodes(state: JobState, now: float, missing: list[int]) -> list[AnyAction]:
    """Wait for lost nodes that no spare can replace; in the end give up."""
    wait_s = state.the_spec().restart.node_wait_s
    due_s = max(state.lost[node] for node in missing) + wait_s
    if now < due_s:
        state.world.deadline_s = due_s
        return []
    names = ", ".join(f"node {node}" for node in missing)
    why = f"{names} did not come back within {wait_s:g} s, and no spare node can stand in"
    return end_job(state, now, "failed", 1, why)


def note_started(state: JobState, now: float, event: RanksStarted) -> list[AnyAction]:
    """A node has started its ranks; the world runs once all have."""
    world = state.find_world(event.generation)
    if world is not None and world.phase == "starting":
        world.started.add(event.node)
        if world.started >= set(world.placement):
            world.enter("all its nodes have started its ranks")
            world.stepping_s, world.deadline_s = now, None
    return []


def end_job(
    state: JobState,
    now: float,
    status: Literal["done", "failed", "stopped"],
    exit_code: int,
    reason: str,
    *,
    grace_s: float = 0.0,
    at_once: bool = False,
) -> list[AnyAction]:
    """Begin the end: every node ends what it runs, keeper included.

    A job whose end was to be saved, and that never was, has not ended well. If the ranks are to
    end `at_once`, no file of a checkpoint is waited for.
    """
    if state.over:
        return []
    to_save = status == "stopped" or state.saves_end
    if exit_code == 0 and to_save and state.unsaved:
        exit_code = PlatformError.exit_code
        reason = f"{reason}, and every checkpoint failed: {state.unsaved}"
        status = "failed" if status == "done" else status
    state.enter("it is done, stopped or given up")
    state.ending = EndJob(status=status, exit_code=exit_code, reason=reason)
    state.boundary = None
    why, answers = f"the job has ended: {reason}", list[AnyAction]()
    for id_, command in sorted(state.commands.items()):  # The end is all that can become of it.
        answers += state.answer(id_, command.kind in ("stop", "kill"), why, {})
    all_ = membership_of(state).make_farewell(state)
    farewell = _number(state, all_, "end", reason, grace_s)
    writer_s = 0.0 if at_once else farewell.writer_s
    state.deadline_s = now + _END_TIMEOUT_S + grace_s + writer_s
    state.farewell = structs.replace(farewell, exit_code=exit_code, writer_s=writer_s)
    for world in state.worlds.values():
        if world.alive:
            world.end()
    nodes = tuple(sorted(state.nodes))
    told = AssignNodes(nodes=nodes, assignment=state.farewell, reason=reason)
    return [*answers, told, *advance_end(state, now)]


def advance_end(state: JobState, now: float) -> list[AnyAction]:
    """Finish once every registered node is empty, or the bound has passed.

    A lost node cannot say that it is; whoever started its agent ends what it still runs.
    """
    if state.phase != "ending" or state.ending is None:
        return []
    overdue = state.deadline_s is not None and now >= state.deadline_s
    there = set(state.nodes) - set(state.lost)
    if not overdue and any(state.stopped.get(n, -1) < state.generation for n in there):
        return []
    state.enter("all is empty")
    state.deadline_s = None
    return close_job(state)


def close_job(state: JobState) -> list[AnyAction]:
    """Return the job's last action, again where `JobEnded` did not reach the journal."""
    open_ = state.phase == "ended" and not state.closed
    return [state.ending] if open_ and state.ending is not None else []


def note_end(state: JobState, now: float, event: JobEnded) -> list[AnyAction]:
    """Know that `JobEnded` is in the journal: nothing is due any more."""
    if not state.over:
        state.enter("it is done, stopped or given up")
    if state.phase == "ending":
        state.enter("all is empty")
    state.closed, state.deadline_s = True, None
    return []
