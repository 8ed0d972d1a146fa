"""A world killed at every single file operation of a save: the old or the new checkpoint is there.

Both ranks live in one process, which kills itself with SIGKILL before its n-th operation under the
checkpoints' directory, for every n until a save survives. What a new world then restores must be
whole, and its own next save must leave nothing half written.
"""

import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from perdure.model.events import CheckpointFailed  # noqa: E402
from perdure.model.job import CheckpointConfig  # noqa: E402
from perdure.worker.checkpoint import Checkpointer  # noqa: E402
from tests.waiting import PATIENCE_S  # noqa: E402

pytestmark = pytest.mark.torch
WORLD = 2
OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


class World:
    """Two ranks of one generation, whose weights tell rank and step."""

    def __init__(self, root: Path, generation: int, keep_last: int) -> None:
        self.models = [nn.Linear(4, 4, bias=False) for _ in range(WORLD)]
        self.events: list[Any] = []
        self.savers = [
            Checkpointer(
                url=str(root), config=CheckpointConfig(keep_last=keep_last), rank=rank,
                world_size=WORLD, generation=generation, emit=self.events.append, now=lambda: 0.0,
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        for saver, model in zip(self.savers, self.models, strict=True):
            saver.register("model", model)

    def save(self, step: int) -> None:
        """Save `step` on both ranks, and wait until it is written."""
        for rank, (saver, model) in enumerate(zip(self.savers, self.models, strict=True)):
            with torch.no_grad():
                model.weight.fill_(10 * step + rank)
            saver.save(step, reason="test", extra={"step": step})
        for saver in self.savers:
            saver.close()
        assert not [e for e in self.events if isinstance(e, CheckpointFailed)], self.events

    def restore(self) -> int:
        """Restore both ranks; return the step that both agree on, by number and by weights."""
        found = []
        for rank, (saver, model) in enumerate(zip(self.savers, self.models, strict=True)):
            extra: dict[str, Any] = {}
            step = saver.restore(extra)
            assert extra == {"step": step}
            assert torch.equal(model.weight, torch.full((4, 4), 10.0 * step + rank))
            found.append(step)
        assert len(set(found)) == 1
        return found[0]


def save_until_killed(root: str, point: int, keep_last: int) -> None:
    """Save step 2, and die before operation number `point`."""
    world = World(Path(root), 1, keep_last)
    lock, counter = threading.Lock(), itertools.count(1)

    def count() -> None:
        with lock:
            if next(counter) == point:
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in OPERATIONS and str(args[0]).startswith(root):
            count()

    os.fsync = lambda fd: count()
    sys.addaudithook(watch)
    try:
        world.save(2)
        os._exit(0)
    finally:
        os._exit(1)


def try_every_point(folder: str, damaged: bool) -> list[int]:
    """Return what was restored after each point, the last of which the save survived."""
    torch.set_num_threads(1)  # And no thread at all while it forks.
    os.fsync = lambda fd: None  # A kill, unlike a power cut, needs none.
    keep_last = 2 if damaged else 1  # 1: the old one is being thrown away at some of the points.
    template, root = Path(folder) / "template", Path(folder) / "checkpoints"
    first = World(template, 0, keep_last)
    first.save(1)
    if damaged:
        first.save(2)
        (template / "step-00000002" / "rank-1.pt").write_bytes(b"cut short")
    found = []
    for point in itertools.count(1):
        shutil.copytree(template, root)
        pid = os.fork()
        if pid == 0:
            save_until_killed(str(root), point, keep_last)
        status = os.waitpid(pid, 0)[1]
        world = World(root, 2, keep_last)
        found.append(world.restore())
        world.save(3)
        assert list(root.glob("*.tmp")) == [], point
        assert World(root, 3, keep_last).restore() == 3
        shutil.rmtree(root)
        if os.waitstatus_to_exitcode(status) == 0:
            return found
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (point, status)
    raise AssertionError


@pytest.mark.parametrize(
    "damaged",
    [pytest.param(False, marks=pytest.mark.long), True],
    ids=["first time", "over a damaged one"],
)
def test_killed_at_every_file_operation(tmp_path: Path, damaged: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, context) as pool:  # A process without pytest's threads.
        found = pool.submit(try_every_point, str(tmp_path), damaged).result(timeout=PATIENCE_S)
    assert len(found) > 50
    assert (found[0], found[-1]) == (1, 2)
    assert set(found) == {1, 2}
