"""The joining side of a join: take a state from several members, then keep up with them.

The members train on meanwhile. The follower makes the same updates of the same reduced gradients,
and so it has bit for bit what they have; it is called into the world when nothing is left for it
to catch up on. Whatever goes wrong here costs nobody anything: it begins again, or in the end it
joins without a state and gets one within the join.
"""

import functools
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import torch
from torch import Tensor

from perdure.model.errors import ProtocolError
from perdure.model.events import MemberReady
from perdure.model.orders import FollowWorld
from perdure.plan.elastic.commit import FRESH
from perdure.worker.elastic.group import start
from perdure.worker.elastic.joining.wire import Ask, At, Connection, Lost, Part, Take
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.moving import fill_blob, list_blobs, open_state
from perdure.worker.elastic.state import Followed

_CONNECT_S = 5.0
_LOOK_S = 0.002
_AHEAD_MAX = 4096
_LAST_S = 10.0
"""How long the members may wait for what is on its way when they are called together."""

Piece = tuple[Part, bytes, list[Tensor]]
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
        self.donors: tuple[int, ...] = ()
        self.bytes = 0
        self.behind = 1
        """Parts that a donor had still to send when it sent its newest."""
        self._connections: dict[int, Connection] = {}
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
            self._connections[donor] = Connection(sock)
            self._connections[donor].send(Ask(order.generation, order.rank))
        answers = {donor: _read_at(connection) for donor, connection in self._connections.items()}
        self.donors = self._choose(answers, order.ahead)
        for donor in set(answers) - set(self.donors):
            self._connections.pop(donor).close()
        connections = list(self._connections.values())
        step = max(answers[donor].step for donor in self.donors) + ahead
        for share, connection in enumerate(connections):
            connection.send(Take(step, share, len(connections)))
        agreed = all([_read_at(connection).step < step for connection in connections])
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
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _read_row(self) -> list[Future[Piece]]:
        connections = self._connections.values()
        return [start(functools.partial(_read_piece, one), "perdure-follow") for one in connections]

    def _take_row(self, wait_s: float) -> list[Piece] | None:
        """Return the next piece of each donor, in the order of their shares, once all are there.

        Raises:
            Lost: a donor is gone, or they are not of one epoch, whose sums alone are alike to the
                last bit.
        """
        left = wait(self._row, wait_s, FIRST_EXCEPTION).not_done
        for donor, piece in zip(self._connections, self._row, strict=True):
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
    part = connection.read()
    if not isinstance(part, Part):
        raise ProtocolError(f"{type(part).__name__} is no part")
    return (part, *connection.read_bytes(part))


def _read_at(connection: Connection) -> At:
    answer = connection.read()
    if not isinstance(answer, At):
        raise ProtocolError(f"{type(answer).__name__} is no answer")
    return answer


class CatchUp:
    """A rank on its way into a world: its state, brought to where the members are."""

    def __init__(self, state: Followed | None) -> None:
        """Follow nobody yet; a `state` that cannot be followed is None."""
        self._state = state
        self._follower: Follower | None = None
        self.error = ""

    @property
    def follows(self) -> bool:
        """Return whether it is still connected to the members."""
        return self._follower is not None

    @property
    def donors(self) -> tuple[int, ...]:
        """Return whom it follows."""
        return self._follower.donors if self._follower is not None else ()

    def follow(self, order: FollowWorld, membership: Membership) -> bool:
        """Follow until this rank is called; return whether it has a state then.

        The controller is told once nothing is left to catch up on.
        """
        began, called, told = time.monotonic(), membership.overtaken, False
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
                    took_s = time.monotonic() - began
                    self._tell(membership, self._state.applied, follower.bytes, took_s)
        except Lost as error:
            self._lose(error)
        return self.follows

    def give_up(self, membership: Membership) -> None:
        """Say that this rank gets its state within the join."""
        if self._state is not None:
            self._state.applied = FRESH
        self._tell(membership, FRESH)

    def _tell(
        self, membership: Membership, step: int, bytes_: int = 0, took_s: float = 0.0
    ) -> None:
        membership.emit(
            MemberReady(
                generation=membership.generation,
                rank=membership.me,
                at_s=membership.now(),
                step=step,
                bytes=bytes_,
                took_s=took_s,
                error=self.error[:300],
            )
        )

    def finish(self, steps: Sequence[int]) -> None:
        """Take the last steps, now that the members stand still.

        `steps` are how far those of the donors are who are members of this epoch.
        """
        follower, state = self._follower, self._state
        if follower is None or state is None:
            return
        try:
            deadline = time.monotonic() + _LAST_S
            # What all donors have applied is on its way from all of them.
            while steps and state.applied < min(steps) and time.monotonic() < deadline:
                self._advance(state, follower)
        except Lost as error:
            self._lose(error)
        self.close()

    def close(self) -> None:
        """Follow no longer; what was reached stays."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()

    def _lose(self, error: Lost) -> None:
        self.error = str(error)
        self.close()

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
