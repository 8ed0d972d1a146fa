"""Copies of tensors from a device to the host's memory, beside what the device computes.

Each device has one stream for them, made once. Large tensors go in chunks, so that copies of the
script (its batches) come between. What is on the CPU is no business of this module.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20

Events: TypeAlias = dict[torch.device, Any]
"""What a device has come to once all that was issued before is done, by device."""
Pairs: TypeAlias = Iterable[tuple[Tensor, Tensor]]
"""(target on the host, source on the device)"""


class DeviceCopies:
    """The copies of one process from its devices."""

    def __init__(self) -> None:
        """Touch no device yet."""
        self._streams: dict[torch.device, Any] = {}

    def is_on_device(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is copied by a device."""
        return tensor.is_cuda

    def make_block(self, size: int) -> Tensor:
        """Return host memory that a device can copy to by itself."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def mark(self, sources: Iterable[Tensor]) -> Events:
        """Return by device what this thread has issued so far where `sources` are."""
        return {
            device: torch.cuda.current_stream(device).record_event()
            for device in {source.device: None for source in sources}
        }

    def copy_late(self, pairs: Pairs, after: Events) -> Events:
        """Issue copies on the devices' own streams; return what they have come to when all is done.

        They begin after `after`. The sources must be kept until then, and may not change.
        """
        pairs = list(pairs)
        events: Events = {}
        for device, mark in after.items():
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(mark)
            with torch.cuda.stream(stream):
                for target, source in pairs:
                    if source.device == device:
                        for part, piece in split(target, source):
                            part.copy_(piece, non_blocking=True)
            events[device] = stream.record_event()
        return events

    def copy_now(self, pairs: Pairs) -> None:
        """Copy all, and wait for each device once."""
        devices: dict[torch.device, None] = {}
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
            devices[source.device] = None
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def hold(self, events: Events) -> None:
        """Have what this thread issues from now on wait for `events`, on the devices."""
        for device, event in events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self, events: Events) -> None:
        """Wait for `events`."""
        for event in events.values():
            event.synchronize()


def split(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both in chunks; of a source that is not contiguous, in whole rows.

    A class of its own may have its own ideas of its parts: it goes as one.
    """
    if type(source) is not Tensor or source.nbytes <= CHUNK_BYTES:
        yield target, source
        return
    if source.is_contiguous():
        target, source = target.view(-1), source.view(-1)
    rows = max(1, CHUNK_BYTES * source.shape[0] // source.nbytes)
    for at in range(0, source.shape[0], rows):
        yield target[at : at + rows], source[at : at + rows]
