"""Which descriptors count as gloo's, without gloo: each sign that is missing is enough to not."""

import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.waiting import PATIENCE_S

from perdure.model.events import CollectivesInterrupted
from perdure.model.orders import InterruptCollectives
from perdure.worker import interrupt
from perdure.worker.interrupt import (
    Interrupter,
    forget_device,
    list_gloo_sockets,
    make_own_device,
    shut_down_devices,
    shut_down_gloo,
)
from perdure.worker.system.sockets import list_links


class Device:
    """Sockets as a gloo device keeps them: an epoll over a listener and a pair's connection."""

    def __init__(self, stack: ExitStack) -> None:
        self.epoll = stack.enter_context(select.epoll())
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.peer = stack.enter_context(socket.create_connection(self.listener.getsockname()))
        self.pair = stack.enter_context(self.listener.accept()[0])
        for sock in (self.listener, self.pair):
            sock.setblocking(False)
            self.epoll.register(sock, select.EPOLLIN)
        self.pair.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_timeouts(300, 300)

    def set_timeouts(self, receive: int, send: int) -> None:
        for option, value in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
            self.pair.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", value, 0))


@pytest.fixture
def device() -> Iterator[Device]:
    with ExitStack() as stack:
        yield Device(stack)


def test_pair_is_found_and_its_peer_is_not(device: Device) -> None:
    assert list_gloo_sockets() == [device.pair.fileno()]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.set_timeouts(0, 0),
        lambda d: d.set_timeouts(300, 60),
        lambda d: d.epoll.unregister(d.pair),
        lambda d: d.epoll.unregister(d.listener),
        lambda d: d.pair.setblocking(True),
        lambda d: d.pair.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0),
    ],
    ids=["no timeouts", "two timeouts", "unwatched", "no listener", "blocking", "delay"],
)
def test_anything_else_is_left_alone(device: Device, change: object) -> None:
    assert callable(change)
    change(device)
    assert list_gloo_sockets() == []


def is_open(device: Device) -> bool:
    """Return whether a device's connection was left alone: a break is seen at once."""
    device.peer.setblocking(False)
    try:
        return device.peer.recv(1) != b""
    except BlockingIOError:
        return True


def test_only_the_connections_of_one_device_are_shut_also_those_made_later(device: Device) -> None:
    with ExitStack() as stack:
        own, listener = make_own_device(lambda: Device(stack))
        later = stack.enter_context(socket.create_connection(own.listener.getsockname()))
        theirs = stack.enter_context(own.listener.accept()[0])
        theirs.setblocking(False)
        own.epoll.register(theirs, select.EPOLLIN)
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            theirs.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 300, 0))
        assert shut_down_gloo() == 2
        for peer in (own.peer, later):
            peer.settimeout(PATIENCE_S)
            assert peer.recv(1) == b""
        assert is_open(device)
        forget_device(listener)
        assert shut_down_gloo() == 0
    assert shut_down_devices({listener}) == 0


def test_a_device_that_appears_beside_an_own_one_is_not_taken_for_it(device: Device) -> None:
    with ExitStack() as stack:
        foreign = [Device(stack)]

        def make() -> Device:
            if len(foreign) < 3:  # The script makes a device at the same time, twice.
                foreign.append(Device(stack))
            return Device(stack)

        own, listener = make_own_device(make)
        assert listener == list_links()[own.listener.fileno()]
        assert shut_down_devices({listener}) == 1
        assert all(map(is_open, [device, *foreign]))
        forget_device(listener)


def test_an_order_is_carried_out_once(device: Device) -> None:
    events: list[CollectivesInterrupted] = []
    interrupter = Interrupter(rank=1, generation=2, emit=events.append, now=lambda: 7.0)
    order = InterruptCollectives(generation=2, ranks=(1,), id="i1", reason="")
    interrupter.handle(InterruptCollectives(generation=1, ranks=(1,), reason="older"))
    interrupter.handle(order)
    interrupter.handle(order)
    assert events == [CollectivesInterrupted(generation=2, rank=1, at_s=7.0, sockets=1)]
    device.peer.close()
    interrupter.handle(InterruptCollectives(generation=2, ranks=(1,), id="i2", reason=""))
    assert "any more" in events[1].error


class Backend:
    """An NCCL backend whose abort ends when all have begun: so it may be across ranks."""

    def __init__(self, all_begun: threading.Barrier) -> None:
        self._all_begun, self.aborted = all_begun, False

    def abort(self) -> None:
        self._all_begun.wait(PATIENCE_S)
        self.aborted = True


def test_nccl_groups_are_aborted_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    all_begun = threading.Barrier(2)
    backends = [Backend(all_begun), Backend(all_begun)]
    monkeypatch.setattr(interrupt, "list_nccl_backends", lambda: backends)
    events: list[CollectivesInterrupted] = []
    interrupter = Interrupter(rank=1, generation=2, emit=events.append, now=lambda: 7.0)
    interrupter.handle(InterruptCollectives(generation=2, ranks=(1,), reason=""))
    for thread in threading.enumerate():
        if thread.name == "perdure-abort":
            thread.join(PATIENCE_S)
    assert all(backend.aborted for backend in backends)
    assert events[0].error == ""
