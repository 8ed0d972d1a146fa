"""An update of a replica: alike on whoever has the reduced gradients, a scaler's skip included."""

from collections import deque
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from perdure.worker.elastic.moving import open_state, pack_state
from perdure.worker.elastic.state.replicated import Replica

pytestmark = pytest.mark.torch


def make() -> Replica:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return Replica(model, optimizer, scaler=scaler, clip_norm=0.5)


def compute(replica: Replica, *, overflow: bool) -> None:
    replica.optimizer.zero_grad()
    loss = replica.model(torch.ones(1, 3)).square().mean()
    replica.scale(loss * (float("inf") if overflow else 1.0)).backward()


def take_gradients(replica: Replica, other: Replica) -> None:
    for mine, its in zip(replica.parameters, other.parameters, strict=True):
        mine.grad = its.grad.clone()


def states(replica: Replica) -> list[object]:
    return [[t.tolist() for t in replica.model.state_dict().values()], replica.scaler.state_dict()]


@pytest.mark.parametrize("overflow", [False, True])
def test_who_rolls_forward_with_applied_gradients_comes_to_the_same_state(overflow: bool) -> None:
    ahead, behind = make(), make()
    before = states(ahead)
    compute(ahead, overflow=overflow)
    ahead.update()
    take_gradients(behind, ahead)
    behind.update(clipped=True)
    assert states(behind) == states(ahead)
    assert (states(ahead)[0] == before[0]) == overflow


def test_a_step_that_overflows_is_skipped_and_the_scale_halved() -> None:
    replica = make()
    compute(replica, overflow=True)
    replica.update()
    assert replica.scaler.get_scale() == 4.0


def test_scaled_and_clipped_gradients_are_those_without_a_scaler() -> None:
    scaled, plain = make(), make()
    plain.scaler = None
    for replica in (scaled, plain):
        compute(replica, overflow=False)
        replica.update()
    assert states(scaled)[0] == [t.tolist() for t in plain.model.state_dict().values()]


def test_a_replica_that_is_given_a_state_has_its_scale() -> None:
    one, other = make(), make()
    compute(one, overflow=True)
    one.update()
    other.load(one.state())
    assert other.scaler.get_scale() == 4.0


def test_a_newcomer_has_moments_of_the_type_that_the_members_have() -> None:
    """torch casts them to the type of their parameter when they are loaded."""
    member, newcomer = (
        Replica(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for model in (nn.Linear(3, 2).bfloat16() for _ in range(2))
    )
    for parameter in member.parameters:
        parameter.grad = torch.rand_like(parameter)
    member.update()
    for state in member.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].float() + 2.0**-20
    newcomer.load(member.state())
    for mine, its in zip(newcomer.parameters, member.parameters, strict=True):
        buffers = [one.optimizer.state[p]["momentum_buffer"] for one, p in
                   ((newcomer, mine), (member, its))]  # fmt: skip
        assert buffers[0].dtype == torch.float32
        assert torch.equal(*buffers)
        assert buffers[0].data_ptr() != buffers[1].data_ptr()


class Clipped(torch.optim.SGD):
    norm = 1.0

    def step(self, closure: Any = None) -> None:
        self.norm *= 0.9
        super().step()


class Annealed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.heat, self.recent = 1.0, deque([0.0], maxlen=3)


def test_a_newcomer_has_the_plain_attributes_that_the_members_have() -> None:
    models = [Annealed(), Annealed()]
    first, second = (Replica(m, Clipped(m.parameters(), lr=0.1)) for m in models)
    for step in range(5):
        models[0](torch.ones(1, 2)).sum().backward()
        first.update()
        models[0].heat *= 0.5
        models[0].recent.append(float(step))
    skeleton, tensors = pack_state(first.state())
    state, empty = open_state(skeleton)
    for target, tensor in zip(empty, tensors, strict=True):
        target.copy_(tensor)
    assert first.list_compared()["attributes"] != second.list_compared()["attributes"]
    second.load(state)
    assert (models[1].heat, models[1].recent) == (models[0].heat, models[0].recent)
    assert vars(second.optimizer)["norm"] == vars(first.optimizer)["norm"]
    assert first.list_compared()["attributes"] == second.list_compared()["attributes"]
