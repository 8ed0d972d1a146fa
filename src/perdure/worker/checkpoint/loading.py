"""Whether files of tensors load, one after the other, as data and nothing else.

A program of its own, since only this room imports torch: paths on standard input as JSON, the
answer on standard output. A folder is a sharded checkpoint, whose index is read as data too.
"""

import io
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from perdure.files.regular import open_file
from perdure.worker.checkpoint.index import read_index

_ZIP = b"PK\x03\x04"
"""Beginning of an archive of torch.save; older files are pickles."""


class Request(msgspec.Struct, frozen=True):
    """The request on standard input."""

    paths: tuple[str, ...]
    allow_pickle: bool = False
    """Where a file is no plain data, load it as a pickle, which may run any code that it names."""


class ForeignError(Exception):
    """A file is whole, for all that is known, and names what is no plain data."""


def load(path: Path, *, allow_pickle: bool) -> int:
    """Load a file, or each tensor of a sharded checkpoint; return how many tensors it has.

    Raises:
        ForeignError: it does not load without running code.
        Exception: it does not load.
    """
    if path.is_dir():
        return _load_shards(path)
    with open_file(path, follow=True) as file:
        check_archive(file)
    try:
        return _count(torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError:
        if not allow_pickle:
            if names := _list_foreign(path):
                raise ForeignError(f"names {', '.join(names[:3])}") from None
            raise
        return _count(torch.load(path, map_location="cpu", weights_only=False))
    except RuntimeError as error:
        if "TorchScript" not in str(error):
            raise
        if not allow_pickle:
            raise ForeignError("is a TorchScript program") from None
        return _count(torch.jit.load(path, map_location="cpu"))  # type: ignore[no-untyped-call]


def check_archive(file: BinaryIO) -> None:
    """Refuse an archive that would take more memory than it has bytes.

    torch.save stores records as they are. Compressed ones, or several that share their bytes, would
    let a file of 1 MB take gigabytes when it is loaded. TorchScript compresses its sources, which
    nobody reads who loads data.

    Raises:
        ValueError: it is such an archive.
        zipfile.BadZipFile: it is damaged.
    """
    if file.read(len(_ZIP)) == _ZIP:
        with zipfile.ZipFile(file) as archive:
            names = archive.infolist()
        records = [one for one in names if one.filename.split("/")[1:2] != ["code"]]
        if packed := [one for one in records if one.compress_type != zipfile.ZIP_STORED]:
            raise ValueError(f"its record {packed[0].filename} is compressed")
        size = file.seek(0, io.SEEK_END)
        if (total := sum(one.file_size for one in records)) > size:
            raise ValueError(f"its records have {total} bytes, and the file has {size}")
    file.seek(0)


def _list_foreign(path: Path) -> list[str]:
    """Return what a whole archive names beside plain data; nothing where it cannot be told."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # It is damaged, or of the older form: that it does not load stands.
        return []


def _count(value: Any) -> int:
    """Return how many tensors are in a value, each once, by a walk that needs no recursion."""
    found: set[int] = set()
    seen: set[int] = set()
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, torch.Tensor):
            found.add(id(one))
        elif isinstance(one, dict | list | tuple | set) and id(one) not in seen:
            seen.add(id(one))
            left += one.values() if isinstance(one, dict) else one
        elif hasattr(one, "state_dict") and hasattr(one, "parameters"):  # A module, as a whole.
            left += one.state_dict().values()
    return len(found)


def _load_shards(folder: Path) -> int:
    index = read_index(folder)
    if not index.storage_data:
        raise ValueError("the index lists no tensors")
    tensors = 0
    for place in index.storage_data.values():
        path = folder / place.relative_path
        if not 0 <= place.offset <= place.offset + place.length <= path.stat().st_size:
            raise ValueError(f"{place.relative_path} ends before its last tensor")
        with open_file(path, follow=True) as file:
            file.seek(place.offset)
            data = file.read(place.length)
        check_archive(shard := io.BytesIO(data))
        tensors += _count(torch.load(shard, map_location="cpu", weights_only=True))
    return tensors


def main() -> None:
    """Load the paths on standard input; print how many were, and what was wrong with others."""
    problems, unknown = [], []
    tensors = 0
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    for path in request.paths:
        try:
            tensors += load(Path(path), allow_pickle=request.allow_pickle)
        except ForeignError as error:
            unknown.append(f"{path} ({error}, which is no data: --allow-pickle would run it)")
        except Exception as error:  # Whatever it is: the file is not whole, and is named.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            problems.append(f"{path} does not load: {lines[0].partition('. ')[0]}")
    loaded = len(request.paths) - len(problems) - len(unknown)
    answer = {"loaded": loaded, "tensors": tensors, "problems": problems, "unknown": unknown}
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    main()
