"""Rows of a sharded state on their way from those who hold them to those who need them."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from perdure.plan.elastic.shards import Shard, ShardReformation, Source, Transfer, plan_transfers
from perdure.worker.elastic.group import Group
from perdure.worker.elastic.moving.exchange import exchange
from perdure.worker.elastic.state.fsdp import Parts

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
        parts = _make_parts(mine, shapes, keys)
        for piece in inner:
            _cut(parts, mine, piece).copy_(_find(read, piece))
    exchange(
        group,
        "rows",
        {to: [_find(read, p) for p in found] for (a, to), found in pairs.items() if a == me},
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


def _make_parts(shard: Shard, shapes: Mapping[str, torch.Size], keys: Keys) -> Parts:
    return {
        name: {
            key: torch.empty((len(shard.rows(shape[0])), *shape[1:]), dtype=dtype)
            for key, dtype in keys[name].items()
        }
        for name, shape in shapes.items()
    }


def _find(read: Callable[[Source], Parts], piece: Piece) -> Tensor:
    """Return a piece, where it lies."""
    source = piece[2].source
    return _cut(read(source), source.shard, piece)


def _cut(parts: Parts, shard: Shard, piece: Piece) -> Tensor:
    """Return where a piece belongs in `parts`, the rows of `shard`."""
    name, key, transfer = piece
    start = shard.rows(transfer.length).start
    return parts[name][key][transfer.first - start : transfer.end - start].detach()
