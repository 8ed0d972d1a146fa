"""Text that is on every machine: the source of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


def read_text(max_bytes: int = 4_000_000) -> bytes:
    """Return the first `max_bytes` of the standard library's modules, in order of their names."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    return text[:max_bytes]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of `context` bytes, each with the bytes one further on."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        """Return how many whole windows there are."""
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (input, target), each of shape (context,) and dtype int64."""
        at = index * self.context
        window = self.bytes[at : at + self.context + 1].long()
        return window[:-1], window[1:]
