"""A listening socket that bounds connections which have shown no token: of the page, the webhook.

uvicorn counts requests, and asyncio counts nothing. So a stranger could use up the process's files
with idle connections. The event loop accepts each connection here, before TLS. The server says
which one has shown a token.
"""

import contextlib
import errno
import resource
import socket
from collections import Counter
from typing import Any

STRANGERS_MAX = 256
"""Connections without a token; at most a quarter of the files that the process may open."""


class Listener(socket.socket):
    """A socket whose new connections drop the oldest ones without a token.

    The address with the most connections loses one. A flood from one machine leaves others alone.
    """

    def __init__(self, host: str, port: int) -> None:
        """Listen at `host`, with port 0 at any free port.

        Raises:
            OSError: that cannot be.
        """
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._strangers: dict[tuple[str, int], socket.socket] = {}
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.strangers_max = STRANGERS_MAX if soft < 0 else max(4, min(STRANGERS_MAX, soft // 4))
        self.backlog = self.strangers_max // 4
        """Connections accepted in one turn of the event loop; the next turns read requests."""
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.bind((host, port))
            self.listen(self.backlog)
        except OSError:
            self.close()
            raise

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection, and drop another one if there are too many.

        Raises:
            BlockingIOError: too many files are open; a connection was dropped for the next try.
        """
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._make_room(1):
                raise BlockingIOError from None
            raise
        self._make_room(self.strangers_max)
        self._strangers[address[:2]] = connection
        return connection, address

    def admit(self, address: tuple[str, int]) -> None:
        """Keep the connection from `address`: it has shown a token."""
        self._strangers.pop(address, None)

    def _make_room(self, count: int) -> bool:
        """Drop a connection if there are `count` or more; return whether one was dropped."""
        if len(self._strangers) >= count:
            self._strangers = {a: c for a, c in self._strangers.items() if c.fileno() >= 0}
        if len(self._strangers) < count:
            return False
        ((host, _),) = Counter(host for host, _ in self._strangers).most_common(1)
        oldest = next(address for address in self._strangers if address[0] == host)
        with contextlib.suppress(OSError):  # The client may have gone.
            self._strangers.pop(oldest).shutdown(socket.SHUT_RDWR)
        return True
