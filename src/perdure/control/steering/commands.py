"""Operators' commands: taken once by id, answered once, never half applied."""

import math
from collections.abc import Callable
from functools import partial

from perdure.control.agreement.boundary import drop_boundary, note_pace, open_boundary
from perdure.control.job import JobState, OpenCommand
from perdure.control.joining import receive_invite, receive_join, receive_revoke
from perdure.control.membership import membership_of
from perdure.control.recovery.formation import end_job, form_world
from perdure.control.recovery.notices import receive_notice
from perdure.control.recovery.probing import receive_probe
from perdure.control.steering.saving import start_checkpoint
from perdure.control.steering.steer import receive_resume, start_pause, start_set
from perdure.control.steering.verbs import receive_verb
from perdure.model.events import CommandReceived, FaultInjected, NodeAsked, OperatorNoted
from perdure.model.failures import Cause
from perdure.model.job import RestartConfig
from perdure.model.orders import AnyAction, InjectFault, RecordEvent
from perdure.model.steering import find_note_fault

_STOP_TIMEOUT_S = 30.0
"""A stop that the ranks have not agreed on by then is carried out with signals."""


_WINDOW_RESERVE = 0.1
"""Share of a platform's window that is kept for what comes after the ranks' end."""


def _read_window_s(command: OpenCommand) -> float | None:
    """Return the seconds that whoever asked for a stop leaves the job; None if it does not say."""
    given = command.args.get("window_s")
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    return float(given) if 0 < given < math.inf else None


def _agree_s(command: OpenCommand) -> float:
    """Return how long ranks may take to agree on a step to stop at: half of a known window."""
    window_s = _read_window_s(command)
    return _STOP_TIMEOUT_S if window_s is None else min(_STOP_TIMEOUT_S, 0.5 * window_s)


def _compute_grace_s(state: JobState, now: float, command: OpenCommand | None) -> float:
    """Return how long ranks have between SIGTERM and SIGKILL: what is left of a known window.

    A grace that the job file names is never exceeded.
    """
    grace_s = state.the_spec().restart.grace_s
    window_s = None if command is None else _read_window_s(command)
    if command is None or window_s is None:
        return grace_s
    left_s = max(0.0, command.at_s + (1.0 - _WINDOW_RESERVE) * window_s - now)
    return left_s if grace_s == RestartConfig().grace_s else min(grace_s, left_s)


def stop_deadline(state: JobState) -> float | None:
    """Return when an open stop is no longer waited for; None where the ranks have agreed."""
    boundary = state.boundary
    if boundary is not None and boundary.kind == "stop" and boundary.move == "commit":
        return None
    open_ = [
        c.at_s + _agree_s(c)
        for c in state.commands.values()
        if c.kind == "stop" and "at_step" not in c.settled
    ]
    return min(open_, default=None)


def find_reached_stop(state: JobState) -> OpenCommand | None:
    """Return the stop that all ranks have carried out, if there is one."""
    stops = [c for c in state.commands.values() if c.kind == "stop"]
    return next((command for command in stops if "at_step" in command.settled), None)


def finish_job(state: JobState, now: float) -> list[AnyAction]:
    """End the job, as every rank has ended well: it is done, or was stopped."""
    stop = next((c for c in state.commands.values() if c.kind == "stop"), None)
    if stop is None:
        return end_job(state, now, "done", 0, "every rank ended with exit code 0")
    done = state.answer(stop.id, True, "stopped", {"step": state.step})
    who = f"stopped by {stop.who or 'an operator'} at step {state.step}"
    return [*done, *end_job(state, now, "stopped", 0, who)]


def give_up_stop(state: JobState, now: float) -> list[AnyAction]:
    """End the ranks with SIGTERM and the configured grace: they did not agree in time."""
    stop = next((c for c in state.commands.values() if c.kind == "stop"), None)
    agree_s = _STOP_TIMEOUT_S if stop is None else _agree_s(stop)
    reason = f"the ranks did not agree on a step to stop at within {agree_s:g} s"
    grace_s = _compute_grace_s(state, now, stop)
    done = state.answer_all("stop", True, reason, {"step": state.step})
    return [*done, *end_job(state, now, "stopped", 1, reason, grace_s=grace_s)]


def receive_command(
    state: JobState, now: float, event: CommandReceived | NodeAsked
) -> list[AnyAction]:
    """Begin, queue or refuse a command; a repeated one gets the answer it had."""
    known = event.as_command() if isinstance(event, NodeAsked) else event
    return _refuse_malformed(state, known.id, lambda: _receive(state, now, known))


def _refuse_malformed(
    state: JobState, id_: str, begin: Callable[[], list[AnyAction]]
) -> list[AnyAction]:
    """Return what `begin` does, or the refusal of a command whose arguments it cannot read.

    They come from outside and are of any type. What cannot be read is no end of the controller,
    whenever it is read, and in a replay as well.
    """
    try:
        return begin()
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        state.injects.pop(id_, None)
        return state.answer(id_, False, f"malformed arguments: {error}", {})


def _receive(state: JobState, now: float, event: CommandReceived) -> list[AnyAction]:
    if event.id in state.answered:
        return state.answer_again(event.id)
    if event.id in state.commands:
        return []
    if state.over:
        return state.answer(event.id, event.kind in ("stop", "kill"), "the job is ending", {})
    note_pace(state, event.pace)
    command = OpenCommand(event.id, event.kind, dict(event.args), event.who, now)
    why = membership_of(state).refuse(state, event.kind)
    if why:
        return state.answer(event.id, False, why, {})
    receive = _RECEIVE.get(event.kind)
    if receive is None:
        return state.answer(event.id, False, f"{event.kind} is not known here", {})
    return receive(state, now, command)


def _kill(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    done = state.answer(command.id, True, "killed", {})
    who = f"killed by {command.who or 'an operator'}"
    return [*done, *end_job(state, now, "stopped", 1, who, at_once=True)]


def _restart(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """End the world now, or one process that the others can do without; it begins again.

    It is no failure: the budget of restarts is as before.
    """
    rank, membership = int(command.args.get("rank", -1)), membership_of(state)
    if state.world.phase != "running":
        return state.answer(command.id, False, f"the world is {state.world.phase}", {})
    if rank >= 0 and membership.find_world_of(state, rank) is None:
        return state.answer(command.id, False, f"there is no rank {rank}", {})
    why = f"restart asked for by {command.who or 'an operator'}"
    found = Cause(
        cause=why, culprit=f"rank {rank}" if rank >= 0 else "the job", at_step=state.step,
        failure_s=now, detected_s=now, reason=why,
    )  # fmt: skip
    done = state.answer(command.id, True, "", {})
    if ended := membership.end_one(state, rank if rank >= 0 else None, found, why):
        return [*done, *ended]
    state.book.decide(found, "restart", state.world.generation, state.world.placement)
    actions = drop_boundary(state, why)
    state.world.failed_s = now
    return [*done, *actions, *form_world(state, now, why)]


def _receive_start(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Begin what has to be agreed upon, or have it wait until it can be."""
    state.commands[command.id] = command
    if membership_of(state).needs_agreement(command.kind):
        return start_waiting_command(state, now)
    return _START[command.kind](state, now, command)


def _note_remark(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Journal what an operator has to say; nothing else follows from it."""
    text, who = command.args.get("text"), command.who or "an operator"
    fault = find_note_fault(text)
    if fault:
        return state.answer(command.id, False, fault, {})
    pace = state.steering.pace  # What heartbeats say is newer than what the journal knows.
    step = max(state.step, pace.step if pace is not None else -1)
    noted = OperatorNoted(id=command.id, text=str(text), step=step, at_s=now, who=command.who)
    record = RecordEvent(event=noted, reason=f"remarked by {who}")
    return [record, *state.answer(command.id, True, "", {"step": step})]


def _receive_inject(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    rank = int(command.args.get("rank", -1))
    world = membership_of(state).find_world_of(state, rank)
    at_step = int(command.args.get("at_step", -1))
    if world is None:
        if at_step < 0 or not 0 <= rank < state.the_spec().world_size:
            return state.answer(command.id, False, f"there is no rank {rank}", {})
        state.injects[command.id] = command  # For when there is: `inject_again`.
        return state.answer(command.id, True, "armed", dict(command.args))
    if at_step >= 0 and state.the_spec().served and rank not in world.joined:
        why = f"rank {rank} has no line `import perdure.torchft`: it counts no steps for a fault"
        return state.answer(command.id, False, why, {})
    if at_step >= 0 and world is state.world and world.stepping and state.step < 0:
        why = "it trains, and the script has declared no step so far (run.steps)"
        return state.answer(command.id, False, why, {})
    state.injects[command.id] = command
    reason = f"asked for by {command.who or 'an operator'}"
    action = inject_action(command, world.generation, reason)
    if at_step >= 0:
        return [action, *state.answer(command.id, True, "armed", dict(command.args))]
    state.commands[command.id] = command
    return [action]


def inject_action(command: OpenCommand, generation: int, reason: str) -> InjectFault:
    """Return the order behind an `inject` command, for the generation of its rank."""
    known = ("rank", "kind", "at_step")
    return InjectFault(
        id=command.id,
        generation=generation,
        rank=int(command.args["rank"]),
        kind=str(command.args.get("kind", "crash")),
        at_step=int(command.args.get("at_step", -1)),
        args={key: value for key, value in command.args.items() if key not in known},
        reason=reason,
    )


def inject_again(state: JobState, reason: str) -> list[AnyAction]:
    """Return the orders of all faults that are armed or open, for the generation that lives."""
    homes = (
        (c, membership_of(state).find_world_of(state, int(c.args["rank"])))
        for c in state.injects.values()
    )
    return [inject_action(c, world.generation, reason) for c, world in homes if world is not None]


def note_fault(state: JobState, now: float, event: FaultInjected) -> list[AnyAction]:
    """Note that an injected fault has taken place, or could not."""
    state.injects.pop(event.id, None)
    result = {"rank": event.rank, "kind": event.kind}
    result |= {"note": event.note} if event.note else {}
    error = event.error
    return state.answer_open(event.id, not error, error or "done", dict(result))


def start_waiting_command(state: JobState, now: float) -> list[AnyAction]:
    """Begin the oldest command that waits for an agreement, if it can begin now; a stop first."""
    waiting = [
        c for c in state.commands.values() if c.kind in _START and "at_step" not in c.settled
    ]
    actions: list[AnyAction] = []
    for command in sorted(waiting, key=lambda c: (c.kind != "stop", c.at_s, c.id)):
        if state.boundary is not None or state.over:
            break
        start = partial(_START[command.kind], state, now, command)
        actions += _refuse_malformed(state, command.id, start)
    return actions


def _start_stop(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Begin a stop. One that no agreement can carry (the script does not take part, or no step
    was made yet) ends the ranks with SIGTERM and the configured grace.
    """  # noqa: D205
    if membership_of(state).agrees(state):
        state.world.checkpoint_due_s = None
        reason = f"stop asked for by {command.who or 'an operator'}"
        return open_boundary(state, now, "stop", reason=reason, command=command.id)
    done = state.answer(command.id, True, "stopped", {"step": state.step})
    grace_s = _compute_grace_s(state, now, command)
    reason = f"stopped by {command.who or 'an operator'}"
    return [*done, *end_job(state, now, "stopped", 0, reason, grace_s=grace_s)]


Receiver = Callable[[JobState, float, OpenCommand], list[AnyAction]]
_START: dict[str, Receiver] = {
    "stop": _start_stop,
    "checkpoint": start_checkpoint,
    "set": start_set,
    "pause": start_pause,
}
"""What waits until it can be agreed upon."""
_RECEIVE: dict[str, Receiver] = {
    "kill": _kill,
    "restart": _restart,
    "inject": _receive_inject,
    "probe": receive_probe,
    **dict.fromkeys(("drain", "cordon", "evict", "restore"), receive_verb),
    "note": _note_remark,
    "notify": receive_notice,
    "join": receive_join,
    "invite": receive_invite,
    "revoke": receive_revoke,
    "resume": receive_resume,
    **dict.fromkeys(_START, _receive_start),
}
