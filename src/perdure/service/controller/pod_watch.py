"""What the cluster says of a job's pods, brought to the controller's door as notices.

A pod that was OOMKilled, evicted or preempted cannot say so itself, and its silence looks like any
other. The first pod asks the API server instead. Each loss is told once: its id is the command's,
so that a controller that is started again tells it to a journal that has it.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from perdure.adapters.notices.kubernetes import KubernetesPods, is_pod
from perdure.model.bus.wire import Command, Notice
from perdure.model.errors import PlatformError
from perdure.model.platforms.kubernetes import JOB_LABEL, PodLoss, explain_pod_loss, list_pod_losses
from perdure.service.part import keep_looking

log = logging.getLogger("perdure.controller")

SOURCE = "kubernetes"
LOOK_S = 1.0


class PodSource(Protocol):
    """Where pods and what was said of them are read."""

    own: str

    async def read(self) -> Sequence[Any]:
        """Return the pods of the job."""

    async def read_events(self, pod: str) -> Sequence[Any]:
        """Return the events about one pod."""


class PodWatch:
    """Tells what becomes of pods, each loss once."""

    def __init__(
        self,
        source: PodSource,
        tell: Callable[[Command], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Read `source`, and `tell` the controller."""
        self._source, self._tell, self._pause = source, tell, pause
        self._told: set[str] = set()

    async def run(self) -> None:
        """Look until cancelled; a server that cannot be asked is asked ever less often."""
        await keep_looking(
            self.look, self._pause, failed="pods are not watched", well="pods are watched"
        )

    async def look(self) -> float:
        """Tell what is new; return how long to wait before the next look.

        Raises:
            PlatformError: the server cannot be asked.
        """
        for loss in list_pod_losses(await self._source.read(), self._source.own):
            if loss.id in self._told:
                continue
            events = await self._source.read_events(loss.pod) if loss.asks else ()
            known = explain_pod_loss(loss, events)
            if known is not None:
                self._told.add(known.id)
                self._tell(_make_command(known))
        return LOOK_S


def open_watch(tell: Callable[[Command], None]) -> PodWatch | None:
    """Return a watch of the pods of the job that this process is in; None outside of a cluster."""
    if not is_pod(os.environ):
        return None
    try:
        return PodWatch(KubernetesPods(os.environ, JOB_LABEL), tell)
    except PlatformError as error:
        log.warning("pods are not watched: %s", error.message)
        return None


def _make_command(loss: PodLoss) -> Command:
    notice = Notice(
        kind="machine",
        machine=loss.pod,
        node=0 if loss.first else -1,
        reason=loss.reason,
        source=SOURCE,
        ended_s=loss.ended_s,
    )
    args: dict[str, Any] = msgspec.to_builtins(notice)
    return Command(id=f"pod-{loss.id}", kind="notify", args=args, who=SOURCE)
