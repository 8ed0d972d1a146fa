"""A rank says once what its snapshots in memory lack, if its world goes on."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from perdure.plan.elastic.shards import Shard, Snapshot  # noqa: E402
from perdure.worker.elastic import snapshots as module  # noqa: E402
from perdure.worker.elastic.group import Broken  # noqa: E402
from perdure.worker.elastic.snapshots import Snapshots  # noqa: E402

pytestmark = pytest.mark.torch


class BrokenGroup:
    """The connections of a world for second copies: they have broken, and nothing else has."""

    me, ended = 0, False

    def open(self, kind: Any, name: str) -> "BrokenGroup":
        return self

    def send(self, tensor: Any, to: int, tag: int) -> None:
        raise Broken("Connection reset by peer")

    def break_(self) -> None:
        self.ended = True

    def give_up(self) -> None: ...


@pytest.fixture
def kept(tmp_path: Any) -> Snapshots[Snapshot]:
    return Snapshots(tmp_path / "a" / "b" / "memory", 0, Snapshot, every=1)


def take(kept: Snapshots[Snapshot], step: int) -> None:
    shard = Shard(0, 1)
    kept.take(Snapshot(step, 1, shard, 0), {"weight": torch.ones(4)}, (0, 1))
    kept.finish()


def test_second_copies_that_end_alone_are_said_once_a_world(kept: Any, capfd: Any) -> None:
    for world in range(2):
        group = BrokenGroup()
        kept.enter(group, {0: "a", 1: "b"})
        take(kept, 10 * world)
        assert group.ended, "members that wait for this one learn of it"
        assert capfd.readouterr().err == "", "the world itself may have broken"
        for step in range(3):
            take(kept, 10 * world + step + 1)
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "until the next world" in lines[0]
        assert "Connection reset by peer" in lines[0]
        kept.leave()
    assert [one.step for one in kept.list_all()] == [12, 13], "its own snapshots are there"


def test_memory_without_room_is_said_once_and_again_after_it_had_room(
    kept: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*of: Any) -> Any:
        raise OSError(28, "No space left on device")

    for step in (0, 10):
        with monkeypatch.context() as full:
            full.setattr(module, "MappedFile", refuse)
            for later in range(3):
                kept._maps.clear()
                take(kept, step + later)
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "No space left on device" in lines[0]
        take(kept, step + 5)
        take(kept, step + 6)
    kept.close()
