"""Raw netlink: what the kernel tells of TCP connections (`inet_diag`).

Raw, not pyroute2: that one parses every attribute into objects, 100 µs and more a socket, and a
node of eight ranks in a world of 64 with three groups has 1,512 of them. Here one precompiled
`struct` takes the ten numbers that matter out of a message at fixed offsets, 1 to 2 µs a socket.
Where TCP_INFO lies in a message depends on the kernel's other attributes, is found once in a
message of each length, and is checked in every message.

Reading another user's or namespace's connections needs the rights that `/proc` or `setns` ask
for; `inet_diag` itself tells any user of the connections of its own network namespace.
"""

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec

from perdure.model.errors import PlatformError

_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_DIAG_INFO = 2
_ESTABLISHED = 1
_CLONE_NEWNET = 0x40000000
_ATTRS_AT = 88
_INFO_NEEDED = 176
"""Bytes of TCP_INFO up to `busy_time` (Linux 4.10)."""
_BUFFER = 1 << 18
_TIMEOUT_S = 2.0

_HEADER = struct.Struct("<IHHII")
_ATTR = struct.Struct("<HH")
_ADDRESSES = struct.Struct("!HH16s16s")

Numbers = tuple[int, ...]
"""Bytes unread, bytes unacknowledged, inode, (a constant,) backoff, age of the last acknowledgement
(ms), rtt (µs), segments sent again, bytes acknowledged, bytes unsent, least rtt (µs), busy time
(µs)."""


class Address(msgspec.Struct, frozen=True):
    """The two ends of a connection, each as `address:port`."""

    local: str
    remote: str

    @property
    def local_port(self) -> int:
        """Return the port at this end."""
        return int(self.local.rpartition(":")[2])


class Dump:
    """The answer of one request: parsed as it is read, message by message."""

    __slots__ = ("_netlink", "data", "offset")

    def __init__(self, netlink: "SockDiag") -> None:
        """Read from `netlink`."""
        self._netlink = netlink
        self.data = b""
        self.offset = 0

    def address(self) -> Address:
        """Return the addresses in the message that was yielded last."""
        at = self.offset
        family = self.data[at + 16]
        sport, dport, local, remote = _ADDRESSES.unpack_from(self.data, at + 20)
        return Address(
            f"{_host(family, local)}:{sport}",
            f"{_host(family, remote)}:{dport}",
        )

    def __iter__(self) -> Iterator[Numbers]:
        """Yield the numbers of each connection."""
        layouts, receive = self._netlink.layouts, self._netlink.receive
        length, layout = 0, struct.Struct("")
        while True:
            data = self.data = receive()
            at, end = 0, len(data)
            while at + 16 <= end:
                size = int.from_bytes(data[at : at + 4], "little")
                if size != length:
                    kind = int.from_bytes(data[at + 4 : at + 6], "little")
                    if kind == _DONE:
                        return
                    if kind == _ERROR:
                        code = -int.from_bytes(data[at + 16 : at + 20], "little", signed=True)
                        raise PlatformError(f"inet_diag: {os.strerror(code)}")
                    found = layouts.get(size) or _find_layout(data, at, size)
                    if found is None:  # A socket without TCP_INFO (closing), or an old kernel.
                        at += (size + 3) & ~3
                        continue
                    layouts[size] = layout = found
                    length = size
                numbers = layout.unpack_from(data, at)
                if numbers[3] != _DIAG_INFO:  # The same length, but other attributes.
                    length = 0
                    if layouts.pop(size, None) is None or not _find_layout(data, at, size):
                        at += (size + 3) & ~3
                    continue
                self.offset = at
                yield numbers
                at += (size + 3) & ~3


class SockDiag:
    """A line to `inet_diag` of one network namespace."""

    def __init__(self, namespace_of: int = 0) -> None:
        """Open it in the caller's namespace, or in that of process `namespace_of`.

        Raises:
            PlatformError: not permitted (another namespace needs CAP_SYS_ADMIN), or not there.
        """
        self.layouts: dict[int, struct.Struct] = {}
        try:
            self._socket = _open_in_namespace(namespace_of) if namespace_of else _open_diag()
        except OSError as error:
            raise PlatformError(f"inet_diag: {error.strerror or error}") from error

    def dump(self, family: int) -> Dump:
        """Ask for all established connections of `family`; iterate over the answer at once.

        Raises:
            PlatformError: the kernel refuses.
        """
        self._ask(family, 1 << _ESTABLISHED, 1 << (_DIAG_INFO - 1))
        return Dump(self)

    def receive(self) -> bytes:
        """Return the next part of an answer.

        Raises:
            PlatformError: none came.
        """
        try:
            return self._socket.recv(_BUFFER)
        except OSError as error:
            raise PlatformError(f"inet_diag: {error.strerror or error}") from error

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def _ask(self, family: int, states: int, extensions: int) -> None:
        body = struct.pack("<BBBBI48x", family, socket.IPPROTO_TCP, extensions, 0, states)
        header = _HEADER.pack(16 + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
        try:
            self._socket.send(header + body)
        except OSError as error:
            raise PlatformError(f"inet_diag: {error.strerror or error}") from error


def _find_layout(data: bytes, message: int, size: int) -> struct.Struct | None:
    """Return what takes the numbers out of messages of this length; None without TCP_INFO."""
    at, end = message + _ATTRS_AT, message + size
    while at + 4 <= end:
        length, kind = _ATTR.unpack_from(data, at)
        if length < 4:
            return None
        if kind == _DIAG_INFO:
            if length < 4 + _INFO_NEEDED:
                return None
            gap = at - message - _ATTRS_AT
            # rqueue, wqueue, inode; the attribute's type; then TCP_INFO from its fifth byte.
            return struct.Struct(f"<72xII4xI{gap}x2xH4xB51xI8xI28xI16xQ16xII16xQ")
        at += (length + 3) & ~3
    return None


def _host(family: int, raw: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntoa(raw[:4])
    if raw[:12] == b"\0" * 10 + b"\xff\xff":
        return socket.inet_ntoa(raw[12:16])
    return socket.inet_ntop(socket.AF_INET6, raw[:16])


def _open_diag() -> socket.socket:
    diag = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
    diag.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    diag.settimeout(_TIMEOUT_S)
    return diag


def _open_in_namespace(pid: int) -> socket.socket:
    """Open the line in the network namespace of `pid`, in a thread that ends in it.

    A socket stays in the namespace it was opened in, and `setns` moves one thread only.
    """
    results: list[socket.socket | OSError] = []

    def enter() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if libc.setns(fd, _CLONE_NEWNET):
                    code = ctypes.get_errno()
                    raise OSError(code, f"setns: {os.strerror(code)}")
            finally:
                os.close(fd)
            results.append(_open_diag())
        except OSError as error:
            results.append(error)

    thread = threading.Thread(target=enter, name="perdure-setns")
    thread.start()
    thread.join()
    if isinstance(results[0], OSError):
        raise results[0]
    return results[0]
