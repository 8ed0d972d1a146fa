"""A loop that is killed twice has the losses of one that is not, to the last bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.worker.changed_loops import CHANGED, GROWN, TOLD
from tests.unit.worker.exact_life import find_difference, live
from tests.unit.worker.exact_loops import LOOPS
from tests.unit.worker.reported_loops import KEPT, NAMED
from tests.waiting import PATIENCE_S

from perdure.model.events import CheckpointRestored
from perdure.worker.checkpoint import checkpointer


@pytest.fixture(autouse=True)
def patient_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may be slow here: no save is skipped for it."""
    monkeypatch.setattr(checkpointer, "WAIT_S", PATIENCE_S)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of small operations wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LONG = {
    *(f"optimizer_{name}" for name in (
        "adadelta", "adagrad", "adam", "adam_amsgrad", "adam_foreach", "adam_fused", "adamw",
        "adamw_maximize", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd_fused",
    )),
    *(f"schedule_{name}" for name in (
        "multiplicative", "step", "multi_step", "constant", "linear", "exponential", "cosine",
        "polynomial", "cyclic", "warm_restarts",
    )),
}  # fmt: skip
"""Optimizers and schedules whose state has the form of one that stays: tensors, and numbers."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in LONG else ())
        for name in (*LOOPS, *KEPT, *CHANGED)
    ],
)
def test_a_killed_loop_has_the_losses_of_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    differ, said = find_difference((LOOPS | KEPT | CHANGED)[name], str(tmp_path))
    assert (differ, said) == ([], "")


@pytest.mark.parametrize("name", [*NAMED, *TOLD])
def test_what_no_checkpoint_keeps_is_named_before_the_first_one(name: str, tmp_path: Path) -> None:
    body, what = (NAMED | TOLD)[name]
    differ, said = find_difference(body, str(tmp_path))
    assert differ
    assert what in said


@pytest.mark.parametrize("name", GROWN)
def test_a_change_of_the_parameters_is_named_before_the_first_save(
    name: str, tmp_path: Path
) -> None:
    body, what = GROWN[name]
    _, life = live(body, str(tmp_path), ends_at=8)
    told = [one.why_not_exact for one in life.find(CheckpointRestored) if one.why_not_exact]
    assert told
    assert what in told[0]
