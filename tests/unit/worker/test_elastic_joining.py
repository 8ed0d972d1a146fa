"""A rank joins over a real socket, and strangers attack the donor's port."""

import contextlib
import functools
import json
import os
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from tests.waiting import PATIENCE_S
from tests.waiting import wait_until as wait_for
from torch import Tensor

from perdure.adapters.nats import make_shared_certificate
from perdure.model.codec import encode
from perdure.model.orders import FollowWorld
from perdure.plan.elastic.commit import FRESH, MemberProgress
from perdure.worker.checkpoint import copying
from perdure.worker.checkpoint.copying import Copy
from perdure.worker.elastic import donor_port, joining
from perdure.worker.elastic.donor_port import DonorPort, SecureStream, connect_donor
from perdure.worker.elastic.joining import (
    At,
    CatchUp,
    Connection,
    Donor,
    Follower,
    Lost,
    Part,
    Take,
)
from perdure.worker.elastic.moving import hash_tensors, pack_state, view_bytes

pytestmark = pytest.mark.torch
KEY, OTHER_KEY = make_shared_certificate(), make_shared_certificate()
HOST = "127.0.0.1"


class Model:
    """A state of two tensors, whose update adds the gradient to both."""

    node, runs = "", ()

    def __init__(self, size: int = 1000) -> None:
        self.tensors = [torch.zeros(size), torch.ones(size)]
        self.flat = torch.zeros(size)
        self.applied, self.ready = 0, 0
        nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.replica = SimpleNamespace(state=self.state, load=self.load, nbytes=nbytes)

    def state(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load(self, state: dict[str, Any]) -> None:
        self.tensors = list(state["tensors"])

    def become(self, state: dict[str, Any], step: int, line: int) -> None:
        self.load(state)
        self.applied = step

    def choose_donors(self, answers: dict[int, At], ahead: Any) -> tuple[int, ...]:
        return tuple(answers)

    def list_sent(self) -> list[Tensor]:
        return [self.flat]

    def hash_settings(self) -> str:
        return "settings"

    def stand(self) -> MemberProgress:
        return MemberProgress(self.applied)

    def update(self, source: str = "reduced") -> None:
        for tensor in self.tensors:
            tensor.add_(self.flat)
        self.applied += 1


class Member:
    """A donor whose training thread makes a step whenever the test wants one."""

    def __init__(self, model: Model | None = None, *, step_s: float = 0.005) -> None:
        self.model = model or Model()
        self._step_s = step_s
        self.donor = Donor(3, self.model)  # type: ignore[arg-type]
        self.address = self.donor.reserve(HOST)
        self.error: BaseException | None = None
        self.hashes: dict[int, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def step(self) -> None:
        model, step = self.model, self.model.applied
        self.hashes[step] = hash_tensors(model.tensors)
        self.donor.stand(step, 0)
        model.flat.fill_(step + 1.0)
        self.donor.release(step, 0)
        model.update()

    def _train(self) -> None:
        try:
            while not self._over.wait(self._step_s):
                self.step()
        except BaseException as error:
            self.error = error

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_S)
        self.donor.close()
        assert self.error is None
        assert not self._thread.is_alive()


@pytest.fixture
def make_member() -> Iterator[Callable[..., Member]]:
    """Make members whose steps the test makes itself."""
    made: list[Member] = []

    def make(model: Model | None = None) -> Member:
        made.append(Member(model))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def member(make_member: Callable[..., Member]) -> Member:
    """Make a member that trains."""
    one = make_member()
    one.start()
    return one


def order(*members: Member | DonorPort, key: str = KEY, rank: int = 9) -> FollowWorld:
    donors = {number: member.address for number, member in enumerate(members)}
    return FollowWorld(generation=3, epoch=1, rank=rank, donors=donors, key=key, reason="test")


def follow(said: FollowWorld, model: Model | None = None) -> Follower:
    return Follower(said, lambda: False, model or Model())  # type: ignore[arg-type]


def come_after(follower: Follower, model: Model, steps: int) -> None:
    """Take the state and make `steps` updates."""
    state, part = follower.take_state()
    model.become(state, part.step, part.epoch)
    for _ in range(steps):
        assert follower.take_step([model.flat], PATIENCE_S) is not None
        model.update()
    follower.close()


def is_listening(member: Member) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((HOST, member.port)) == 0


def test_a_rank_that_joins_has_bit_for_bit_what_the_donors_have(
    make_member: Callable[..., Member],
) -> None:
    members = [make_member(), make_member()]
    said, model = order(*members), Model()
    for one in members:
        one.donor.open(said)
    found: list[Follower] = []
    thread = threading.Thread(target=lambda: found.append(follow(said, model)), daemon=True)
    thread.start()
    while thread.is_alive():  # Both make the same steps, as members do.
        for one in members:
            one.step()
    for _ in range(8):
        for one in members:
            one.step()
    come_after(found[0], model, 4)
    assert hash_tensors(model.tensors) == members[0].hashes[model.applied]


@pytest.mark.parametrize("late", [-1, 1])
def test_a_step_in_the_place_of_another_one_is_not_applied(
    make_member: Callable[..., Member], late: int
) -> None:
    member, model = make_member(), Model()
    said = order(member)
    member.donor.open(said)
    found: list[Follower] = []
    thread = threading.Thread(target=lambda: found.append(follow(said, model)), daemon=True)
    thread.start()
    while thread.is_alive():
        member.step()
    while not any(one.follows for one in member.donor._sessions):
        member.step()
    follower, step = found[0], member.model.applied
    state, part = follower.take_state()
    model.become(state, part.step, part.epoch)
    while model.applied < step:
        assert follower.take_step([model.flat], PATIENCE_S) is not None
        model.update()
    member.donor.release(step + late, 0)
    with pytest.raises(Lost, match=f"step {step + late} came in the place of step {step}"):
        follower.take_step([model.flat], PATIENCE_S)
    follower.close()


@pytest.mark.parametrize(("settings", "applied"), [("settings", 7), ("others", FRESH)])
def test_a_rank_whose_attributes_are_not_the_members_takes_the_state_again(
    settings: str, applied: int
) -> None:
    """`on_step` changed them after the last update that it followed."""
    store, model = dist.HashStore(), Model()
    model.applied = 7
    told = MemberProgress(7, settings=settings)
    store.set("standing/0", encode(told))
    membership = SimpleNamespace(overtaken=lambda: False)
    catching = CatchUp(membership, model)  # type: ignore[arg-type]
    catching._follower = SimpleNamespace(connections={0: None}, close=lambda: None)  # type: ignore[assignment]
    catching.finish(store, [0, 1])
    assert model.applied == applied


def test_a_port_listens_only_while_a_join_is_under_way(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donor_port, "_OPEN_S", 1.0)
    assert not is_listening(member)
    member.donor.open(order(member))
    wait_for(lambda: is_listening(member))
    wait_for(lambda: not is_listening(member))
    member.donor.open(order(member))
    model = Model()
    come_after(follow(order(member), model), model, 1)


def speak(member: Member, *lines: bytes) -> bytes:
    """Speak the port's own protocol without a key; return what comes back before the end."""
    with socket.create_connection((HOST, member.port), timeout=PATIENCE_S) as sock:
        sock.sendall(b"".join(line + b"\n" for line in lines))
        found = b""
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(1 << 16):
                found += data
        return found


def test_a_stranger_who_knows_the_protocol_gets_nothing(member: Member) -> None:
    member.donor.open(order(member))
    wait_for(lambda: is_listening(member))
    ask = json.dumps({"type": "Ask", "generation": 3, "member": 9}).encode()
    take = encode(Take(member.model.applied + 50, 0, 1))
    found = speak(member, ask, take)
    assert len(found) < 100  # A TLS alert.
    assert b"At" not in found


def test_a_stranger_with_another_key_gets_nothing(member: Member) -> None:
    member.donor.open(order(member))
    with pytest.raises(Lost):
        follow(order(member, key=OTHER_KEY))


def test_a_rank_takes_no_state_from_a_donor_without_the_key(member: Member) -> None:
    member.donor.open(order(member, key=OTHER_KEY))
    with pytest.raises(Lost):
        follow(order(member))


def connect_both() -> tuple[SecureStream, SecureStream]:
    """Return a donor's and a joining rank's end of a connection, after their handshake."""
    ends = [
        SecureStream(sock, donor_port._make_context(KEY, server=server), server=server)
        for sock, server in zip(socket.socketpair(), (True, False), strict=True)
    ]
    shaking = threading.Thread(target=ends[0].do_handshake, daemon=True)
    shaking.start()
    ends[1].do_handshake()
    shaking.join(PATIENCE_S)
    return ends[0], ends[1]


def take_sent(stream: SecureStream, count: int) -> list[bytes]:
    """Return the sealed blocks that have come, each with its length."""
    blocks = []
    for _ in range(count):
        head = stream._sock.recv(4, socket.MSG_WAITALL)
        blocks.append(head + stream._sock.recv(int.from_bytes(head), socket.MSG_WAITALL))
    return blocks


@pytest.mark.parametrize(
    ("meddle", "left"),
    [
        (lambda one, two: [one, two], b"onetwo"),
        (lambda one, two: [one[:-1] + bytes([one[-1] ^ 1]), two], b""),
        (lambda one, two: [two, one], b""),
        (lambda one, two: [one, one], b"one"),
        (lambda one, two: [one, two[:-1]], b"one"),
        (lambda one, two: [b"\x7f\xff\xff\xff" + one], b""),
        (lambda one, two: [bytes(4), one, two], b""),
    ],
    ids=["whole", "changed", "swapped", "replayed", "cut", "huge", "empty"],
)
def test_who_sits_between_can_neither_change_nor_repeat_what_is_sent(
    meddle: Callable[[bytes, bytes], list[bytes]], left: bytes
) -> None:
    donor, joiner = connect_both()
    donor.sendall(b"one")
    donor.sendall(b"two")
    between, joiner_sock = socket.socketpair()
    with between, joiner_sock:
        between.sendall(b"".join(meddle(*take_sent(joiner, 2))))
        between.shutdown(socket.SHUT_WR)
        joiner._sock.close()
        joiner._sock = joiner_sock
        found: list[bytes] = []
        with pytest.raises(OSError, match=r"closed|block"):
            found.extend(iter(functools.partial(joiner.read, 1), b""))
    assert b"".join(found) == left
    donor.close()


def test_what_is_sent_is_no_bytes_of_the_state() -> None:
    """And one block is another each time, in each direction."""
    donor, joiner = connect_both()
    for _ in range(2):
        donor.sendall(b"weights" * 10)
    joiner.sendall(b"weights" * 10)
    sent = [*take_sent(joiner, 2), *take_sent(donor, 1)]
    assert len(set(sent)) == 3
    assert not any(b"weights" in one for one in sent)
    for end in (donor, joiner):
        end.close()


def test_a_handshake_of_one_byte_now_and_then_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(donor_port, "_HANDSHAKE_S", 0.1)
    stranger, sock = socket.socketpair()
    over = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            stranger.sendall(b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03")
            while not over.wait(0.0005):
                stranger.sendall(b"\x00")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    stream = SecureStream(sock, donor_port._make_context(KEY, server=True), server=True)
    try:
        with pytest.raises(TimeoutError):
            stream.do_handshake()
    finally:
        over.set()
        stream.close()
        stranger.close()
        thread.join(PATIENCE_S)


def test_a_flood_hurts_neither_the_training_nor_the_join(member: Member) -> None:
    said = order(member)
    member.donor.open(said)
    wait_for(lambda: is_listening(member))
    over = threading.Event()

    def flood() -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((HOST, member.port), timeout=1.0))
                held[-1].sendall(b"P")
            for sock in held[:-20]:
                sock.close()
            del held[:-20]
        for sock in held:
            sock.close()

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        model, deadline = Model(), time.monotonic() + PATIENCE_S
        while model.applied == 0:  # The flood may cost the join some tries.
            assert time.monotonic() < deadline
            member.donor.open(said)
            with contextlib.suppress(Lost):
                come_after(follow(said, model), model, 1)
        before = member.model.applied
        wait_for(lambda: member.model.applied > before + 20)
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert len(member.donor._port._pending) <= donor_port._PENDING_MAX + 1  # type: ignore[union-attr]


@pytest.mark.parametrize("share", [(0, 0), (1, 1), (-1, 1), (5, -2)])
def test_a_share_that_does_not_exist_is_refused(member: Member, share: tuple[int, int]) -> None:
    for _ in range(20):
        member.donor.open(order(member))  # It listens for some seconds only.
        connection = Connection(connect_donor(member.address, KEY))
        connection.send(joining.Ask(3, 9))
        step = connection.read(At).step + 3
        connection.send(Take(step, *share))
        with pytest.raises(ConnectionError):
            connection.read(At)
        connection.close()
    before = member.model.applied
    wait_for(lambda: member.model.applied > before + 10)


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have no copy made before the event that is returned."""
    real, go = Copy.make, threading.Event()

    def make(copy: Copy) -> None:
        assert go.wait(PATIENCE_S)
        real(copy)

    monkeypatch.setattr(Copy, "make", make)
    return go


def test_a_copy_that_is_late_is_thrown_away(
    make_member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    member, model = make_member(), Model()
    said, go = order(member), hold_copies(monkeypatch)
    monkeypatch.setattr(copying, "DEADLINE_S", 0.2)
    member.donor.open(said)
    found: list[Follower] = []
    thread = threading.Thread(target=lambda: found.append(follow(said, model)), daemon=True)
    thread.start()
    wait_for(lambda: bool(member.donor._sessions))
    for _ in range(3):
        member.step()  # An update is made while the copy is not whole.
    assert member.donor._sessions == []
    go.set()
    thread.join(PATIENCE_S)
    with pytest.raises(Lost):
        found[0].take_state()
    found[0].close()


def test_weights_that_are_changed_for_a_moment_reach_nobody(
    make_member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest was right, since it was made of the changed weights as well."""
    member, go = make_member(), hold_copies(monkeypatch)
    said, weights = order(member), member.model.tensors[0]
    found: list[Follower] = []

    def join() -> None:
        member.donor.open(said)
        thread = threading.Thread(target=lambda: found.append(follow(said)), daemon=True)
        thread.start()
        wait_for(lambda: any(not s.follows for s in member.donor._sessions))
        thread.join(PATIENCE_S)

    join()
    member.donor.stand(0, 0)
    weights.data.fill_(7.0)  # Torch does not count it.
    go.set()
    assert member.donor._copy.made.wait(PATIENCE_S)
    weights.data.zero_()
    member.donor.release(0, 0)
    member.model.update()
    with pytest.raises(Lost):
        found[0].take_state()
    found[0].close()
    join()  # It tries again, and now gets a copy that was made while training stood still.
    for _ in range(3):
        member.step()
    model = Model()
    come_after(found[1], model, 1)
    assert hash_tensors(model.tensors) == member.hashes[model.applied]


def test_ranks_that_join_together_share_a_copy(
    make_member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    member, copies = make_member(), []
    real = Copy.make

    def make(copy: Copy) -> None:
        copies.append(copy)
        real(copy)

    monkeypatch.setattr(Copy, "make", make)
    said = [order(member, rank=rank) for rank in (8, 9)]
    models, found = [Model(), Model()], dict[int, Follower]()

    def start(turn: int) -> threading.Thread:
        member.donor.open(said[turn])

        def run() -> None:
            found[turn] = follow(said[turn], models[turn])

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    threads = [start(0), start(1)]
    wait_for(lambda: len(member.donor._sessions) == 2)
    for _ in range(4):
        member.step()
    for thread in threads:
        thread.join(PATIENCE_S)
    for turn, model in enumerate(models):
        come_after(found[turn], model, 2)
        assert hash_tensors(model.tensors) == member.hashes[model.applied]
    assert len(copies) == 1


def test_no_second_copy_is_made_while_one_is_unsent(make_member: Callable[..., Member]) -> None:
    member = make_member(Model(4 << 20))  # More than the buffers of a connection hold.
    member.donor.open(order(member))
    slow, other = (Connection(connect_donor(member.address, KEY)) for _ in range(2))
    slow.send(joining.Ask(3, 8))
    assert slow.read(At).step == -1
    slow.send(Take(0, 0, 1))
    assert not slow.read(At).busy
    slow.send(joining.Begin(agreed=True))
    member.step()  # Its copy waits, since it reads nothing.
    other.send(joining.Ask(3, 9))
    step = other.read(At).step
    other.send(Take(step + 1, 0, 1))
    assert other.read(At).busy
    member.step()
    for one in (slow, other):
        one.close()


def test_what_is_larger_than_a_ranks_own_state_is_refused() -> None:
    connection = Connection.__new__(Connection)
    for sizes in ((1 << 40,), (1 << 20, 1 << 20), (-1, 5)):
        with pytest.raises(joining.ProtocolError):
            connection.read_bytes(Part("state", 1, 0, sizes, ""), 1 << 20)


def serve_lies(part: Part, skeleton: bytes, blobs: list[Tensor]) -> DonorPort:
    """Be a donor that has the key, and sends this with a digest that is right."""

    def serve(sock: ssl.SSLSocket) -> None:
        with contextlib.suppress(OSError):
            connection = Connection(sock)
            connection.read(joining.Ask)
            connection.send(At(1, "", ()))
            connection.read(Take)
            connection.send(At(1))
            connection.read(joining.Begin)
            digest = joining._join_digests(skeleton, [hash_tensors([blob]) for blob in blobs])
            sizes = tuple(blob.numel() for blob in blobs)
            more = {"digest": digest, "sizes": sizes, "skeleton": len(skeleton)}
            sent = msgspec.structs.replace(part, **more)
            connection.send(sent, [skeleton, *(view_bytes(blob) for blob in blobs)])
            connection.send(joining.Proved())
            sock.read(1)  # The follower hangs up.
            connection.close()

    port = DonorPort(HOST, serve)
    port.open(KEY)
    return port


ONE, SMALL = torch.zeros(1, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
SKELETON = pack_state({"tensors": [torch.zeros(10)]})[0]


@pytest.mark.parametrize(
    ("skeleton", "blobs"),
    [(b"junk", [SMALL]), (SKELETON, []), (SKELETON, [ONE]), (b"", [SMALL])],
)
def test_a_state_of_a_donor_that_lies_is_dropped(skeleton: bytes, blobs: list[Tensor]) -> None:
    """A donor that had the key ended the rank that joined."""
    port = serve_lies(Part("state", 2, 0, (), ""), skeleton, blobs)
    follower = follow(order(port))
    try:
        with pytest.raises(Lost):
            follower.take_state()
    finally:
        follower.close()
        port.close()


@pytest.mark.parametrize("blobs", [[], [ONE], [SMALL]])
def test_a_step_of_a_donor_that_lies_is_dropped(blobs: list[Tensor]) -> None:
    port = serve_lies(Part("step", 2, 0, (), ""), b"", blobs)
    follower = follow(order(port))
    flat = torch.zeros(1000)
    try:
        with pytest.raises(Lost):
            wait_for(lambda: follower.take_step([flat], 0.01))
    finally:
        follower.close()
        port.close()
    assert not flat.any()


def test_a_follower_cannot_have_the_others_begin_in_the_far_future(member: Member) -> None:
    """Donors propose the step of the last follower, and it never came."""
    wait_for(lambda: member.model.applied > 3)
    member.donor.open(order(member))
    with connect_donor(member.address, KEY) as sock:
        connection = Connection(sock)
        connection.send(joining.Ask(3, 8))
        now = connection.read(At).step
        connection.send(Take(now + 10**6, 0, 1))
        with pytest.raises((ConnectionError, ssl.SSLError)):
            connection.read(At)
    model = Model()
    follower = follow(order(member), model)
    try:
        assert follower.take_state()[1].step < now + 10**5
    finally:
        follower.close()


def test_an_unreachable_donor_is_left_out(member: Member) -> None:
    with socket.socket() as gone:
        gone.bind((HOST, 0))
        said = order(member)
        donors = {**said.donors, 5: f"{HOST}:{gone.getsockname()[1]}"}
        member.donor.open(said)
        model = Model()
        whole = FollowWorld(generation=3, epoch=1, rank=9, donors=donors, key=KEY, reason="test")
        come_after(follow(whole, model), model, 1)
    assert model.applied > 0


def test_a_rank_that_is_called_waits_for_no_donor() -> None:
    with socket.create_server((HOST, 0)) as silent:  # It accepts, and never answers.
        donors = {0: f"{HOST}:{silent.getsockname()[1]}"}
        said = FollowWorld(generation=3, epoch=1, rank=9, donors=donors, key=KEY, reason="test")
        with pytest.raises(Lost, match="does not wait"):
            Follower(said, lambda: True, Model())  # type: ignore[arg-type]


def test_resets_do_not_stop_a_port_from_accepting(member: Member) -> None:
    said, model = order(member), Model()
    member.donor.open(said)
    wait_for(lambda: is_listening(member))
    for _ in range(60):
        with socket.create_connection((HOST, member.port), timeout=PATIENCE_S) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    come_after(follow(said, model), model, 1)


def test_a_forked_child_does_not_keep_the_port_listening(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donor_port, "_OPEN_S", 1.0)
    member.donor.open(order(member))
    wait_for(lambda: is_listening(member))
    child = os.fork()
    if child == 0:
        time.sleep(PATIENCE_S)
        os._exit(0)
    try:
        wait_for(lambda: not is_listening(member))
        model = Model()
        member.donor.open(order(member))
        come_after(follow(order(member), model), model, 1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_an_order_of_an_older_epoch_does_not_change_the_key(member: Member) -> None:
    newer = msgspec.structs.replace(order(member), epoch=2)
    member.donor.open(newer)
    member.donor.open(order(member, key=OTHER_KEY))
    model = Model()
    come_after(follow(newer, model), model, 1)
