"""Rows of a sharded state on their way from those who hold them to those who need them.

Both sides list the same pieces in the same order, from the same plan. They travel a few megabytes
at a time, from several sources at once; what came is hashed against what was sent. Nothing of a
member's own state is altered or freed here, so who is interrupted is what it was.
"""

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from perdure.model.errors import ProtocolError
from perdure.plan.shards import Shard, ShardReformation, Source, Transfer, plan_transfers
from perdure.worker.elastic.group import Group, wait_for
from perdure.worker.elastic.sharding import Parts

_BLOB_BYTES = 8 << 20
"""Pieces are sent together up to about this size."""

Piece = tuple[str, str, Transfer]
"""Parameter, key, and which rows go from where to where."""


def share_plain(
    group: Group, me: int, source: int, plain: Any, overtaken: Callable[[], bool]
) -> Any:
    """Return what every member has alike, as member `source` has it: its `plain`.

    Raises:
        Broken: there is a newer epoch.
    """
    if me == source:
        buffer = io.BytesIO()
        torch.save(plain, buffer)
        group.store.set("plain", buffer.getvalue())
        return plain
    wait_for(group.store, ["plain"], overtaken)
    return torch.load(io.BytesIO(group.store.get("plain")), weights_only=True)


def move_parts(
    group: Group,
    me: int,
    plan: ShardReformation,
    shapes: Mapping[str, torch.Size],
    keys: Mapping[str, Mapping[str, torch.dtype]],
    read: Callable[[Source], Parts],
    overtaken: Callable[[], bool],
) -> Parts:
    """Return this member's rows by `plan`; `read` gives what this member is the source of.

    `keys` says of which types a parameter's tensors are. What this member holds as it is to be
    is not copied.

    Raises:
        Broken: a member was lost.
        ProtocolError: what came is not what was sent.
    """
    mine = plan.layout[me]
    pairs = _list_pieces(plan, shapes, keys)
    inner = pairs.pop((me, me), [])
    if Source(me, mine) in plan.sources:
        parts = read(Source(me, mine))
    else:
        parts = _make_parts(mine, shapes, keys)
        for piece in inner:
            _view(parts, mine.rows(shapes[piece[0]][0]).start, piece).copy_(_find(read, piece))
    out = [_Outgoing(to, _blobs(p, shapes, keys)) for (a, to), p in pairs.items() if a == me]
    into = [_Incoming(a, _blobs(p, shapes, keys)) for (a, to), p in pairs.items() if to == me]
    turns = max((len(p) for p in (*(o.blobs for o in out), *(i.blobs for i in into))), default=0)
    for turn in range(turns):
        for sent in out:
            sent.begin(group, turn, read)
        for came in into:
            came.begin(group, turn, shapes, keys)
        group.wait()
        for came in into:
            came.end(turn, parts, plan, shapes, me)
    for sent in out:
        group.store.set(f"rows/{me}/{sent.to}", sent.digest.hexdigest())
    wait_for(group.store, [f"rows/{one.source}/{me}" for one in into], overtaken)
    for one in into:
        if group.store.get(f"rows/{one.source}/{me}").decode() != one.digest.hexdigest():
            raise ProtocolError(f"the rows that rank {one.source} sent came over damaged")
    return parts


class _Outgoing:
    """What goes to one member."""

    def __init__(self, to: int, blobs: list[list[Piece]]) -> None:
        self.to, self.blobs = to, blobs
        self.digest = xxhash.xxh3_128()

    def begin(self, group: Group, turn: int, read: Callable[[Source], Parts]) -> None:
        if turn < len(self.blobs):
            data = torch.cat([_bytes_of(_find(read, piece)) for piece in self.blobs[turn]])
            self.digest.update(_buffer(data))
            group.send(data, self.to, turn)


class _Incoming:
    """What comes from one member."""

    def __init__(self, source: int, blobs: list[list[Piece]]) -> None:
        self.source, self.blobs = source, blobs
        self.digest = xxhash.xxh3_128()
        self._data = torch.empty(0)

    def begin(self, group: Group, turn: int, shapes: Any, keys: Any) -> None:
        if turn < len(self.blobs):
            size = sum(_size_of(piece, shapes, keys) for piece in self.blobs[turn])
            self._data = torch.empty(size, dtype=torch.uint8)
            group.receive(self._data, self.source, turn)

    def end(self, turn: int, parts: Parts, plan: ShardReformation, shapes: Any, me: int) -> None:
        if turn >= len(self.blobs):
            return
        self.digest.update(_buffer(self._data))
        at = 0
        for piece in self.blobs[turn]:
            first = plan.layout[me].rows(shapes[piece[0]][0]).start
            target = _bytes_of(_view(parts, first, piece))
            target.copy_(self._data[at : at + target.numel()])
            at += target.numel()


def _make_parts(shard: Shard, shapes: Any, keys: Any) -> Parts:
    return {
        name: {
            key: torch.empty(_cut(shape, len(shard.rows(shape[0]))), dtype=dtype)
            for key, dtype in keys[name].items()
        }
        for name, shape in shapes.items()
    }


def _list_pieces(
    plan: ShardReformation,
    shapes: Mapping[str, torch.Size],
    keys: Mapping[str, Mapping[str, torch.dtype]],
) -> dict[tuple[int, int], list[Piece]]:
    """Return the pieces of each (source, receiver), in an order that all agree on."""
    planned = {length: plan_transfers(plan, length) for length in {s[0] for s in shapes.values()}}
    pairs: dict[tuple[int, int], list[Piece]] = {}
    for name, shape in shapes.items():
        for transfer in planned[shape[0]]:
            pair = pairs.setdefault((transfer.source.member, transfer.to), [])
            pair += [(name, key, transfer) for key in sorted(keys[name])]
    return pairs


def _blobs(pieces: list[Piece], shapes: Any, keys: Any) -> list[list[Piece]]:
    blobs: list[list[Piece]] = []
    filled = _BLOB_BYTES
    for piece in pieces:
        if filled >= _BLOB_BYTES:
            blobs.append([])
            filled = 0
        blobs[-1].append(piece)
        filled += _size_of(piece, shapes, keys)
    return blobs


def _find(read: Callable[[Source], Parts], piece: Piece) -> Tensor:
    """Return a piece, where it lies."""
    name, key, transfer = piece
    held = read(transfer.source)[name]
    length = transfer.length
    first = transfer.source.shard.rows(length).start
    return held[key][transfer.first - first : transfer.end - first].detach()


def _view(parts: Parts, start: int, piece: Piece) -> Tensor:
    """Return where a piece belongs in `parts`, whose rows begin at `start`."""
    name, key, transfer = piece
    return parts[name][key][transfer.first - start : transfer.end - start]


def _size_of(piece: Piece, shapes: Any, keys: Any) -> int:
    name, key, transfer = piece
    count: int = _cut(shapes[name], transfer.end - transfer.first).numel()
    return count * int(keys[name][key].itemsize)


def _cut(shape: torch.Size, rows: int) -> torch.Size:
    return torch.Size((rows, *shape[1:]))


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _buffer(tensor: Tensor) -> Any:
    return tensor.numpy()
