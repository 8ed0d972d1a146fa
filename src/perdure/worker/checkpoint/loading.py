"""Whether files of tensors load, one after the other, as data and nothing else.

A program of its own, since only this room imports torch: paths on standard input as JSON, the
answer on standard output. A folder is a sharded checkpoint; its index is a pickle of torch's own
making, of which only the classes of an index are let through.
"""

import io
import pickle
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata

_PLAIN = {
    "builtins": {"set", "frozenset", "slice", "complex", "bytearray"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size", "device", "dtype"},
    "torch.serialization": {"_get_layout"},
}


class _IndexUnpickler(pickle.Unpickler):
    """Lets an index name its own classes, and no other: a pickle may call anything otherwise."""

    def find_class(self, module: str, name: str) -> Any:
        own = module.startswith("torch.distributed.checkpoint.")
        kind = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if own or kind or name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the index names {module}.{name}")


class Request(msgspec.Struct, frozen=True):
    """What is on standard input."""

    paths: tuple[str, ...]
    allow_pickle: bool = False
    """Where a file is no plain data, load it as a pickle, which may run any code that it names."""


def load(path: Path, *, allow_pickle: bool) -> None:
    """Load a file, or each tensor of a sharded checkpoint.

    Raises:
        Exception: it does not load, or not without running code.
    """
    if path.is_dir():
        _load_shards(path)
        return
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        if not allow_pickle:
            raise
        torch.load(path, map_location="cpu", weights_only=False)


def _load_shards(folder: Path) -> None:
    with open(folder / ".metadata", "rb") as file:
        index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata) or not index.storage_data:
        raise ValueError("the index lists no tensors")
    for place in index.storage_data.values():
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        if len(data) != place.length:
            raise ValueError(f"{place.relative_path} ends before its last tensor")
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def main() -> None:
    """Load the paths on standard input; print how many were, and what was wrong with others."""
    problems = []
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    for path in request.paths:
        try:
            load(Path(path), allow_pickle=request.allow_pickle)
        except Exception as error:  # Whatever it is: the file is not whole, and is named.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            problems.append(f"{path} does not load: {lines[0].partition('. ')[0]}")
    answer = {"loaded": len(request.paths) - len(problems), "problems": problems}
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    main()
