"""The rendezvous store of one generation, in a process of its own.

It is forked from the image like a rank. No store outlives its generation, and no port is chosen
twice: a key or a connection of a dead world can never reach a living one.
"""

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_TRY_S = 5.0
"""Seconds of one try to reach a store."""
_PAUSE_S = 0.1
_ROOM_BYTES = 1 << 30
_PAIR_BYTES = 1 << 12
"""Memory for a store, and more for each pair of ranks: each gives each other one an address."""


def open_store(bind: str, world_size: int, answer: int) -> object:
    """Return a TCPStore that listens on `bind` only.

    Its port, which the system chooses, goes to the pipe `answer`; or else, after an exclamation
    mark, the reason why there is none, and the process ends.
    """
    try:
        store, port = serve_store(bind, world_size)
    except (OSError, RuntimeError) as error:
        os.write(answer, f"! {error}".encode()[:4000])
        os._exit(1)
    _bound_memory(_ROOM_BYTES + world_size**2 * _PAIR_BYTES)
    os.write(answer, str(port).encode())
    os.close(answer)
    return store


def _bound_memory(more: int) -> None:
    """Let this process grow by `more` bytes at most, because anybody may write into its store.

    It closes connections that would write more. Ranks that have met no longer need it.
    """
    with open("/proc/self/statm") as file:
        data_pages = int(file.read().split()[5])
    limit = data_pages * resource.getpagesize() + more
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def serve_store(bind: str, world_size: int) -> tuple[object, int]:
    """Return a TCPStore that a thread of this process serves on `bind` only, and its port.

    Raises:
        OSError: no port can be had.
        RuntimeError: it cannot be served.
    """
    import torch.distributed

    make: Any = vars(torch.distributed)["TCPStore"]
    listener = _listen(bind, 0)
    port: int = listener.getsockname()[1]
    store = make(
        bind, port, world_size, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def bind_store(host: str, port: int) -> dict[str, int]:
    """Return the option by which a TCPStore listens at `host` alone; empty to leave it to torch.

    torch's server takes every interface. A host's name is left to it all the same: on Debian a
    host's own name is 127.0.1.1, at which no other node is.
    """
    with contextlib.suppress(OSError):  # `host` is a name, or this process serves it already.
        if host != "localhost":
            socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
        return {"master_listen_fd": _listen(host, port).detach()}
    return {}


def reach_store(make: Callable[[timedelta], Any], host: str, port: int, timeout: timedelta) -> Any:
    """Return a client of the keeper's store at this address, made by `make(TIMEOUT)`.

    The store was there before this rank. If it has ended, torch itself would go on trying.

    Raises:
        DistNetworkError: the store has ended, or is not reached within `timeout`.
    """
    import torch.distributed

    deadline_s = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), _TRY_S).close()
        except ConnectionRefusedError:
            gone = f"The client socket has failed: the store at {host}:{port} has ended"
            raise torch.distributed.DistNetworkError(gone) from None
        except OSError:  # torch tries it as well, and says why not.
            pass
        try:
            store = make(min(timeout, timedelta(seconds=_TRY_S)))
        except torch.distributed.DistNetworkError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_PAUSE_S)
        else:
            store.set_timeout(timeout)
            return store


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=4096)


def wait_for_ever(store: object) -> None:
    """Keep `store`, whose own thread serves, until this process is killed."""
    while store is not None:
        signal.pause()
