"""A torchft process group's own connections: noted when it is formed, broken when it is void.

gloo has no abort: what ends a pending collective at once is to shut its sockets down
(`perdure.worker.interrupt`). A process has connections of other groups as well, its own replica
group's among them, so those of each quorum are told apart by when they appeared. While a group is
still being formed it hangs on its rendezvous store, whose connection is then broken as well.

A break is fenced by the quorum's id: one meant for a group that is gone by now touches nothing.

gloo tells a pair's failure to what waits in its queues, and not to the transfer that it was just
writing, which then waits until its time-out (1 in 200 kills). Such a collective is given up, with
its group: nothing moves on closed connections, so its tensors are as safe as after an error.
"""

import contextlib
import ctypes
import socket
import threading
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from perdure.worker.interrupt import list_gloo_sockets
from perdure.worker.sockets import borrow, list_sockets, shut_down

_SLICE = timedelta(seconds=0.25)
"""How often a collective that is waited for is asked whether its group was broken; and how long
one may go on in a broken group."""


@dataclass(slots=True)
class Connections:
    """What belongs to one process group of one quorum."""

    quorum_id: int
    before: dict[int, str]
    """Sockets that were there before it: descriptor -> the kernel's name of it."""
    store: int = 0
    """Port of its rendezvous, while it is being formed. Its host has several names."""
    sockets: dict[int, str] | None = None
    """Its own, once it is formed."""
    broken: bool = False


@dataclass(slots=True)
class Fences:
    """Keeps the connections of all torchft process groups of this process, to break them."""

    groups: "weakref.WeakKeyDictionary[Any, Connections]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, group: Any, quorum_id: int, store: int) -> None:
        """Note that a group is about to be formed, at the rendezvous on port `store`."""
        with self.lock:
            self.groups[group] = Connections(quorum_id, list_sockets(), store)

    def end(self, group: Any) -> None:
        """Note that the group was formed, or could not be."""
        with self.lock:
            held = self.groups.get(group)
            if held is None:
                return
            links = list_sockets()
            mine = (fd for fd in list_gloo_sockets() if links.get(fd) != held.before.get(fd))
            held.sockets, held.store = {fd: links[fd] for fd in mine if fd in links}, 0

    def break_up(self, quorum_id: int) -> int:
        """Break what belongs to this quorum and nothing else; return how many sockets there were.

        A second call breaks only what has come since, as a group that is being formed may.
        """
        count = 0
        with self.lock:
            for group, held in list(self.groups.items()):
                if held.quorum_id != quorum_id:
                    continue
                if held.sockets is None:
                    count += _shut_forming(held)
                elif not held.broken:
                    held.broken = True
                    links = list_sockets()
                    same = [fd for fd, name in held.sockets.items() if links.get(fd) == name]
                    count += sum(shut_down(fd, blocking=True) for fd in same)
                    count += _abort_device(group)
        return count

    def outlast(self, group: Any, work: Any) -> bool:
        """Wait until gloo's `work` has ended, well or not; False where it never will."""
        held = self.groups.get(group)
        if held is None or not _is_gloo(group):
            return True
        while True:
            broken = held.broken
            try:
                work.wait(_SLICE)
                return True
            except RuntimeError:
                if work.is_completed():
                    return True
            if broken:
                # Its destructor would wait for the collective: it is never called.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group._pg))
                return False


def _is_gloo(group: Any) -> bool:
    return type(group).__name__ == "ProcessGroupGloo"


def _shut_forming(held: Connections) -> int:
    links = list_sockets()
    new = {fd for fd, name in links.items() if held.before.get(fd) != name}
    pairs = new.intersection(list_gloo_sockets())
    stores = {fd for fd in new - pairs if held.store and _port_of(fd) == held.store}
    return sum(shut_down(fd, blocking=True) for fd in sorted(pairs | stores))


def _abort_device(group: Any) -> int:
    """Abort a group on devices by torchft's own means: NCCL has one. Never waits."""
    if not type(group).__name__.startswith(("ProcessGroupNCCL", "ProcessGroupXCCL")):
        return 0
    threading.Thread(target=group.abort, name="perdure-abort", daemon=True).start()
    return 1


def _port_of(fd: int) -> int:
    """Return the port at the other end; 0 where there is none."""
    with contextlib.suppress(OSError), borrow(fd, blocking=True) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6):
            return int(found.getpeername()[1])
    return 0
