"""The TCP port at which a member sends its state to ranks that join.

The port listens only while a join is under way. Each join has a key: a certificate with its private
key. The controller makes it, and sends it over the bus to the joining rank and its donors. Both
sides show this certificate in a TLS 1.3 handshake and accept no other. So a stranger can neither
read a state nor send one. The handshake gives each direction a key of its own, and the state goes
as blocks that are sealed with it (AES-256-GCM).

A stranger can connect while a join is under way. It costs a donor one of `_PENDING_MAX` sockets for
at most `_HANDSHAKE_S`, and nothing in the training thread.
"""

import contextlib
import functools
import io
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_BLOCK = 1 << 20
"""Most bytes of a block before it is sealed."""
_TAG = 16
"""Bytes by which a block is longer when it is sealed."""
_LENGTH = 4
"""Bytes before a block that say how long it is."""
_NONCE = 12
_KEY = 32
_RECEIVED = 1 << 16
"""Bytes of a handshake that come from the socket in one call."""
Done = TypeVar("Done")
_OPEN_S = 5.0
"""Seconds for which the port listens after the last order. The controller repeats it each second
until the rank has joined or is gone."""
_LOOK_S = 0.2
"""Seconds between two looks at whether the join is over."""
_HANDSHAKE_S = 5.0
"""Seconds for a TLS handshake, and for connecting."""
_REFUSED_S = 2.0
"""Seconds for which a donor may refuse a rank: the order may reach the donor after the rank."""
_RETRY_S = 0.01
_PENDING_MAX = 16
"""Connections in a handshake. If there is one more, the oldest is dropped."""
_ACCEPT_PAUSE_S = 0.002
"""Seconds between two accepted connections: a flood takes no CPU time from the training."""
_KEEPALIVE_S = 5
_KEEPALIVE_EVERY_S = 2
_KEEPALIVE_TRIES = 3


class SecureStream(io.RawIOBase):
    """A connection whose ends have shown each other a key, and whose bytes are sealed.

    A handshake of TLS proves the key. It also carries two fresh keys, one for each direction. What
    follows is blocks: the length, then the bytes sealed by AES-GCM with the block's number as the
    nonce. So no block is lost, changed, or sent twice unnoticed. Records of TLS have 16 KB at most,
    and take twice the CPU time. The stream never ends well: its users know when they have all.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        """Talk over the connection `sock`. Nothing is sent before the handshake."""
        self._sock, self._server = sock, server
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._sent = self._received = 0
        """Blocks so far."""
        self._opened = memoryview(b"")
        """What is left of the newest block."""

    def do_handshake(self) -> None:
        """Show the key, and see that of the other end.

        Raises:
            OSError: it has another key, is gone, or takes longer than `_HANDSHAKE_S`.
        """
        until_s = time.monotonic() + _HANDSHAKE_S
        keys = os.urandom(2 * _KEY)
        try:
            self._shake(self._tls.do_handshake, until_s)
            if self._server:
                self._tls.write(keys)
            else:
                keys = self._shake(lambda: self._tls.read(2 * _KEY), until_s)
        except OSError:
            with contextlib.suppress(OSError):  # The alert, which says why not.
                self._flush()
            raise
        self._flush()
        if len(keys) != 2 * _KEY or self._incoming.pending:  # A donor speaks only when asked.
            raise ConnectionAbortedError("the other end sends no keys")
        first, second = AESGCM(keys[:_KEY]), AESGCM(keys[_KEY:])
        self._mine, self._others = (first, second) if self._server else (second, first)
        self._sealed = memoryview(bytearray(_BLOCK + _TAG))
        self._sock.settimeout(_HANDSHAKE_S)

    def _shake(self, act: Callable[[], Done], until_s: float) -> Done:
        """Return what `act` returns once the other end has sent what it needs."""
        while True:
            try:
                return act()
            except ssl.SSLWantReadError:
                self._flush()
                left_s = until_s - time.monotonic()
                if left_s <= 0:  # It sends a byte now and then.
                    raise TimeoutError("the other end takes too long") from None
                self._sock.settimeout(left_s)
                data = self._sock.recv(_RECEIVED)
                if not data:
                    raise ConnectionResetError("the other end has closed") from None
                self._incoming.write(data)

    def settimeout(self, wait_s: float | None) -> None:
        """Bound each wait for the other end, to send or to receive."""
        self._sock.settimeout(wait_s)

    def readable(self) -> bool:
        """Return that bytes come from it."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill some of `buffer`; return how many bytes.

        Raises:
            OSError: the other end is gone, or its bytes were changed on their way.
        """
        while not self._opened:
            self._opened = memoryview(self._open_next())
        count = min(len(buffer), len(self._opened))
        buffer[:count], self._opened = self._opened[:count], self._opened[count:]
        return count

    def _open_next(self) -> bytes:
        head = self._sealed[:_LENGTH]
        self._fill(head)
        size = int.from_bytes(head, "big")
        if not _TAG <= size <= len(self._sealed):
            raise ConnectionAbortedError(f"a block of {size} bytes")
        self._fill(self._sealed[:size])
        nonce = self._received.to_bytes(_NONCE, "big")
        try:
            opened = self._others.decrypt(nonce, self._sealed[:size], None)
        except InvalidTag:
            raise ConnectionAbortedError("a block that the other end has not sealed") from None
        self._received += 1
        return opened

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise ConnectionResetError("the other end has closed")
            view = view[count:]

    def sendall(self, data: memoryview | bytes) -> None:
        """Send `data`.

        Raises:
            OSError: the other end is gone.
        """
        view = memoryview(data)
        for at in range(0, len(view), _BLOCK):
            nonce = self._sent.to_bytes(_NONCE, "big")
            self._sent += 1
            sealed = self._mine.encrypt(nonce, view[at : at + _BLOCK], None)
            self._sock.sendall(len(sealed).to_bytes(_LENGTH, "big"))
            self._sock.sendall(sealed)

    def hang_up(self) -> None:
        """End the connection. A thread that reads from it or writes to it wakes up."""
        hang_up(self._sock)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
        super().close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._sock.sendall(self._outgoing.read())


class DonorPort:
    """A port that is reserved for as long as the process lives, and listens during joins."""

    def __init__(self, host: str, serve: Callable[[SecureStream], None]) -> None:
        """Reserve a port of `host`. `serve` gets each connection that has shown the key.

        Raises:
            OSError: `host` is no address of this machine, or has no free port.
        """
        self._serve = serve
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # A bound socket that does not listen keeps the port from others, and refuses connections.
        self._reserved = self._bind((host, 0))
        self._bound = self._reserved.getsockname()
        self.address = f"{host}:{self._bound[1]}"
        self._lock = threading.Lock()
        self._key = ""
        self._until_s = 0.0
        self._listens = self._closed = False
        self._context_key = ""
        self._pending: dict[SecureStream, None] = {}
        """Connections in a handshake, the oldest first."""

    def open(self, key: str) -> None:
        """Listen for ranks that have `key`, for the next `_OPEN_S` seconds. Returns at once."""
        with self._lock:
            self._key, self._until_s = key, time.monotonic() + _OPEN_S
            if self._listens or self._closed:
                return
            self._listens = True
        if not _start(self._listen):
            self._listens = False  # The next order tries again.

    def close(self) -> None:
        """Give the port up for good. A listener of a join that is under way ends in a moment."""
        with self._lock:
            self._closed = True
        self._reserved.close()

    def _bind(self, address: tuple[str, int]) -> socket.socket:
        bound = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
        return bound

    def _listen(self) -> None:
        try:
            with self._bind(self._bound) as listener:
                listener.listen()
                listener.settimeout(_LOOK_S)
                try:
                    while not self._is_over():
                        self._accept(listener)
                finally:
                    hang_up(listener)  # A forked child may have it as well.
        except (OSError, ValueError):  # No socket, or no valid key. The next order tries again.
            with self._lock:
                self._listens = False

    def _is_over(self) -> bool:
        with self._lock:
            self._listens = time.monotonic() < self._until_s and not self._closed
            return not self._listens

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (TimeoutError, ConnectionError):
            return
        except OSError:  # No file descriptor is left.
            time.sleep(_LOOK_S)
            return
        with self._lock:
            key = self._key
        if key != self._context_key:
            self._context, self._context_key = _make_context(key, server=True), key
        time.sleep(_ACCEPT_PAUSE_S)
        try:
            secured = _wrap(self._context, sock, server=True)
        except OSError:  # The connection is gone again.
            return
        with self._lock:
            self._pending[secured] = None
            oldest = next(iter(self._pending)) if len(self._pending) > _PENDING_MAX else None
        if oldest is not None:
            oldest.hang_up()
        if not _start(functools.partial(self._greet, secured)):
            with self._lock:
                del self._pending[secured]
            secured.close()

    def _greet(self, secured: SecureStream) -> None:
        """Serve the connection once it has shown the key."""
        try:
            secured.do_handshake()
        except OSError:  # A stranger, or a rank that has another key.
            secured.close()
            return
        finally:
            with self._lock:
                self._pending.pop(secured, None)
        self._serve(secured)


def connect_donor(address: str, key: str) -> SecureStream:
    """Return a connection to the donor at `address` (`host:port`), which has shown `key`.

    Raises:
        OSError: the donor is not reached in time, or does not have the key.
        ValueError: `address` or `key` is malformed.
    """
    context = _make_context(key, server=False)
    until_s = time.monotonic() + _REFUSED_S
    while True:
        secured = _wrap(context, _reach(address), server=False)
        try:
            secured.do_handshake()
            return secured
        except OSError as error:
            secured.close()
            if not isinstance(error, ssl.SSLCertVerificationError) or time.monotonic() > until_s:
                raise
            time.sleep(_RETRY_S)  # The donor still has the key of the join before.


def _reach(address: str) -> socket.socket:
    """Return a connection to `address`, which may begin to listen a moment later.

    Raises:
        OSError: it is not reached.
        ValueError: it is no address.
    """
    host, _, port = address.rpartition(":")
    until_s = time.monotonic() + _REFUSED_S
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=_HANDSHAKE_S)
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_RETRY_S)


def _start(run: Callable[[], None]) -> bool:
    """Start a thread; return False if this process may have no more."""
    try:
        threading.Thread(target=run, name="perdure-donor", daemon=True).start()
    except RuntimeError:
        return False
    return True


def hang_up(sock: socket.socket) -> None:
    """Shut `sock` down. A thread that waits for it wakes up."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _make_context(key: str, *, server: bool) -> ssl.SSLContext:
    """Return a TLS context that shows the certificate in `key` (PEM), and accepts no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=key)
    with tempfile.NamedTemporaryFile("w") as file:  # OpenSSL reads a private key from files only.
        file.write(key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _wrap(context: ssl.SSLContext, sock: socket.socket, *, server: bool) -> SecureStream:
    """Return `sock` with TLS, before the handshake."""
    try:
        sock.getpeername()  # It raises if the connection is gone again.
        sock.settimeout(_HANDSHAKE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _detect_lost_peer(sock)
        return SecureStream(sock, context, server=server)
    except OSError:
        sock.close()
        raise


def _detect_lost_peer(sock: socket.socket) -> None:
    """Have the kernel end the connection within about 11 s if the other host vanishes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_S),
        ("TCP_KEEPALIVE", _KEEPALIVE_S),  # The same on macOS.
        ("TCP_KEEPINTVL", _KEEPALIVE_EVERY_S),
        ("TCP_KEEPCNT", _KEEPALIVE_TRIES),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
