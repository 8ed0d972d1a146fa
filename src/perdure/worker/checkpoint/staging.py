"""A copy of the training state, taken beside the next forward and backward.

Parameters and optimizer moments do not change until the optimizer's next step, so they may be
copied while the next forward and backward run; `wait` before that step is the gate. Buffers change
in forward (BatchNorm's statistics) and are copied at once, as is everything small. The copies lie
in buffers that are used again by the next checkpoint.
"""

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_SMALL = 4096
"""Elements up to which a tensor is copied at once: a thread would cost more."""


class Staging:
    """The reused buffers of one rank, and the copy under way."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._buffers: dict[str, Tensor] = {}
        self._done = threading.Event()
        self._done.set()
        self._late: list[tuple[Tensor, Tensor]] = []
        self._event: Any = None
        self.error: BaseException | None = None

    def begin(self, state: dict[str, Any], at_once: Callable[[str], bool]) -> dict[str, Any]:
        """Return a structure like `state` over the buffers; `run` must still fill it.

        `at_once` says of a path such as `model/model/0.bias` that it may change before the
        gate. The state dict is nested; tensors may be DTensors, of which the local part counts.
        """
        self._late = []
        self._event = None
        self.error = None
        staged = self._stage("", state, at_once)
        self._done.clear()
        if any(source.is_cuda for source, _ in self._late):
            self._copy_on_device()
        assert isinstance(staged, dict)
        return staged

    def run(self) -> None:
        """Copy what could wait; called in the background thread. Opens the gate in any case."""
        try:
            if self._event is not None:
                self._event.synchronize()
            else:
                for source, target in self._late:
                    target.copy_(source)
        except BaseException as error:
            self.error = error
        finally:
            self._late = []
            self._done.set()

    def wait(self) -> float:
        """Wait until the state may change; return the seconds waited."""
        if self._done.is_set():
            return 0.0
        began = time.monotonic()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        else:
            self._done.wait()
        return time.monotonic() - began

    def _copy_on_device(self) -> None:
        """Issue the copies on a stream of their own; the device orders them, not the CPU."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for source, target in self._late:
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def _stage(self, path: str, value: Any, at_once: Callable[[str], bool]) -> Any:
        if isinstance(value, dict):
            return {k: self._stage(f"{path}/{k}", v, at_once) for k, v in value.items()}
        if isinstance(value, list | tuple):
            rows = [self._stage(f"{path}/{i}", v, at_once) for i, v in enumerate(value)]
            return type(value)(rows)
        if isinstance(value, DTensor):
            local = self._stage_tensor(path, value.to_local().detach(), at_once)
            return DTensor.from_local(
                local,
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        if isinstance(value, Tensor):
            return self._stage_tensor(path, value.detach(), at_once)
        return copy.deepcopy(value)

    def _stage_tensor(self, path: str, source: Tensor, at_once: Callable[[str], bool]) -> Tensor:
        target = self._buffers.get(path)
        if target is None or target.shape != source.shape or target.dtype != source.dtype:
            target = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[path] = target
        if source.numel() <= _SMALL or at_once(path):
            target.copy_(source)
        else:
            self._late.append((source, target))
        return target
