"""Snapshots on their way to a neighbour on another node, over connections of their own.

All members take a snapshot at the same step, and each one's thread sends and receives then. A
world that breaks ends it: the snapshot before is still there.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from perdure.worker.elastic.group import Group

_CHUNK_BYTES = 16 << 20


class Mirror:
    """One member's part: `keeper` keeps its snapshots, and it keeps those of `owners`."""

    def __init__(self, group: Group, mirrors: Mapping[int, int]) -> None:
        """Use `group` for what `mirrors` says, member -> keeper, and for nothing else."""
        self.group = group
        self._keeper = mirrors[group.me]
        self.owners = tuple(sorted(m for m, keeper in mirrors.items() if keeper == group.me))

    def swap_headers(self, mine: bytes) -> dict[int, bytes]:
        """Send `mine` to the keeper; return the owners' headers.

        Raises:
            Broken: a member was lost, or the world is left.
        """
        lengths = {owner: torch.zeros(1, dtype=torch.int64) for owner in self.owners}
        self.group.send(torch.tensor([len(mine)]), self._keeper, 0)
        for owner, length in lengths.items():
            self.group.receive(length, owner, 0)
        self.group.wait()
        found = {o: torch.empty(int(n), dtype=torch.uint8) for o, n in lengths.items()}
        if mine:
            self.group.send(torch.frombuffer(bytearray(mine), dtype=torch.uint8), self._keeper, 1)
        for owner, header in found.items():
            if header.numel():
                self.group.receive(header, owner, 1)
        self.group.wait()
        return {owner: header.numpy().tobytes() for owner, header in found.items()}

    def swap_data(self, mine: Tensor, sizes: Mapping[int, int], into: Mapping[int, Tensor]) -> None:
        """Send `mine` to the keeper; take `sizes` bytes of each owner, to its place if any.

        Raises:
            Broken: a member was lost, or the world is left.
        """
        for at in range(0, max([mine.numel(), *sizes.values()]), _CHUNK_BYTES):
            tag, end = 2 + at // _CHUNK_BYTES, at + _CHUNK_BYTES
            if at < mine.numel():
                self.group.send(mine[at:end], self._keeper, tag)
            for owner, size in sizes.items():
                if at < size:
                    place = into.get(owner)
                    if place is None:
                        place = torch.empty(size, dtype=torch.uint8)
                    self.group.receive(place[at:end], owner, tag)
            self.group.wait()
