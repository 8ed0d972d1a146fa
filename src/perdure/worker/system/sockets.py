"""Sockets of this process, whoever has opened them: looked at and shut down, never taken over.

Those of perdure's own lie inside a process that is not its own (`OwnSocket`). A script may close
descriptors that it never opened (`os.closerange`, as daemons do), and the next file that it opens
gets one of their numbers. Whoever wrote on would write into a checkpoint, and whoever closed would
close it.
"""

import contextlib
import os
import socket
from collections.abc import Iterator

_FD_DIR = "/proc/self/fd"


def list_links() -> dict[int, str]:
    """Return what each descriptor of this process stands for, as the kernel names it.

    The name of a socket is never used twice.
    """
    links = {}
    for name in os.listdir(_FD_DIR):
        with contextlib.suppress(OSError):
            links[int(name)] = os.readlink(f"{_FD_DIR}/{name}")
    return links


def list_sockets() -> dict[int, str]:
    """Return the descriptors that are sockets, with the kernel's names of them."""
    return {fd: name for fd, name in list_links().items() if name.startswith("socket:")}


@contextlib.contextmanager
def borrow(fd: int, *, blocking: bool = False) -> Iterator[socket.socket]:
    """Lend a duplicate of the socket behind `fd`, whose owner may close its own meanwhile.

    Python may switch a socket that it wraps to non-blocking (`socket.setdefaulttimeout`), which
    would break an owner that has one which blocks. So such a one is only lent where `blocking`
    says so, and is switched back at once.

    Raises:
        OSError: it is no socket any more, or may not be lent.
    """
    blocks = os.get_blocking(fd)
    if blocks and not blocking:
        raise OSError("it blocks")
    copy = os.dup(fd)
    try:
        borrowed = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with borrowed:
        os.set_blocking(copy, blocks)
        yield borrowed


def shut_down(fd: int, *, blocking: bool = False) -> int:
    """Shut a connection down; return how many that were: none where it is gone by now."""
    with contextlib.suppress(OSError), borrow(fd, blocking=blocking) as found:
        found.getpeername()
        found.shutdown(socket.SHUT_RDWR)
        return 1
    return 0


def is_tcp(sock: socket.socket) -> bool:
    """Return whether a socket speaks TCP."""
    return (
        sock.family in (socket.AF_INET, socket.AF_INET6)
        and sock.type == socket.SOCK_STREAM
        and sock.proto == socket.IPPROTO_TCP
    )


def is_listener(sock: socket.socket) -> bool:
    """Return whether connections come in by a socket of TCP."""
    return is_tcp(sock) and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


class OwnSocket:
    """A socket that is known by what it is, not by its number."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over `sock`, which is open."""
        self.sock = sock
        self._identity = _identify(sock.fileno())

    @property
    def intact(self) -> bool:
        """Whether its number is still its own."""
        return _identify(self.sock.fileno()) == self._identity

    def close(self) -> None:
        """Close it; where its number belongs to another file by now, only forget it."""
        if self.intact:
            self.sock.close()
        else:
            self.sock.detach()


def _identify(fd: int) -> tuple[int, int]:
    try:
        found = os.fstat(fd)
    except OSError:
        return -1, -1
    return found.st_dev, found.st_ino
