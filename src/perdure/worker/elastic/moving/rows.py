"""Rows of a sharded state on their way from those who hold them to those who need them.

Both sides list the same pieces in the same order, from the same plan. They travel a few megabytes
at a time, from several sources at once; what came is hashed against what was sent. Nothing of a
member's own state is altered or freed here, so who is interrupted is what it was.
"""

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from perdure.model.errors import ProtocolError
from perdure.plan.elastic.shards import Shard, ShardReformation, Source, Transfer, plan_transfers
from perdure.worker.elastic.group import Group, wait_for
from perdure.worker.elastic.state.fsdp import Parts

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
    out = [
        Outgoing(to, [functools.partial(_join, read, blob) for blob in _blobs(p, shapes, keys)])
        for (a, to), p in pairs.items()
        if a == me
    ]
    into = []
    for (source, to), pieces in pairs.items():
        if to == me:
            blobs = _blobs(pieces, shapes, keys)
            sizes = [sum(_size_of(piece, shapes, keys) for piece in blob) for blob in blobs]
            fill = functools.partial(_fill, blobs, parts, mine, shapes)
            into.append(Incoming(source, sizes, fill))
    swap(group, me, "rows", out, into, overtaken)
    return parts


class Outgoing:
    """What goes to one member: what makes each message, when its turn has come."""

    def __init__(self, to: int, makes: Sequence[Callable[[], Tensor]]) -> None:
        """Send to member `to`."""
        self.to, self.makes = to, makes
        self.digest = xxhash.xxh3_128()

    def begin(self, group: Group, turn: int) -> None:
        """Begin to send a message, if there is one left."""
        if turn < len(self.makes):
            data = self.makes[turn]()
            self.digest.update(_buffer(data))
            group.send(data, self.to, turn)


class Incoming:
    """What comes from one member: the size of each message, and what takes it."""

    def __init__(
        self, source: int, sizes: Sequence[int], take: Callable[[int, Tensor], object]
    ) -> None:
        """Receive from member `source`; `take` is given the number of a message, and its bytes."""
        self.source, self.sizes, self._take = source, sizes, take
        self.digest = xxhash.xxh3_128()
        self._data = torch.empty(0)

    def begin(self, group: Group, turn: int) -> None:
        """Begin to receive a message, if there is one left."""
        if turn < len(self.sizes):
            self._data = torch.empty(self.sizes[turn], dtype=torch.uint8)
            group.receive(self._data, self.source, turn)

    def end(self, turn: int) -> None:
        """It has come."""
        if turn < len(self.sizes):
            self.digest.update(_buffer(self._data))
            self._take(turn, self._data)


def swap(
    group: Group,
    me: int,
    name: str,
    out: Sequence[Outgoing],
    into: Sequence[Incoming],
    overtaken: Callable[[], bool],
) -> None:
    """Send and receive all, each one's first message at once, then the second ones, and so on.

    Raises:
        Broken: a member was lost.
        ProtocolError: what came is not what was sent.
    """
    lengths = [len(one.makes) for one in out] + [len(one.sizes) for one in into]
    for turn in range(max(lengths, default=0)):
        for sent in out:
            sent.begin(group, turn)
        for came in into:
            came.begin(group, turn)
        group.wait()
        for came in into:
            came.end(turn)
    for sent in out:
        group.store.set(f"{name}/{me}/{sent.to}", sent.digest.hexdigest())
    wait_for(group.store, [f"{name}/{one.source}/{me}" for one in into], overtaken)
    for one in into:
        if group.store.get(f"{name}/{one.source}/{me}").decode() != one.digest.hexdigest():
            raise ProtocolError(f"the {name} that rank {one.source} sent came over damaged")


def _join(read: Callable[[Source], Parts], pieces: Sequence[Piece]) -> Tensor:
    return torch.cat([_bytes_of(_find(read, piece)) for piece in pieces])


def _fill(
    blobs: list[list[Piece]], parts: Parts, mine: Shard, shapes: Any, turn: int, data: Tensor
) -> None:
    at = 0
    for piece in blobs[turn]:
        first = mine.rows(shapes[piece[0]][0]).start
        target = _bytes_of(_view(parts, first, piece))
        target.copy_(data[at : at + target.numel()])
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
