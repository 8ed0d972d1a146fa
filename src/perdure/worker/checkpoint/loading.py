"""Whether files of tensors load, one after the other, as data and nothing else.

A program of its own, since only this room imports torch: paths on standard input as JSON, the
answer on standard output. A folder is a sharded checkpoint, whose index is read as data too.
"""

import io
import pickle
import sys
from pathlib import Path

import msgspec
import torch

from perdure.worker.checkpoint.index import read_index


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
    index = read_index(folder)
    if not index.storage_data:
        raise ValueError("the index lists no tensors")
    for place in index.storage_data.values():
        path = folder / place.relative_path
        if not 0 <= place.offset <= place.offset + place.length <= path.stat().st_size:
            raise ValueError(f"{place.relative_path} ends before its last tensor")
        with open(path, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
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
