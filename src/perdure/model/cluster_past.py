"""What has happened to a job's pods and their nodes, by the cluster's own objects and events.

A pod that was deleted is gone with its status; the events about it stay for an hour. Objects are
the JSON of the API.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.model.kubernetes import explain_pod

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


def tell_past(job: str, pods: Sequence[Object], events: Sequence[Object]) -> tuple[str, ...]:
    """Return what happened to the pods of the Job `job` and to their nodes, the oldest first.

    One line each, with its time (UTC), without what is as it should be.
    """
    own = re.compile(rf"{re.escape(job)}(-nodes)?(-\d+)?-[a-z0-9]{{5}}")
    nodes = {str(pod.get("spec", {}).get("nodeName", "")) for pod in pods}
    told: list[tuple[str, str]] = []
    for pod in pods:
        state = explain_pod(pod)
        if state.state not in ("running", "waiting", "done", "cancelled"):
            trap = f" [{state.trap}]" if state.trap else ""
            name = pod["metadata"]["name"]
            told.append((_find_end(pod), f"pod {name}: {state.state}{trap}: {state.reason}"))
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
    """Return when a pod ended, as far as it says so."""
    ends = [
        str(one.get("state", {}).get("terminated", {}).get("finishedAt", ""))
        for one in pod.get("status", {}).get("containerStatuses", ())
    ]
    made = pod.get("metadata", {}).get("creationTimestamp", "")
    return max(ends, default="") or str(pod.get("status", {}).get("startTime", made))
