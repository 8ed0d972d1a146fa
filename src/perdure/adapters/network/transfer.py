"""Connections between two agents; and what an active probe measures over one.

A `Listener` lets in one peer, that knows its token, and both ends have a `Wire` then. They are
plain blocking sockets, to be used in threads, and every call on one ends by a deadline.

A probe measures TCP transfers each way, and a fixed piece of arithmetic. What is timed is the
kernel and the network. A transfer is timed at the sender from its first byte to the receiver's word
that it has the last one, so buffers hide nothing; the best of up to five counts, because a busy
processor can hold up any single one for longer than a fast network takes. Python moves about 1 to
3 GB/s this way, so a link that is faster than that is only told from one that is slower.

The arithmetic is a matrix product of Python integers in a process of its own: no torch, no numpy
(an agent has neither), 50 to 100 ms on one core, the best of three. It tells a throttled or
crowded host, not a slow GPU.
"""

import contextlib
import hmac
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec

from perdure.model.errors import PlatformError

_CHUNK = 1 << 20
_TOKEN_BYTES = 16
_TOKEN_S = 1.0
"""For how long whoever has connected may keep the token to himself."""
_PENDING_MAX = 32
"""Connections that have not shown a token yet; where there is one more, the oldest is dropped."""
_PINGS = 8
_REPEATS = 5
_REPEAT_SHARE = 0.3
"""Of the deadline: no transfer is begun again after that."""
_AGAIN, _OVER = b"+", b"."
_ARITHMETIC = """
import time
n = 72
a = [[(i * 31 + j * 17) % 97 for j in range(n)] for i in range(n)]
best = 1e9
for _ in range(3):
    began = time.perf_counter()
    b = list(zip(*a))
    c = [[sum(x * y for x, y in zip(row, column)) for column in b] for row in a]
    best = min(best, time.perf_counter() - began)
print(best)
"""


class Transfer(msgspec.Struct, frozen=True):
    """How long the two directions took; 0 where one did not end in time."""

    there_s: float = 0.0
    back_s: float = 0.0
    rtt_s: float = 0.0
    error: str = ""


class Wire:
    """One end of a connection, which is good for so many seconds."""

    def __init__(self, peer: socket.socket, end_s: float) -> None:
        """Use `peer`, which is somebody else's to close, until `end_s` by the monotonic clock."""
        self._peer, self.end_s = peer, end_s

    def send(self, data: bytes | memoryview) -> None:
        """Send all of `data`.

        Raises:
            OSError: not in time, or the other end is gone.
        """
        _set_deadline(self._peer, self.end_s)
        self._peer.sendall(data)

    def receive(self, size: int) -> bytes:
        """Return the next `size` bytes; meant for what fits into memory.

        Raises:
            OSError: not in time, or the other end is gone.
        """
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            filled += self.receive_into(view[filled:])
        return bytes(data)

    def receive_into(self, buffer: memoryview | bytearray) -> int:
        """Return how many bytes there are now in `buffer`, at least one.

        Raises:
            OSError: not in time, or the other end is gone.
        """
        _set_deadline(self._peer, self.end_s)
        count = self._peer.recv_into(buffer)
        if not count:
            raise ConnectionError("closed by the other end")
        return count


class Listener:
    """A listening socket for one peer."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of `host`.

        Raises:
            PlatformError: not an address of this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise PlatformError(f"cannot listen on {host}: {error.strerror}") from error
        self.host, self.port = host, int(self._server.getsockname()[1])
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._peer: socket.socket | None = None
        self._serving = self._closed = False

    def serve(self, answer: Callable[[Wire], None], deadline_s: float) -> None:
        """Answer the one that knows the token, until `deadline_s` seconds from now; then close.

        Whatever goes wrong is the other end's to report. Who comes without the token, or is silent,
        neither uses the listener up nor has another wait.
        """
        end_s, self._serving = time.monotonic() + deadline_s, True
        with contextlib.suppress(OSError), self._server:
            if self._closed:
                return
            with self._wait_known(end_s) as peer:
                self._peer = peer
                if not self._closed:
                    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    answer(Wire(peer, end_s))

    def close(self) -> None:
        """Have `serve` end now, in whatever thread it is, or not begin."""
        self._closed = True
        if not self._serving:
            self._server.close()
        for each in filter(None, (self._server, self._peer)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _wait_known(self, end_s: float) -> socket.socket:
        """Return the connection that has shown the token; drop all others.

        Raises:
            OSError: not in time, or `close` was called.
        """
        self._server.setblocking(False)
        with _Newcomers(self._server) as newcomers:
            while True:
                for peer, said in newcomers.look(end_s):
                    if hmac.compare_digest(said, self.token.encode()):
                        return newcomers.keep(peer)
                    newcomers.drop(peer)


class _Newcomers:
    """Who has connected and is still to show a token: all are heard beside one another."""

    def __init__(self, server: socket.socket) -> None:
        self._server, self._selector = server, selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._until_s = dict[socket.socket, float]()
        """When each is dropped; the oldest first."""
        self._said = dict[socket.socket, bytearray]()

    def __enter__(self) -> "_Newcomers":
        return self

    def __exit__(self, *_: object) -> None:
        for peer in list(self._until_s):
            self.drop(peer)
        self._selector.close()

    def look(self, end_s: float) -> list[tuple[socket.socket, bytes]]:
        """Wait for somebody, and return who has said as much as a token has.

        Raises:
            OSError: not by `end_s`, or the server is closed.
        """
        now_s = time.monotonic()
        waits_s = [max(0.0, until_s - now_s) for until_s in self._until_s.values()]
        ready = {key.fileobj for key, _ in self._selector.select(min([_left(end_s), *waits_s]))}
        for peer in [each for each in self._said if each in ready]:
            self._hear(peer)
        if self._server in ready:
            with contextlib.suppress(BlockingIOError, ConnectionError):  # It has left again.
                self._admit(self._server.accept()[0])
        late = [each for each, until_s in self._until_s.items() if until_s <= time.monotonic()]
        for peer in late or list(self._until_s)[:-_PENDING_MAX]:
            self.drop(peer)
        return [(peer, bytes(s)) for peer, s in self._said.items() if len(s) == _TOKEN_BYTES]

    def keep(self, peer: socket.socket) -> socket.socket:
        """Return `peer`, which is somebody else's to close from now on."""
        self._selector.unregister(peer)
        del self._until_s[peer], self._said[peer]
        return peer

    def drop(self, peer: socket.socket) -> None:
        """Close `peer`."""
        self.keep(peer).close()

    def _admit(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._selector.register(peer, selectors.EVENT_READ)
        self._until_s[peer], self._said[peer] = time.monotonic() + _TOKEN_S, bytearray()

    def _hear(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(_TOKEN_BYTES - len(self._said[peer]))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._said[peer] += data
        else:
            self.drop(peer)


@contextlib.contextmanager
def open_wire(
    host: str, port: int, token: str, *, source: str, deadline_s: float
) -> Iterator[Wire]:
    """Give a wire to a listener, for `deadline_s` seconds.

    `source` is the address to use at this end, of the interface that the ranks use; empty, or one
    from which the listener cannot be reached, leaves it to the kernel.

    Raises:
        OSError: it is not reached.
    """
    end_s = time.monotonic() + deadline_s
    with _connect(host, port, source, end_s) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(peer, end_s)
        wire.send(token.encode())
        yield wire


def answer_transfer(wire: Wire, size: int) -> None:
    """Be the other end of `run_transfer`."""
    for _ in range(_PINGS):
        wire.send(wire.receive(1))
    while wire.receive(1) == _AGAIN:
        _drain(wire, size)
        wire.send(b"!")
        wire.receive(1)
        _send(wire, size)


def run_transfer(
    host: str, port: int, token: str, *, source: str, size: int, deadline_s: float
) -> Transfer:
    """Send `size` bytes through a listener and have as many sent back, within `deadline_s` seconds.

    `source` is that of `open_wire`.
    """
    again_s = time.monotonic() + _REPEAT_SHARE * deadline_s
    there, back = list[float](), list[float]()
    rtt_s, problem = 0.0, ""
    try:
        with open_wire(host, port, token, source=source, deadline_s=deadline_s) as wire:
            rtts = []
            for _ in range(_PINGS):
                began_s = time.monotonic()
                wire.send(b"?")
                wire.receive(1)
                rtts.append(time.monotonic() - began_s)
            rtt_s = min(rtts)
            while not back or (len(back) < _REPEATS and time.monotonic() < again_s):
                wire.send(_AGAIN)
                began_s = time.monotonic()
                _send(wire, size)
                wire.receive(1)
                there.append(time.monotonic() - began_s)
                began_s = time.monotonic()
                wire.send(b"?")
                _drain(wire, size)
                back.append(time.monotonic() - began_s)
            wire.send(_OVER)
    except OSError as error:
        if not back:
            problem = f"{'back' if there else 'there'}: {error.strerror or error}"
    return Transfer(min(there, default=0.0), min(back, default=0.0), rtt_s, problem)


def run_arithmetic(deadline_s: float) -> float:
    """Return the seconds that the fixed piece takes; 0 where it did not end in time."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _ARITHMETIC],
            capture_output=True,
            timeout=deadline_s,
            check=True,
        )
        return float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0


def _connect(host: str, port: int, source: str, end_s: float) -> socket.socket:
    same_family = bool(source) and (":" in source) == (":" in host)
    if same_family:
        with contextlib.suppress(OSError):
            return socket.create_connection(
                (host, port), timeout=_left(end_s), source_address=(source, 0)
            )
    return socket.create_connection((host, port), timeout=_left(end_s))


def _left(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("not in time")
    return left_s


def _set_deadline(sock: socket.socket, end_s: float) -> None:
    sock.settimeout(_left(end_s))


def _send(wire: Wire, size: int) -> None:
    block = memoryview(bytes(_CHUNK))
    while size > 0:
        wire.send(block[: min(size, _CHUNK)])
        size -= _CHUNK


def _drain(wire: Wire, size: int) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    while size > 0:
        size -= wire.receive_into(buffer[: min(size, _CHUNK)])
