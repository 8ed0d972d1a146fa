"""The agent's looks at its GPUs: every few seconds, beside the loop; without GPUs, never."""

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from perdure.adapters.devices import Nvml
from perdure.adapters.host import find_parents
from perdure.model.signals.devices import DeviceSample
from perdure.model.signals.progress import NodeBeat

log = logging.getLogger("perdure.agent")

LOOK_S = 5.0


class DeviceTelemetry:
    """The newest look at a node's devices."""

    def __init__(self, clock_offset_s: float, nvml: Nvml | None) -> None:
        """Look through `nvml`."""
        self._offset_s, self._nvml = clock_offset_s, nvml
        self._taken: tuple[DeviceSample, ...] = ()

    async def run(self, ranks: Callable[[], Mapping[int, int]]) -> None:
        """Look until cancelled; `ranks` is rank -> pid."""
        nvml = self._nvml
        while nvml is not None:
            pids = dict(ranks())
            try:
                looks = await asyncio.to_thread(nvml.sample, find_parents, pids, self._offset_s)
                self._taken = looks
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
