"""Activations as one message: what they are, then their bytes.

The first message over an edge in a world carries only the description, and its bytes follow in
a message of their own. From the next step on both ends know how much the edge has carried at most,
and the bytes travel with the description; what is larger follows again. So shapes may change
from micro-batch to micro-batch and from step to step, and nobody waits for a description first.
Gradients have the shapes of what they are gradients of, and need no description.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from perdure.model.codec import decode, encode
from perdure.model.errors import ConfigError
from perdure.worker.checkpoint.slabs import round_up
from perdure.worker.elastic.moving import make_places

HEADER_BYTES = 512


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """One tensor."""

    dtype: str
    shape: tuple[int, ...]
    differs: bool
    """Whether a gradient of it comes back."""

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """What a stage hands to the next one."""

    kinds: tuple[Kind, ...]
    single: bool
    """A tensor alone, and no tuple of one."""

    @property
    def payload(self) -> int:
        """Return the bytes of all, each begun at a whole multiple of the alignment."""
        return sum(round_up(kind.nbytes) for kind in self.kinds)

    def gradients(self) -> "Layout":
        """Return what comes back."""
        return Layout(tuple(kind for kind in self.kinds if kind.differs), False)


def list_tensors(value: Any) -> tuple[Tensor, ...]:
    """Return the tensors that a block has returned.

    Raises:
        ConfigError: It is neither a tensor nor a tuple of them.
    """
    found = value if isinstance(value, tuple | list) else (value,)
    for tensor in found:
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"pipeline: a block returned {type(tensor).__name__}, which cannot go to another "
                "rank",
                hint="blocks take and return a tensor, or a tuple of tensors",
            )
    return tuple(found)


def describe(value: Any, differs: Sequence[bool]) -> Layout:
    """Return the layout of what a block has returned."""
    tensors = list_tensors(value)
    kinds = tuple(
        Kind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), wanted)
        for tensor, wanted in zip(tensors, differs, strict=True)
    )
    return Layout(kinds, isinstance(value, Tensor))


def pack(tensors: Sequence[Tensor], layout: Layout, *, header: bool, room: int) -> Tensor:
    """Return a message of bytes with a header or without; the payload only if `room` suffices."""
    offset = HEADER_BYTES if header else 0
    message = torch.empty(offset + room, dtype=torch.uint8)
    if header:
        text = encode(layout)
        if len(text) > HEADER_BYTES - 4:
            raise ConfigError(
                f"pipeline: {len(layout.kinds)} tensors between two blocks are too many",
                hint="blocks hand over a few tensors",
            )
        head = len(text).to_bytes(4, "little") + text
        message[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if layout.payload <= room:
        with torch.no_grad():
            for tensor, place in zip(tensors, _views(message[offset:], layout), strict=True):
                place.copy_(tensor)
    return message


def read_layout(message: Tensor) -> Layout:
    """Return what the header of `message` says."""
    head = message[:HEADER_BYTES].numpy().tobytes()
    size = int.from_bytes(head[:4], "little")
    return decode(head[4 : 4 + size], Layout)


def unpack(payload: Tensor, layout: Layout, device: Any) -> list[Tensor]:
    """Return the tensors in `payload`, which they keep alive."""
    return [view.to(device) for view in _views(payload, layout)]


def _views(payload: Tensor, layout: Layout) -> list[Tensor]:
    place = make_places(payload)
    return [place(kind.shape, getattr(torch, kind.dtype)) for kind in layout.kinds]
