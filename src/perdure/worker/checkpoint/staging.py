"""The copy of the training state that a checkpoint is written from.

What an optimizer's step waits for is copied beside training (`copying`). Everything else (buffers
change in forward, and what is small) is copied at once. The copies lie in slabs that are used again
by the next checkpoint: one more copy of the state in host memory. A checkpoint is published once
the gate has compared its copy.

A CUDA graph that has captured an optimizer's step changes what it likes, counts nothing and passes
no gate. So all is copied at once where a step was captured, or no gate was passed since the copy
before, unless the script passes the gate itself, before each replay.
"""

import itertools
import threading
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from perdure.worker.checkpoint.copying import Copier, Copy, is_ordinary
from perdure.worker.checkpoint.device_copies import DeviceCopies
from perdure.worker.checkpoint.plain import copy_plain, visit
from perdure.worker.checkpoint.slabs import Slabs

GIVE_WAY_S = 0.2
"""The longest that the writer waits for an optimizer's step."""
_SMALL = 4096
"""Elements up to which a tensor is copied at once: a thread would cost more."""


class Staging:
    """The reused memory of one rank, and the copy under way."""

    def __init__(self, device: DeviceCopies | None = None) -> None:
        """Hold nothing yet; `device` is how a device's tensors are copied."""
        self._device = device or DeviceCopies()
        self._pinned = Slabs(self._device.make_block)
        self._own = Slabs(self._device.make_block)
        self._pageable = Slabs(lambda size: torch.empty(size, dtype=torch.uint8))
        self._calm = threading.Event()
        self._calm.set()
        self._copier = Copier(self._device)
        self.copy = Copy(self._copier, {})
        """What is copied beside training."""
        self._passed = False
        """A gate was passed since the last copy began."""
        self.captured = False
        """An optimizer's step was captured, whose replays pass no gate but the script's own."""

    def begin(self, tensors: dict[str, Tensor], late: Collection[str]) -> dict[str, Tensor]:
        """Return copies of `tensors`; those of the keys in `late` may be filled by `copy.make`."""
        late = late if self._passed and not self.captured and not self._copier.torn else ()
        self._passed = False
        sources = {key: _take_local(value) for key, value in tensors.items()}
        on_device = {key for key, one in sources.items() if self._device.is_on_device(one)}
        staged = {
            **self._pinned.fit({key: one for key, one in sources.items() if key in on_device}),
            **self._pageable.fit({k: one for k, one in sources.items() if k not in on_device}),
        }
        waiting = {key for key in late if sources[key].numel() > _SMALL}
        if waiting & on_device:
            waiting &= on_device  # The gate holds a device or the CPU.
        now = [key for key in sources if key not in waiting]
        self._device.copy_now([(staged[key], sources[key]) for key in now if key in on_device])
        for key in now:
            if key not in on_device:
                staged[key].copy_(sources[key])
        self.copy = Copy(
            self._copier,
            {key: one for key, one in sources.items() if key in waiting},
            [staged[key] for key in sources if key in waiting],
            issued=bool(waiting & on_device),
        )
        return {key: _wrap_alike(staged[key], value) for key, value in tensors.items()}

    def copy_own(self, plain: Any) -> Any:
        """Return a deep copy on the CPU of plain state: containers, tensors, arrays, numbers.

        A device is waited for once, however many tensors it has. What it copied lies in memory
        that the next such copy uses again.
        """
        found: list[Tensor] = []
        visit(plain, lambda one: found.append(_take_local(one)), lambda _: None)
        sources = {
            str(number): source
            for number, source in enumerate(found)
            if self._device.is_on_device(source) and is_ordinary(source)
        }
        places = self._own.fit(sources)
        self._device.copy_now([(places[key], source) for key, source in sources.items()])
        numbers = itertools.count()

        def take(source: Tensor) -> Tensor:
            place = places.get(str(next(numbers)))
            return _take_local(source).to("cpu", copy=True) if place is None else place

        return visit(plain, take, copy_plain)

    def enter_update(self) -> float:
        """Gate before an optimizer's step, which also quiets the writer; return seconds waited.

        A step that a graph captures changes nothing, and may not wait.
        """
        if is_capturing():
            self.captured = True
            return 0.0
        self._calm.clear()
        self._passed = True
        return self.copy.wait()

    def enter_replay(self) -> float:
        """Gate before a replay of a captured step; return seconds waited."""
        self.captured = False
        self._passed = True
        return self.copy.wait()

    def leave_update(self) -> None:
        """The optimizer's step is over."""
        self._calm.set()

    def give_way(self) -> None:
        """Hold the writing thread while an optimizer steps, briefly.

        A step over all parameters is bound by memory's bandwidth, and so is writing them: beside
        one another both took half as long again. Bounded, for a step that raised.
        """
        if not self._calm.wait(GIVE_WAY_S):
            self._calm.set()


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured by this thread."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False  # A torch without CUDA cannot be asked.
    return torch.cuda.is_current_stream_capturing()


def _take_local(value: Tensor) -> Tensor:
    """Return what of `value` is here, detached."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _wrap_alike(local: Tensor, value: Tensor) -> Tensor:
    """Return `local`, sharded as `value` is."""
    if not isinstance(value, DTensor):
        return local
    # Not DTensor.from_local: that would move the copy back to the mesh's device.
    return DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
