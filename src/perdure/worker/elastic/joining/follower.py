"""The joining side of a join: take a state from several members, then keep up with them.

The members train on meanwhile. The follower makes the same updates of the same reduced gradients,
and so it has bit for bit what they have; it is called into the world when nothing is left for it
to catch up on. Whatever goes wrong here costs nobody anything: it begins again, or in the end it
joins without a state and gets one within the join.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from perdure.model.errors import ProtocolError
from perdure.model.events import MemberReady
from perdure.model.orders import FollowWorld
from perdure.plan.elastic.commit import FRESH
from perdure.worker.elastic.gradients.buckets import Buckets
from perdure.worker.elastic.joining.wire import Ask, At, Line, Part, Take, hash_settings
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.moving.packing import fill_blob, list_targets, open_state, restore_state
from perdure.worker.elastic.state.replicated import Replica

_CONNECT_S = 5.0
_LOOK_S = 0.002
_AHEAD_MAX = 4096
_QUEUED_MAX = 16
"""Parts that wait here; what is more waits at the donors, within their bounds."""
_LAST_S = 10.0
"""How long the members may wait for what is on its way when they are called together."""

Piece = tuple[Part, bytes, list[Tensor]]
ChooseDonors = Callable[[Mapping[int, At], Sequence[int]], tuple[int, ...]]
"""(what each has answered, who has chosen before) -> whom to follow"""


class Lost(Exception):
    """It cannot be followed any further this time."""


class Follower:
    """One attempt: connections to all donors, and a reading thread for each."""

    def __init__(
        self, order: FollowWorld, called: Callable[[], bool], choose: ChooseDonors
    ) -> None:
        """Connect, and agree on the step whose state is taken.

        Raises:
            Lost: a donor is gone or refuses.
        """
        self._choose = choose
        self.donors: tuple[int, ...] = ()
        self.bytes = 0
        self.behind = 1
        """Parts that a donor had still to send when it sent its newest."""
        self._called = called
        self._pieces: queue.Queue[tuple[int, Piece | Exception]] = queue.Queue(_QUEUED_MAX)
        self._found: dict[tuple[str, int], dict[int, Piece]] = {}
        self._over = False
        self._lines: dict[int, Line] = {}
        ahead = 1
        try:
            while not self._agree(order, ahead):
                self._hang_up()
                ahead *= 2
        except (OSError, ProtocolError, Lost) as error:
            self._hang_up()
            raise Lost(f"a donor cannot be followed: {error}") from None
        for donor, line in self._lines.items():
            threading.Thread(
                target=self._read, args=(donor, line), name="perdure-follow", daemon=True
            ).start()

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
            self._lines[donor] = Line(sock)
            self._lines[donor].send(Ask(order.generation, order.rank))
        answers = {donor: _read_at(line) for donor, line in self._lines.items()}
        self.donors = self._choose(answers, order.ahead)
        for donor in set(answers) - set(self.donors):
            self._lines.pop(donor).close()
        lines = list(self._lines.values())
        step = max(answers[donor].step for donor in self.donors) + ahead
        for share, line in enumerate(lines):
            line.send(Take(step, share, len(lines)))
        agreed = all([_read_at(line).step < step for line in lines])
        for line in lines:
            line.sock.settimeout(None)
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
            self._gather(_LOOK_S)
            pieces = self._pop("state", None)
        skeleton, tensors = open_state(pieces[0][1])
        for number, targets in enumerate(list_targets(tensors)):
            _, _, blobs = pieces[number % len(pieces)]
            fill_blob(targets, blobs[number // len(pieces)])
        return restore_state(skeleton, tensors), pieces[0][0]

    def take_step(self, step: int, flats: list[Tensor], wait_s: float) -> Part | None:
        """Fill `flats` with the reduced gradients of a step; None where they are not there yet.

        Returns what they are, with the hash of the settings with which they were applied.

        Raises:
            Lost: a donor is gone.
        """
        pieces = self._pop("step", step)
        if pieces is None:
            self._gather(wait_s)
            pieces = self._pop("step", step)
        if pieces is None:
            return None
        for number, flat in enumerate(flats):
            flat.view(torch.uint8).copy_(pieces[number % len(pieces)][2][number // len(pieces)])
        self.behind = max(part.behind for part, _, _ in pieces) + len(self._found)
        return pieces[0][0]

    def close(self) -> None:
        """End the connections."""
        self._over = True
        self._hang_up()
        while True:  # A reader that waits for room goes on, and ends.
            try:
                self._pieces.get_nowait()
            except queue.Empty:
                return

    def _hang_up(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _read(self, donor: int, line: Line) -> None:
        try:
            while not self._over:
                part = line.read()
                if not isinstance(part, Part):
                    raise ProtocolError(f"{type(part).__name__} is no part")
                self._put(donor, (part, *line.read_bytes(part)))
        except (OSError, ProtocolError, ValueError) as error:
            self._put(donor, error)

    def _put(self, donor: int, piece: Piece | Exception) -> None:
        while not self._over:
            try:
                self._pieces.put((donor, piece), timeout=0.2)
                return
            except queue.Full:
                continue

    def _gather(self, wait_s: float) -> None:
        """Take what the readers have; wait for it a little where they have nothing."""
        while True:
            try:
                donor, piece = self._pieces.get(timeout=wait_s)
            except queue.Empty:
                return
            if isinstance(piece, Exception):
                raise Lost(f"donor {donor}: {piece}")
            part = piece[0]
            self.bytes += part.skeleton + sum(part.sizes)
            self._found.setdefault((part.kind, part.step), {})[donor] = piece
            wait_s = 0.0001

    def _pop(self, kind: str, step: int | None) -> list[Piece] | None:
        """Return the pieces of all donors, in the order of their shares, once they are there.

        Raises:
            Lost: they are not of one epoch, whose sums alone are alike to the last bit.
        """
        for key, found in self._found.items():
            if key[0] == kind and step in (None, key[1]) and len(found) == len(self.donors):
                del self._found[key]
                if len({(part.epoch, part.settings) for part, _, _ in found.values()}) > 1:
                    raise Lost(f"{kind} {key[1]} was reduced in two epochs")
                return [found[donor] for donor in self.donors]
        return None


def _read_at(line: Line) -> At:
    answer = line.read()
    if not isinstance(answer, At):
        raise ProtocolError(f"{type(answer).__name__} is no answer")
    return answer


class Pupil(Protocol):
    """Who catches up: a rank with a replica of its own."""

    def choose_donors(
        self, answers: Mapping[int, At], ahead: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return whom to follow of those who have answered; `ahead` have chosen before.

        Raises:
            Lost: this time nobody.
        """

    def take_state(self, state: Any) -> None:
        """Become the donors' `state`."""

    def list_sent(self, step: int) -> list[Tensor]:
        """Return what a donor sends of a step: what its update is made of."""

    def update(self, step: int) -> None:
        """Make a step's update of what `list_sent` has."""

    def hash_settings(self) -> str:
        """Return a hash of all else that an update depends on."""


class ReplicaPupil:
    """A rank that has everything."""

    def __init__(self, replica: Replica, buckets: Buckets) -> None:
        """Bring `replica` up to its donors, whose gradients go through `buckets`."""
        self._replica, self._buckets = replica, buckets

    def choose_donors(
        self, answers: Mapping[int, At], ahead: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return all of them."""
        return tuple(answers)

    def take_state(self, state: Any) -> None:
        """Become `state`."""
        self._replica.load(state)

    def list_sent(self, step: int) -> list[Tensor]:
        """Return the buffers of a step's gradients."""
        return self._buckets.flats(step)

    def update(self, step: int) -> None:
        """Apply the gradients of a step."""
        self._buckets.expose(step)
        self._replica.update()
        self._buckets.drop()

    def hash_settings(self) -> str:
        """Return a hash of the optimizer's settings."""
        return hash_settings(self._replica.optimizer)


class CatchUp:
    """A rank on its way into a world: its replica, brought to where the members are."""

    def __init__(self, pupil: Pupil) -> None:
        """Have no state."""
        self.pupil = pupil
        self._follower: Follower | None = None
        self.applied = FRESH
        """Steps that the replica contains; `FRESH` where it has no state."""
        self.epoch = -1
        """In which the donors reduced the last of them."""
        self.error = ""

    @property
    def fresh(self) -> bool:
        """Return whether it has no state."""
        return self.applied == FRESH

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
        began, called = time.monotonic(), membership.overtaken
        self.applied, told = FRESH, False
        self.close()
        try:
            follower = self._follower = Follower(order, called, self.pupil.choose_donors)
            state, part = follower.take_state()
            self.pupil.take_state(state)
            self.applied, self.epoch = part.step, part.epoch
            while not called():
                if self._advance(follower, _LOOK_S) and not told and not follower.behind:
                    told = True
                    took_s = time.monotonic() - began
                    self._tell(membership, bytes_=follower.bytes, took_s=took_s)
        except Lost as error:
            self.error = str(error)
            self.close()
        return self.follows

    def give_up(self, membership: Membership) -> None:
        """Say that this rank gets its state within the join."""
        self.applied = FRESH
        self._tell(membership)

    def _tell(self, membership: Membership, *, bytes_: int = 0, took_s: float = 0.0) -> None:
        membership.emit(
            MemberReady(
                generation=membership.generation,
                rank=membership.me,
                at_s=membership.now(),
                step=self.applied,
                bytes=bytes_,
                took_s=took_s,
                error=self.error[:300],
            )
        )

    def finish(self, steps: Sequence[int]) -> None:
        """Take the last steps, now that the members stand still.

        `steps` are how far those of the donors are who are members of this epoch.
        """
        follower = self._follower
        if follower is None:
            return
        try:
            deadline = time.monotonic() + _LAST_S
            # What all donors have applied is on its way from all of them.
            while steps and self.applied < min(steps) and time.monotonic() < deadline:
                self._advance(follower, _LOOK_S)
        except Lost as error:
            self.error = str(error)
        self.close()

    def close(self) -> None:
        """Follow no longer; what was reached stays."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()

    def _advance(self, follower: Follower, wait_s: float) -> bool:
        """Make one update; return whether there was one to make.

        Raises:
            Lost: the members have made it with other settings.
        """
        part = follower.take_step(self.applied, self.pupil.list_sent(self.applied), wait_s)
        if part is None:
            return False
        if part.settings != self.pupil.hash_settings():
            self.applied = FRESH
            raise Lost("the optimizer's settings are not the members'")
        self.pupil.update(self.applied)
        self.applied, self.epoch = self.applied + 1, part.epoch
        return True
