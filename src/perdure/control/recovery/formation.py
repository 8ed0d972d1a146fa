"""Generations: how a world is ended and the next one formed.

Each phase is one `Assignment` to all nodes. Assignments are levels: they may be repeated, and a
node that registers late gets the newest.
"""

from typing import Literal

from perdure.control.elastic.state import ElasticState
from perdure.control.recovery.placement import place_nodes
from perdure.control.state import Answer, ControllerState, Ending
from perdure.control.steering.changes import note_high, restart_changes
from perdure.control.steering.pauses import find_steering, restart_pause
from perdure.model.actions import AnswerCommand, AnyAction, Assignment, AssignNodes, EndJob
from perdure.model.events import JobSubmitted, RanksStarted, StoreReady
from perdure.model.settings import Steering

REGISTER_TIMEOUT_S = 180.0
"""From the job's first event until the last node's first hello, its keeper's start included."""
_FORM_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 20.0


def note_submission(state: ControllerState, now: float, event: JobSubmitted) -> list[AnyAction]:
    """Learn what the job is; its nodes have to register in time."""
    state.spec, state.submitted_s = event.spec, event.at_s
    patience_s = event.spec.restart.node_wait_s if event.spec.remote else 0.0
    state.phase_deadline_s = now + max(REGISTER_TIMEOUT_S, patience_s)
    return []


def has_enough(state: ControllerState) -> bool:
    """Return whether the first world can be formed: spare nodes from elsewhere may come later."""
    spec = state.the_spec()
    local = set(range(spec.local_nodes)) <= set(state.nodes)
    return local and len(state.nodes) >= spec.nodes


def form_world(
    state: ControllerState,
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
    state.phase = "forming"
    state.generation += 1
    state.phase_deadline_s = now + _FORM_TIMEOUT_S
    state.store = None
    state.started.clear()
    state.exits.clear()
    state.elastic = ElasticState()
    state.joined.clear()
    state.stepping, state.stepping_s = False, None
    state.resumed_step = -1
    state.boundary = None
    state.stacks = None
    state.standing.clear()
    state.withheld.clear()
    state.checkpoint_due_s = None
    note_high(state, state.step)
    restart_changes(state)
    restart_pause(state)
    for command in state.commands.values():
        if command.kind == "checkpoint":
            command.args.pop("at_step", None)  # What it agreed on died with the older world.
    return [assign(state, "store", reason, grace_s=grace_s)]


def assign(
    state: ControllerState,
    phase: Literal["store", "run", "end"],
    reason: str,
    *,
    grace_s: float = 0.0,
) -> AssignNodes:
    """Number a new assignment and send it to every node that has registered."""
    state.number += 1
    store = state.store
    state.assignment = Assignment(
        number=state.number,
        generation=state.generation + (phase == "end"),
        phase=phase,
        grace_s=grace_s,
        master_addr=store.host if store else "",
        master_port=store.port if store else 0,
        agent_store=store.agent_store if store else False,
        restart_count=max(0, state.generation),
        placement=state.placement,
        steering=find_steering(state) if phase == "run" else Steering(),
        reason=reason,
    )
    return AssignNodes(nodes=tuple(sorted(state.nodes)), assignment=state.assignment, reason=reason)


def note_store(state: ControllerState, now: float, event: StoreReady) -> list[AnyAction]:
    """Take that the generation's store is served."""
    if event.generation == state.generation and state.phase == "forming":
        state.store = event
    return advance_formation(state, now)


def advance_formation(state: ControllerState, now: float) -> list[AnyAction]:
    """Start the ranks once nothing older lives anywhere and the store is served."""
    if state.phase != "forming" or state.store is None:
        return []
    # A lost node cannot say that it is empty. Its ranks have lost their store and their peers,
    # and it ends them before anything else once it is back.
    waited = set(state.nodes) - (set(state.lost) - set(state.placement))
    if any(state.stopped.get(node, -1) < state.generation - 1 for node in waited):
        return []
    state.phase = "starting"
    state.phase_deadline_s = now + _FORM_TIMEOUT_S
    return [assign(state, "run", f"generation {state.generation}: all older ranks are gone")]


def wait_for_nodes(state: ControllerState, now: float, missing: list[int]) -> list[AnyAction]:
    """A world whose lost nodes no spare can replace waits for them, and in the end gives up."""
    wait_s = state.the_spec().restart.node_wait_s
    due_s = max(state.lost[node] for node in missing) + wait_s
    if now < due_s:
        state.phase_deadline_s = due_s
        return []
    names = ", ".join(f"node {node}" for node in missing)
    why = f"{names} did not come back within {wait_s:g} s, and no spare node can stand in"
    return end_job(state, now, "failed", 1, why)


def note_started(state: ControllerState, now: float, event: RanksStarted) -> list[AnyAction]:
    """A node has started its ranks; the world runs once all have."""
    if event.generation == state.generation and state.phase == "starting":
        state.started.add(event.node)
        if state.started >= set(state.placement):
            state.phase, state.stepping_s = "running", now
            state.phase_deadline_s = None
    return []


def end_job(
    state: ControllerState,
    now: float,
    status: Literal["done", "failed", "stopped"],
    exit_code: int,
    reason: str,
    *,
    grace_s: float = 0.0,
) -> list[AnyAction]:
    """Begin the end: every node ends what it runs, keeper included."""
    if state.phase in ("ending", "ended"):
        return []
    state.phase = "ending"
    state.phase_deadline_s = now + _END_TIMEOUT_S + grace_s
    state.ending = Ending(status, exit_code, reason)
    state.boundary = None
    state.stacks = None
    state.checkpoint_due_s = None
    return [
        *_answer_all(state, reason),
        assign(state, "end", reason, grace_s=grace_s),
        *advance_end(state, now),
    ]


def _answer_all(state: ControllerState, reason: str) -> list[AnyAction]:
    """Answer every command that is still open: the end is all that can become of it."""
    actions: list[AnyAction] = []
    for id_ in sorted(state.commands):
        ok, why = state.commands[id_].kind in ("stop", "kill"), f"the job has ended: {reason}"
        state.answered[id_] = Answer(ok, why, {})
        actions.append(AnswerCommand(id=id_, ok=ok, reason=why))
    state.commands.clear()
    return actions


def advance_end(state: ControllerState, now: float) -> list[AnyAction]:
    """Finish once every registered node is empty, or the bound has passed.

    A lost node cannot say that it is; whoever started its agent ends what it still runs.
    """
    if state.phase != "ending" or state.ending is None:
        return []
    overdue = state.phase_deadline_s is not None and now >= state.phase_deadline_s
    there = set(state.nodes) - set(state.lost)
    if not overdue and any(state.stopped.get(n, -1) < state.generation for n in there):
        return []
    state.phase = "ended"
    state.phase_deadline_s = None
    return close_job(state)


def close_job(state: ControllerState) -> list[AnyAction]:
    """Return the job's last action, again where `JobEnded` did not reach the journal."""
    ending = state.ending
    if state.phase != "ended" or state.closed or ending is None:
        return []
    return [EndJob(status=ending.status, exit_code=ending.exit_code, reason=ending.reason)]


def note_end(state: ControllerState) -> list[AnyAction]:
    """Know that `JobEnded` is in the journal: nothing is due any more."""
    state.phase, state.closed = "ended", True
    state.phase_deadline_s = state.checkpoint_due_s = None
    return []
