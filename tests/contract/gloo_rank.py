"""Two ranks for `test_gloo_groups`: groups of perdure's beside the script's own; one breaks.

Each prints, as JSON, which groups could still sum, and the error of the one that was broken.
"""

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from perdure.worker.elastic.apart import Broken
from perdure.worker.elastic.communicators import Communicator, gloo
from perdure.worker.elastic.communicators.split import choose_engine
from perdure.worker.elastic.group import Group
from tests.waiting import PATIENCE_S

BROKEN = "mirror"


def end_with_parent() -> None:
    """A test that is killed leaves no rank behind: its end of the pipe is closed then."""
    sys.stdin.read()
    os._exit(3)


def reach_store(name: str) -> Any:
    """Return a connection of its own: a wait on one keeps other threads from using it."""
    limit = timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=limit)
    return dist.PrefixStore(name, store)


def open_both(rank: int) -> dict[str, Group]:
    """Connect two groups by two threads at once, while the script connects its own groups."""
    found: dict[str, Group] = {}
    connect = choose_engine(torch.device("cpu"))

    def open_one(name: str) -> None:
        found[name] = Group((0, 1), rank, reach_store(name), connect)

    threads = [threading.Thread(target=open_one, args=(n,)) for n in ("training", BROKEN)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def is_whole(all_reduce: Callable[[torch.Tensor], object]) -> bool:
    """Return whether two ranks can sum."""
    tensor = torch.ones(1000)
    try:
        all_reduce(tensor)
    except (RuntimeError, Broken):
        return False
    return bool((tensor == 2).all())


def sum_over(group: Group) -> Callable[[torch.Tensor], None]:
    def all_reduce(tensor: torch.Tensor) -> None:
        group.all_reduce(tensor)
        group.wait()

    return all_reduce


def wait_broken(comm: Communicator) -> str:
    """Return the error of a sum in which the other rank never takes part."""
    ticket = comm.all_reduce(torch.ones(1000))
    while comm.poll(ticket) == "running":
        comm.rest(ticket, 1.0)
    return ticket.error


def main(rank: int) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)  # Shows where a group hangs.
    torch.set_num_threads(1)
    if sys.argv[2] == "lazy":
        make: Any = dist.ProcessGroupGloo.create_device
        gloo.make_device = lambda: make(hostname="127.0.0.1", lazy_init=True)  # type: ignore[assignment]
    dist.init_process_group("gloo", store=reach_store("default"), rank=rank, world_size=2)
    groups: dict[str, Any] = {}
    opening = threading.Thread(target=lambda: groups.update(open_both(rank)))
    opening.start()
    pair = dist.new_group([0, 1])
    own: Any = dist.ProcessGroupGloo(reach_store("own"), rank, 2, timedelta(seconds=PATIENCE_S))
    opening.join()

    sums: dict[str, Callable[[torch.Tensor], object]] = {
        "default": dist.all_reduce,
        "pair": lambda tensor: dist.all_reduce(tensor, group=pair),
        "own": lambda tensor: own.allreduce([tensor]).wait(),
        "training": sum_over(groups["training"]),
    }
    before = {name: is_whole(one) for name, one in sums.items()}
    before[BROKEN] = is_whole(sum_over(groups[BROKEN]))
    error = ""
    if rank == 0:
        groups[BROKEN].break_()
    else:
        error = wait_broken(groups[BROKEN].comm)
    after = {name: is_whole(one) for name, one in sums.items()}
    answer = {"rank": rank, "before": before, "after": after, "error": error}
    os.write(1, json.dumps(answer).encode() + b"\n")
    if rank == 0:
        os.wait()
    os._exit(0)


if os.fork() == 0:
    main(1)
else:
    main(0)
