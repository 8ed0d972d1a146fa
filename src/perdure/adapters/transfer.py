"""What an active probe measures: TCP transfers each way, and a fixed piece of arithmetic.

Plain blocking sockets, to be used in threads: what is timed is the kernel and the network. A
transfer is timed at the sender from its first byte to the receiver's word that it has the last
one, so buffers hide nothing; the best of up to five counts, because a busy processor can hold up
any single one for longer than a fast network takes. Python moves about 1 to 3 GB/s this way, so a
link that is faster than that is only told from one that is slower.

The arithmetic is a matrix product of Python integers in a process of its own: no torch, no numpy
(an agent has neither), 50 to 100 ms on one core, the best of three. It tells a throttled or
crowded host, not a slow GPU.
"""

import contextlib
import hmac
import secrets
import socket
import subprocess
import sys
import time

import msgspec

from perdure.model.errors import PlatformError

_CHUNK = 1 << 20
_TOKEN_BYTES = 16
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


class Listener:
    """A listening socket for one transfer."""

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

    def serve(self, size: int, deadline_s: float) -> None:
        """Answer the one that knows the token, until `deadline_s` seconds from now; then close.

        Whatever goes wrong is the other end's to report.
        """
        end_s = time.monotonic() + deadline_s
        with contextlib.suppress(OSError), self._server:
            while True:
                _set_deadline(self._server, end_s)
                peer, _ = self._server.accept()
                with peer:
                    _set_deadline(peer, end_s)
                    token = _receive(peer, _TOKEN_BYTES, end_s)
                    if hmac.compare_digest(token, self.token.encode()):
                        self._answer(peer, size, end_s)
                        return

    def _answer(self, peer: socket.socket, size: int, end_s: float) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            peer.sendall(_receive(peer, 1, end_s))
        while _receive(peer, 1, end_s) == _AGAIN:
            _drain(peer, size, end_s)
            peer.sendall(b"!")
            _receive(peer, 1, end_s)
            _send(peer, size, end_s)


def run_transfer(
    host: str, port: int, token: str, *, source: str, size: int, deadline_s: float
) -> Transfer:
    """Send `size` bytes through a listener and have as many sent back, within `deadline_s` seconds.

    `source` is the address to use at this end, of the interface that the ranks use; empty, or one
    from which the listener cannot be reached, leaves it to the kernel.
    """
    begin_s = time.monotonic()
    end_s, again_s = begin_s + deadline_s, begin_s + _REPEAT_SHARE * deadline_s
    there, back = list[float](), list[float]()
    rtt_s, problem = 0.0, ""
    try:
        with _connect(host, port, source, end_s) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(token.encode())
            rtts = []
            for _ in range(_PINGS):
                began_s = time.monotonic()
                peer.sendall(b"?")
                _receive(peer, 1, end_s)
                rtts.append(time.monotonic() - began_s)
            rtt_s = min(rtts)
            while not back or (len(back) < _REPEATS and time.monotonic() < again_s):
                peer.sendall(_AGAIN)
                began_s = time.monotonic()
                _send(peer, size, end_s)
                _receive(peer, 1, end_s)
                there.append(time.monotonic() - began_s)
                began_s = time.monotonic()
                peer.sendall(b"?")
                _drain(peer, size, end_s)
                back.append(time.monotonic() - began_s)
            peer.sendall(_OVER)
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


def _send(peer: socket.socket, size: int, end_s: float) -> None:
    block = bytes(_CHUNK)
    while size > 0:
        _set_deadline(peer, end_s)
        peer.sendall(block if size >= _CHUNK else block[:size])
        size -= _CHUNK


def _drain(peer: socket.socket, size: int, end_s: float) -> None:
    buffer = bytearray(_CHUNK)
    while size > 0:
        _set_deadline(peer, end_s)
        count = peer.recv_into(buffer, min(size, _CHUNK))
        if not count:
            raise ConnectionError("closed by the other end")
        size -= count


def _receive(peer: socket.socket, size: int, end_s: float) -> bytes:
    data = b""
    while len(data) < size:
        _set_deadline(peer, end_s)
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionError("closed by the other end")
        data += part
    return data
