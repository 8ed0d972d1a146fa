"""Trainers of pipeline stages, before there is a world: what they refuse, and orders that come.

And what blocks share: who has it, and its one place in a checkpoint.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perdure.model.errors import ConfigError
from perdure.model.events import CheckpointFailed
from perdure.model.job import CheckpointConfig
from perdure.plan.elastic.stages import Model, Section, choose_balanced
from perdure.worker.checkpoint import Checkpointer
from perdure.worker.elastic import open_pipeline_trainer, train
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.state import At
from perdure.worker.elastic.state.blocks import StagedReplica, StageRegistry
from perdure.worker.elastic.state.sharded import ShardedReplica
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


# --- what blocks share ------------------------------------------------------------------------


class Back(nn.Module):
    """A head that leads back by its embedding's matrix."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def make_tied(seed: int = 0, *, tied: bool = True) -> StagedReplica:
    """Return three blocks whose ends share a matrix, after a step."""
    torch.manual_seed(seed)
    first = nn.Linear(4, 6, bias=False)
    last = Back(first.weight if tied else nn.Parameter(torch.ones(6, 4)))
    replica = StagedReplica(
        [first, nn.Linear(6, 6), last], lambda ps: torch.optim.AdamW(ps, lr=1.0)
    )
    for p in replica.parameters:
        p.grad = torch.full_like(p, seed + 1.0)
    replica.optimizer.step()
    return replica


def give(replica: StagedReplica, first: int, stop: int) -> StagedReplica:
    """Leave it these blocks only."""
    replica.adopt((Section(first, stop),), {}, None)
    return replica


def save(folder: Path, parts: Sequence[StagedReplica]) -> None:
    events: list[Any] = []
    savers = [open_saver(folder, part, n, len(parts), events) for n, part in enumerate(parts)]
    for saver in savers:
        saver.save(7, reason="test", extra={})
    for saver in savers:
        saver.close()
    assert not [event for event in events if isinstance(event, CheckpointFailed)]


def open_saver(
    folder: Path, replica: StagedReplica, number: int, count: int, events: list[Any]
) -> Checkpointer:
    return Checkpointer(
        url=str(folder), config=CheckpointConfig(), rank=number, world_size=count, generation=0,
        emit=events.append, now=lambda: 0.0, registry=StageRegistry(replica, number, count),
    )  # fmt: skip


@pytest.mark.parametrize("saved", [((0, 3),), ((0, 1), (1, 3)), ((0, 2), (2, 3))])
@pytest.mark.parametrize("read", [(0, 3), (0, 1), (1, 2), (2, 3)])
def test_what_blocks_share_is_saved_once_and_read_into_any_cut(
    saved: Sequence[tuple[int, int]], read: tuple[int, int], tmp_path: Path
) -> None:
    parts = [give(make_tied(), *cut) for cut in saved]
    names = [name for part in parts for name in StageRegistry(part, 0, 1).tensors()]
    assert len(names) == len(set(names)) == 4 * 3
    save(tmp_path, parts)
    mine = give(make_tied(seed=5), *read)
    assert open_saver(tmp_path, mine, 0, 1, []).restore({}) == 7
    whole = make_tied()
    for found, wanted in zip(mine.model.parameters(), whole.model.parameters(), strict=True):
        if found.numel():
            assert torch.equal(found, wanted)
            for key, value in whole.optimizer.state[wanted].items():
                assert torch.equal(mine.optimizer.state[found][key], value)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_blocks_that_shared_otherwise_is_refused(
    tied: bool, tmp_path: Path
) -> None:
    save(tmp_path, [make_tied(tied=tied)])
    for cut in ((0, 3), (2, 3)):
        mine = give(make_tied(tied=not tied), *cut)
        with pytest.raises(ConfigError, match=r"does not fit the script: .*2\.weight"):
            open_saver(tmp_path, mine, 0, 1, []).restore({})


def test_what_a_block_shares_stays_when_the_other_one_leaves() -> None:
    """A parameter, and a buffer; once no block here has it, it takes no memory."""
    replica = make_tied()
    for block in (replica.blocks[0], replica.blocks[1]):
        block.register_buffer("table", replica.blocks[0].weight.detach()[:1].clone())
    replica.blocks[1].table = replica.blocks[0].table
    assert len(replica.parameters) == 3
    give(replica, 1, 3)
    assert replica.blocks[2].weight.numel() == replica.blocks[1].table.numel() * 6 == 24
    assert replica.optimizer.state[replica.blocks[2].weight]
    give(replica, 1, 2)
    assert replica.blocks[2].weight.numel() == 0
    assert replica.blocks[1].table.numel() == 4


def test_one_memory_under_two_parameters_is_refused() -> None:
    first = nn.Linear(4, 6, bias=False)
    for view in (first.weight.detach(), first.weight.detach()[2:3], first.weight.detach().T):
        with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight are views of one memory"):
            StagedReplica([first, Back(nn.Parameter(view))], make_optimizer)
    flat = torch.zeros(48)
    StagedReplica(
        [Back(nn.Parameter(flat[:24].view(6, 4))), Back(nn.Parameter(flat[24:].view(6, 4)))],
        make_optimizer,
    )


def test_settings_that_would_part_what_blocks_share_are_told_apart() -> None:
    def by_place(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.1 + n} for n, p in enumerate(parameters)])

    def alike(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=torch.tensor(0.1), weight_decay=0.5)

    for cut in ((0, 1), (1, 2)):
        first = nn.Linear(4, 6, bias=False)
        last = nn.Sequential(nn.Linear(6, 6), Back(first.weight))
        give(StagedReplica([first, last], alike), *cut)
    with pytest.raises(ConfigError, match=r"the optimizer gives 1\.0\.weight other settings"):
        give(StagedReplica([first, last], by_place), 1, 2)


def test_shards_refuse_what_two_modules_share() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight are one parameter"):
        ShardedReplica(model, make_optimizer)
