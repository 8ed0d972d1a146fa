"""What is copied beside training, and what is copied at once since nobody would wait for it."""

import threading

import pytest
import torch
from torch import Tensor

from perdure.worker.checkpoint import staging as module
from perdure.worker.checkpoint.staging import Staging

KEY = "model.weight"


@pytest.fixture
def weight() -> Tensor:
    return torch.zeros(1 << 16)


def begin(staging: Staging, weight: Tensor) -> tuple[Tensor, bool]:
    """Begin to copy `weight`; return the copy, and whether it is there at once."""
    weight += 1
    copy = staging.begin({KEY: weight}, {KEY})[KEY]
    return copy, torch.equal(copy, weight)


def pass_gate(staging: Staging) -> None:
    staging.enter_update()
    staging.leave_update()


def test_beside_training_is_copied_what_an_optimizer_waits_for(weight: Tensor) -> None:
    staging = Staging()
    pass_gate(staging)
    copy, at_once = begin(staging, weight)
    assert not at_once
    staging.run()
    pass_gate(staging)
    assert torch.equal(copy, weight)


def test_an_update_that_passes_no_gate_has_all_copied_at_once(weight: Tensor) -> None:
    staging = Staging()
    for _ in range(2):  # A graph that was captured before perdure knew of the optimizer.
        copy, at_once = begin(staging, weight)
        assert at_once
        with torch.autograd._unsafe_preserve_version_counter((weight,)):
            weight += 10
        staging.run()
        assert torch.equal(copy + 10, weight)
    pass_gate(staging)
    assert not begin(staging, weight)[1]


@pytest.fixture
def captured(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> Staging:
    """A step that was captured while a copy was under way."""
    staging = Staging()
    pass_gate(staging)
    begin(staging, weight)
    with monkeypatch.context() as capture:
        capture.setattr(module, "is_capturing", lambda: True)
        assert staging.enter_update() == 0.0, "a capture waits for nothing"
        staging.leave_update()
    return staging


def test_after_a_capture_all_is_copied_at_once_whatever_passes_the_gate(
    captured: Staging, weight: Tensor
) -> None:
    captured.run()
    for _ in range(2):
        pass_gate(captured)
        assert begin(captured, weight)[1]
        captured.run()


def test_a_replay_that_passes_the_gate_waits_for_the_copy(
    captured: Staging, weight: Tensor
) -> None:
    threading.Timer(0.2, captured.run).start()
    assert captured.enter_replay() > 0.1
    _, at_once = begin(captured, weight)
    assert not at_once
    captured.run()
