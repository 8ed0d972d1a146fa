"""How a device misbehaves, and that a `Group` over it takes nothing for granted."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, wait_until

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from tests import fake_communicator as fake
from tests.fake_communicator import FakeComm, FakeDevice

from perdure.model.errors import DeviceLostError
from perdure.worker.elastic.group import Broken, Group

pytestmark = pytest.mark.torch


class Two:
    """Two members in this process, each with a device of its own."""

    def __init__(self) -> None:
        self.store: Any = dist.HashStore()
        self.devices = FakeDevice(build_s=PATIENCE_S), FakeDevice(build_s=PATIENCE_S)
        self.left = False
        groups: dict[int, Group] = {}

        def form(me: int) -> None:
            connect = self.devices[me].connect
            groups[me] = Group((0, 1), me, self.store, connect, lambda: self.left)

        threads = [threading.Thread(target=form, args=(me,)) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        self.groups = groups[0], groups[1]


@pytest.fixture
def two() -> Iterator[Two]:
    before = set(threading.enumerate())
    made = Two()
    yield made
    for device, group in zip(made.devices, made.groups, strict=True):
        device.hangs, device.error = False, ""
        group.give_up()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name


class Clock:
    """The clock of all devices, which stands still unless it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.looks = Counter[int]()
        """Of each thread of a device: how often it has looked since whether its operation ends."""
        monkeypatch.setattr(fake, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.looks[threading.get_ident()] += 1
        time.sleep(seconds)

    def wait_for_looks(self, devices: int) -> None:
        """Wait until so many devices have looked some times from now on, in vain."""
        self.looks.clear()
        wait_until(lambda: sum(1 for count in self.looks.values() if count >= 5) >= devices, "look")


@pytest.fixture
def clock(two: Two) -> Iterator[Clock]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Clock(monkeypatch)


def test_what_is_aborted_looks_complete_and_is_garbage(two: Two, clock: Clock) -> None:
    group, tensor = two.groups[0], torch.ones(4)
    ticket = group.comm.all_reduce(tensor)
    clock.wait_for_looks(1)
    assert group.comm.poll(ticket) == "running"
    group.comm.break_()
    wait_until(lambda: group.comm.poll(ticket) != "running")
    assert (ticket.state, ticket.error) == ("done", "")
    assert tensor.tolist() != [2.0] * 4
    assert group.comm.drained(PATIENCE_S)


def test_a_group_does_not_take_that_for_a_sum(two: Two) -> None:
    group = two.groups[0]
    group.all_reduce(torch.ones(4))
    threading.Timer(0.05, group.break_).start()
    with pytest.raises(Broken):
        group.wait()


def test_an_end_may_come_late(two: Two, clock: Clock) -> None:
    for device in two.devices:
        device.late_s = 0.2
    first, other = two.groups
    tensor = torch.ones(1)
    ticket = first.comm.all_reduce(tensor)
    other.comm.all_reduce(torch.ones(1))
    clock.wait_for_looks(2)
    assert two.store.check(["all/2/0", "all/2/1"]), "it could end by now"
    clock.now_s += 0.1
    clock.wait_for_looks(2)
    assert first.comm.poll(ticket) == "running"
    clock.now_s += 0.2
    wait_until(lambda: first.comm.poll(ticket) == "done")
    assert tensor.tolist() == [2.0]


def test_who_hangs_has_lost_its_device(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.worker.elastic.group._DRAIN_S", 0.2)
    group, two.devices[0].hangs = two.groups[0], True
    group.all_reduce(torch.ones(1))
    threading.Timer(0.05, group.break_).start()
    with pytest.raises(DeviceLostError, match="does not become idle"):
        group.wait()


def test_two_that_send_to_each_other_first_wait_for_ever_over_one_stream(
    two: Two, clock: Clock
) -> None:
    tickets = []
    for group in two.groups:
        to = 1 - group.me
        tickets += [group.send(torch.ones(1), to, 0), group.receive(torch.zeros(1), to, 0)]
    wait_until(lambda: two.store.check(["0-1/1", "1-0/1"]))
    clock.wait_for_looks(2)
    comms = [group.comm for group in two.groups for _ in range(2)]
    looks = [comm.poll(t) for comm, t in zip(comms, tickets, strict=True)]
    assert looks == ["running"] * 4
    for group in two.groups:
        group.break_()
        with pytest.raises(Broken):
            group.wait()


def test_an_error_of_the_device_is_for_ever(two: Two) -> None:
    group, device = two.groups[0], two.devices[0]
    ticket = group.comm.all_reduce(torch.ones(1))
    device.error = "an illegal memory access was encountered"
    assert group.comm.poll(ticket) == "failed"
    assert not group.comm.drained(0.1)
    with pytest.raises(Broken, match="illegal memory access"):
        group.comm.all_reduce(torch.ones(1))
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        device.connect(two.store, 0, 1, lambda: False)


def test_a_forming_that_never_ends_is_left_and_breaks_what_it_has_made() -> None:
    device, store = FakeDevice(build_s=3600.0), dist.HashStore()
    before = set(threading.enumerate())

    def list_left() -> set[str]:
        return {thread.name for thread in set(threading.enumerate()) - before}

    with pytest.raises(Broken, match="newer epoch"):
        device.connect(store, 0, 2, lambda: "perdure-device" in list_left())
    assert list_left() == {"perdure-connect", "perdure-device"}
    late = FakeComm(device, store, 1, 2)
    late.all_reduce(torch.zeros(1))  # It comes after all, and is met by nobody.
    wait_until(lambda: len(set(threading.enumerate()) - before) == 1)
    late.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_member_that_does_not_come_ends_a_forming_by_the_clock() -> None:
    with pytest.raises(Broken, match="did not come"):
        FakeDevice(build_s=0.1).connect(dist.HashStore(), 0, 2, lambda: False)


def test_who_is_called_away_does_not_wait_for_a_member_that_may_have_left(two: Two) -> None:
    group = two.groups[0]
    group.all_reduce(torch.ones(1))
    two.groups[1].give_up()
    two.left = True
    with pytest.raises(Broken):
        group.wait()


def test_a_graph_that_lives_holds_up_an_abort_for_ever(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.worker.elastic.group._DRAIN_S", 0.2)
    comm = two.groups[0].comm
    assert isinstance(comm, FakeComm)
    graph = comm.capture()
    two.groups[0].break_()
    with pytest.raises(DeviceLostError, match="does not become idle"):
        two.groups[0].wait()
    graph.reset()
    with pytest.raises(Broken):
        two.groups[0].wait()


@pytest.mark.parametrize("ending", ["break", "give up"])
def test_graphs_are_destroyed_once_before_their_communicators_end(two: Two, ending: str) -> None:
    """One that waits for its kernels does not wait for ever; one that fails stops no other."""
    group = two.groups[0]
    comm = group.comm
    assert isinstance(comm, FakeComm)
    graph, calls, aborted = comm.capture(), list[str](), threading.Event()

    def destroy() -> None:
        calls.append("slow")
        if ending == "break":
            assert aborted.wait(PATIENCE_S)
        graph.reset()

    group.captures.add(lambda: calls.append("first") or 1 / 0)
    group.captures.add(destroy)
    if ending == "break":
        group.all_reduce(torch.ones(1))
        group.break_()
        aborted.set()
        with pytest.raises(Broken):
            group.wait()
    else:
        group.give_up()
        assert comm.drained(0.0)
    group.give_up()
    assert calls == ["first", "slow"]


def test_what_is_captured_after_a_break_is_destroyed_as_well(two: Two) -> None:
    """An order breaks a world in another thread, which who captures may not have heard of."""
    group = two.groups[0]
    comm = group.comm
    assert isinstance(comm, FakeComm)
    graph = comm.capture()
    group.break_()
    group.captures.add(graph.reset)
    group.give_up()
    assert comm.drained(0.0)


def test_a_break_of_one_group_destroys_what_was_captured_beside_it(two: Two) -> None:
    beside: dict[int, Group] = {}

    def open_beside(me: int) -> None:
        beside[me] = two.groups[me].open(Group, "beside")

    threads = [threading.Thread(target=open_beside, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    comm = beside[0].comm
    assert isinstance(comm, FakeComm)
    two.groups[0].captures.add(comm.capture().reset)
    for group in beside.values():
        group.give_up()
    assert comm.drained(0.0)
