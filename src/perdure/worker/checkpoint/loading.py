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


def load(path: Path) -> None:
    """Load a file, or each tensor of a sharded checkpoint.

    Raises:
        Exception: it does not load, or not without running code.
    """
    if path.is_dir():
        _load_shards(path)
    else:
        torch.load(path, map_location="cpu", weights_only=True)


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
    paths = msgspec.json.decode(sys.stdin.buffer.read(), type=list[str])
    for path in paths:
        try:
            load(Path(path))
        except Exception as error:  # Whatever it is: the file is not whole, and is named.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            problems.append(f"{path} does not load: {lines[0]}")
    answer = {"loaded": len(paths) - len(problems), "problems": problems}
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    main()
