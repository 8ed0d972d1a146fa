"""Files of tensors looked into without torch: safetensors, and the index of a model in shards.

The formats are read here by their published description rather than by the `safetensors` library,
whose way to open a file brings numpy or torch with it: a laptop that verifies what it has pulled
may have neither. A header comes from elsewhere, and nothing of it is believed before it was
compared with the file's own size.
"""

import json
import math
from pathlib import Path
from typing import Any

import msgspec

HEADER_MAX = 100_000_000
"""Bytes; the format's own bound."""
INDEX_MAX = 200_000_000
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
INDICES = (".safetensors.index.json", ".bin.index.json")
"""Ends of the names of indices of models in shards."""


class TensorInfo(msgspec.Struct, frozen=True):
    """One entry of a header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_safetensors(path: Path) -> frozenset[str]:
    """Return the names of the tensors of a safetensors file, whose bytes are all there.

    Raises:
        ValueError: it is cut off, or its header says what cannot be.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(HEADER_MAX, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = file.read(length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        infos = {name: msgspec.json.decode(raw, type=TensorInfo) for name, raw in entries.items()}
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"its header: {error}") from None
    end = 0
    for name, info in sorted(infos.items(), key=lambda item: item[1].data_offsets):
        begin, after = info.data_offsets
        if begin != end or after < begin:
            raise ValueError(f"tensor {name!r} begins at {begin}, and the one before ends at {end}")
        bits = _BITS.get(info.dtype)
        if min(info.shape, default=0) < 0:
            raise ValueError(f"tensor {name!r} has the shape {list(info.shape)}")
        if bits is not None and (after - begin) * 8 != math.prod(info.shape) * bits:
            raise ValueError(f"tensor {name!r} has {after - begin} bytes, which is not its shape")
        end = after
    if 8 + length + end != size:
        raise ValueError(f"its tensors end at byte {8 + length + end} of {size}")
    return frozenset(infos)


def list_missing_files(index: Path) -> list[str]:
    """Return what the index of a model in shards names and the folder has not.

    Raises:
        ValueError: it is no index, or names a file elsewhere.
        OSError: it cannot be read.
    """
    document = _read_json(index)
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        raise ValueError("it names no tensors")
    problems: list[str] = []
    shards: dict[str, list[str]] = {}
    for name, shard in found.items():
        if not isinstance(shard, str) or not shard or "/" in shard or shard in (".", ".."):
            raise ValueError(f"tensor {name!r} is in {shard!r}, which is no file beside it")
        shards.setdefault(shard, []).append(name)
    for shard, names in sorted(shards.items()):
        path = index.parent / shard
        if path.is_symlink() or not path.is_file():
            problems.append(f"{shard} with {len(names)} tensors is missing")
            continue
        if shard.endswith(".safetensors"):
            lacking = sorted(set(names) - read_safetensors(path))
            problems += [f"tensor {name!r} is not in {shard}" for name in lacking]
    return problems


def check_config(path: Path) -> None:
    """See that a model's `config.json` is a document.

    Raises:
        ValueError: it is none.
        OSError: it cannot be read.
    """
    if not isinstance(_read_json(path), dict):
        raise ValueError("it is no document")


def _read_json(path: Path) -> Any:
    if path.stat().st_size > INDEX_MAX:
        raise ValueError(f"{path.stat().st_size} bytes are too many")
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_pickle(path: Path) -> bool:
    """Return whether a file may be torch's: an archive, or a pickle of the older form."""
    with open(path, "rb") as file:
        head = file.read(4)
    return head == b"PK\x03\x04" or (
        head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04")
    )
