"""A rank on its way into a world that trains: its donors, and itself.

What it is sent are parts, each a header line and bytes: a state at one step first, then the reduced
gradients of each step after it. Every donor sends its
share of both: the blobs whose number leaves its own modulo the number of donors. The bytes of a
part are hashed; the epoch in which a step was reduced goes with it, because what two epochs made
of the same step may differ in the last bit.

A member's side is its share of the state, sent by a thread while training goes on (`Donor`). The
state is that between two steps. It is copied while the next forward and backward run, and the
update of the parameters waits for the copy. From then on the reduced gradients of each step are
copied before they are applied, and sent after the state: with them the follower makes the same
updates and comes as far as everyone.

The joining side takes a state from several members, then keeps up with them (`CatchUp`). The
members train on meanwhile. The follower makes the same updates of the same reduced gradients, and
so it has bit for bit what they have; it is called into the world when nothing is left for it to
catch up on. Whatever goes wrong here costs nobody anything: it begins again, or in the end it joins
without a state and gets one within the join.
"""

import contextlib
import functools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import torch
import xxhash
from torch import Tensor

from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.model.events import MemberReady
from perdure.model.orders import FollowWorld
from perdure.plan.elastic.commit import FRESH
from perdure.worker.elastic.apart import start
from perdure.worker.elastic.group import read_progress
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.moving import (
    fill_blob,
    hash_blobs,
    join_blob,
    list_blobs,
    open_state,
    pack_state,
    view_bytes,
)
from perdure.worker.elastic.state import At, Followed, Lost

_HEADER_BYTES_MAX = 1 << 20


class Ask(msgspec.Struct, frozen=True, tag=True):
    """The follower's question how far the donor is; it is answered by `At`."""

    generation: int
    member: int


class Take(msgspec.Struct, frozen=True, tag=True):
    """The follower's request for its share of the state at `step` and every step from there on."""

    step: int
    share: int
    shares: int


class Part(msgspec.Struct, frozen=True, tag=True):
    """The donor's header of bytes that follow: the skeleton's first, then the blobs'."""

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
AnyMessage = TypeVar("AnyMessage", Ask, At, Take, Part)


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

    def read(self, kind: type[AnyMessage]) -> AnyMessage:
        """Return the next message, which is to be of this kind.

        Raises:
            OSError: the other end is gone.
            ProtocolError: it says something else, or what cannot be understood.
        """
        line = self._file.readline(_HEADER_BYTES_MAX)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the other end has closed")
        return decode(line, kind)

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


BACKLOG_MIN = 256 << 20
"""Bytes of gradients that may wait for a follower that is slow; or twice the state's share."""
_COPY_S_MAX = 60.0


_NOTHING = Take(-1, 0, 1)
Piece = tuple[Part, bytes, list[Tensor]]
"""A header, the skeleton, and what belongs to it."""


@dataclass(slots=True)
class _Session:
    """One follower."""

    connection: Connection
    take: Take = _NOTHING
    """State at this step is to be taken, and what share of it; -1: none."""
    source: Piece | None = None
    """The state, to be copied before it changes."""
    follows: bool = False
    """Its state was taken: it gets every step from there on."""
    copied: threading.Event = field(default_factory=threading.Event)
    parts: deque[Piece] = field(default_factory=deque)
    waiting: int = 0
    """Bytes in `parts`."""
    limit: int = BACKLOG_MIN
    over: bool = False


class Donor:
    """What a member gives to those who follow. Only `_serve` and below run in other threads."""

    def __init__(self, generation: int, state: Followed | None) -> None:
        """Serve nobody yet; a `state` that cannot be followed is None."""
        self._generation = generation
        self._state: Any = state
        self._changed = threading.Condition()
        self._sessions: list[_Session] = []
        self._applied = -1
        self._address = ""

    def open(self, host: str) -> str:
        """Listen at `host`; return the address, an empty string if no port can be had."""
        if self._address or self._state is None:
            return self._address
        try:
            listener = socket.create_server((host, 0))
        except OSError:  # Then nobody follows.
            return ""
        self._address = f"{host}:{listener.getsockname()[1]}"
        threading.Thread(
            target=self._listen, args=(listener,), name="perdure-feed", daemon=True
        ).start()
        return self._address

    # --- by the training thread ---------------------------------------------------------------

    def stand(self, step: int, epoch: int) -> None:
        """Note that the state is that after `step` steps, and does not change before `release`.

        `epoch` tells it from what others made of the same step.
        """
        with self._changed:
            self._applied = step
            due = [s for s in self._sessions if s.take.step <= step and not s.follows]
            for session in [s for s in due if s.take.step < step]:
                self._end(session)  # Several steps came at once, from a re-formation.
            taken = [s for s in due if s.take.step == step]
            if not taken:
                return
            skeleton, tensors = pack_state(self._state.replica.state())
            for session in taken:
                session.source = (Part("state", step, epoch, (), ""), skeleton, tensors)
                session.follows = True
            self._changed.notify_all()

    def release(self, step: int, epoch: int) -> None:
        """Wait until the state may change: step number `step` is applied.

        Followers are sent what the member itself makes that update of.
        """
        if not self._sessions:
            return
        with self._changed:
            followed = [s for s in self._sessions if s.follows]
        flats = self._state.list_sent() if followed else []
        settings = self._state.hash_settings() if followed else ""
        for session in followed:
            session.copied.wait(_COPY_S_MAX)
            blobs = [join_blob([flat]) for flat in flats[session.take.share :: session.take.shares]]
            part = Part("step", step, epoch, tuple(b.numel() for b in blobs), "", settings=settings)
            with self._changed:
                session.parts.append((part, b"", blobs))
                session.waiting += sum(part.sizes)
                if session.waiting > session.limit:
                    self._end(session)
                self._changed.notify_all()

    def cut(self) -> None:
        """End all that follow: the coming update is not made of what they would be sent."""
        with self._changed:
            for session in [s for s in self._sessions if s.follows]:
                self._end(session)

    # --- by threads of its own ----------------------------------------------------------------

    def _listen(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(
                target=self._serve, args=(sock,), name="perdure-feed", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        session = _Session(Connection(sock))
        try:
            self._agree(session)
            self._copy(session)
            while True:
                self._send_next(session)
        except (OSError, ProtocolError, ValueError):
            pass  # It has what it wanted, or it is gone.
        finally:
            with self._changed:
                self._end(session)

    def _agree(self, session: _Session) -> None:
        """Agree on a step that is still to come; the follower compares the answers of all."""
        if session.connection.read(Ask).generation != self._generation:
            raise ProtocolError("a follower of another world")

        session.connection.send(At(self._applied, self._state.node, self._state.runs))
        take = session.connection.read(Take)
        with self._changed:
            session.take, applied = take, self._applied
            if take.step > applied:
                self._sessions = [*self._sessions, session]
        session.connection.send(At(applied))
        if take.step <= applied:
            raise ProtocolError("the step has passed")

    def _copy(self, session: _Session) -> None:
        """Copy the state once it stands at the step that was agreed upon."""
        with self._changed:
            self._changed.wait_for(lambda: session.source is not None or session.over)
            source = session.source
        if source is None:
            raise ProtocolError("the follower was dropped")
        part, skeleton, tensors = source
        try:
            mine = list_blobs(tensors)[session.take.share :: session.take.shares]
            blobs = [join_blob(tensors) for tensors in mine]
        finally:
            session.source = None
            session.copied.set()
        skeleton = skeleton if session.take.share == 0 else b""
        sizes = tuple(blob.numel() for blob in blobs)
        part = msgspec.structs.replace(part, sizes=sizes, skeleton=len(skeleton))
        with self._changed:
            session.limit = max(BACKLOG_MIN, 2 * sum(sizes))
            session.parts.appendleft((part, skeleton, blobs))
            session.waiting += sum(sizes)

    def _send_next(self, session: _Session) -> None:
        with self._changed:
            self._changed.wait_for(lambda: session.parts or session.over)
            if session.over:
                raise ProtocolError("the follower was dropped")
            part, skeleton, blobs = session.parts.popleft()
            behind = len(session.parts)
        header = msgspec.structs.replace(part, digest=hash_blobs(skeleton, blobs), behind=behind)
        session.connection.send(header, [skeleton, *(view_bytes(blob) for blob in blobs)])
        with self._changed:
            session.waiting -= sum(part.sizes)

    def _end(self, session: _Session) -> None:
        session.over = True
        session.copied.set()
        session.connection.close()
        self._sessions = [s for s in self._sessions if s is not session]
        self._changed.notify_all()


_CONNECT_S = 5.0
_LOOK_S = 0.002
_AHEAD_MAX = 4096
_LAST_S = 10.0
"""How long the members may wait for what is on its way when they are called together."""

ChooseDonors = Callable[[Mapping[int, At], Sequence[int]], tuple[int, ...]]
"""(what each has answered, who has chosen before) -> whom to follow"""


class Follower:
    """One attempt: connections to all donors, whose parts are read a row at a time."""

    def __init__(
        self, order: FollowWorld, called: Callable[[], bool], choose: ChooseDonors
    ) -> None:
        """Connect, and agree on the step whose state is taken.

        Raises:
            Lost: a donor is gone or refuses.
        """
        self._called, self._choose = called, choose
        self.bytes = 0
        self.behind = 1
        """Parts that a donor had still to send when it sent its newest."""
        self.connections: dict[int, Connection] = {}
        """By whom it follows."""
        ahead = 1
        try:
            while not self._agree(order, ahead):
                self.close()
                ahead *= 2
        except (OSError, ProtocolError, Lost) as error:
            self.close()
            raise Lost(f"a donor cannot be followed: {error}") from None
        self._row = self._read_row()
        """What is read now; what comes after it waits at the donors, within their bounds."""

    def _agree(self, order: FollowWorld, ahead: int) -> bool:
        """Ask the donors for one step, `ahead` of the furthest; return whether none had passed it.

        Raises:
            Lost: they are too fast to be asked, or not to be followed.
        """
        if ahead > _AHEAD_MAX:
            raise Lost("the members' steps are too short")
        for donor in sorted(order.donors):
            host, _, port = order.donors[donor].rpartition(":")
            sock = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
            self.connections[donor] = Connection(sock)
            self.connections[donor].send(Ask(order.generation, order.rank))
        answers = {donor: one.read(At) for donor, one in self.connections.items()}
        for donor in set(answers) - set(self._choose(answers, order.ahead)):
            self.connections.pop(donor).close()
        connections = list(self.connections.values())
        step = max(answers[donor].step for donor in self.connections) + ahead
        for share, connection in enumerate(connections):
            connection.send(Take(step, share, len(connections)))
        agreed = all([connection.read(At).step < step for connection in connections])
        for connection in connections:
            connection.sock.settimeout(None)
        return agreed

    def take_state(self) -> tuple[Any, Part]:
        """Return the members' state, and what it is.

        Raises:
            Lost: a donor is gone, or this rank was called into the world meanwhile.
        """
        pieces = None
        while pieces is None:
            if self._called():
                raise Lost("the world does not wait for it")
            pieces = self._take_row(_LOOK_S)
        state, tensors = open_state(pieces[0][1])
        for number, targets in enumerate(list_blobs(tensors)):
            _, _, blobs = pieces[number % len(pieces)]
            fill_blob(targets, blobs[number // len(pieces)])
        return state, pieces[0][0]

    def take_step(self, flats: list[Tensor], wait_s: float) -> Part | None:
        """Fill `flats` with the reduced gradients of the next step; None where these are to come.

        Returns what they are, with the hash of the settings with which they were applied.

        Raises:
            Lost: a donor is gone.
        """
        pieces = self._take_row(wait_s)
        if pieces is None:
            return None
        for number, flat in enumerate(flats):
            flat.view(torch.uint8).copy_(pieces[number % len(pieces)][2][number // len(pieces)])
        self.behind = max(part.behind for part, _, _ in pieces)
        return pieces[0][0]

    def close(self) -> None:
        """End the connections, and with them who reads from them."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    def _read_row(self) -> list[Future[Piece]]:
        connections = self.connections.values()
        return [start(functools.partial(_read_piece, one), "perdure-follow") for one in connections]

    def _take_row(self, wait_s: float) -> list[Piece] | None:
        """Return the next piece of each donor, in the order of their shares, once all are there.

        Raises:
            Lost: a donor is gone, or they are not of one epoch, whose sums alone are alike to the
                last bit.
        """
        left = wait(self._row, wait_s, FIRST_EXCEPTION).not_done
        for donor, piece in zip(self.connections, self._row, strict=True):
            if piece.done() and (error := piece.exception()):
                raise Lost(f"donor {donor}: {error}")
        if left:
            return None
        pieces = [piece.result() for piece in self._row]
        parts = [part for part, _, _ in pieces]
        self.bytes += sum(part.skeleton + sum(part.sizes) for part in parts)
        if len({(part.kind, part.step, part.epoch, part.settings) for part in parts}) > 1:
            raise Lost(f"{parts[0].kind} {parts[0].step} was reduced in two epochs")
        self._row = self._read_row()
        return pieces


def _read_piece(connection: Connection) -> Piece:
    part = connection.read(Part)
    return (part, *connection.read_bytes(part))


class CatchUp:
    """A rank on its way into a world: its state, brought to where the members are."""

    def __init__(self, membership: Membership, state: Followed | None) -> None:
        """Follow nobody yet; a `state` that cannot be followed is None."""
        self._membership, self._state = membership, state
        self._follower: Follower | None = None
        self._error = ""

    def follow(self, order: FollowWorld) -> bool:
        """Follow until this rank is called; return whether it has a state then.

        The controller is told once nothing is left to catch up on.
        """
        began, called, told = time.monotonic(), self._membership.overtaken, False
        self.close()
        try:
            if self._state is None:
                raise Lost("such a state is given within the join")
            self._state.applied = FRESH
            follower = self._follower = Follower(order, called, self._state.choose_donors)
            state, part = follower.take_state()
            self._state.become(state, part.step, part.epoch)
            while not called():
                if self._advance(self._state, follower) and not told and not follower.behind:
                    told = True
                    self._tell(self._state.applied, follower.bytes, time.monotonic() - began)
        except Lost as error:
            self._error = str(error)
            self.close()
        return self._follower is not None

    def give_up(self) -> None:
        """Say that this rank gets its state within the join."""
        if self._state is not None:
            self._state.applied = FRESH
        self._tell(FRESH)

    def _tell(self, step: int, bytes_: int = 0, took_s: float = 0.0) -> None:
        membership = self._membership
        membership.emit(
            MemberReady(
                generation=membership.generation,
                rank=membership.me,
                at_s=membership.now(),
                step=step,
                bytes=bytes_,
                took_s=took_s,
                error=self._error[:300],
            )
        )

    def finish(self, store: Any, members: Sequence[int]) -> None:
        """Take the last steps, now that the `members` of this epoch stand still at `store`.

        Raises:
            Broken: there is a newer epoch.
        """
        follower, state = self._follower, self._state
        if follower is None or state is None:
            return
        donors = [donor for donor in follower.connections if donor in members]
        told = read_progress(store, donors, type(state.stand()), self._membership.overtaken)
        # What all donors have applied is on its way from all of them.
        last = min((progress.applied for progress in told.values()), default=FRESH)
        try:
            deadline = time.monotonic() + _LAST_S
            while state.applied < last and time.monotonic() < deadline:
                self._advance(state, follower)
        except Lost as error:
            self._error = str(error)
        self.close()

    def close(self) -> None:
        """Follow no longer; what was reached stays."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()

    def _advance(self, state: Followed, follower: Follower) -> bool:
        """Make one update; return whether there was one to make.

        Raises:
            Lost: the members have made it with other settings.
        """
        part = follower.take_step(state.list_sent(), _LOOK_S)
        if part is None:
            return False
        if part.settings != state.hash_settings():
            state.applied = FRESH
            raise Lost("the optimizer's settings are not the members'")
        state.ready = part.epoch
        state.update("followed")
        return True
