"""A member's side of a join: its share of the state, sent by a thread while training goes on.

The state is that between two steps. It is copied while the next forward and backward run, and
the update of the parameters waits for the copy. From then on the reduced gradients of each step
are copied before they are applied, and sent after the state: with them the follower makes the
same updates and comes as far as everyone.
"""

import socket
import threading
from collections import deque
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from perdure.model.errors import ProtocolError
from perdure.worker.elastic.joining.wire import Ask, At, Connection, Part, Take
from perdure.worker.elastic.moving import (
    hash_blobs,
    join_blob,
    list_blobs,
    pack_state,
    view_bytes,
)
from perdure.worker.elastic.state import Followed

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
        self._generation, self._state = generation, state
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
        """The state is that after `step` steps, and does not change before `release`.

        `epoch` tells it from what others made of the same step.
        """
        if self._state is None:
            return
        with self._changed:
            self._applied = step
            due = [s for s in self._sessions if s.take.step <= step and not s.follows]
            for session in [s for s in due if s.take.step < step]:
                self._end(session)  # Several steps came at once, from a re-formation.
            taken = [s for s in due if s.take.step == step]
            if not taken:
                return
            skeleton, tensors = pack_state(self._state.offered())
            for session in taken:
                session.source = (Part("state", step, epoch, (), ""), skeleton, tensors)
                session.follows = True
            self._changed.notify_all()

    def release(self, step: int, epoch: int) -> None:
        """Wait until the state may change: step number `step` is applied.

        Followers are sent what the member itself makes that update of.
        """
        if not self._sessions or self._state is None:
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
        message = session.connection.read()
        if not isinstance(message, Ask) or message.generation != self._generation:
            raise ProtocolError("a follower of another world")
        assert self._state is not None
        session.connection.send(At(self._applied, self._state.node, self._state.runs))
        take = session.connection.read()
        if not isinstance(take, Take):
            raise ProtocolError("no step was named")
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
        digest = hash_blobs(skeleton, blobs)
        header = msgspec.structs.replace(part, digest=digest, behind=behind)
        session.connection.send(header, [skeleton, *(view_bytes(blob) for blob in blobs)])
        with self._changed:
            session.waiting -= sum(part.sizes)

    def _end(self, session: _Session) -> None:
        session.over = True
        session.copied.set()
        session.connection.close()
        self._sessions = [s for s in self._sessions if s is not session]
        self._changed.notify_all()
