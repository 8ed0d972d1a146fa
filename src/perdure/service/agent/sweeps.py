"""The agent's looks beside its loop: at its GPUs, and at its ranks' connections.

GPUs are looked at every few seconds; without any, never. Connections are swept once a second, five
times while suspicious. A sweep is taken in a thread (most of it is the kernel's own work), and goes
out with the next heartbeat. However many connections there are, sweeps may use only their share of
a core: where they would need more, they come less often.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from perdure.adapters.devices import Nvml
from perdure.adapters.host import list_ancestors
from perdure.adapters.network.links import LinkReader
from perdure.adapters.network.nccl_links import DeviceRank, NcclLinkReader
from perdure.files.regular import open_regular
from perdure.model.orders import WatchClosely
from perdure.model.paths import JobPaths
from perdure.model.signals.devices import DeviceSample
from perdure.model.signals.links import LinkSweep
from perdure.model.signals.progress import NodeBeat
from perdure.service.agent.memory import MemoryWatch
from perdure.service.part import wait_event
from perdure.worker.recording.groups import SUFFIX

log = logging.getLogger("perdure.agent")

LOOK_S = 5.0


class DeviceTelemetry:
    """The newest look at a node's devices."""

    def __init__(self, clock_offset_s: float, nvml: Nvml | None) -> None:
        """Look through `nvml`."""
        self._offset_s, self._nvml = clock_offset_s, nvml
        self.memory = MemoryWatch(nvml)
        self._taken: tuple[DeviceSample, ...] = ()

    async def run(self, ranks: Callable[[], Mapping[int, int]]) -> None:
        """Look until cancelled; `ranks` is rank -> pid."""
        nvml = self._nvml
        while nvml is not None:
            pids = dict(ranks())
            try:
                looks = await asyncio.to_thread(nvml.sample, list_ancestors, pids, self._offset_s)
                self._taken = looks
                await asyncio.to_thread(self.memory.look, pids)
            except Exception:  # A driver in trouble may say anything; training is not in it.
                log.exception("no look at the devices")
            await asyncio.sleep(LOOK_S)

    def join(self, beat: NodeBeat) -> NodeBeat:
        """Return `beat` with the newest look, if no heartbeat has carried it yet."""
        if not self._taken:
            return beat
        taken, self._taken = self._taken, ()
        return msgspec.structs.replace(beat, devices=taken)

    def close(self) -> None:
        """End the line to NVML."""
        if self._nvml is not None:
            self._nvml.close()


QUIET_S, WATCH_S = 1.0, 0.2
QUIET_SHARE, WATCH_SHARE = 0.01, 0.05
"""Of a core."""


class Ranks(NamedTuple):
    """The ranks whose connections are looked at."""

    generation: int
    pids: Mapping[int, int]
    store_ports: frozenset[int]
    on_device: Mapping[int, DeviceRank]
    """Those of them whose collectives run on a device."""


class LinkTelemetry:
    """Sweeps of one node."""

    def __init__(
        self,
        paths: JobPaths,
        node: int,
        clock_offset_s: float,
        *,
        alone: bool,
    ) -> None:
        """Look for notes of process groups under `paths`; `alone`: there is no other node."""
        self._paths, self._node = paths, node
        self._generation = -1
        self.reader = LinkReader(self._read_groups, alone=alone)
        self._by_nccl = NcclLinkReader(clock_offset_s)
        self._watch_until_s = float("-inf")
        self._taken: deque[LinkSweep] = deque(maxlen=4)
        self._wake = asyncio.Event()
        self._cost_s = 0.0

    def watch(self, order: WatchClosely) -> None:
        """Sweep at the suspicious rate until the order's time."""
        if self._node in order.nodes:
            self._watch_until_s = max(self._watch_until_s, order.until_s)
            self._wake.set()

    def period_s(self, now: float) -> float:
        """Return how long after a sweep's start the next one begins."""
        if now < self._watch_until_s:
            return max(WATCH_S, self._cost_s / WATCH_SHARE)
        return max(QUIET_S, self._cost_s / QUIET_SHARE)

    async def run(self, ranks: Callable[[], Ranks], now: Callable[[], float]) -> None:
        """Sweep until cancelled."""
        while True:
            began_s, looked = now(), ranks()
            if looked.pids:
                await asyncio.to_thread(self.sweep, began_s, looked)
            while (left_s := began_s + self.period_s(now()) - now()) > 0:
                self._wake.clear()
                if not await wait_event(self._wake, left_s):
                    break

    def sweep(self, now: float, ranks: Ranks) -> None:
        """Look once; the result goes with the next heartbeat."""
        self._generation = ranks.generation
        sweep = self.reader.sweep(now, ranks.pids, ranks.store_ports)
        if ranks.on_device:
            began_s = time.thread_time()
            links = self._by_nccl.read(ranks.on_device, now)
            cost_s = sweep.cost_s + time.thread_time() - began_s
            sweep = msgspec.structs.replace(sweep, by_nccl=links, cost_s=cost_s)
        self._cost_s = sweep.cost_s
        self._taken.append(sweep)

    def join(self, beat: NodeBeat) -> NodeBeat:
        """Return `beat` with the oldest sweep that no heartbeat has carried yet."""
        if not self._taken or self._generation != beat.generation:
            self._taken.clear()
            return beat
        return msgspec.structs.replace(beat, sweep=self._taken.popleft())

    def close(self) -> None:
        """Close the lines to the kernel."""
        self.reader.close()

    def _read_groups(self, rank: int) -> dict[int, str]:
        try:
            path = self._paths.ring(self._generation, rank) + SUFFIX
            with open(path, "rb", opener=open_regular) as file:
                return {int(port): str(name) for port, name in json.load(file).items()}
        except (OSError, ValueError, AttributeError):
            return {}
