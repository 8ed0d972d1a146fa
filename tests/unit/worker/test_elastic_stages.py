"""Trainers of pipeline stages, before there is a world: what they refuse, and orders that come."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from perdure.model.errors import ConfigError
from perdure.plan.elastic.stages import Model, choose_balanced
from perdure.worker.elastic import open_pipeline_trainer, train
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.state import At
from perdure.worker.elastic.state.blocks import StagedReplica
from perdure.worker.elastic.state.staged import StagedState
from perdure.worker.elastic.trainer import Trainer


class Hasty(Membership):
    """Under orders before its trainer is whole: calls at once what ends old connections."""

    @property
    def break_groups(self) -> Callable[[], object]:
        return self._break_groups

    @break_groups.setter
    def break_groups(self, call: Callable[[], object]) -> None:
        self._break_groups = call
        call()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def load(step: int, micro_batch: int) -> Any:
    return torch.ones(2, 4), torch.zeros(2, 4)


def make_state(replica: StagedReplica, me: int = 0, model: Model | None = None) -> StagedState:
    model = model or Model(replica.weights, replica.sizes, 1)
    return StagedState(
        replica, load, nn.functional.mse_loss, me=me, count=2, seed=0, exact=False,
        choose=partial(choose_balanced, model),
    )  # fmt: skip


def test_an_order_may_come_while_a_trainer_is_made() -> None:
    replica = StagedReplica([nn.Linear(4, 4), nn.Linear(4, 4)], make_optimizer)
    membership = Hasty(None)
    trainer = Trainer(make_state(replica), membership=membership)
    assert [step.step for step in trainer.steps(2)] == [0, 1]


def test_schedules_that_cannot_be_are_refused() -> None:
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with pytest.raises(ConfigError, match="'gpipe' is none of 1f1b, zero-bubble, interleaved"):
        open_pipeline_trainer(
            blocks, make_optimizer, load, nn.functional.mse_loss, stages=2, micro_batches=2,
            schedule="gpipe",
        )  # fmt: skip
    with pytest.raises(ConfigError, match=r"needs pipeline=N"):
        train(
            blocks=blocks, optimizer=make_optimizer, dataset=[load(0, 0)] * 8,
            loss=nn.functional.mse_loss, steps=1, global_batch=8, micro_batch=4,
            schedule="zero-bubble",
        )  # fmt: skip


def test_what_breaks_at_a_boundary_keeps_nothing_of_the_step_before() -> None:
    replica = StagedReplica([nn.Linear(4, 4), nn.Linear(4, 4)], make_optimizer)
    state = make_state(replica)
    steps = Trainer(state, membership=Membership(None)).steps(2)
    next(steps)
    state.leave()
    assert state.stand().done == ()
    assert len(list(steps)) == 1


def test_who_come_in_at_once_follow_different_stages() -> None:
    """Two stages of two copies: the second to be told takes the other stage, whatever its rank."""
    model = Model((1.0, 1.0), (4, 4), 2)
    runs = {0: ((0, 1),), 1: ((1, 2),), 2: ((0, 1),), 3: ((1, 2),)}
    answers = {member: At(3, "a", mine) for member, mine in runs.items()}

    def follow(me: int, ahead: tuple[int, ...]) -> tuple[int, ...]:
        replica = StagedReplica([nn.Linear(4, 4), nn.Linear(4, 4)], make_optimizer)
        return make_state(replica, me, model).choose_donors(answers, ahead)

    assert follow(4, ()) == follow(5, ())
    assert {follow(5, ()), follow(4, (5,))} == {(0, 2), (1, 3)}
