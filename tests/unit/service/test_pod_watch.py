"""What becomes of pods is told once, with the best words that there are for it."""

import asyncio
from typing import Any

import pytest

from perdure.model.bus.wire import Command
from perdure.model.errors import PlatformError
from perdure.model.platforms.kubernetes import explain_pod_loss, list_pod_losses
from perdure.service.controller.pod_watch import PodWatch

ENDED = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-11-22T04:00:00Z"}
FAILED = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ENDED}}]}
AGAIN = {"phase": "Running", "containerStatuses": [
    {"state": {"running": {}}, "lastState": {"terminated": ENDED}, "restartCount": 1}]}  # fmt: skip
DELETED = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
UNREADY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]}


def pod(name: str, status: Any, job: str = "job-nodes", **head: Any) -> Any:
    labels = {"job-name": job}
    return {"metadata": {"name": name, "uid": f"u-{name}", "labels": labels, **head},
            "status": status}  # fmt: skip


def event(reason: str, message: str) -> Any:
    return {"reason": reason, "message": message, "lastTimestamp": "2026-11-22T04:00:00Z"}


OWN = pod("own", DELETED, "job")


@pytest.mark.parametrize(
    ("status", "head", "events", "words"),
    [
        (FAILED, {}, [], "out of memory: OOMKilled"),
        (AGAIN, {}, [], "out of memory: OOMKilled"),
        (DELETED, {"deletionTimestamp": "x"}, [], "pod x: deleted"),
        (DELETED, {"deletionTimestamp": "x"}, [event("Preempted", "by a/b")], "preempted: by a/b"),
        (UNREADY, {}, [event("NodeNotReady", "Node is not ready")], "its node is not ready"),
        (UNREADY, {}, [event("Pulled", "image")], ""),
        (DELETED, {}, [], ""),
        ({"phase": "Succeeded"}, {}, [], ""),
    ],
)
def test_a_fate_has_the_platforms_words(status: Any, head: Any, events: Any, words: str) -> None:
    found = list_pod_losses([OWN, pod("x", status, **head)], "own")
    told = [known.reason for loss in found if (known := explain_pod_loss(loss, events)) is not None]
    assert [words in reason for reason in told] == ([True] if words else [])


def test_the_job_s_first_pod_is_known_from_others() -> None:
    before = pod("before", FAILED, "job")
    losses = list_pod_losses([OWN, before, pod("x", FAILED)], "own")
    assert {loss.pod: loss.first for loss in losses} == {"before": True, "x": False}
    assert {loss.ended_s for loss in losses} == {1795320000.0}


class Cluster:
    own = "own"

    def __init__(self) -> None:
        self.pods, self.asked = [OWN, pod("x", DELETED)], 0

    async def read(self) -> list[Any]:
        return self.pods

    async def read_events(self, name: str) -> list[Any]:
        self.asked += 1
        return []


def test_each_fate_is_told_once() -> None:
    cluster, told = Cluster(), list[Command]()
    watch = PodWatch(cluster, told.append)
    asyncio.run(watch.look())
    cluster.pods[1] = pod("x", FAILED)
    for _ in range(3):
        asyncio.run(watch.look())
    (command,) = told
    assert (command.kind, command.args["kind"], command.args["machine"]) == (
        "notify",
        "machine",
        "x",
    )
    assert command.id == "pod-u-x-out of memory-1795320000"
    assert cluster.asked == 0, "the pod itself said why"


def test_why_pods_are_not_watched_is_said_once_with_what_would_help(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pauses: list[float] = []

    class Closed(Cluster):
        async def read(self) -> list[Any]:
            raise PlatformError("/pods answers 403", hint="allow it to list pods")

    async def pause(wait_s: float) -> None:
        pauses.append(wait_s)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(PodWatch(Closed(), list[Command]().append, pause).run())
    assert pauses == [2.0, 4.0, 8.0]
    (line,) = caplog.messages
    assert line == "pods are not watched: /pods answers 403 (allow it to list pods)"
