"""What a member that follows the world is sent, and how: parts, each a header line and bytes.

A state at one step first, then the reduced gradients of each step after it. Every donor sends its
share of both: the blobs whose number leaves its own modulo the number of donors. The bytes of a
part are hashed; the epoch in which a step was reduced goes with it, because what two epochs made
of the same step may differ in the last bit.
"""

import contextlib
import socket
from collections.abc import Sequence

import msgspec
import torch
import xxhash
from torch import Tensor

from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.worker.elastic.moving import view_bytes

_HEADER_BYTES_MAX = 1 << 20


class Ask(msgspec.Struct, frozen=True, tag=True):
    """From the follower: how far are you? Answered by `At`."""

    generation: int
    member: int


class At(msgspec.Struct, frozen=True, tag=True):
    """From the donor: steps applied by now. To a `Take`: it came too late."""

    step: int
    node: str = ""
    runs: tuple[tuple[int, int], ...] = ()
    """Where the model is cut into stages: its runs of blocks, each the first and the one behind."""


class Take(msgspec.Struct, frozen=True, tag=True):
    """From the follower: send your share of the state at `step`, and every step from there on."""

    step: int
    share: int
    shares: int


class Part(msgspec.Struct, frozen=True, tag=True):
    """From the donor: bytes follow, the skeleton's first, then the blobs'."""

    kind: str
    """`state`, or `step`: the reduced gradients of step number `step`."""
    step: int
    epoch: int
    sizes: tuple[int, ...]
    """Bytes of each blob."""
    digest: str
    skeleton: int = 0
    settings: str = ""
    """Of a step: hash of the optimizer's settings (learning rate and such) at its update."""
    behind: int = 0
    """Parts that wait to be sent after this one."""


Message = Ask | At | Take | Part


class Lost(Exception):
    """The members cannot be followed any further this time."""


class Connection:
    """One connection: header lines, and bytes straight into tensors."""

    def __init__(self, sock: socket.socket) -> None:
        """Talk over `sock`, which blocks."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._file = sock.makefile("rb", buffering=1 << 16)

    def send(self, message: Message, blobs: Sequence[memoryview | bytes] = ()) -> None:
        """Send a message and what belongs to it.

        Raises:
            OSError: the other end is gone.
        """
        self.sock.sendall(encode(message) + b"\n")
        for blob in blobs:
            self.sock.sendall(blob)

    def read(self) -> Message:
        """Return the next message.

        Raises:
            OSError: the other end is gone.
            ProtocolError: it says what cannot be understood.
        """
        line = self._file.readline(_HEADER_BYTES_MAX)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the other end has closed")
        message: Message = decode(line, Message)
        return message

    def read_bytes(self, part: Part) -> tuple[bytes, list[Tensor]]:
        """Return the skeleton and the blobs of `part`.

        Raises:
            OSError: the other end is gone.
            ProtocolError: they are not what was sent.
        """
        digest = xxhash.xxh3_128()
        skeleton = self._file.read(part.skeleton)
        digest.update(skeleton)
        blobs = []
        for size in part.sizes:
            blob = torch.empty(size, dtype=torch.uint8)
            view = view_bytes(blob)
            while view:
                count = self._file.readinto(view)  # type: ignore[attr-defined]
                if not count:
                    raise ConnectionResetError("the other end has closed")
                digest.update(view[:count])
                view = view[count:]
            blobs.append(blob)
        if digest.hexdigest() != part.digest:
            raise ProtocolError(f"{part.kind} {part.step} came over damaged")
        return skeleton, blobs

    def close(self) -> None:
        """End the connection; whoever reads from it wakes up."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def hash_settings(optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all that an update depends on beside gradients and state."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return xxhash.xxh3_64(repr(groups).encode()).hexdigest()
