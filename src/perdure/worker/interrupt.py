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
"""

import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

from perdure.model.events import CollectivesInterrupted
from perdure.model.orders import InterruptCollectives
from perdure.worker.sockets import borrow, is_listener, is_tcp, list_links, shut_down
from perdure.worker.stderr import say

_TIMEVAL = struct.Struct("@ll")


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
            sockets = shut_down_gloo()
        except OSError as error:
            errors.append(f"gloo: {error}")
        nccl = list_nccl_backends()
        if nccl:
            # It may wait for the device, and the control thread may not.
            threading.Thread(
                target=_abort_all, args=(nccl,), name="perdure-abort", daemon=True
            ).start()
        elif not sockets:
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


def shut_down_gloo() -> int:
    """Shut down every connection of this process's gloo pairs; return how many there were."""
    return sum(map(shut_down, list_gloo_sockets()))


def list_gloo_sockets() -> list[int]:
    """Return descriptors of this process that surely are connections of gloo's pairs."""
    targets = list_links()
    found: set[int] = set()
    for fd, target in targets.items():
        if target != "anon_inode:[eventpoll]":
            continue
        watched = [w for w in _read_watched(fd) if targets.get(w, "").startswith("socket:")]
        if any(_is_listener(w) for w in watched):
            found.update(w for w in watched if _is_pair(w))
    return sorted(found)


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


def _abort_all(backends: list[Any]) -> None:
    """Abort all of them as one NCCL group: one by one, two ranks' orders can deadlock."""
    try:
        backends[0]._group_start()
        try:
            for backend in backends:
                backend.abort()
        finally:
            backends[0]._group_end()
    except Exception as error:
        say(f"aborting NCCL failed: {error!r}")


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
