"""JSON lines over a stream socket: non-blocking for the keeper, blocking for its image."""

import socket
from collections.abc import Callable
from typing import Any

from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.model.input.plain import make_plain

_CHUNK = 1 << 16


class LineSocket:
    """One peer. Lines come out of `read`; `send` never blocks, and `flush` sends the rest."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over `sock` and make it non-blocking."""
        sock.setblocking(False)
        self.sock = sock
        self._in = bytearray()
        self._out = bytearray()
        self.closed = False
        """The peer is gone, or we are; the socket keeps its number until `close`."""

    @property
    def wants_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out) and not self.closed

    def send(self, message: Any) -> None:
        """Send `message`, as far as the peer takes it now."""
        self._out += encode(message) + b"\n"
        self.flush()

    def send_with(self, message: Any, fd: int) -> bool:
        """Send `message` and the open file `fd` with it; say whether that could be done now."""
        self.flush()
        if self._out or self.closed:
            return False
        line = encode(message) + b"\n"
        try:
            sent = socket.send_fds(self.sock, [line], [fd])
        except OSError:
            return False
        self._out += line[sent:]
        return True

    def flush(self) -> None:
        """Send what waits; a peer that is gone makes it `closed`."""
        while self._out and not self.closed:
            try:
                sent = self.sock.send(self._out)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            del self._out[:sent]

    def read(self, type_: Any, refused: Callable[[str], None] | None = None) -> list[Any]:
        """Return the messages that have arrived whole; at the peer's end it becomes `closed`.

        With `refused`, a line that is no such message is left out and `refused` is told of it:
        hanging up would only have it sent again.

        Raises:
            ProtocolError: a line is no such message.
        """
        while not self.closed:
            try:
                data = self.sock.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.closed = not data
            self._in += data
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        messages: list[Any] = []
        for line in filter(None, lines):
            try:
                messages.append(decode(line, type_))
            except ProtocolError as error:
                if refused is None:
                    raise
                refused(f"{error}: {make_plain(line)}")
        return messages

    def close(self) -> None:
        """Close it; harmless when repeated."""
        self.closed = True
        self.sock.close()
