"""A torchft job's checkpoint: the manager's state, written by one group and loaded by all."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perdure.model.events import (
    BoundaryAnswered,
    BoundaryReached,
    CheckpointFailed,
    CheckpointSaved,
)
from perdure.model.job import CheckpointConfig
from perdure.model.orders import SendBoundary
from perdure.model.steering import Steering
from perdure.worker.torchft.settings import ReplicaConfig

pytestmark = pytest.mark.torch


class Manager:
    """What a torchft Manager has of it."""

    def __init__(self, value: float) -> None:
        self.step, self.weight = 0, torch.full((4,), value)
        self._load_state_dict_fns: dict[str, Any] = {"default": self._load}
        self._user: dict[str, Any] = {"default": lambda: {"weight": self.weight}}

    def _load(self, state: dict[str, Any]) -> None:
        self.weight.copy_(state["weight"])

    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
        self._load_state_dict_fns[key], self._user[key] = load, save

    def _manager_state_dict(self) -> dict[str, Any]:
        user = {key: save() for key, save in self._user.items()}
        return {"user": user, "torchft": {"step": self.step, "batches_committed": 3 * self.step}}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def current_step(self) -> int:
        return self.step


def make(manager: Manager, events: list[Any], *, heals: bool = False) -> ReplicaConfig:
    found = ReplicaConfig()
    found.join(
        rank=2,
        generation=5,
        nproc=1,
        now=lambda: 1.0,
        emit=events.append,
        quorum_id=lambda: 1,
        steering=Steering(heals=heals),
        checkpoint=CheckpointConfig(),
    )
    found.config.declare("lr", float, default=0.1)
    found.begin_step(manager, committed=False)
    return found


def agree(config: ReplicaConfig, step: int) -> None:
    for move in ("prepare", "commit"):
        config.take(
            SendBoundary(
                id="b1.1@2", move=move, kind="checkpoint", step=step, ranks=(2,), generation=5,
                reason="",
            )  # type: ignore[arg-type]
        )  # fmt: skip


def test_what_one_group_saves_the_next_run_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_CHECKPOINT_URL", str(tmp_path / "checkpoints"))
    manager, events = Manager(1.5), list[Any]()
    first = make(manager, events)
    manager.step = 7
    first.begin_step(manager, committed=True)
    agree(first, step=8)
    manager.step = 8
    first.begin_step(manager, committed=True)
    assert [e.step for e in events if isinstance(e, BoundaryReached)] == [8]
    first._saver.close()
    saved = next(e for e in events if isinstance(e, CheckpointSaved))
    assert (saved.step, saved.generation) == (8, 5)

    torch.manual_seed(9)
    before = torch.get_rng_state()
    later = Manager(0.0)
    make(later, [])
    assert later.step == 8
    assert later.weight.tolist() == [1.5] * 4
    assert torch.equal(before, torch.get_rng_state()), "generators are each group's own"

    healing = Manager(0.0)
    make(healing, [], heals=True)
    assert healing.step == 0
    own = Manager(0.25)
    own.step = 3  # The script has loaded one itself.
    make(own, [])
    assert own.step == 3


def test_a_step_that_was_healed_past_is_told_of_and_the_plan_was_acknowledged() -> None:
    manager, events = Manager(1.5), list[Any]()
    group = make(manager, events)
    agree(group, step=8)
    planned = [e.planned for e in events if isinstance(e, BoundaryAnswered)]
    assert planned == [False, True]
    manager.step = 12  # Left out before step 8, it has healed from a peer.
    group.begin_step(manager, committed=True)
    failed = [e for e in events if isinstance(e, CheckpointFailed)]
    assert [(e.step, e.generation) for e in failed] == [(8, 5)]
    assert "healed past" in failed[0].error
    assert not [e for e in events if isinstance(e, BoundaryReached)]
