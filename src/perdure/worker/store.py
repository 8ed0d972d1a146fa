"""The rendezvous store of one generation, in a process of its own.

It is forked from the image like a rank. No store outlives its generation, and no port is chosen
twice: a key or a connection of a dead world can never reach a living one.
"""

import os
import signal
import socket
from typing import Any


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
    os.write(answer, str(port).encode())
    os.close(answer)
    return store


def serve_store(bind: str, world_size: int) -> tuple[object, int]:
    """Return a TCPStore that a thread of this process serves on `bind` only, and its port.

    Raises:
        OSError: no port can be had.
        RuntimeError: it cannot be served.
    """
    import torch.distributed

    make: Any = vars(torch.distributed)["TCPStore"]
    listener = socket.create_server((bind, 0), backlog=4096)
    port: int = listener.getsockname()[1]
    store = make(
        bind, port, world_size, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def wait_for_ever(store: object) -> None:
    """Keep `store`, whose own thread serves, until this process is killed."""
    while store is not None:
        signal.pause()
