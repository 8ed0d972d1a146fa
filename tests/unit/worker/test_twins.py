"""An object that does not give back its state is named before work is done, or at the resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from perdure.model.errors import UnfitError
from perdure.model.events import AnyEvent, CheckpointRestored
from perdure.model.job import CheckpointConfig
from perdure.worker.checkpoint import Checkpointer, twins
from perdure.worker.checkpoint.twins import find_lost, try_twin


class Whole:
    def __init__(self) -> None:
        self.seen, self.count, self.rows = np.arange(4.0), 3, [torch.ones(2, dtype=torch.bfloat16)]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "count": self.count, "rows": self.rows, "nan": float("nan")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen[:], self.count, self.rows = state["seen"], state["count"], state["rows"]


class Refuses(Whole):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["number"]


class Loses(Whole):
    """Counts from 0 after each load."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.count = 0


class Ignores(Whole):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Draws(Whole):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        torch.randn(3)


def make_saver(folder: Path, **objects: Any) -> tuple[Checkpointer, list[AnyEvent]]:
    events: list[AnyEvent] = []
    saver = Checkpointer(
        url=str(folder), config=CheckpointConfig(), rank=0, world_size=1, generation=0,
        emit=events.append, now=lambda: 0.0,
    )  # fmt: skip
    for name, value in objects.items():
        saver.register(name, value)
    return saver, events


def test_an_object_that_gives_back_its_state_is_told_nothing() -> None:
    whole = Whole()
    before = torch.get_rng_state()
    assert try_twin("own", whole) == ""
    assert try_twin("own", Draws()) == ""
    assert torch.equal(torch.get_rng_state(), before)
    assert (whole.count, whole.seen.tolist()) == (3, [0.0, 1.0, 2.0, 3.0])


def test_a_schedulers_twin_shares_the_optimizer() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n),
                    lr_scheduler.ExponentialLR(optimizer, 0.9)], [3])  # fmt: skip
    rates = [group["lr"] for group in optimizer.param_groups]
    assert try_twin("schedule", schedule) == ""
    assert [group["lr"] for group in optimizer.param_groups] == rates


def test_an_object_that_refuses_its_own_state_ends_the_job_before_its_first_step(
    tmp_path: Path,
) -> None:
    saver, _ = make_saver(tmp_path, own=Refuses())
    with pytest.raises(UnfitError, match=r"own \(Refuses\)\.load_state_dict\(\) refuses .*number"):
        saver.check()


def test_an_object_that_loses_a_part_is_named_at_the_start(tmp_path: Path) -> None:
    saver, events = make_saver(tmp_path, own=Loses())
    saver.check()
    saver.restore({})
    (restored,) = events
    assert isinstance(restored, CheckpointRestored)
    assert restored.why_not_exact == "own (Loses) does not restore count"


def test_an_object_that_ignores_its_state_is_named_at_the_resume(tmp_path: Path) -> None:
    other = Ignores()
    other.rows = [torch.zeros(2, dtype=torch.bfloat16)]
    saver, _ = make_saver(tmp_path, own=other)
    saver.check()
    saver.save(4, reason="test", extra={})
    saver.close()
    again, events = make_saver(tmp_path, own=Ignores())
    again.check()
    assert again.restore({}) == 4
    (restored,) = events
    assert isinstance(restored, CheckpointRestored)
    assert restored.why_not_exact == "own (Ignores) does not restore rows[0]"


def test_bits_are_compared_and_what_is_unknown_is_not() -> None:
    class Has:
        def __init__(self, state: Any) -> None:
            self.state = state

        def state_dict(self) -> Any:
            return self.state

    assert find_lost("a", Has({"x": -0.0, "y": object()}), {"x": -0.0, "y": object()}) == ""
    nan = torch.tensor([float("nan"), 1.0])
    assert find_lost("a", Has([nan]), [nan.clone()]) == ""
    zeros = torch.zeros(2)
    assert find_lost("a", Has({"x": zeros}), {"x": -zeros}) == "a (Has) does not restore x"


def test_a_large_state_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "BYTES_MAX", 31)
    assert try_twin("own", Loses()) == ""
    assert find_lost("own", Loses(), {"seen": np.zeros(4)}) == ""
    monkeypatch.setattr(twins, "BYTES_MAX", 36)
    assert try_twin("own", Loses()) != ""
