"""How a rank joins a world that trains: what its donors send, and how it catches up.

A donor (`Donor`) sends parts, each a header line and bytes. The first part is the state at one
step. After it comes the reduced gradients of each later step. Each donor sends its share of both:
the blobs whose number modulo the number of donors is the donor's index. A digest finds a blob that
was damaged on its way. The header names the epoch in which a step was reduced, because two epochs
can differ in the last bit of the same step.

Training goes on while a donor sends. The state is copied beside the next forward and backward pass
(`checkpoint.copying`). The donor sends the copy at once, and says that it is the state (`Proved`)
once the gate has compared it. All ranks that join at one step share the copy. Another copy is made
only after that one has been sent.

The rank that joins (`CatchUp`) takes the state from several donors and applies the same updates
from the same reduced gradients. So it has the members' state bit for bit. The controller calls it
into the world when it has caught up. If something fails, the rank tries again. After some tries it
gets its state within the join.
"""

import contextlib
import functools
import io
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import xxhash
from torch import Tensor

from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.events import MemberReady
from perdure.model.orders import FollowWorld
from perdure.plan.elastic.commit import FRESH
from perdure.worker.checkpoint.copying import Copier, Copy
from perdure.worker.elastic.apart import start
from perdure.worker.elastic.donor_port import DonorPort, SecureStream, connect_donor
from perdure.worker.elastic.group import read_progress
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.moving import (
    fill_blob,
    hash_tensors,
    join_blob,
    lay_out,
    list_blobs,
    measure_blob,
    name_tensors,
    open_state,
    pack_state,
    view_bytes,
)
from perdure.worker.elastic.state import At, Followed, Lost

_HEADER_BYTES_MAX = 1 << 20


class Ask(msgspec.Struct, frozen=True, tag=True):
    """The follower's question how far the donor is. `At` answers it."""

    generation: int
    member: int


class Take(msgspec.Struct, frozen=True, tag=True):
    """The follower's request for a share of the state at `step` and of every later step."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    share: Annotated[int, msgspec.Meta(ge=0)]
    shares: Annotated[int, msgspec.Meta(ge=1)]


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The follower's last word on the step that it asked for; if not `agreed`, it asks again."""

    agreed: bool


class Part(msgspec.Struct, frozen=True, tag=True):
    """The donor's header of bytes that follow: the skeleton's first, then the blobs'."""

    kind: str
    """`state`, or `step`: the reduced gradients of step number `step`."""
    step: int
    epoch: int
    sizes: tuple[int, ...] = ()
    """Bytes of each blob."""
    digest: str = ""
    """Of the digests of the skeleton and of each blob."""
    skeleton: int = 0
    settings: str = ""
    """Of a step: hash of the optimizer's settings (learning rate and such) at its update."""
    behind: int = 0
    """Parts that wait to be sent after this one."""


class Proved(msgspec.Struct, frozen=True, tag=True):
    """The donor's word that the state that it sent is that of the step. Else it hangs up."""


Message = Ask | At | Take | Begin | Part | Proved
AnyMessage = TypeVar("AnyMessage", Ask, At, Take, Begin, Part, Proved)


class Connection:
    """A connection of a donor and a follower: header lines, and bytes straight into tensors."""

    def __init__(self, stream: SecureStream) -> None:
        """Talk over `stream`, whose other end has shown the key of the join."""
        self.stream = stream
        self._file = io.BufferedReader(stream, 1 << 16)
        self._steps: list[list[Tensor]] = [[], []]
        """The blobs of the two latest steps, to be filled again: fresh memory costs time."""

    def send(self, message: Message, blobs: Sequence[memoryview | bytes] = ()) -> None:
        """Send a message and the bytes that belong to it.

        Raises:
            OSError: the other end is gone.
        """
        self.stream.sendall(encode(message) + b"\n")
        for blob in blobs:
            self.stream.sendall(blob)

    def read(self, kind: type[AnyMessage]) -> AnyMessage:
        """Return the next message, which has to be of this kind.

        Raises:
            OSError: the other end is gone.
            ProtocolError: it says something else, or what cannot be understood.
        """
        line = self._file.readline(_HEADER_BYTES_MAX)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the other end has closed")
        return decode(line, kind)

    def read_bytes(self, part: Part, bytes_max: int) -> tuple[bytes, list[Tensor]]:
        """Return the skeleton and the blobs of `part`.

        The blobs of a step are filled again by the second one after it.

        Raises:
            OSError: the other end is gone.
            ProtocolError: they are more than `bytes_max` bytes, or not those of the donor.
        """
        if min(part.skeleton, *part.sizes, 0) < 0 or part.skeleton + sum(part.sizes) > bytes_max:
            raise ProtocolError(f"{part.kind} {part.step} is larger than this rank's own state")
        skeleton = self._file.read(part.skeleton)
        blobs = self._steps[0]
        if part.sizes != tuple(map(len, blobs)):
            blobs = [torch.empty(size, dtype=torch.uint8) for size in part.sizes]
        if part.kind == "step":
            self._steps = [self._steps[1], blobs]
        for blob in blobs:
            view = view_bytes(blob)
            while view:
                count = self._file.readinto(view)
                if not count:
                    raise ConnectionResetError("the other end has closed")
                view = view[count:]
        if part.digest != _join_digests(skeleton, [hash_tensors([blob]) for blob in blobs]):
            raise ProtocolError(f"{part.kind} {part.step} is not what the donor has")
        return skeleton, blobs

    def close(self) -> None:
        """End the connection. A thread that reads from it wakes up."""
        self.stream.hang_up()
        self._file.close()


def _join_digests(skeleton: bytes, digests: Sequence[str]) -> str:
    """Return the digest of a part whose blobs have these `digests`."""
    return xxhash.xxh3_128_hexdigest(skeleton + "".join(digests).encode())


BACKLOG_MIN = 256 << 20
"""Bytes of gradients that may wait for a slow follower; or twice its share of the state."""
_ASK_S = 60.0
"""Seconds for a follower to ask for a state. It waits meanwhile for donors that do not answer."""

_SEND_S = 60.0
"""Seconds for a follower to take the next few kilobytes: its host may have vanished."""

Share = tuple[int, int]
"""Index of a donor among a follower's donors, and their number."""


Piece = tuple[Part, bytes, list[Tensor]]
"""A header, the skeleton, and the blobs."""


@dataclass(slots=True, eq=False)
class _Session:
    """One follower."""

    connection: Connection
    member: int
    take: Take
    copy: Copy | None = None
    """The state that it is to be sent first; None before `take.step`, and once it was sent."""
    follows: bool = False
    """It gets every step from `take.step` on."""
    parts: deque[Piece] = field(default_factory=deque)
    waiting: int = 0
    """Bytes in `parts`."""
    limit: int = BACKLOG_MIN
    over: bool = False

    @property
    def share(self) -> Share:
        """Return which share of the state it takes from this donor."""
        return self.take.share, self.take.shares

    def add(self, piece: Piece) -> None:
        """Have `piece` sent."""
        self.parts.append(piece)
        self.waiting += sum(map(len, piece[2]))


class Donor:
    """What a member sends to ranks that join. Only `_serve` and below run in other threads."""

    def __init__(self, generation: int, state: Followed | None) -> None:
        """Serve nobody yet; a `state` that cannot be followed is None."""
        self._generation = generation
        self._state: Any = state
        self._copier = Copier()
        self._copy = Copy(self._copier, {})
        """The newest copy, which the next update waits for."""
        self._changed = threading.Condition()
        self._sessions: list[_Session] = []
        self._applied = self._epoch = -1
        self._port: DonorPort | None = None

    def reserve(self, host: str) -> str:
        """Reserve a port at `host`; return its address, or an empty string if there is none."""
        if self._port is None and self._state is not None:
            with contextlib.suppress(OSError):  # Without a port, nobody follows this member.
                self._port = DonorPort(host, self._serve)
        return self._port.address if self._port is not None else ""

    def open(self, order: FollowWorld) -> None:
        """Listen for the rank that `order` names. Called in the control thread; never waits."""
        if self._port is not None and order.key and order.epoch >= self._epoch:
            self._epoch = order.epoch
            self._port.open(order.key)

    # --- by the training thread ---------------------------------------------------------------

    def close(self) -> None:
        """Give the port up, and end all that follow: there is nothing left to follow."""
        self._copy.drop("training is over")
        self._drop(self._sessions)
        if self._port is not None:
            self._port.close()

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
            blobs = list_blobs(tensors)
            shares = [range(len(blobs))[s.take.share :: s.take.shares] for s in taken]
            memory = {
                number: torch.empty(measure_blob(blobs[number]), dtype=torch.uint8)
                for share in shares
                for number in share
            }
            self._copy = copy = Copy(
                self._copier,
                name_tensors([one for number in memory for one in blobs[number]]),
                [place for n, blob in memory.items() for place in lay_out(blob, blobs[n])],
            )
            for session, share in zip(taken, shares, strict=True):
                begins = b"" if session.take.share else skeleton
                session.add((Part("state", step, epoch), begins, [memory[n] for n in share]))
                session.limit = session.waiting + max(BACKLOG_MIN, 2 * session.waiting)
                session.copy, session.follows = copy, True
            start(copy.make, "perdure-donor")
            self._changed.notify_all()
        if self._copier.torn:
            copy.wait()

    def release(self, step: int, epoch: int) -> None:
        """Wait until the state may change: step number `step` is applied.

        Followers are sent what the member itself makes that update of. A follower that causes an
        error here is dropped: training goes on.
        """
        self._copy.wait()
        if self._copy.problem:
            self._drop([s for s in self._sessions if s.copy is self._copy])
        with self._changed:
            followed = [s for s in self._sessions if s.follows]
        if not followed:
            return
        flats, settings = self._state.list_sent(), self._state.hash_settings()
        sent = {
            (index, count): [join_blob([flat]) for flat in flats[index::count]]
            for index, count in {session.share for session in followed}
        }
        for session in followed:
            blobs = sent[session.share]
            with self._changed:
                session.add((Part("step", step, epoch, settings=settings), b"", blobs))
                if session.waiting > session.limit:
                    self._end(session)
                self._changed.notify_all()

    def cut(self) -> None:
        """End all that follow: the coming update is not made of what they would be sent."""
        self._copy.drop("the update did not wait for the copy")
        with self._changed:
            followed = [s for s in self._sessions if s.follows]
        self._drop(followed)

    def _drop(self, sessions: Iterable[_Session]) -> None:
        with self._changed:
            for session in sessions:
                self._end(session)

    # --- by threads of its own ----------------------------------------------------------------

    def _serve(self, stream: SecureStream) -> None:
        """Serve a follower that has shown the key, until it has what it wanted or is gone."""
        connection = Connection(stream)
        session = None
        try:
            session = self._agree(connection)
            stream.settimeout(_SEND_S)
            while True:
                self._send_next(session)
        except (OSError, PlatformError, ProtocolError, RuntimeError, ValueError):
            pass
        finally:
            connection.close()
            if session is not None:
                self._drop([session])

    def _agree(self, connection: Connection) -> _Session:
        """Return the session once a step is agreed on that is still to come.

        The follower compares the answers of all its donors. If one of them cannot begin at the
        step, it asks all of them again.

        Raises:
            OSError: the follower is gone, or too slow.
            ProtocolError: it is of another world, or not understood.
        """
        connection.stream.settimeout(_ASK_S)
        while True:
            ask = connection.read(Ask)
            if ask.generation != self._generation:
                raise ProtocolError("a follower of another world")
            with self._changed:
                coming = [s.take.step - 1 for s in self._sessions if not s.follows]
                step = max([self._applied, *coming])  # Then both begin there, with one copy.
            connection.send(At(step, self._state.node, self._state.runs))
            session = _Session(connection, ask.member, connection.read(Take))
            try:
                answer = self._admit(session)
                connection.send(answer)
                if connection.read(Begin).agreed and not (answer.late or answer.busy):
                    return session
            except BaseException:
                self._drop([session])
                raise
            with self._changed:
                self._sessions = [s for s in self._sessions if s is not session]

    def _admit(self, session: _Session) -> At:
        """Take the session in if its step is still to come, and no other copy is to be sent."""
        take = session.take
        if take.share >= take.shares or take.step > self._applied + 2 * _AHEAD_MAX:
            raise ProtocolError(f"share {take.share} of {take.shares} of step {take.step}")
        with self._changed:
            for old in [s for s in self._sessions if s.member == session.member]:
                self._end(old)  # The rank has begun again.
            unsent = [s for s in self._sessions if not s.follows or s.copy is not None]
            answer = At(
                self._applied,
                late=take.step <= self._applied,
                busy=any(s.take.step != take.step for s in unsent),
            )
            if not (answer.late or answer.busy):
                self._sessions = [*self._sessions, session]
        return answer

    def _send_next(self, session: _Session) -> None:
        """Send the next part. A state goes as soon as it is copied, and is proved by the gate."""
        with self._changed:
            self._changed.wait_for(lambda: session.parts or session.over)
            if session.over:
                raise ProtocolError("the follower was dropped")
            part, skeleton, blobs = session.parts.popleft()
            behind, copy = len(session.parts), session.copy
        if copy is not None:
            copy.made.wait()
        header = msgspec.structs.replace(
            part,
            sizes=tuple(map(len, blobs)),
            digest=_join_digests(skeleton, [hash_tensors([blob]) for blob in blobs]),
            skeleton=len(skeleton),
            behind=behind,
        )
        session.connection.send(header, [skeleton, *map(view_bytes, blobs)])
        if copy is not None:
            copy.confirm()
            session.connection.send(Proved())
        with self._changed:
            session.copy = None
            session.waiting -= sum(header.sizes)

    def _end(self, session: _Session) -> None:
        session.over, session.copy = True, None
        session.parts.clear()
        session.connection.stream.hang_up()
        self._sessions = [s for s in self._sessions if s is not session]
        self._changed.notify_all()


_LOOK_S = 0.002
_BUSY_S = 0.05
"""Seconds between two questions to a donor that sends another copy of its state."""
_AHEAD_MAX = 4096
_LAST_S = 10.0
"""Seconds for which the members wait for the last steps when they are called together."""
_SLACK_BYTES = 256 << 20
"""A part may be so much larger than twice this rank's own state."""

ChooseDonors = Callable[[Mapping[int, At], Sequence[int]], tuple[int, ...]]
"""(the donors' answers, the ranks that chose before) -> the donors to follow"""


class Follower:
    """One attempt: connections to all donors, whose parts are read a row at a time."""

    def __init__(self, order: FollowWorld, called: Callable[[], bool], state: Followed) -> None:
        """Connect for the rank that has `state`, and agree on the step at which it begins.

        Raises:
            Lost: too few donors are left, or this rank was called into the world meanwhile.
        """
        self._called = called
        self._bytes_max = 2 * state.replica.nbytes + _SLACK_BYTES
        self.bytes = 0
        self.behind = 1
        """Parts that a donor had still to send when it sent its newest."""
        self.connections: dict[int, Connection] = {}
        """By donor."""
        try:
            self._connect(order)
            self._agree(order, state.choose_donors)
        except (Lost, OSError, ProtocolError) as error:
            self.close()
            raise Lost(f"a donor cannot be followed: {error}") from None
        self._row = self._read_row()
        """What is read now; what comes after it waits at the donors, within their bounds."""
        self._next = "state", self._step
        """What the row has to be."""

    def _connect(self, order: FollowWorld) -> None:
        """Connect to all donors at once; leave out those that cannot be reached.

        Raises:
            Lost: none can be reached, or this rank was called into the world meanwhile.
        """
        reached = {
            donor: start(
                functools.partial(connect_donor, order.donors[donor], order.key), "perdure-follow"
            )
            for donor in sorted(order.donors)
        }
        while wait(reached.values(), _LOOK_S).not_done:
            if self._called():
                for reaching in reached.values():
                    reaching.add_done_callback(_hang_up_late)
                raise Lost("the world does not wait for it")
        problem = "there is no donor"
        for donor, reaching in reached.items():
            if error := reaching.exception():
                problem = f"donor {donor}: {error}"
            else:
                self.connections[donor] = Connection(reaching.result())
        if not self.connections:
            raise Lost(problem)

    def _agree(self, order: FollowWorld, choose: ChooseDonors) -> None:
        """Agree with the donors on one step that none of them has passed.

        Raises:
            Lost: they are too fast to be asked, or not to be followed, or this rank was called
                into the world meanwhile.
        """
        ahead = 1
        while True:
            for connection in self.connections.values():
                connection.send(Ask(order.generation, order.rank))
            answers = {donor: one.read(At) for donor, one in self.connections.items()}
            for donor in set(answers) - set(choose(answers, order.ahead)):
                self.connections.pop(donor).close()
            connections = list(self.connections.values())
            step = max(answers[donor].step for donor in self.connections) + ahead
            for share, connection in enumerate(connections):
                connection.send(Take(step, share, len(connections)))
            told = [connection.read(At) for connection in connections]
            late, busy = any(one.late for one in told), any(one.busy for one in told)
            for connection in connections:
                connection.send(Begin(agreed=not (late or busy)))
            if not (late or busy):
                break
            if self._called():
                raise Lost("the world does not wait for it")
            ahead *= 2 if late else 1
            if ahead > _AHEAD_MAX:
                raise Lost("the members' steps are too short")
            if busy:
                time.sleep(_BUSY_S)
        self._step = step
        for connection in connections:
            connection.stream.settimeout(None)

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
        try:
            state, tensors = open_state(pieces[0][1])
        except Exception as error:  # Bytes that are no skeleton raise anything.
            raise Lost(f"the donor's skeleton cannot be read: {error!r:.200}") from None
        for number, targets in enumerate(list_blobs(tensors)):
            fill_blob(targets, _find_blob(pieces, number, measure_blob(targets)))
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
            fill_blob([flat], _find_blob(pieces, number, measure_blob([flat])))
        self.behind = max(part.behind for part, _, _ in pieces)
        return pieces[0][0]

    def close(self) -> None:
        """End the connections, and with them who reads from them."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    def _read_row(self) -> list[Future[Piece]]:
        connections = self.connections.values()
        return [
            start(functools.partial(_read_piece, one, self._bytes_max), "perdure-follow")
            for one in connections
        ]

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
        kind, step = parts[0].kind, parts[0].step
        if (kind, step) != self._next:
            raise Lost(f"{kind} {step} came in the place of {' '.join(map(str, self._next))}")
        self._next = "step", step + (kind == "step")
        self._row = self._read_row()
        return pieces


def _find_blob(pieces: Sequence[Piece], number: int, size: int) -> Tensor:
    """Return the blob of this number, which has to be of `size` bytes.

    Raises:
        Lost: the donors have not sent such a blob.
    """
    blobs = pieces[number % len(pieces)][2][number // len(pieces) :]
    if not blobs or blobs[0].numel() != size:
        raise Lost("a donor sends other tensors than this rank has")
    return blobs[0]


def _hang_up_late(reached: Future[SecureStream]) -> None:
    if reached.exception() is None:
        reached.result().close()


def _read_piece(connection: Connection, bytes_max: int) -> Piece:
    part = connection.read(Part)
    skeleton, blobs = connection.read_bytes(part, bytes_max)
    if part.kind == "state":
        connection.read(Proved)
    return part, skeleton, blobs


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
            follower = self._follower = Follower(order, called, self._state)
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

        If an attribute is not the members', this rank gets its state within the join.

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
            mine = state.hash_settings()  # `on_step` may have changed an attribute after that step.
            if any(p.applied == state.applied and p.settings != mine for p in told.values()):
                state.applied = FRESH
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
            raise Lost("the optimizer's settings, or attributes of the model, are not the members'")
        state.ready = part.epoch
        state.update("followed")
        return True
