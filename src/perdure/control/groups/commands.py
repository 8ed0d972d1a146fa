"""Operators' commands to a torchft job."""

from perdure.control.answers import answer, answer_again
from perdure.control.groups.agreement import start_group_set
from perdure.control.groups.pauses import end_group_pause, start_group_pause
from perdure.control.groups.saving import reopen_lost, start_group_checkpoint
from perdure.control.groups.verbs import order_replicas
from perdure.control.state import ControllerState, OpenCommand
from perdure.control.steering.boundary import note_pace
from perdure.control.steering.commands import inject_action, receive_command
from perdure.model.actions import AnyAction
from perdure.model.events import CommandReceived, NodeAsked


def receive_group_command(
    state: ControllerState, now: float, event: CommandReceived | NodeAsked
) -> list[AnyAction]:
    """Begin or refuse a command; a repeated one gets the answer it had.

    As in `commands`, arguments of a wrong type refuse it.
    """
    event = event.as_command() if isinstance(event, NodeAsked) else event
    try:
        return _receive(state, now, event)
    except (TypeError, ValueError, KeyError) as error:
        return answer(state, event.id, False, f"malformed arguments: {error}", {})


def _receive(state: ControllerState, now: float, event: CommandReceived) -> list[AnyAction]:
    if event.id in state.answered:
        return answer_again(state, event.id)
    if event.id in state.commands:
        return []
    note_pace(state, event.pace)
    match event.kind:
        case "kill" | "stop" | "notify":
            return receive_command(state, now, event)
        case "pause" | "resume" if state.phase != "running":
            return answer(state, event.id, False, f"the job is {state.phase}", {})
        case "pause":
            return start_group_pause(state, now, event)
        case "resume":
            return end_group_pause(state, now, event)
        case "set" | "checkpoint" as kind:
            if state.phase in ("ending", "ended"):
                return answer(state, event.id, False, "the job is ending", {})
            args = dict(event.args)
            state.commands[event.id] = OpenCommand(event.id, kind, args, event.who, now)
            return []  # Begun by `start_waiting`, now or once it can be.
        case "inject":
            return _inject(state, now, event)
        case "drain" | "cordon" | "evict" | "restore":
            args = dict(event.args)
            command = OpenCommand(event.id, event.kind, args, event.who, now)
            return order_replicas(state, now, command)
        case _:
            why = f"{event.kind} is not for a torchft job; see docs/torchft.md"
            return answer(state, event.id, False, why, {})


def start_waiting(state: ControllerState, now: float) -> list[AnyAction]:
    """Begin the oldest command that waits for an agreement, if it can begin now."""
    if state.phase in ("ending", "ended"):
        return []
    reopen_lost(state)
    kinds = ("set", "checkpoint")
    waiting = [c for c in state.commands.values() if c.kind in kinds and "at_step" not in c.args]
    actions: list[AnyAction] = []
    for command in sorted(waiting, key=lambda c: (c.at_s, c.id)):
        if state.boundary is None:
            start = start_group_set if command.kind == "set" else start_group_checkpoint
            actions += start(state, now, command)
    return actions


def _inject(state: ControllerState, now: float, event: CommandReceived) -> list[AnyAction]:
    rank = int(event.args.get("rank", -1))
    group = state.groups.get(rank // state.the_spec().nproc)
    if rank < 0 or group is None:
        return answer(state, event.id, False, f"there is no rank {rank}", {})
    command = OpenCommand(event.id, "inject", dict(event.args), event.who, now)
    reason = f"asked for by {event.who or 'an operator'}"
    order = inject_action(command, group.generation, reason)
    if order.at_step >= 0:
        return [order, *answer(state, event.id, True, "armed", dict(event.args))]
    state.commands[event.id] = command
    return [order]
