"""Blocks of a pipelined state on their way from those who hold them to those who lack them.

The first holder of a block tells through the store what its state consists of; the tensors come
from all holders at once, each sending its share. Nothing of a member's own state is altered here,
so who is interrupted is what it was.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from perdure.plan.elastic.stage_commit import Holder, Move
from perdure.worker.elastic.group import Group, wait_for
from perdure.worker.elastic.moving.packing import (
    fill_blob,
    list_blobs,
    list_targets,
    open_state,
    pack_state,
    restore_state,
)
from perdure.worker.elastic.moving.rows import Incoming, Outgoing, swap
from perdure.worker.elastic.state.blocks import BlockState

Read = Callable[[Holder, int], BlockState]
"""(holder, which is this member; block) -> the block's state"""


def move_blocks(
    group: Group, me: int, moves: Iterable[Move], read: Read, overtaken: Callable[[], bool]
) -> dict[int, BlockState]:
    """Return the blocks that `moves` bring to this member.

    Raises:
        Broken: a member was lost.
        ProtocolError: what came is not what was sent.
    """
    own = [m for m in moves if m.to == me == m.holders[0].member]
    remote = [m for m in moves if m.to != m.holders[0].member]
    found = {move.block: read(move.holders[0], move.block) for move in own}
    for block, teller in sorted({m.block: min(m.holders) for m in remote}.items()):
        if teller.member == me:
            group.store.set(f"block/{block}", pack_state(read(teller, block))[0])
    mine = [move for move in remote if move.to == me]
    wait_for(group.store, [f"block/{move.block}" for move in mine], overtaken)
    opened = {m.block: open_state(group.store.get(f"block/{m.block}")) for m in mine}
    out: dict[int, list[Callable[[], Tensor]]] = {}
    into: dict[int, list[list[Tensor]]] = {}
    for move in remote:
        if move.to == me:
            for number, targets in enumerate(list_targets(opened[move.block][1])):
                source = move.holders[number % len(move.holders)].member
                into.setdefault(source, []).append(targets)
        for share, holder in enumerate(move.holders):
            if holder.member == me:
                makes = list_blobs(pack_state(read(holder, move.block))[1])
                out.setdefault(move.to, []).extend(makes[share :: len(move.holders)])
    going = [Outgoing(to, makes) for to, makes in sorted(out.items())]
    coming = [_make_incoming(source, blobs) for source, blobs in sorted(into.items())]
    swap(group, me, "blocks", going, coming, overtaken)
    return found | {block: restore_state(*opened[block]) for block in opened}


def _make_incoming(source: int, blobs: list[list[Tensor]]) -> Incoming:
    def take(turn: int, data: Tensor) -> Any:
        fill_blob(blobs[turn], data)

    return Incoming(source, [sum(t.nbytes for t in blob) for blob in blobs], take)
