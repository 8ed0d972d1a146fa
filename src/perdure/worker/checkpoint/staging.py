"""A copy of the training state, taken beside the next forward and backward.

Parameters and optimizer moments do not change until the optimizer's next step, so they may be
copied while the next forward and backward run; `wait` before that step is the gate. Everything
else (buffers change in forward, and what is small) is copied at once. The copies lie in buffers
that are used again by the next checkpoint: one more copy of the state in host memory.

Torch counts the changes of every tensor. If one was changed while it could be copied (a script
that writes parameters by hand), the copy is worth nothing and says so. On a device the gate holds
the device and not the CPU, so the next update may be counted before the copy is done: there the
gate itself looks at the counts.

A CUDA graph that has captured an optimizer's step changes what it likes, counts nothing and passes
no gate. So all is copied at once where a step was captured, or no gate was passed since the copy
before, unless the script passes the gate itself, before each replay.
"""

import copy
import threading
import time
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from perdure.model.errors import PlatformError

GIVE_WAY_S = 0.2
"""The longest that the writer waits for an optimizer's step."""
_SMALL = 4096
"""Elements up to which a tensor is copied at once: a thread would cost more."""


class Staging:
    """The reused buffers of one rank, and the copy under way."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._buffers: dict[str, Tensor] = {}
        self._done = threading.Event()
        self._done.set()
        self._calm = threading.Event()
        self._calm.set()
        self._late: list[tuple[str, Tensor, Tensor, int]] = []
        self._event: Any = None
        self._looking = threading.Lock()
        self._changed: str | None = None
        """Which tensor was changed before the gate, empty for none; None: nobody has looked."""
        self._torn = False
        """A copy was changed under way: whoever does so passes no gate."""
        self._passed = False
        """A gate was passed since the last copy began."""
        self.captured = False
        """An optimizer's step was captured, whose replays pass no gate but the script's own."""

    def begin(self, tensors: dict[str, Tensor], late: Collection[str]) -> dict[str, Tensor]:
        """Return copies of `tensors`; those of the keys in `late` may be filled by `run`."""
        self._late, self._event, self._changed = [], None, None
        late = late if self._passed and not self.captured and not self._torn else ()
        self._passed = False
        staged = {key: self._stage(key, value, key in late) for key, value in tensors.items()}
        if any(source.is_cuda for _, source, _, _ in self._late):
            self._copy_on_device()
        self._done.clear()
        return staged

    def run(self) -> None:
        """Copy what could wait; called in the background thread. Opens the gate in any case.

        Raises:
            PlatformError: a tensor was changed before the optimizer's step.
        """
        try:
            if self._event is not None:
                self._event.synchronize()
            else:
                for _, source, target, _ in self._late:
                    target.copy_(source)
            key = self._find_changed()
            if key:
                self._torn = True
                raise PlatformError(
                    f"{key} was changed between a step's end and the next optimizer step; "
                    "from now on everything is copied at once"
                )
        finally:
            self._late = []
            self._done.set()

    def wait(self) -> float:
        """Wait until the state may change; return the seconds waited."""
        if self._done.is_set():
            return 0.0
        began = time.monotonic()
        if self._event is not None:
            self._find_changed()
            torch.cuda.current_stream().wait_event(self._event)
        else:
            self._done.wait()
        return time.monotonic() - began

    def _find_changed(self) -> str:
        """Return which tensor was changed while it could be copied; empty for none.

        Who comes first looks, the gate or the end of the copy, and the other hears the same.
        """
        with self._looking:
            if self._changed is None:
                changed = (key for key, source, _, seen in self._late if source._version != seen)
                self._changed = next(changed, "")
            return self._changed

    def enter_update(self) -> float:
        """Gate before an optimizer's step, which also quiets the writer; return seconds waited.

        A step that a graph captures changes nothing, and may not wait.
        """
        if is_capturing():
            self.captured = True
            return 0.0
        self._calm.clear()
        self._passed = True
        return self.wait()

    def enter_replay(self) -> float:
        """Gate before a replay of a captured step; return seconds waited."""
        self.captured = False
        self._passed = True
        return self.wait()

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

    def _copy_on_device(self) -> None:
        """Issue the copies on a stream of their own; the device orders them, not the CPU."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _, source, target, _ in self._late:
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def _stage(self, key: str, value: Tensor, late: bool) -> Tensor:
        if not isinstance(value, DTensor):
            return self._stage_local(key, value.detach(), late)
        local = self._stage_local(key, value.to_local().detach(), late)
        # Not DTensor.from_local: that would move the copy back to the mesh's device.
        return DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def _stage_local(self, key: str, source: Tensor, late: bool) -> Tensor:
        target = self._buffers.get(key)
        if target is None or target.shape != source.shape or target.dtype != source.dtype:
            target = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[key] = target
        if late and source.numel() > _SMALL:
            self._late.append((key, source, target, source._version))
        else:
            target.copy_(source)
        return target


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured by this thread."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False  # A torch without CUDA cannot be asked.
    return torch.cuda.is_current_stream_capturing()


def copy_plain(value: Any) -> Any:
    """Return a deep copy on the CPU of plain state: containers, tensors, numbers, strings."""
    if isinstance(value, dict):
        return {k: copy_plain(v) for k, v in value.items()}
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(copy_plain(row) for row in value)
    return copy.deepcopy(value)
