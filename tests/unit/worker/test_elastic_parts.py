"""Shards and stages train what a plain loop trains, or name what they cannot have."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from perdure.model.errors import ConfigError
from perdure.plan.elastic.stages import Model, Section, choose_balanced
from perdure.worker.elastic.comparing import hash_state
from perdure.worker.elastic.gradients import Accumulation, Buckets
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.moving import map_tensors
from perdure.worker.elastic.state import load_plain
from perdure.worker.elastic.state.blocks import StagedReplica
from perdure.worker.elastic.state.replicated import Replica, ReplicatedState
from perdure.worker.elastic.state.sharded import ShardedReplica
from perdure.worker.elastic.state.staged import StagedState
from perdure.worker.elastic.trainer import Trainer

pytestmark = pytest.mark.torch
Make = Callable[[Any], torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.heat, self.table = nn.Linear(2, 2), 1.0, torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.heat


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make_by_place(parameters: Any) -> torch.optim.Optimizer:
    several = list(parameters)
    groups = [{"params": several[:2], "lr": 0.3}, {"params": several[2:]}]
    return torch.optim.SGD(groups, lr=0.1)


def make_by_shape(parameters: Any) -> torch.optim.Optimizer:
    several = list(parameters)
    weights = [p for p in several if p.ndim > 1]
    rest = [p for p in several if p.ndim <= 1]
    return torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": rest}], lr=0.1)


def test_a_stage_s_optimizer_that_chooses_by_place_is_named() -> None:
    blocks = [Block(), Block()]
    StagedReplica(blocks, make_by_shape).adopt((Section(1, 2),), {}, None)
    replica = StagedReplica(blocks, make_by_place)
    with pytest.raises(ConfigError, match=r"gives 1\.linear\.\w+ other settings"):
        replica.adopt((Section(1, 2),), {}, None)


def test_a_stage_takes_over_attributes_and_flags() -> None:
    one, other = (StagedReplica([Block(), Block()], make_sgd) for _ in range(2))
    one.blocks[1].heat, one.blocks[1].table = 0.5, torch.ones(2)
    one.blocks[0].eval()
    plain = pickle.loads(pickle.dumps(one.plain()))
    other.adopt((Section(1, 2),), {1: one.state_of(1)}, plain)
    assert other.blocks[1].heat == 0.5
    assert torch.equal(other.blocks[1].table, torch.ones(2))
    assert [block.training for block in other.blocks] == [False, True]


def test_members_have_the_tensors_that_a_script_drew_at_random() -> None:
    """Random features without a common seed, as a plain attribute."""
    one, other = Block(), Block()
    one.table = torch.ones(2)
    first, second = (Replica(block, make_sgd(block.parameters())) for block in (one, other))
    second.load(map_tensors(first.state(), Tensor.clone))
    assert hash_state(first.list_compared()) == hash_state(second.list_compared())
    assert hash_state(first.list_named()) == hash_state(second.list_named())
    assert torch.equal(other.table, torch.ones(2))
    other.table[0] = 5.0
    assert hash_state(first.list_named()) != hash_state(second.list_named())
    staged = StagedReplica([one], make_sgd)
    fresh = StagedReplica([Block()], make_sgd)
    load_plain(fresh.model, staged.plain())
    one.table.zero_()  # As a later snapshot does with the memory of an earlier one.
    assert torch.equal(fresh.blocks[0].table, torch.ones(2))


def test_a_newcomer_takes_fractions_over_and_keeps_a_rank_s_number() -> None:
    """Its script was edited: a fraction that differs would give other gradients."""
    one, other = Block(), Block()
    one.rank, other.rank, other.heat = 0, 3, 0.2
    first, second = (Replica(block, make_sgd(block.parameters())) for block in (one, other))
    second.load(map_tensors(first.state(), Tensor.clone))
    assert (other.heat, other.rank) == (1.0, 3)
    assert hash_state(first.list_compared()) == hash_state(second.list_compared())
    one.heat = 0.5  # By `on_step`, which the other does not call while it follows.
    states = [
        ReplicatedState(r, lambda *_: torch.zeros(()), count=1, seed=0, exact=False)
        for r in (first, second)
    ]
    assert states[0].hash_settings() != states[1].hash_settings()
    third = Block()
    third.rank, third.heat = 3, 0.2
    fresh = StagedReplica([third], make_sgd)
    fresh.adopt((Section(0, 1),), {}, StagedReplica([one], make_sgd).plain())
    assert (third.heat, third.rank) == (0.5, 3)


def test_a_stage_that_goes_back_undoes_what_its_script_has_changed_since() -> None:
    block = Block()
    block.depth, block.seen = 1, [1]
    replica = StagedReplica([block], make_sgd)
    before = replica.plain()
    block.heat, block.depth = 0.5, 2
    block.seen.append(2)
    replica.adopt((Section(0, 1),), {}, before)
    assert (block.heat, block.depth, block.seen) == (1.0, 1, [1])


def stage(block: Block, memory: Path | None = None) -> StagedState:
    replica = StagedReplica([block], make_sgd)
    return StagedState(
        replica,
        lambda step, number: (torch.ones(1, 2), torch.zeros(1, 2)),
        lambda output, target: (output - target).square().mean(),
        me=0,
        count=1,
        seed=0,
        exact=False,
        choose=partial(choose_balanced, Model(replica.weights, replica.sizes, 1)),
        snapshot_every=2,
        memory=memory,
    )


def test_a_snapshot_has_what_the_script_makes_of_its_step(tmp_path: Path) -> None:
    block = Block()
    state = stage(block, tmp_path)
    found = {}
    for step in Trainer(state, membership=Membership(None)).steps(8):
        block.heat = 1.0 + step.step
        for one in state.snapshots.list_all():
            heat = state.snapshots.make_reader()(one)["plain"]["attributes"]["model.0"]["heat"]
            found[one.step] = heat
    assert found.keys() >= {0, 2, 4, 6}, "and more of them, if a step takes a second"
    assert found == {step: float(step or 1) for step in found}


def alter(replica: Any, block: Block) -> None:
    """Have a pass alter a number that no result depends on."""
    replica.guard.note()
    block.heat = 0.5
    replica.guard.check(lambda: torch.zeros(1))


def test_a_rank_that_follows_a_stage_has_no_part_in_what_passes_leave_behind() -> None:
    blocks = Block(), Block()
    donor, follower = map(stage, blocks)
    alter(donor.replica, blocks[0])
    follower.become(map_tensors(donor.replica.state(), Tensor.clone), 4, 1)
    assert blocks[1].heat == 1.0
    assert follower.hash_settings() == donor.hash_settings()


def test_a_member_that_takes_the_state_again_keeps_what_passes_leave_behind_apart() -> None:
    blocks = Block(), Block()
    first, second = (Replica(block, make_sgd(block.parameters())) for block in blocks)
    alter(second, blocks[1])
    second.load(map_tensors(first.state(), Tensor.clone))
    blocks[1].heat = 0.25
    assert hash_state(first.list_compared()) == hash_state(second.list_compared())


@pytest.mark.parametrize(
    "make",
    [
        lambda block: ShardedReplica(nn.Sequential(block), make_sgd),
        lambda block: StagedReplica([block, Block()], make_sgd),
    ],
)
def test_views_of_one_memory_are_named(make: Callable[[nn.Module], Any]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
            self.other.weight.data = self.one.weight.data

    with pytest.raises(ConfigError, match="are views of one memory"):
        make(Tied())


def test_a_hook_on_a_gradient_is_named_for_shards() -> None:
    model = nn.Sequential(Block())
    model[0].linear.weight.register_hook(lambda gradient: gradient * 0.1)
    with pytest.raises(ConfigError, match=r"0\.linear\.weight has a hook on its gradient"):
        ShardedReplica(model, make_sgd)


@pytest.mark.parametrize("place", [0, 1])
def test_members_draw_alike_in_an_update(place: int) -> None:
    """karpathy/llm.c#597: an optimizer rounds at random, on each rank in its own way."""

    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(torch.randn_like(p))

    found = []
    for member in range(2):
        torch.manual_seed(5)
        model = nn.Linear(2, 2)
        replica = Replica(model, Noisy(model.parameters(), lr=0.1))
        compute: Callable[[int, int], Tensor] = lambda step, number: torch.zeros(())  # noqa: E731
        state = ReplicatedState(replica, compute, count=1, seed=0, exact=False)
        state.applied = place
        torch.manual_seed(member)
        state.update("reduced")
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)


def test_another_part_draws_other_numbers() -> None:
    work = Accumulation(
        lambda step, number: torch.zeros(()), lambda loss, counts: None, Buckets((), 1), count=1,
        seed=0, exact=False, whole=False,
    )  # fmt: skip
    drawn = []
    for part in ("rows 0", "rows 1", "rows 0"):
        work.seed_update(3, part)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[2] != drawn[1]
