"""A device that is played: the CPU's tensors count as its own, and torch's streams are recorded."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from perdure.worker.checkpoint.device_copies import DeviceCopies, Events, Pairs
from tests.waiting import PATIENCE_S


class PlayedEvent:
    """What a stream has come to; it may be held up."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.done.set()

    def synchronize(self) -> None:
        assert self.done.wait(PATIENCE_S)


class PlayedStream:
    """A stream whose work is done at once; `said` is what it was asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.said: list[Any] = []

    def record_event(self) -> PlayedEvent:
        self.said.append(PlayedEvent())
        return self.said[-1]  # type: ignore[no-any-return]

    def wait_event(self, event: PlayedEvent) -> None:
        self.said.append(("wait", event))

    def synchronize(self) -> None:
        self.said.append("synchronize")


class PlayedDevice(DeviceCopies):
    """Copies from a device that is played; `blocks` are the sizes of what was pinned."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.blocks: list[int] = []
        self.made: list[PlayedStream] = []
        self.current = PlayedStream(torch.device("cpu"))
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        patch.setattr(torch.cuda, "Stream", self._make_stream)
        patch.setattr(torch.cuda, "stream", self._use)
        self.used: list[PlayedStream] = []

    def is_on_device(self, tensor: Tensor) -> bool:
        """Return True, but for what is told apart by being 16-bit integers."""
        return tensor.dtype != torch.int16

    def make_block(self, size: int) -> Tensor:
        """Return ordinary memory."""
        self.blocks.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def copy_late(self, pairs: Pairs, after: Events) -> Events:
        """Copy what is on the device, and nothing else."""
        pairs = list(pairs)
        assert all(self.is_on_device(source) for _, source in pairs)
        return super().copy_late(pairs, after)

    def copy_now(self, pairs: Pairs) -> None:
        """Copy what is on the device, and nothing else."""
        pairs = list(pairs)
        assert all(self.is_on_device(source) for _, source in pairs)
        super().copy_now(pairs)

    def _make_stream(self, device: torch.device) -> PlayedStream:
        self.made.append(PlayedStream(device))
        return self.made[-1]

    @contextlib.contextmanager
    def _use(self, stream: PlayedStream) -> Iterator[None]:
        self.used.append(stream)
        yield
