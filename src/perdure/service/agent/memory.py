"""How long a rank's start waits for the memory that dead ranks of the node had on its GPUs.

A process that is gone has usually left its device as well, and then nobody waits. Where another
process maps its memory, under MPS and in some sandboxes, the driver is later than that, and a rank
that is started at once would run out of memory. So the newest look at living ranks is kept, and a
start waits until what the dead among them had is free again, for `WAIT_S` at most.

Without NVML, where it hides what processes have, or before it has seen a rank's memory, nobody
waits, and nothing is asked.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from perdure.adapters.devices import Nvml
from perdure.adapters.host import list_ancestors
from perdure.model.signals.devices import DeviceMemory, count_left_behind

log = logging.getLogger("perdure.agent")

FREE_BYTES = 256 << 20
"""A device counts as free of the dead once no more of their memory than this is in use."""
WAIT_S = 5.0
_POLL_S = 0.02


class _Seen(NamedTuple):
    memory: DeviceMemory
    owners: dict[int, tuple[int, int]]
    """Pid that has memory -> the rank, and its pid, that it belongs to."""


class MemoryWatch:
    """What ranks of a node had on its devices when they were last seen there."""

    def __init__(
        self, nvml: Nvml | None, parents: Callable[[int], Collection[int]] = list_ancestors
    ) -> None:
        """Look through `nvml`; `parents` tells a pid's ancestors."""
        self._nvml, self._parents = nvml, parents
        self._seen: dict[str, _Seen] = {}

    def look(self, ranks: Mapping[int, int]) -> None:
        """Note what `ranks` (rank -> pid) have; a device that none of them is on keeps its note.

        So a look between a rank's death and the next one's start forgets nothing. It is called in
        a thread.
        """
        if self._nvml is None:
            return
        by_pid = {pid: (rank, pid) for rank, pid in ranks.items()}
        for device, memory in self._nvml.list_memory().items():
            owners = dict[int, tuple[int, int]]()
            for pid in memory.held:
                owner = next((p for p in (pid, *self._parents(pid)) if p in by_pid), None)
                if owner is not None:
                    owners[pid] = by_pid[owner]
            if owners:
                self._seen[device] = _Seen(memory, owners)

    def list_dead(
        self, living: Collection[int], concerns: Callable[[int], bool] = lambda rank: True
    ) -> dict[str, frozenset[int]]:
        """Return the pids of the dead by device, where they had memory worth waiting for.

        `living` are the pids of ranks, and `concerns` says of a rank whether its memory is to be
        waited for.
        """
        found = dict[str, frozenset[int]]()
        for device, (memory, owners) in list(self._seen.items()):
            gone = (p for p, (rank, pid) in owners.items() if pid not in living and concerns(rank))
            dead = frozenset(gone)
            if sum(memory.held[pid] for pid in dead) > FREE_BYTES:
                found[device] = dead
        return found

    async def wait(self, dead: Mapping[str, frozenset[int]]) -> str:
        """Wait until the memory of the `dead` is free; return what is to be said of it.

        That is nothing where it was free at the first look. Whatever goes wrong, the wait is over.
        """
        began_s = time.monotonic()
        left, looks = dict[str, int](), 0
        seen = {device: self._seen.pop(device) for device in dead if device in self._seen}
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    looks += 1
                    left = await asyncio.to_thread(self._measure, seen, dead)
                    if not left:
                        break
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            pass
        except Exception:  # A driver in trouble may say anything; the rank starts anyhow.
            log.exception("the memory of GPUs cannot be looked at")
            return ""
        waited_s = time.monotonic() - began_s
        whom = ", ".join(sorted(left or dead))
        if left:
            size = sum(left.values()) / 2**30
            return f"waited {waited_s:.2f} s; {size:.1f} GiB of dead ranks are still on {whom}"
        return f"waited {waited_s:.2f} s for the memory of dead ranks on {whom}" * (looks > 1)

    def _measure(
        self, seen: Mapping[str, _Seen], dead: Mapping[str, frozenset[int]]
    ) -> dict[str, int]:
        """Return the bytes that the dead still have, by device, where they are too many."""
        memory = self._nvml.list_memory() if self._nvml is not None else {}
        left = {
            device: count_left_behind(then.memory, memory[device], dead[device])
            for device, then in seen.items()
            if device in memory
        }
        return {device: size for device, size in left.items() if size > FREE_BYTES}
