"""What the cluster says of a job's pods, brought to the controller's door as notices.

A pod that was OOMKilled, evicted or preempted cannot say so itself, and its silence looks like any
other. The first pod asks the API server instead. Each fate is told once: its id is the command's,
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
from perdure.model.platforms.kubernetes import JOB_LABEL, PodFate, explain_fate, find_fates

log = logging.getLogger("perdure.controller")

SOURCE = "kubernetes"
LOOK_S = 1.0
RETRY_S_MAX = 60.0


class PodSource(Protocol):
    """Where pods and what was said of them are read."""

    own: str

    async def read(self) -> Sequence[Any]:
        """Return the pods of the job."""

    async def read_events(self, pod: str) -> Sequence[Any]:
        """Return the events about one pod."""


class PodWatch:
    """Tells what becomes of pods, each fate once."""

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
        failures = 0
        while True:
            try:
                await self.look()
            except PlatformError as error:
                failures += 1
                if failures == 1:
                    log.warning("pods are not watched: %s (%s)", error.message, error.hint)
                await self._pause(min(RETRY_S_MAX, LOOK_S * 2.0 ** min(failures, 10)))
                continue
            if failures:
                log.info("pods are watched")
                failures = 0
            await self._pause(LOOK_S)

    async def look(self) -> None:
        """Tell what is new.

        Raises:
            PlatformError: the server cannot be asked.
        """
        for fate in find_fates(await self._source.read(), self._source.own):
            if fate.id in self._told:
                continue
            events = await self._source.read_events(fate.pod) if fate.asks else ()
            known = explain_fate(fate, events)
            if known is not None:
                self._told.add(known.id)
                self._tell(_make_command(known))


def open_watch(tell: Callable[[Command], None]) -> PodWatch | None:
    """Return a watch of the pods of the job that this process is in; None outside of a cluster."""
    if not is_pod(os.environ):
        return None
    try:
        return PodWatch(KubernetesPods(os.environ, JOB_LABEL), tell)
    except PlatformError as error:
        log.warning("pods are not watched: %s", error.message)
        return None


def _make_command(fate: PodFate) -> Command:
    notice = Notice(
        kind="machine",
        machine=fate.pod,
        node=0 if fate.first else -1,
        reason=fate.reason,
        source=SOURCE,
        ended_s=fate.ended_s,
    )
    args: dict[str, Any] = msgspec.to_builtins(notice)
    return Command(id=f"pod-{fate.id}", kind="notify", args=args, who=SOURCE)
