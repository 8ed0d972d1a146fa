"""A state as what can be sent and kept: a skeleton in bytes, and its tensors, in one order.

Whoever has the skeleton makes the same tensors in the same order, and needs only their bytes.
These travel a few megabytes at a time: neighbouring tensors together, a large one alone.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

_BLOB_BYTES = 8 << 20
"""Tensors are sent together up to about this size."""
_MARK = "__perdure_tensor__"

Place = Callable[[list[int], torch.dtype], Tensor]
"""(shape, type) -> a tensor to be filled"""


def pack_state(state: Any) -> tuple[bytes, list[Tensor]]:
    """Return the skeleton of `state`, and its tensors, which are not copied."""
    tensors: list[Tensor] = []

    def strip(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value.detach())
        return {_MARK: True, "shape": list(value.shape), "dtype": value.dtype}

    return pack_plain(_change(state, strip)), tensors


def open_state(skeleton: bytes, place: Place | None = None) -> tuple[Any, list[Tensor]]:
    """Return the state that has this skeleton, and its tensors, which are to be filled.

    `place` makes them, one after another; without it they are new ones.
    """
    tensors: list[Tensor] = []

    def restore(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        make = place or (lambda shape, dtype: torch.empty(shape, dtype=dtype))
        tensors.append(make(value["shape"], value["dtype"]))
        return tensors[-1]

    return _change(open_plain(skeleton), restore), tensors


def pack_plain(plain: Any) -> bytes:
    """Return what has few and small tensors, or none, as bytes."""
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def open_plain(packed: bytes) -> Any:
    """Return what was packed; nothing in it is executed."""
    return torch.load(io.BytesIO(packed), weights_only=True)


def list_blobs(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the groups of tensors that travel together."""
    blobs: list[list[Tensor]] = []
    filled = _BLOB_BYTES
    for tensor in tensors:
        if filled >= _BLOB_BYTES:
            blobs.append([])
            filled = 0
        blobs[-1].append(tensor)
        filled += tensor.nbytes
    return blobs


def join_blob(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of the tensors' bytes, one after another."""
    return torch.cat([_bytes_of(tensor) for tensor in tensors])


def fill_blob(tensors: Sequence[Tensor], data: Tensor) -> None:
    """Copy the bytes of `data` into `tensors`, one after another."""
    at = 0
    for tensor in tensors:
        _bytes_of(tensor).copy_(data[at : at + tensor.nbytes])
        at += tensor.nbytes


def copy_tensors(state: Any) -> Any:
    """Return `state` with copies of its tensors."""
    return _change(state, lambda value: value.clone() if isinstance(value, Tensor) else value)


def count_bytes(state: Any) -> int:
    """Return the bytes of a state's tensors."""
    return sum(tensor.nbytes for tensor in pack_state(state)[1])


def view_bytes(blob: Tensor) -> memoryview:
    """Return the memory of a tensor of bytes."""
    array: Any = blob.numpy()
    return memoryview(array)


def hash_tensors(tensors: Sequence[Tensor]) -> str:
    """Return a hash of the tensors' bytes."""
    return hash_blobs(b"", [_bytes_of(tensor) for tensor in tensors])


def hash_blobs(skeleton: bytes, blobs: Sequence[Tensor]) -> str:
    """Return a hash of these bytes, one after another."""
    digest = xxhash.xxh3_128(skeleton)
    for blob in blobs:
        digest.update(view_bytes(blob))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _change(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with all that is in its collections changed; a mark is no collection."""
    if isinstance(value, dict) and _MARK not in value:
        return {key: _change(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_change(one, change) for one in value])
    return change(value)
