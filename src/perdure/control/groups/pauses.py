"""Pause and resume of a torchft job: all groups are held at the lighthouse, before one step.

Each group comes there before every step, so nothing has to be agreed upon, and one that starts
or comes back meanwhile is held as well. The command is answered once all who train stand.
"""

from typing import Any

from perdure.control.answers import answer
from perdure.control.groups.holds import hold_groups
from perdure.control.state import ControllerState, OpenCommand
from perdure.model.actions import AnyAction, RecordEvent
from perdure.model.events import CommandReceived, JobPaused, JobResumed


def start_group_pause(
    state: ControllerState, now: float, event: CommandReceived
) -> list[AnyAction]:
    """Hold all groups before their next step; a pause that is there already is as good."""
    quorum = state.quorum
    if state.the_spec().torchft.lighthouse != "perdure":
        why = 'only perdure\'s own lighthouse can hold replicas (torchft.lighthouse = "perdure")'
        return answer(state, event.id, False, why, {})
    again = bool(quorum.paused)
    state.commands[event.id] = OpenCommand(event.id, "pause", dict(event.args), event.who, now)
    if again:
        return []  # Answered with the one that is under way.
    quorum.paused = event.who or "an operator"
    quorum.pause_id = event.id
    for group in state.groups.values():
        group.stands = None
    held = hold_groups(state, f"paused by {quorum.paused}")
    quorum.pause_hold = held.number
    return [held, _note_pause(state, now, str(event.args.get("why", "")))]


def end_group_pause(state: ControllerState, now: float, event: CommandReceived) -> list[AnyAction]:
    """Let all groups go on; none that is paused is as good."""
    quorum, who = state.quorum, event.who or "an operator"
    result: dict[str, Any] = {"step": max(state.step, 0), "ranks": _ranks(state), "paused": False}
    if not quorum.paused:
        return answer(state, event.id, True, "it is not paused", result)
    actions: list[AnyAction] = []
    for id_ in sorted(c.id for c in state.commands.values() if c.kind == "pause"):
        actions += answer(state, id_, False, f"resumed by {who}", {})
    quorum.paused = ""
    for group in state.groups.values():
        group.stands = None
    resumed = JobResumed(id=quorum.pause_id, step=max(state.step, 0), at_s=now, who=event.who)
    reason = f"resumed by {who}"
    actions += [hold_groups(state, reason), RecordEvent(event=resumed, reason=reason)]
    return actions + answer(state, event.id, True, "", result)


def advance_pause(state: ControllerState) -> list[AnyAction]:
    """Answer who asked for the pause, once every group that trains stands."""
    waiting = sorted(c.id for c in state.commands.values() if c.kind == "pause")
    if not waiting:
        return []
    members = [
        g
        for g in state.groups.values()
        if g.alive and not g.absent and g.replica and g.replica in state.quorum.members
    ]
    steps = [g.stands for g in members if g.stands is not None]
    if len(steps) < len(members):
        return []
    reason = "" if members else "no replica trains yet, and none will begin"
    step = min(steps, default=max(state.step, 0))
    state.step = max(state.step, step)
    actions: list[AnyAction] = []
    for id_ in waiting:
        result: dict[str, Any] = {"step": step, "ranks": _ranks(state), "paused": True}
        already = "" if id_ == state.quorum.pause_id else "it is paused already"
        actions += answer(state, id_, True, reason or already, result)
    return actions


def note_group_pause(state: ControllerState, event: JobPaused | JobResumed) -> None:
    """`event` is in the journal."""
    noted = state.quorum.pauses_noted
    kind = type(event).__name__
    noted[:] = [*[n for n in noted if not n.startswith(kind)], f"{kind} {event.id}"]


def pauses_again(state: ControllerState, now: float) -> list[AnyAction]:
    """Return the record that has not reached the journal."""
    quorum = state.quorum
    if quorum.paused and f"JobPaused {quorum.pause_id}" not in quorum.pauses_noted:
        return [_note_pause(state, now, "")]
    ended = not quorum.paused and f"JobPaused {quorum.pause_id}" in quorum.pauses_noted
    if ended and f"JobResumed {quorum.pause_id}" not in quorum.pauses_noted:
        resumed = JobResumed(id=quorum.pause_id, step=max(state.step, 0), at_s=now)
        return [RecordEvent(event=resumed, reason="resumed")]
    return []


def _note_pause(state: ControllerState, now: float, why: str) -> RecordEvent:
    quorum = state.quorum
    paused = JobPaused(
        id=quorum.pause_id, step=max(state.step, 0), at_s=now, who=quorum.paused, reason=why
    )
    return RecordEvent(event=paused, reason=f"paused by {quorum.paused}")


def _ranks(state: ControllerState) -> list[int]:
    nproc = state.the_spec().nproc
    return [
        number * nproc + local
        for number, group in sorted(state.groups.items())
        if group.alive and group.active
        for local in range(nproc)
    ]
