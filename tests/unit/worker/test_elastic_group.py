"""How the end of a collective is seen, and how a world that is not to be is left."""

import threading
import time

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from perdure.worker.elastic import group as group_module
from perdure.worker.elastic.group import Broken, Group

pytestmark = pytest.mark.torch


class Late:
    """A collective that ends in between: after a look, and before it is asked whether it has."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def wait(self, timeout: object = None) -> bool:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return True


def wait_for(work: Late) -> None:
    group = Group((0,), 0, None, None)
    group._works = [(work, "collective")]
    group.wait()


def test_one_that_ends_well_between_two_looks_is_no_failure() -> None:
    wait_for(Late())


def test_one_that_fails_between_two_looks_tells_its_own_error() -> None:
    with pytest.raises(Broken, match="reset by peer"):
        wait_for(Late("Connection reset by peer"))


def test_a_newer_order_is_heard_while_a_member_that_never_comes_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits inside gloo is left behind, to its own time-out."""
    monkeypatch.setattr(group_module, "_BUILD_S", 1.0)
    began, before = time.monotonic(), set(threading.enumerate())
    device = group_module.make_device()
    with pytest.raises(Broken, match="newer epoch"):
        Group((0, 1), 0, dist.HashStore(), device, lambda: time.monotonic() > began + 0.05)
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left] == ["perdure-connect"]
    for thread in left:
        thread.join(30)
        assert not thread.is_alive()


class Forgotten:
    """A send that gloo has forgotten: whoever waits for it waits for as long as it may."""

    def __init__(self) -> None:
        self.ends = threading.Event()

    def wait(self, timeout: object) -> bool:
        self.ends.wait(60)
        return True


def test_a_send_that_gloo_has_forgotten_is_left_once_the_world_is_abandoned() -> None:
    group, work = Group((0,), 0, None, None), Forgotten()
    group._works = [(work, "send")]
    threading.Timer(0.05, group.abandon).start()
    began = time.monotonic()
    with pytest.raises(Broken, match="abandoned"):
        group.wait()
    assert time.monotonic() - began < 30
    work.ends.set()
