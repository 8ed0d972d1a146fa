"""A replica's whole state, from living peers to one that has none.

Plain data travels through the store; tensors go from several donors at once, each sending its
share, with a hash of what it has sent. Nothing is loaded before everything has come and every
hash was right, so a receiver that is interrupted is what it was.
"""

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from perdure.model.errors import ProtocolError
from perdure.worker.elastic.group import Group, wait_for

_BLOB_BYTES = 8 << 20
"""Tensors are sent together up to about this size."""
_MARK = "__perdure_tensor__"


def send_state(group: Group, state: Any, me: int, donors: Sequence[int], to: int) -> int:
    """Send this donor's share of `state` to member `to`; return its bytes.

    Raises:
        Broken: a member was lost.
    """
    skeleton, tensors = pack_state(state)
    share = donors.index(me)
    if share == 0:
        group.store.set(f"state/{to}", skeleton)
    digest, total = xxhash.xxh3_128(), 0
    for number, make in enumerate(list_blobs(tensors)):
        if number % len(donors) == share:
            data = make()
            digest.update(_buffer(data))
            total += data.numel()
            group.send(data, to, number)
            group.wait()
    group.store.set(f"hash/{to}/{me}", digest.hexdigest())
    return total


def receive_state(
    group: Group, me: int, donors: Sequence[int], overtaken: Callable[[], bool]
) -> tuple[Any, int]:
    """Return the donors' state and its bytes.

    Raises:
        Broken: a member was lost.
        ProtocolError: what came is not what was sent.
    """
    wait_for(group.store, [f"state/{me}"], overtaken)
    skeleton, tensors = open_state(group.store.get(f"state/{me}"))
    digests = {donor: xxhash.xxh3_128() for donor in donors}
    total = 0
    for number, blob in enumerate(_blobs([t.nbytes for t in tensors])):
        donor = donors[number % len(donors)]
        data = torch.empty(sum(tensors[i].nbytes for i in blob), dtype=torch.uint8)
        group.receive(data, donor, number)
        group.wait()
        digests[donor].update(_buffer(data))
        total += data.numel()
        fill_blob([tensors[i] for i in blob], data)
    wait_for(group.store, [f"hash/{me}/{donor}" for donor in donors], overtaken)
    for donor, digest in digests.items():
        if group.store.get(f"hash/{me}/{donor}").decode() != digest.hexdigest():
            raise ProtocolError(f"the state that rank {donor} sent came over damaged")
    return restore_state(skeleton, tensors), total


def pack_state(state: Any) -> tuple[bytes, list[Tensor]]:
    """Return the plain part of `state`, encoded, and its tensors, which are not copied."""
    tensors: list[Tensor] = []
    buffer = io.BytesIO()
    torch.save(_strip(state, tensors), buffer)
    return buffer.getvalue(), tensors


def open_state(packed: bytes) -> tuple[Any, list[Tensor]]:
    """Return the plain part of a packed state, and empty tensors to be filled."""
    skeleton = torch.load(io.BytesIO(packed), weights_only=True)
    tensors: list[Tensor] = []
    _find_marks(skeleton, tensors)
    return skeleton, tensors


def restore_state(skeleton: Any, tensors: list[Tensor]) -> Any:
    """Return the state that was packed, of its plain part and its tensors."""
    return _restore(skeleton, tensors)


def list_blobs(tensors: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
    """Return, for each group of tensors that travels together, what copies it into bytes."""

    def make(blob: list[int]) -> Tensor:
        return torch.cat([_bytes_of(tensors[i]) for i in blob])

    return [functools.partial(make, blob) for blob in _blobs([t.nbytes for t in tensors])]


def list_targets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the groups of tensors that travel together."""
    return [[tensors[i] for i in blob] for blob in _blobs([t.nbytes for t in tensors])]


def fill_blob(tensors: Sequence[Tensor], data: Tensor) -> None:
    """Copy the bytes of `data` into `tensors`, one after another."""
    at = 0
    for tensor in tensors:
        _bytes_of(tensor).copy_(data[at : at + tensor.nbytes])
        at += tensor.nbytes


def hash_tensors(tensors: Sequence[Tensor]) -> str:
    """Return a hash of the tensors' bytes."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(_buffer(_bytes_of(tensor.detach()).cpu()))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _buffer(tensor: Tensor) -> Any:
    return tensor.numpy()


def _blobs(sizes: Sequence[int]) -> list[list[int]]:
    """Return which tensors travel together."""
    blobs: list[list[int]] = []
    filled = _BLOB_BYTES
    for index, size in enumerate(sizes):
        if filled >= _BLOB_BYTES:
            blobs.append([])
            filled = 0
        blobs[-1].append(index)
        filled += size
    return blobs


def _strip(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` with marks in the place of tensors, which are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().contiguous())
        return {_MARK: len(tensors) - 1, "shape": list(value.shape), "dtype": value.dtype}
    if isinstance(value, dict):
        return {key: _strip(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_strip(one, tensors) for one in value])
    return value


def _find_marks(value: Any, tensors: list[Tensor]) -> None:
    """Make an empty tensor for each mark, in the order of `_strip`."""
    if isinstance(value, dict):
        if _MARK in value:
            tensors.append(torch.empty(value["shape"], dtype=value["dtype"]))
            return
        for one in value.values():
            _find_marks(one, tensors)
    elif isinstance(value, list | tuple):
        for one in value:
            _find_marks(one, tensors)


def _restore(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, dict):
        if _MARK in value:
            return tensors[value[_MARK]]
        return {key: _restore(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_restore(one, tensors) for one in value])
    return value
