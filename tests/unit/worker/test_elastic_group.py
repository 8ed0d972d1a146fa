"""How the end of an operation is seen, and how a world that is not to be is left."""

import contextlib
import threading
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from perdure.model.orders import ReformWorld
from perdure.worker.elastic.communicators import gloo
from perdure.worker.elastic.communicators.gloo import GlooComm, connect
from perdure.worker.elastic.group import Broken, Group
from perdure.worker.elastic.membership import Membership

pytestmark = pytest.mark.torch


class Late:
    """A collective that ends in between: after a look, and before it is asked whether it has."""

    def __init__(self, error: str = "") -> None:
        self.error, self.rested = error, False

    def wait(self, timeout: object = None) -> bool:
        if timeout is not None:
            self.rested = True
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.rested


class Forgotten:
    """A send that gloo has forgotten: whoever waits for it waits for as long as it may."""

    def __init__(self) -> None:
        self.ends, self.over = threading.Event(), False

    def wait(self, timeout: object) -> bool:
        self.ends.wait(PATIENCE_S)
        self.over = True
        return True


class Gloo:
    """A process group of gloo of which every operation is the one given."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def allreduce(self, tensors: Any) -> Any:
        return self.work

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        return self.work


def make_group(work: Any) -> Group:
    return Group((0, 1), 0, None, lambda *_: GlooComm(Gloo(work), ""))


def test_one_that_ends_well_between_two_looks_is_no_failure() -> None:
    make_group(Late()).meet()


def test_one_that_fails_between_two_looks_tells_its_own_error() -> None:
    with pytest.raises(Broken, match="reset by peer"):
        make_group(Late("Connection reset by peer")).meet()


def test_a_newer_order_is_heard_while_a_member_that_never_comes_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits inside gloo is left behind, here until the member comes after all."""
    monkeypatch.setattr(gloo, "_BUILD_S", PATIENCE_S)
    store, before = dist.HashStore(), set(threading.enumerate())
    with pytest.raises(Broken, match="newer epoch"):
        Group((0, 1), 0, store, connect, lambda: bool(set(threading.enumerate()) - before))
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left] == ["perdure-connect"]
    with contextlib.suppress(Broken):  # The end that was left behind may close first.
        Group((0, 1), 1, store, connect)
    for thread in left:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_send_that_gloo_has_forgotten_is_left_once_the_world_is_broken() -> None:
    work = Forgotten()
    group = make_group(work)
    group.send(torch.zeros(1), 1, 0)
    threading.Timer(0.05, group.break_).start()
    with pytest.raises(Broken, match="left behind"):
        group.wait()
    assert not work.over
    work.ends.set()


def test_what_ended_in_a_group_that_was_broken_by_then_has_not_happened() -> None:
    """What is aborted may look as if it were complete."""
    work = Late()
    group = make_group(work)
    group.all_reduce(torch.zeros(1))
    group.break_()
    work.rested = True
    with pytest.raises(Broken):
        group.wait()
    with pytest.raises(Broken, match="is left"):
        group.all_reduce(torch.zeros(1))


def test_a_transfer_that_was_waited_for_is_refused() -> None:
    group = make_group(Late())
    ticket = group.send(torch.zeros(1), 1, 0)
    group.comm.poll = lambda _: "done"  # type: ignore[method-assign]
    group.wait_for(ticket)
    with pytest.raises(ValueError, match="another epoch"):
        group.wait_for(ticket)


@pytest.mark.parametrize("urgent", [True, False])
def test_an_urgent_order_breaks_the_world_before_it_can_be_read(urgent: bool) -> None:
    membership, ordered = Membership(None), list[int]()
    membership.break_groups = lambda: ordered.append(membership.ordered)
    membership.take(ReformWorld(generation=0, epoch=1, ranks=(0,), urgent=urgent, reason=""))
    assert ordered[:1] == ([0] if urgent else [])
    assert membership.wait().epoch == 1  # What goes on breaking ends with that.
