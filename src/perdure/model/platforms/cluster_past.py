"""What has happened to a job's pods and their nodes, by the cluster's own objects and events.

A pod that was deleted is gone with its status; the events about it stay for an hour. Objects are
the JSON of the API.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from perdure.model.platforms.kubernetes import explain_pod, find_index

Object = Mapping[str, Any]
_OF_PODS = {
    "Killing": "told to go", "Evicted": "evicted", "Preempted": "preempted",
    "TaintManagerEviction": "evicted, its node is tainted", "Failed": "failed",
    "BackOff": "waits longer each time", "FailedMount": "a volume cannot be mounted",
    "FailedAttachVolume": "a volume cannot be attached", "FailedScheduling": "finds no node",
    "NodeNotReady": "its node is not ready", "Unhealthy": "unhealthy",
}  # fmt: skip
_OF_NODES = {
    "NodeNotReady": "not ready", "NodeNotSchedulable": "cordoned", "Rebooted": "rebooted",
    "SystemOOM": "the kernel was out of memory", "EvictionThresholdMet": "short of a resource",
    "NodeHasDiskPressure": "short of disk", "NodeHasInsufficientMemory": "short of memory",
    "RemovingNode": "removed", "DeletingNode": "deleted", "Shutdown": "shuts down",
}  # fmt: skip
"""Reason of an event -> in words. What is not here is no trouble."""


_TAKEN = ("Preempted", "Evicted", "TaintManagerEviction", "NodeNotReady")
"""Reason of an event that says why a pod was deleted, where the pod itself does not."""


class PodFate(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a pod of a running job."""

    id: str
    """The same for the same fate of the same pod."""
    pod: str
    reason: str
    ended_s: float = 0.0
    """When its container ended; 0: it has not, as far as is known."""
    asks: bool = False
    """Its events may say why."""
    doubtful: bool = False
    """It is nothing unless they do."""
    first: bool = False
    """It was the job's first pod."""


def find_fates(pods: Sequence[Object], own: str) -> tuple[PodFate, ...]:
    """Return what has become of pods that ended or are told to go, and of restarted containers.

    `own` is the job's first pod, which looks; an end on its own is none to tell of.
    """
    mine = next((_find_role(pod) for pod in pods if pod["metadata"]["name"] == own), None)
    return tuple(
        msgspec.structs.replace(fate, first=_find_role(pod) == mine)
        for pod in pods
        if (fate := _find_fate(pod, own)) is not None
    )


def _find_fate(pod: Object, own: str) -> PodFate | None:
    status, name, uid = pod.get("status", {}), pod["metadata"]["name"], pod["metadata"]["uid"]
    state, ended_s = explain_pod(pod), parse_time(_find_end(pod))
    if state.state == "running":
        if any(one.get("lastState", {}).get("terminated") for one in _list_containers(pod)):
            state = explain_pod({"status": {**status, "phase": "Failed"}})
        elif name != own and _is_unready(pod):
            reason = f"pod {name}: not ready"
            return PodFate(id=f"{uid}-unready", pod=name, reason=reason, asks=True, doubtful=True)
        else:
            return None
    elif state.state in ("waiting", "done") or name == own:
        return None
    # Whether another one comes is not known here.
    words = "deleted" if state.state == "cancelled" else f"{state.state}: {state.reason}"
    return PodFate(
        id=f"{uid}-{state.state}-{ended_s:.0f}",
        pod=name,
        reason=f"pod {name}: {words}",
        ended_s=ended_s,
        asks=state.state == "cancelled",
    )


def explain_fate(fate: PodFate, events: Sequence[Object]) -> PodFate | None:
    """Return what events of a pod add to its fate; None where it is none without them."""
    told = [e for e in sorted(events, key=_find_time) if e.get("reason") in _TAKEN]
    if told:
        reason, message = told[-1]["reason"], told[-1].get("message", "")
        text = f"pod {fate.pod}: {_OF_PODS[reason]}: {message}".removesuffix(": ")
        return msgspec.structs.replace(fate, reason=text)
    return None if fate.doubtful else fate


def parse_time(text: str) -> float:
    """Return a time of the API, such as `2026-11-22T03:45:44Z`, in seconds since 1970; 0 for none.

    >>> parse_time("1970-01-01T00:01:00Z")
    60.0
    """
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _find_role(pod: Object) -> tuple[str, int]:
    """Return which pod of which Job this is: the next one of both takes its place."""
    return str(pod["metadata"].get("labels", {}).get("job-name", "")), find_index(pod)


def _is_unready(pod: Object) -> bool:
    rows = pod.get("status", {}).get("conditions", ())
    return any(row.get("type") == "Ready" and row.get("status") == "False" for row in rows)


def _list_containers(pod: Object) -> Sequence[Object]:
    found: Sequence[Object] = pod.get("status", {}).get("containerStatuses", ())
    return found


def tell_past(job: str, pods: Sequence[Object], events: Sequence[Object]) -> tuple[str, ...]:
    """Return what happened to the pods of the Job `job` and to their nodes, the oldest first.

    One line each, with its time (UTC), without what is as it should be.
    """
    own = re.compile(rf"{re.escape(job)}(-nodes?)?(-\d+)?-[a-z0-9]{{5}}")
    nodes = {str(pod.get("spec", {}).get("nodeName", "")) for pod in pods}
    told: list[tuple[str, str]] = []
    for pod in pods:
        state = explain_pod(pod)
        if state.state not in ("running", "waiting", "done", "cancelled"):
            trap = f" [{state.trap}]" if state.trap else ""
            name, at = pod["metadata"]["name"], _find_end(pod) or _find_start(pod)
            told.append((at, f"pod {name}: {state.state}{trap}: {state.reason}"))
    for event in events:
        about, reason = event.get("involvedObject", {}), str(event.get("reason", ""))
        kind, name = about.get("kind", ""), str(about.get("name", ""))
        table = _OF_PODS if kind == "Pod" and own.fullmatch(name) else {}
        table = _OF_NODES if kind == "Node" and name in nodes else table
        if reason in table:
            count = int(event.get("count") or 1)
            times = f" ({count} times)" if count > 1 else ""
            text = f"{kind.lower()} {name}: {table[reason]}{times}: {event.get('message', '')}"
            told.append((_find_time(event), text))
    return tuple(f"{time[11:19]} {text}" for time, text in sorted(told))


def _find_time(event: Object) -> str:
    made = event.get("metadata", {}).get("creationTimestamp")
    return str(event.get("lastTimestamp") or event.get("eventTime") or made or "")


def _find_end(pod: Object) -> str:
    """Return when the last of a pod's containers ended, now or in its life before; empty: never."""
    return max(
        (
            str(one[life]["terminated"].get("finishedAt") or "")
            for one in _list_containers(pod)
            for life in ("state", "lastState")
            if one.get(life, {}).get("terminated")
        ),
        default="",
    )


def _find_start(pod: Object) -> str:
    made = pod.get("metadata", {}).get("creationTimestamp", "")
    return str(pod.get("status", {}).get("startTime", made))
