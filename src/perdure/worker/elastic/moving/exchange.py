"""Tensors on their way between the members of a new world, from all who hold them at once.

Both sides list the same tensors in the same order, from the same plan. They travel a few
megabytes at a time; what came is hashed against what was sent. What a member holds itself is
neither altered nor freed here, so who is interrupted is what it was.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from perdure.model.errors import ProtocolError
from perdure.plan.elastic.stage_commit import Holder, Move
from perdure.worker.elastic.group import Group
from perdure.worker.elastic.moving.packing import (
    fill_blob,
    join_blob,
    list_blobs,
    open_plain,
    open_state,
    pack_plain,
    pack_state,
    view_bytes,
)


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
                data = torch.empty(sum(t.nbytes for t in blobs[turn]), dtype=torch.uint8)
                group.receive(data, source, turn)
                found.append((source, blobs[turn], data))
        group.wait()
        for source, blob, data in found:
            came[source].update(view_bytes(data))
            fill_blob(blob, data)
    for to, digest in sent.items():
        group.store.set(f"{name}/{group.me}/{to}", digest.hexdigest())
    told = group.read([f"{name}/{source}/{group.me}" for source in came])
    for (source, digest), its in zip(came.items(), told, strict=True):
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
