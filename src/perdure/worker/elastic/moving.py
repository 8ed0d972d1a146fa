"""State on its way between the members of a new world.

It is packed as what can be sent and kept: a skeleton in bytes, and its tensors, in one order.
Whoever has the skeleton makes the same tensors in the same order, and needs only their bytes. These
travel a few megabytes at a time: neighbouring tensors together, a large one alone.

Tensors come from all who hold them at once. Both sides list the same tensors in the same order,
from the same plan. They travel a few megabytes at a time; what came is hashed against what was
sent. What a member holds itself is neither altered nor freed here, so who is interrupted is what it
was.

What moves is blocks of a staged state, or rows of a sharded one.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from perdure.model.errors import ConfigError, ProtocolError
from perdure.plan.elastic.shards import Shard, ShardReformation, Source, Transfer, plan_transfers
from perdure.plan.elastic.stage_commit import Holder, Move
from perdure.worker.checkpoint.plain import copy_plain, read_plain_state
from perdure.worker.checkpoint.slabs import round_up
from perdure.worker.elastic.group import Group

_BLOB_BYTES = 8 << 20
"""Tensors are sent together up to about this size."""
_MARK = "__perdure_tensor__"

Place = Callable[[Sequence[int], torch.dtype], Tensor]
"""(shape, type) -> a tensor to be filled"""


def pack_state(state: Any) -> tuple[bytes, list[Tensor]]:
    """Return the skeleton of `state`, and its tensors, which are not copied."""
    tensors: list[Tensor] = []

    def strip(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _make_plain(value)
        tensors.append(value.detach())
        return {_MARK: True, "shape": list(value.shape), "dtype": value.dtype}

    return _save(_change(state, strip)), tensors


def name_tensors(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a packed state under words for them."""
    return {f"tensor {n}, of shape {list(one.shape)},": one for n, one in enumerate(tensors)}


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

    return read_plain_state(_change(_load(skeleton), restore)), tensors


def check_sendable(state: Mapping[str, Any]) -> None:
    """Open what `state` is packed as, as a rank that joins does.

    Raises:
        ConfigError: an entry of it cannot be sent.
    """
    try:
        open_plain(pack_state(state)[0])
    except Exception as error:  # A class may raise anything while it is pickled.
        for path, value in _list_entries("", state):
            try:
                open_plain(pack_plain(value))
            except Exception:
                kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix(
                    "builtins."
                )
                if path.startswith("rest."):  # What a model has beside its tensors.
                    path = f"model.{path[5:]}"
                raise ConfigError(
                    f"elastic: {path} is of type {kind}, and no other rank could be sent it",
                    hint="let state_dict() return tensors, arrays, numbers, strings, lists, dicts",
                ) from None
        raise ConfigError(f"elastic: the state cannot be sent to other ranks: {error}") from None


def _list_entries(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is no plain collection in `value`, each with its path."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _list_entries(f"{path}.{key}" if path else str(key), one)
            yield f"{path}: the key {key!r}", key
    elif type(value) in (list, tuple):
        for number, one in enumerate(value):
            yield from _list_entries(f"{path}[{number}]", one)
    else:
        yield path, value


def pack_plain(plain: Any) -> bytes:
    """Return what has few and small tensors, or none, as bytes."""
    return _save(_change(plain, _make_plain))


def open_plain(packed: bytes) -> Any:
    """Return what was packed; nothing in it is executed."""
    return read_plain_state(_load(packed))


def _make_plain(value: Any) -> Any:
    """Return an array or a number of NumPy as plain data, anything else as it is."""
    return copy_plain(value) if type(value).__module__ == "numpy" else value


def _save(plain: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def _load(packed: bytes) -> Any:
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


def find_device(model: nn.Module) -> torch.device:
    """Return where the parameters are that are trained; the CPU where there are none."""
    found = (p.device for p in model.parameters() if p.requires_grad)
    return next(found, torch.device("cpu"))


def measure_blob(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of a copy of `tensors`, each of which begins at a whole `ALIGN`."""
    return sum(round_up(tensor.nbytes) for tensor in tensors)


def lay_out(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the place of each tensor in `memory`, bytes."""
    place = make_places(memory)
    return [place(tensor.shape, tensor.dtype) for tensor in tensors]


def join_blob(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of the tensors, one after another in memory."""
    memory = torch.empty(measure_blob(tensors), dtype=torch.uint8)
    for place, tensor in zip(lay_out(memory, tensors), tensors, strict=True):
        place.copy_(tensor)
    return memory


def fill_blob(tensors: Sequence[Tensor], data: Tensor) -> None:
    """Copy what is in `data`, as `join_blob` makes it, into `tensors`."""
    for place, tensor in zip(lay_out(data, tensors), tensors, strict=True):
        tensor.copy_(place)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return `value`, a tensor or a collection of them, with what `change` makes of each."""
    return _change(value, lambda one: change(one) if isinstance(one, Tensor) else one)


def collect_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a collection."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


def view_bytes(blob: Tensor) -> memoryview:
    """Return the memory of a tensor of bytes."""
    array: Any = blob.numpy()
    return memoryview(array)


def hash_tensors(tensors: Sequence[Tensor]) -> str:
    """Return a hash of the tensors' bytes, one after another."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(view_bytes(_bytes_of(tensor)))
    return digest.hexdigest()


def make_places(memory: Tensor) -> Place:
    """Return what gives a place in `memory`, bytes, to one tensor after another."""
    at = 0

    def place(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nonlocal at
        size = math.prod(shape) * dtype.itemsize
        part = memory[at : at + size]
        at += round_up(size)
        return part.view(dtype).view(torch.Size(shape))

    return place


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _change(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with all that is in its collections changed; a mark is no collection."""
    if isinstance(value, dict) and _MARK not in value:
        return {key: _change(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        changed = [_change(one, change) for one in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return change(value)


def exchange(
    group: Group,
    name: str,
    out: Mapping[int, Sequence[Tensor]],
    into: Mapping[int, Sequence[Tensor]],
) -> None:
    """Send the tensors of `out`, by member, and fill those of `into`, by who sends them.

    Each one's first message goes at once, then the second ones, and so on.

    Raises:
        Broken: a member was lost.
        ProtocolError: what came is not what was sent.
    """
    going = {to: list_blobs(tensors) for to, tensors in out.items()}
    coming = {source: list_blobs(tensors) for source, tensors in into.items()}
    sent = {to: xxhash.xxh3_128() for to in going}
    came = {source: xxhash.xxh3_128() for source in coming}
    for turn in range(max(map(len, (*going.values(), *coming.values())), default=0)):
        for to, blobs in going.items():
            if turn < len(blobs):
                data = join_blob(blobs[turn])
                sent[to].update(view_bytes(data))
                group.send(data, to, turn)
        found = []
        for source, blobs in coming.items():
            if turn < len(blobs):
                data = torch.empty(measure_blob(blobs[turn]), dtype=torch.uint8)
                group.receive(data, source, turn)
                found.append((source, blobs[turn], data))
        group.wait()
        for source, blob, data in found:
            came[source].update(view_bytes(data))
            fill_blob(blob, data)
    for to, digest in sent.items():
        group.store.set(f"{name}/{group.me}/{to}", digest.hexdigest())
    places = [f"{name}/{source}/{group.me}" for source in came]
    for (source, digest), its in zip(came.items(), group.read(places), strict=True):
        if its.decode() != digest.hexdigest():
            raise ProtocolError(f"the {name} that rank {source} sent came over damaged")


def move_blocks(
    group: Group, moves: Iterable[Move], read: Callable[[Holder, int], Any]
) -> dict[int, Any]:
    """Return the states of the blocks that `moves` bring to this member.

    `read(holder, block)` gives a block of which this member is a holder. The first holder tells
    through the store what a block's state consists of; each sends its share of the tensors.

    Raises:
        Broken: a member was lost.
        ProtocolError: what came is not what was sent.
    """
    me = group.me
    remote = [m for m in moves if m.to != m.holders[0].member]
    found = {
        m.block: read(m.holders[0], m.block) for m in moves if m.to == me == m.holders[0].member
    }
    given = {m.block: h for m in remote for h in m.holders if h.member == me}
    packed = {block: pack_state(read(holder, block)) for block, holder in given.items()}
    for block, teller in {m.block: min(m.holders) for m in remote}.items():
        if teller.member == me:
            group.store.set(f"block/{block}", packed[block][0])
    mine = [move for move in remote if move.to == me]
    skeletons = group.read([f"block/{move.block}" for move in mine])
    opened = {m.block: open_state(one) for m, one in zip(mine, skeletons, strict=True)}
    out: dict[int, list[Tensor]] = {}
    into: dict[int, list[Tensor]] = {}
    for move in remote:
        for share, holder in enumerate(move.holders):
            if holder.member == me:
                _add_share(out.setdefault(move.to, []), packed[move.block][1], move, share)
            if move.to == me:
                _add_share(into.setdefault(holder.member, []), opened[move.block][1], move, share)
    exchange(group, "blocks", out, into)
    return found | {block: state for block, (state, _) in opened.items()}


def _add_share(to: list[Tensor], tensors: Sequence[Tensor], move: Move, share: int) -> None:
    """Add what the holder number `share` sends of a block."""
    for blob in list_blobs(tensors)[share :: len(move.holders)]:
        to += blob


def share_plain(group: Group, source: int, tell: Callable[[], Any]) -> Any:
    """Return what every member has alike, as member `source` tells it.

    Raises:
        Broken: there is a newer epoch.
    """
    if group.me == source:
        plain = tell()
        group.store.set("plain", pack_plain(plain))
        return plain
    return open_plain(group.read(["plain"])[0])


Parts = dict[str, dict[str, Tensor]]
"""Name of a parameter -> key -> rows of it (key `PARAMETER`), or of an optimizer's state."""
PARAMETER = ""
Keys = Mapping[str, Mapping[str, torch.dtype]]
"""Parameter -> key -> type of a tensor of it."""
Piece = tuple[str, str, Transfer]
"""Parameter, key, and which rows go from where to where."""


def move_rows(
    group: Group,
    plan: ShardReformation,
    shapes: Mapping[str, torch.Size],
    keys: Keys,
    read: Callable[[Source], Parts],
) -> Parts:
    """Return this member's rows by `plan`; `read` gives what this member is the source of.

    What this member holds as it is to be is not copied.

    Raises:
        Broken: a member was lost.
        ProtocolError: what came is not what was sent.
    """
    me = group.me
    mine = plan.layout[me]
    pairs = _list_pieces(plan, shapes, keys)
    inner = pairs.pop((me, me), [])
    if Source(me, mine) in plan.sources:
        parts = read(Source(me, mine))
    else:
        parts = {
            name: {
                key: torch.empty((len(mine.rows(shape[0])), *shape[1:]), dtype=dtype)
                for key, dtype in keys[name].items()
            }
            for name, shape in shapes.items()
        }
        for piece in inner:
            _cut(parts, mine, piece).copy_(_read_piece(read, piece))
    exchange(
        group,
        "rows",
        {to: [_read_piece(read, p) for p in found] for (a, to), found in pairs.items() if a == me},
        {a: [_cut(parts, mine, p) for p in found] for (a, to), found in pairs.items() if to == me},
    )
    return parts


def _list_pieces(
    plan: ShardReformation, shapes: Mapping[str, torch.Size], keys: Keys
) -> dict[tuple[int, int], list[Piece]]:
    """Return the pieces of each (source, receiver), in an order that all agree on."""
    planned = {length: plan_transfers(plan, length) for length in {s[0] for s in shapes.values()}}
    pairs: dict[tuple[int, int], list[Piece]] = {}
    for name, shape in shapes.items():
        for transfer in planned[shape[0]]:
            pair = pairs.setdefault((transfer.source.member, transfer.to), [])
            pair += [(name, key, transfer) for key in sorted(keys[name])]
    return pairs


def _read_piece(read: Callable[[Source], Parts], piece: Piece) -> Tensor:
    """Return a piece, where it lies."""
    source = piece[2].source
    return _cut(read(source), source.shard, piece)


def _cut(parts: Parts, shard: Shard, piece: Piece) -> Tensor:
    """Return where a piece belongs in `parts`, the rows of `shard`."""
    name, key, transfer = piece
    start = shard.rows(transfer.length).start
    return parts[name][key][transfer.first - start : transfer.end - start].detach()
