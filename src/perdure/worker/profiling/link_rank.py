"""One of the processes that measure links.

python -m perdure.worker.profiling.link_rank RANK SIZE HOST PORT
"""

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from perdure.model.codec import encode
from perdure.worker.elastic.group import Group, make_device
from perdure.worker.pipeline.messages import HEADER_BYTES, describe, pack, unpack
from perdure.worker.profiling.links import Found, list_groups

MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
SUM_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
_TIMES = 15
_WARM = 2

_TCPStore: Any = vars(dist)["TCPStore"]
_PrefixStore: Any = vars(dist)["PrefixStore"]


def _live(rank: int, size: int, store: Any) -> None:
    torch.set_num_threads(1)
    device = make_device()
    groups = {
        count: Group(tuple(range(count)), rank, _PrefixStore(f"group{count}", store), device)
        for count in list_groups(size)
        if rank < count
    }
    whole = groups[size]
    found: Found = {}
    for count in list_groups(size):
        whole.meet()
        if rank < count:
            sums = [_time_sums(groups[count], nbytes) for nbytes in SUM_BYTES]
            found[f"all-reduce over {count}"] = list(zip(SUM_BYTES, sums, strict=True))
    whole.meet()
    if rank < 2:
        line = Group((0, 1), rank, _PrefixStore("line", store), device)
        sent = [_time_messages(groups[2], line, rank, nbytes) for nbytes in MESSAGE_BYTES]
        found["message"] = list(zip(MESSAGE_BYTES, sent, strict=True))
    whole.meet()
    if rank == 0:
        store.set("done", encode(found))
    for group in groups.values():
        group.give_up()


def _time_sums(group: Group, nbytes: int) -> list[float]:
    tensor = torch.zeros(nbytes // 4)

    def once() -> float:
        group.meet()
        began = time.perf_counter()
        group.all_reduce(tensor)
        group.wait()
        return time.perf_counter() - began

    return _repeat(once)


def _time_messages(group: Group, line: Group, rank: int, nbytes: int) -> list[float]:
    """Return how long one takes over `line`, as half of there and back."""
    value = torch.zeros(nbytes // 4)
    layout = describe(value, [True])
    room, peer = layout.payload, 1 - rank
    buffers = [torch.empty(HEADER_BYTES + room, dtype=torch.uint8) for _ in range(_TIMES + _WARM)]
    tags = iter(range(2 * (_TIMES + _WARM)))

    def send(tag: int) -> Any:
        return line.send(pack([value], layout, header=True, room=room), peer, tag)

    def once() -> float:
        buffer, there, back = buffers.pop(), next(tags), next(tags)
        coming = line.receive(buffer, peer, back if rank == 0 else there)
        group.meet()
        began = time.perf_counter()
        sent = send(there) if rank == 0 else None
        line.wait_for(coming)
        unpack(buffer[HEADER_BYTES:], layout, "cpu")
        if rank == 1:
            sent = send(back)
        line.wait_for(sent)
        return (time.perf_counter() - began) / 2

    return _repeat(once)


def _repeat(once: Callable[[], float]) -> list[float]:
    """Return equally many times on all ranks."""
    return [once() for _ in range(_TIMES + _WARM)][_WARM:]


def main(argv: Sequence[str]) -> None:
    """Be one of the processes."""
    rank, size, host, port = argv
    store = _TCPStore(host, int(port), None, False, timedelta(seconds=60))
    _live(int(rank), int(size), store)


if __name__ == "__main__":
    main(sys.argv[1:])
