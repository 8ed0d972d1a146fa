"""Breaking the collective in flight from beside it: the rank's own connections are shut down.

gloo's `abort`, `shutdown` and `set_timeout` return at once and leave a collective that waits
for a lost peer waiting. What ends it in milliseconds is `shutdown(2)` on the connections of its
pairs, by any thread of the process: the waiting thread gets the `RuntimeError` that a lost peer
would have given it. NCCL has `abort`.

Only what is surely gloo's is touched. A pair's socket is watched by an epoll that also watches
a listening TCP socket (one device: one loop, one listener), is connected, does not block, has
TCP_NODELAY, and has the same SO_RCVTIMEO and SO_SNDTIMEO, which gloo sets to the group's timeout
although nothing else does so on a socket that never blocks. The store's connections, an asyncio
server, HTTP clients and perdure's own line all lack one of these. What cannot be told is left.

A rank that is stopped, or that holds the GIL in native code, cannot do this; its peers can.

gloo makes one device for each group. The kernel's name of its listener, which is never used twice,
identifies a device, and so all connections of one group, also those made later. An elastic group
notes the listener of its own device (`make_own_device`). A torchft group notes the listeners that
appear while the group is formed (`Fences`). A break touches only the devices of its own group.
An order to interrupt a rank (`Interrupter`) breaks all groups: the world of the rank starts again.

While a torchft group is still being formed it hangs on its rendezvous store, whose connection is
then broken as well. A break is fenced by the quorum's id: one meant for a group that is gone by now
touches nothing.

gloo tells a pair's failure to what waits in its queues, and not to the transfer that it was just
writing, which then waits until its time-out (1 in 200 kills). Such a collective is given up, with
its group: nothing moves on closed connections, so its tensors are as safe as after an error.
"""

import contextlib
import ctypes
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from perdure.model.events import CollectivesInterrupted
from perdure.model.orders import InterruptCollectives
from perdure.worker.system.sockets import (
    borrow,
    is_listener,
    is_tcp,
    list_links,
    list_sockets,
    shut_down,
)
from perdure.worker.system.stderr import say

_TIMEVAL = struct.Struct("@ll")
_making = threading.Lock()
_own: set[str] = set()
"""Listeners of the devices of perdure's own groups."""


class Interrupter:
    """Carries out each order once: a repeat may not break what was formed since."""

    def __init__(
        self,
        *,
        rank: int,
        generation: int,
        emit: Callable[[CollectivesInterrupted], object],
        now: Callable[[], float],
    ) -> None:
        """Answer by `emit` in job time `now`."""
        self._rank, self._generation = rank, generation
        self._emit, self._now = emit, now
        self._done: set[str] = set()

    def handle(self, order: InterruptCollectives) -> None:
        """Break what is in flight. Called in the control thread; never raises, never waits."""
        if order.generation != self._generation or order.id in self._done:
            return
        self._done.add(order.id)
        sockets, errors = 0, []
        try:
            sockets = sum(map(shut_down, list_gloo_sockets()))
        except OSError as error:
            errors.append(f"gloo: {error}")
        nccl = list_nccl_backends()
        for backend in nccl:
            start_abort(backend)
        if not nccl and not sockets:
            errors.append("nothing of gloo or NCCL is connected (any more)")
        self._emit(
            CollectivesInterrupted(
                generation=self._generation,
                rank=self._rank,
                at_s=self._now(),
                sockets=sockets,
                error="; ".join(errors),
            )
        )


def make_own_device(make: Callable[[], Any]) -> tuple[Any, str]:
    """Return the gloo device that `make()` returns, and its listener, for one group of perdure's.

    Another thread may begin to listen at the same time. Then `make` runs again.
    """
    with _making:
        while True:
            before = set(list_sockets().values())
            device = make()
            sockets = list_sockets().items()
            new = [name for fd, name in sockets if name not in before and _is_listener(fd)]
            if len(new) <= 1:
                break
    listener = next(iter(new), "")
    _own.add(listener)
    return device, listener


def forget_device(listener: str) -> None:
    """Note that a group of perdure's is left, whose connections were shut down."""
    _own.discard(listener)


def shut_down_gloo() -> int:
    """Shut down the connections of every group of perdure's; return how many there were."""
    return shut_down_devices(_own.copy())


def shut_down_devices(listeners: Set[str]) -> int:
    """Shut down the connections of the gloo devices with these listeners; return their number."""
    devices = list_devices()
    pairs = {fd for name in devices.keys() & listeners for fd in devices[name]}
    return sum(shut_down(fd) for fd in sorted(pairs))


def list_gloo_sockets() -> list[int]:
    """Return descriptors of this process that surely are connections of gloo's pairs."""
    return sorted({fd for pairs in list_devices().values() for fd in pairs})


def list_devices() -> dict[str, list[int]]:
    """Return the descriptors of each gloo device's pairs, by the kernel's name of its listener."""
    targets = list_links()
    devices: dict[str, list[int]] = {}
    for fd, target in targets.items():
        if target != "anon_inode:[eventpoll]":
            continue
        watched = [w for w in _read_watched(fd) if targets.get(w, "").startswith("socket:")]
        listeners = [w for w in watched if _is_listener(w)]
        if listeners:
            pairs = [w for w in watched if _is_pair(w)]
            devices |= {targets[listener]: pairs for listener in listeners}
    return devices


def list_nccl_backends() -> list[Any]:
    """Return the NCCL backend of each process group of this process; none without torch."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not getattr(c10d, "is_nccl_available", bool)():
        return []
    import torch

    device, backends = torch.device("cuda"), []
    for group in list(c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(device)
            if isinstance(backend, c10d.ProcessGroupNCCL):
                backends.append(backend)
    return backends


def start_abort(backend: Any) -> threading.Thread:
    """Abort an NCCL backend in a thread of its own, which is returned.

    It may wait for the device, and one that is aborted after another one may wait for that one's
    peers for ever: two ranks may have them in other orders (`docs/gpu.md`, F3 and F4).
    """

    def abort() -> None:
        try:
            backend.abort()
        except Exception as error:
            say(f"aborting NCCL failed: {error!r}")

    thread = threading.Thread(target=abort, name="perdure-abort", daemon=True)
    thread.start()
    return thread


def _read_watched(epoll_fd: int) -> list[int]:
    """Return the descriptors that an epoll instance watches."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll_fd}") as file:
        return [int(line.split()[1]) for line in file if line.startswith("tfd:")]
    return []


def _is_listener(fd: int) -> bool:
    with contextlib.suppress(OSError), borrow(fd) as sock:
        return is_listener(sock)
    return False


def _is_pair(fd: int) -> bool:
    with contextlib.suppress(OSError), borrow(fd) as sock:
        if not is_tcp(sock) or not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY):
            return False
        sock.getpeername()
        receive, send = (
            _TIMEVAL.unpack(sock.getsockopt(socket.SOL_SOCKET, option, _TIMEVAL.size))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
        )
        return bool(receive == send and any(receive))
    return False


# --- the groups of a torchft job ---------------------------------------------------------------

_SLICE = timedelta(seconds=0.25)
"""How often a collective that is waited for is asked whether its group was broken; and how long
one may go on in a broken group."""


@dataclass(slots=True)
class Connections:
    """What belongs to one process group of one quorum."""

    quorum_id: int
    before: Set[str]
    """Listeners of the devices that were there before it."""
    sockets: dict[int, str]
    """Sockets that were there before its rendezvous: descriptor -> the kernel's name of it."""
    store: int
    """Port of its rendezvous. Its host has several names."""
    devices: Set[str] | None = None
    """Listeners of its own devices, once it is formed."""
    broken: bool = False


@dataclass(slots=True)
class Fences:
    """Keeps the connections of all torchft process groups of this process, to break them."""

    groups: "weakref.WeakKeyDictionary[Any, Connections]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    coming: "weakref.WeakKeyDictionary[Any, dict[int, str]]" = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """The sockets that were there before a group went to its rendezvous."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self, group: Any) -> None:
        """Note that a group is about to go to its rendezvous."""
        with self.lock:
            self.coming[group] = list_sockets()

    def begin(self, group: Any, quorum_id: int, store: int) -> None:
        """Note that a group is about to be formed, at the rendezvous on port `store`."""
        with self.lock:
            sockets = self.coming.pop(group, None) or list_sockets()
            self.groups[group] = Connections(quorum_id, list_devices().keys(), sockets, store)

    def end(self, group: Any) -> None:
        """Note that the group was formed, or could not be."""
        with self.lock:
            held = self.groups.get(group)
            if held is not None:
                held.devices = list_devices().keys() - held.before
                held.sockets.clear()

    def break_up(self, quorum_id: int) -> int:
        """Break what belongs to this quorum and nothing else; return how many sockets there were.

        A second call breaks only what has come since, as a group that is being formed may.
        """
        count = 0
        with self.lock:
            for group, held in list(self.groups.items()):
                if held.quorum_id != quorum_id:
                    continue
                if held.devices is None:
                    count += _shut_forming(held)
                elif not held.broken:
                    held.broken = True
                    count += shut_down_devices(held.devices) + _abort_device(group)
        return count

    def outlast(self, group: Any, work: Any) -> bool:
        """Wait until gloo's `work` has ended, well or not; False where it never will."""
        held = self.groups.get(group)
        if held is None or type(group).__name__ != "ProcessGroupGloo":
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


def _shut_forming(held: Connections) -> int:
    new = (fd for fd, name in list_sockets().items() if held.sockets.get(fd) != name)
    stores = [fd for fd in new if held.store and _port_of(fd) == held.store]
    count = sum(shut_down(fd, blocking=True) for fd in stores)
    return count + shut_down_devices(list_devices().keys() - held.before)


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
