"""Host memory for the copies of a state: places in a few large blocks, used again and again.

Pinned memory is dear to make, and torch rounds each piece of it up to a power of two, so that a
buffer for each tensor wastes up to half of it. Here blocks are powers of two, and tensors share
them, the largest first, so that the small ones fill what is left.

Nothing in a place outlives the next checkpoint. So where the state's layout has changed, all
places are dealt anew over the blocks that are there. What is no longer part of the state keeps
nothing, blocks that nobody needs go, and where the others have become too large for what is in
them, they are made anew.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGN = 64
"""Bytes at whose multiples places begin."""
_BLOCK_MIN, _BLOCK_MAX = 1 << 20, 256 << 20
_SHARE = 8
"""So many of the largest tensors fit into a block where these are large."""
_SLACK = 1.25
"""Blocks are made anew where new ones would take less by more than this."""


class SlabPlan(NamedTuple):
    """Where each of a list of tensors lies."""

    blocks: list[int]
    """The sizes of the blocks."""
    places: list[tuple[int, int]]
    """Block and offset of each tensor."""


def plan_slabs(sizes: Sequence[int], blocks: Sequence[int] = ()) -> SlabPlan:
    """Return places for tensors of these sizes, in `blocks` and in new ones where they are full.

    Of `blocks` only those that are used are in the plan. New ones together never take more than
    each tensor in a power of two of its own, but for one of the least size: a block is no larger
    than all that is left, and is left only for a tensor that does not fit.
    """
    taken = [round_up(size) for size in sizes]
    filled: list[int] = [0] * len(blocks)
    all_blocks, left = list(blocks), sum(taken)
    places = [(0, 0)] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -taken[n]):
        size = taken[number]
        if not size:
            break
        for block, total in enumerate(all_blocks):
            if filled[block] + size <= total:
                break
        else:
            block = len(all_blocks)
            all_blocks.append(_choose_block(size, left))
            filled.append(0)
        places[number] = block, filled[block]
        filled[block] += size
        left -= size
    used = [block for block, bytes_ in enumerate(filled) if bytes_]
    index = {block: place for place, block in enumerate(used)}
    return SlabPlan(
        [all_blocks[block] for block in used],
        [(index.get(block, 0), offset) for block, offset in places],
    )


def _choose_block(size: int, left: int) -> int:
    """Return the size of a new block whose largest tensor has `size`, while `left` has no place."""
    needed = 1 << (size - 1).bit_length()
    shared = min(max(_BLOCK_MAX, _SHARE * needed), 1 << (left.bit_length() - 1))
    return max(needed, shared, _BLOCK_MIN)


def round_up(size: int) -> int:
    """Return the bytes that a tensor of `size` takes where each begins at a whole `ALIGN`."""
    return -(-size // ALIGN) * ALIGN


class Slabs:
    """The blocks of one kind of memory, and the places in them."""

    def __init__(self, make_block: Callable[[int], Tensor]) -> None:
        """Hold nothing yet; `make_block` returns so many bytes of memory."""
        self._make_block = make_block
        self._blocks: list[Tensor] = []
        self._layout: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._places: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Return what the blocks take."""
        return sum(block.nbytes for block in self._blocks)

    def fit(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a place for each tensor, contiguous, of its shape and type.

        They are the same as before while no key, shape and type has changed. Otherwise none of
        those before may be in use any more.
        """
        layout = {key: (value.shape, value.dtype) for key, value in state.items()}
        if layout != self._layout:
            self._layout, self._places = {}, {}  # Kept only once all of them are there.
            self._places = self._deal(layout)
            self._layout = layout
        return self._places

    def _deal(self, layout: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in layout.values()]
        plan, fresh = plan_slabs(sizes, [b.nbytes for b in self._blocks]), plan_slabs(sizes)
        if sum(plan.blocks) > _SLACK * sum(fresh.blocks):
            plan = fresh
        self._hold(plan.blocks)
        places = {}
        for (key, (shape, dtype)), size, (block, offset) in zip(
            layout.items(), sizes, plan.places, strict=True
        ):
            places[key] = (
                _view(self._blocks[block], offset, size, shape, dtype)
                if size
                else (torch.empty(shape, dtype=dtype))
            )
        return places

    def _hold(self, sizes: Sequence[int]) -> None:
        """Have blocks of these sizes, in this order; those that are not needed go first."""
        old, self._blocks = self._blocks, []
        found: list[Tensor | None] = []
        for size in sizes:
            at = next((n for n, block in enumerate(old) if block.nbytes == size), None)
            found.append(None if at is None else old.pop(at))
        old.clear()
        for size, block in zip(sizes, found, strict=True):
            self._blocks.append(self._make_block(size) if block is None else block)


def _view(block: Tensor, offset: int, size: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a place in `block` as a tensor with a storage of its own.

    Whoever writes a tensor to a file writes its storage, or copies it first.
    """
    flat = torch.frombuffer(block.numpy(), dtype=torch.uint8, count=size, offset=offset)
    return flat.view(dtype).view(shape)
