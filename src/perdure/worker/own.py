"""Sockets of perdure's inside a process that is not its own.

A script may close descriptors that it never opened (`os.closerange`, as daemons do), and the next
file that it opens gets one of their numbers. Whoever wrote on would write into a checkpoint, and
whoever closed would close it.
"""

import os
import socket


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
