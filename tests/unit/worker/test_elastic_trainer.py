"""An elastic world breaks under one of its members: what the loop still knows afterwards."""

import functools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from perdure.model.events import AnyEvent, WorldReformed
from perdure.model.orders import ReformWorld
from perdure.worker.elastic.group import Broken
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.state import Taken
from perdure.worker.elastic.state.sharded import ShardedReplica, ShardedState
from perdure.worker.elastic.steering import Steering
from perdure.worker.elastic.trainer import Trainer
from perdure.worker.progress import Progress
from perdure.worker.steering.config import Config

pytestmark = pytest.mark.torch


class Alone(Membership):
    """A membership that is called into one world after another, as their only member."""

    def __init__(self) -> None:
        super().__init__(None)
        self.told: list[AnyEvent] = []

    def emit(self, event: AnyEvent) -> None:
        self.told.append(event)

    def wait(self, broken: str = "") -> ReformWorld:
        if broken:
            self._order = ReformWorld(generation=0, epoch=self.epoch + 1, ranks=(0,), reason=broken)
        return super().wait()


class Disk:
    """Checkpoints: the newest is of step 4, and what is said of it is `breaks` at first."""

    agreed = False

    def __init__(self, breaks: str = "", newest: int = 0) -> None:
        self.breaks, self.newest = breaks, newest
        self.saved: list[tuple[int, str]] = []

    def enter(self, mine: bool, number: int, count: int) -> None:
        pass

    def read_newest(self) -> int:
        if self.breaks:
            why, self.breaks = self.breaks, ""
            raise RuntimeError(why)
        return self.newest

    def restore(self, extra: dict[str, Any]) -> int:
        return self.newest

    def wants(self, applied: int, members: tuple[int, ...]) -> bool:
        return False

    def save(self, applied: int, members: tuple[int, ...], reason: str, extra: Any) -> None:
        self.saved.append((applied, reason))

    def close(self) -> None:
        pass


class Sharded:
    """A sharded world of one member, and what its loop is made of."""

    def __init__(self, disk: Disk) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        replica = ShardedReplica(model, lambda ps: torch.optim.SGD(ps, lr=0.1))
        self.membership, self.disk = Alone(), disk
        self.before_loss: Any = lambda: None

        def compute(step: int, number: int) -> torch.Tensor:
            self.before_loss()
            return replica.model(torch.ones(2, 4)).square().mean()

        self.state = ShardedState(replica, compute, me=0, count=1, seed=0, minimum=0)
        self.trainer = Trainer(self.state, membership=self.membership)
        self.trainer._saving = self.trainer._steering._saving = disk  # type: ignore[assignment]


def a_world_that_breaks_before_it_has_read_its_checkpoint_reads_it_in_the_next() -> None:
    world = Sharded(Disk("Connection reset by peer", newest=4))
    assert [step.step for step in world.trainer.steps(6)] == [4, 5]
    assert world.membership.epoch == 1


def who_rolls_forward_saves_the_checkpoint_that_the_votes_of_that_step_asked_for() -> None:
    world = Sharded(Disk())
    steps = world.trainer.steps(9)
    next(steps)
    trainer, tally = world.trainer, world.state.work.tally
    for asked in (0.0, 1.0):
        applied, group = trainer.applied, trainer._group
        assert group is not None
        world.state.work.buckets.copy(applied, 0.0)
        sums = tally.read(applied)
        sums.votes[0] = asked
        plan: Any = SimpleNamespace(step=applied + 1, holder=-1, forward=(0,))
        group.receive = lambda *_: None  # type: ignore[method-assign]
        world.state.take = lambda *_: Taken()  # type: ignore[method-assign]
        trainer._bring_together(plan, group)
        assert trainer.applied == applied + 1
    assert world.disk.saved == [(applied, "interval")]


def a_step_that_was_rolled_forward_is_seen_before_the_next_begins() -> None:
    """What `on_step` does after it, such as unfreezing, is in force for the next."""
    world = Sharded(Disk())
    steps, computed = world.trainer.steps(9), list[int]()
    seen = next(steps)
    reform = world.trainer._reform

    def outer(why: str) -> str:
        found = reform(why)
        world.trainer._finished.append(seen)
        return found

    world.trainer._reform = outer  # type: ignore[method-assign]
    world.before_loss = lambda: computed.append(1)
    world.membership._order = ReformWorld(
        generation=0, epoch=world.membership.epoch + 1, ranks=(0,), reason="a loss"
    )
    assert next(steps) is seen
    assert not computed
    assert next(steps).step == 1


def who_waited_within_its_copy_says_since_when() -> None:
    world = Sharded(Disk())
    since: list[float] = []

    def wait_in_vain() -> None:
        if not since:
            since.append(time.monotonic() - 3.0)
            world.state.groups[0].waits_since_s = since[0]
            raise Broken("Connection closed by peer")

    world.before_loss = wait_in_vain
    assert len(list(world.trainer.steps(2))) == 2
    formed = [e for e in world.membership.told if isinstance(e, WorldReformed)]
    assert [e.waited_s for e in formed] == [0.0, pytest.approx(since[0], abs=0.1), 0.0]


SCENARIOS = (
    a_step_that_was_rolled_forward_is_seen_before_the_next_begins,
    a_world_that_breaks_before_it_has_read_its_checkpoint_reads_it_in_the_next,
    who_rolls_forward_saves_the_checkpoint_that_the_votes_of_that_step_asked_for,
    who_waited_within_its_copy_says_since_when,
)


@functools.cache
def play_scenarios() -> tuple[dict[str, int], str]:
    """Return the exit code of each, and what they said.

    Not in this process: a fork of a later test must not collect what is left of gloo.
    """
    env = {n: v for n, v in os.environ.items() if not n.startswith("PERDURE_")}
    done = subprocess.run(
        [sys.executable, __file__], env=env | {"RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    codes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return codes, done.stderr


@pytest.mark.parametrize("name", [one.__name__ for one in SCENARIOS])
def test_in_a_sharded_world(name: str) -> None:
    codes, said = play_scenarios()
    assert codes[name] == 0, said[-2000:]


@pytest.mark.parametrize("who", [(2, 3), (3, 2)])
def test_a_newcomer_takes_settings_from_who_is_there_whatever_their_numbers(
    who: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer, old = who
    store = dist.HashStore()

    def join(me: int) -> Steering:
        monkeypatch.setenv("PERDURE_MEMBER", str(me))
        saving: Any = SimpleNamespace(config=SimpleNamespace(every_steps=0), every_s=0.0)
        config = Config().declare("lr", float, default=0.1)
        return Steering(Membership(None), config, saving, Progress(None))

    there, comes = join(old), join(newcomer)
    there._begun = True
    there.load({"config": {"epoch": 2, "values": {"lr": 0.5}}})
    members = tuple(sorted(who))
    there.share(store, members)
    comes.share(store, members)
    assert (comes.config.lr, there.config.lr) == (0.5, 0.5)


if __name__ == "__main__":
    # Each in a fork of what has imported torch, and has no world yet.
    processes = {one.__name__: multiprocessing.get_context("fork").Process(target=one)
                 for one in SCENARIOS}  # fmt: skip
    for process in processes.values():
        process.start()
        process.join()
    print(json.dumps({name: process.exitcode for name, process in processes.items()}))
