"""What an outside monitor, or a device's own counters, say: notices to events, events to verdicts.

A notice becomes an event only if it names something that is there. A device that has failed makes
the verdict UnhealthyDevice, which the policy acts upon as on any other. Where no world runs that
could be ended for it, its node is cordoned instead, so that the next world does without it.
"""

from typing import Any

import msgspec

from perdure.control.job import JobState, OpenCommand
from perdure.control.membership import membership_of
from perdure.control.recovery.response import weigh_verdict
from perdure.control.targets import UnknownTargetError, resolve_nodes
from perdure.model.bus.wire import Notice
from perdure.model.events import (
    DeviceReported,
    MachineReported,
    PreemptionNoticed,
    PreemptionWithdrawn,
    VerdictReached,
)
from perdure.model.orders import AnyAction, RecordEvent
from perdure.model.verdicts import Culprit, Verdict

_GRACE_S_MAX = 7 * 86400.0
_Told = PreemptionNoticed | PreemptionWithdrawn | MachineReported | DeviceReported


def receive_notice(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Answer a `notify` command, and journal what it says if that can be."""
    try:
        notice = msgspec.convert(command.args, Notice)
    except msgspec.ValidationError as error:
        return state.answer(command.id, False, f"malformed notice: {error}", {})
    try:
        node = _resolve_node(state, notice)
    except UnknownTargetError as error:
        return state.answer(command.id, False, str(error), {})
    if notice.kind == "preemption" and not 0 <= notice.grace_s <= _GRACE_S_MAX:
        return state.answer(command.id, False, f"grace_s of {notice.grace_s:g} s", {})
    source = notice.source or command.who or "notify"
    event, told = _tell(notice, node, source, now)
    result: dict[str, Any] = {"node": node, "kind": notice.kind}
    if isinstance(event, DeviceReported):
        result["device"] = event.device
    record = RecordEvent(event=event, reason=f"told by {source}")
    return [record, *state.answer(command.id, True, told, result)]


def _tell(notice: Notice, node: int, source: str, now: float) -> tuple[_Told, str]:
    """Return what a notice is as an event, and in words."""
    match notice.kind:
        case "preemption":
            return PreemptionNoticed(
                node=node,
                at_s=now,
                grace_s=notice.grace_s,
                source=source,
                reason=notice.reason,
                waits=notice.waits,
            ), f"node {node} goes away in {notice.grace_s:g} s"
        case "preemption-withdrawn":
            why = notice.reason or "not going away after all"
            return PreemptionWithdrawn(
                node=node, at_s=now, source=source, reason=why
            ), f"node {node} stays"
        case "machine":
            why = notice.reason or "gone"
            return MachineReported(
                node=node,
                at_s=now,
                reason=why,
                source=source,
                machine=notice.machine,
                ended_s=notice.ended_s,
            ), f"node {node}: {why}"
        case _:
            healthy = notice.kind == "device-ok"
            device = DeviceReported(
                device=notice.device or f"node {node}",  # All of it: its id is not known.
                node=node,
                at_s=now,
                healthy=healthy,
                reason=notice.reason or ("healthy again" if healthy else "said to have failed"),
                source=source,
            )
            return device, f"{name_device(device)} is {'healthy' if healthy else 'unhealthy'}"


def _resolve_node(state: JobState, notice: Notice) -> int:
    """Return the node that a notice is about.

    Raises:
        UnknownTargetError: there is none.
    """
    if notice.device:
        found = resolve_nodes(state, [notice.device])[0]
        if notice.node not in (-1, found):
            raise UnknownTargetError(f"{notice.device} is on node {found}, not {notice.node}")
        return found
    if notice.machine and notice.node < 0:
        if notice.machine not in state.hosts:
            raise UnknownTargetError(f"no machine {notice.machine} has joined")
        return state.hosts[notice.machine]
    if notice.node < 0:
        raise UnknownTargetError(f"{notice.kind} of what? a device or a node is missing")
    return resolve_nodes(state, [str(notice.node)])[0]


def name_device(event: DeviceReported) -> str:
    """Return the device and its node in words."""
    node = f"node {event.node}"
    return node if event.device == node else f"{event.device} on {node}"


def note_device(state: JobState, now: float, event: DeviceReported) -> list[AnyAction]:
    """Return the verdict on a device that has failed, and a cordon where nothing runs on it."""
    if event.healthy or event.node in state.cordoned or event.node not in state.nodes:
        return []
    whole = event.device == f"node {event.node}"
    verdict = Verdict(
        kind="UnhealthyDevice",
        culprit=Culprit(node=event.node) if whole else Culprit(device=event.device),
        generation=state.world.generation,
        first_seen_s=event.at_s,
        confirmed_s=now,
        confidence=0.9,
        reason=f"{name_device(event)}: {event.reason} ({event.source})",
        actionable=True,
        activity="busy",
        step=state.step,
        evidence={"node": event.node, "source": event.source},
        certain=True,
        ground="platform",
        acts_s=now,
        acts_why=f"{event.source} says so",
    )
    actions: list[AnyAction] = [
        RecordEvent(event=VerdictReached(verdict=verdict), reason=verdict.reason)
    ]
    runs = state.world.phase == "running" and event.node in state.world.placement
    wanted = state.the_spec().policy.unhealthy_device
    if runs or state.over or wanted not in ("evict", "restart"):
        return actions  # `_judge` weighs it, or there is nothing to do.
    reaction = weigh_verdict(state, verdict)
    if event.node not in state.world.placement or reaction.leave_out:
        actions += membership_of(state).cordon(state, event.node, verdict.reason)
    return actions
