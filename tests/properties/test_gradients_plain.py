"""Worlds of one to four members train random models as a plain loop of PyTorch does.

A member is a thread with a model of its own, its real buckets, tally, and replica. Only one thread
runs at a time, because micro-batches draw from the generator that all threads share.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from perdure.plan.elastic.microbatches import assign
from perdure.worker.data import derive_seed, seed_all
from perdure.worker.elastic.state.replicated import Replica, ReplicatedState

pytestmark = pytest.mark.torch

WIDTH, COUNT, STEPS, SEED, WAIT_S = 4, 5, 4, 3, 120.0
KINDS = ("plain", "again", "twice", "unused", "rare", "checkpointed", "short", "dropped", "turned")
"""What a block does; see `Block`."""


class Block(nn.Module):
    """A layer that is used as its `kind` says; `first` is the layer of the model's first block."""

    def __init__(self, kind: str, first: nn.Linear | None) -> None:
        super().__init__()
        self.kind, self.linear, self.number = kind, nn.Linear(WIDTH, WIDTH), 0
        if kind == "again" and first is not None:
            self.linear = first
        if kind == "turned":
            self.linear.weight = nn.Parameter(self.linear.weight.detach().t())
        if kind == "short":
            self.linear.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        apply = lambda y: torch.tanh(self.linear(y))  # noqa: E731
        match self.kind:
            case "twice":
                for _ in range(2):
                    x = checkpoint(apply, x, use_reentrant=True)
            case "checkpointed":
                x = checkpoint(apply, x, use_reentrant=False)
            case "short":
                x = x + self.linear(x.bfloat16()).to(x.dtype)
            case "dropped":
                x = nn.functional.dropout(apply(x), 0.3)
            case "rare" if self.number % 3:
                pass
            case "unused":
                pass
            case _:
                x = apply(x)
        return x


@dataclass(frozen=True)
class Plan:
    """A model and how it is trained."""

    kinds: tuple[str, ...]
    shut: frozenset[int]
    """Blocks that do not train at first."""
    frozen: tuple[tuple[int, int], ...]
    """(step, block): from this step on the block trains if it did not, and the reverse."""
    adam: bool
    fused: bool
    """One kernel, which pairs elements by their places in memory."""
    clip: float
    exact: bool
    bucket_bytes: int

    def make(self) -> nn.Sequential:
        torch.manual_seed(11)
        blocks: list[Block] = []
        for kind in ("plain", *self.kinds):
            blocks.append(Block(kind, blocks[0].linear if blocks else None))
        model = nn.Sequential(*blocks).double()
        for number, block in enumerate(blocks[1:]):
            if block.kind == "short":
                block.bfloat16()
            block.requires_grad_(number not in self.shut or block.kind == "again")
        return model

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(
                model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3, fused=self.fused
            )
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def turn(self, model: nn.Module, step: int) -> None:
        """Freeze and unfreeze as is due before `step`, on every member alike."""
        for at, number in self.frozen:
            if at == step and number < len(self.kinds):
                for parameter in model[number + 1].parameters():
                    parameter.requires_grad_(not parameter.requires_grad)

    def compute(self, model: nn.Sequential, step: int, number: int) -> Tensor:
        for block in model:
            block.number = step + number
        generator = torch.Generator().manual_seed(100 * step + number)
        x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
        return model(x.requires_grad_()).square().mean()


Row = list[Tensor | None]


def train_plainly(plan: Plan) -> tuple[list[Row], list[Tensor]]:
    """Return the gradients of each step, and the last parameters."""
    model = plan.make()
    optimizer = plan.make_optimizer(model)
    rows: list[Row] = []
    for step in range(STEPS):
        plan.turn(model, step)
        optimizer.zero_grad()
        for number in range(COUNT):
            seed_all(derive_seed(SEED, "micro-batch", step, number))
            (plan.compute(model, step, number) / COUNT).backward()
        rows.append(read_gradients(model))
        if plan.clip:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], plan.clip)
        optimizer.step()
    return rows, [p.detach() for p in model.parameters()]


def read_gradients(model: nn.Module) -> Row:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@dataclass
class World:
    """Lets one member run at a time, and exchanges when all of them wait."""

    size: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    begun: dict[int, list[tuple[Tensor, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)

    def meet(self, me: int, begun: list[tuple[Tensor, int]]) -> None:
        self.begun[me] = begun
        self.turn.release()
        try:
            if self.barrier.wait(WAIT_S) == 0:
                self.exchange()
            self.barrier.wait(WAIT_S)
        finally:
            self.turn.acquire()

    def exchange(self) -> None:
        for row in zip(*(self.begun[member] for member in range(self.size)), strict=True):
            source = row[0][1]
            tensors = [tensor for tensor, _ in row]
            result = tensors[source].clone()
            if source < 0:
                result = torch.stack(tensors).sum(0)
            for tensor in tensors:
                tensor.copy_(result)


class Link:
    """One member's group."""

    def __init__(self, world: World, me: int) -> None:
        self.world, self.me = world, me
        self.members = tuple(range(world.size))
        self.begun: list[tuple[Tensor, int]] = []

    def overtaken(self) -> bool:
        return False

    def all_reduce(self, tensor: Tensor) -> None:
        self.begun.append((tensor, -1))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self.begun.append((tensor, source))

    def wait(self) -> None:
        begun, self.begun = self.begun, []
        self.world.meet(self.me, begun)


def train_member(plan: Plan, link: Any) -> tuple[list[Row], list[Tensor]]:
    model = plan.make()
    replica = Replica(model, plan.make_optimizer(model), clip_norm=plan.clip)
    state = ReplicatedState(
        replica, partial(plan.compute, model), count=COUNT, seed=SEED, exact=plan.exact,
        bucket_bytes=plan.bucket_bytes,
    )  # fmt: skip
    state.applied = 0
    state.work.enter(assign(COUNT, link.members), {}, link.me, (link.me,))
    rows: list[Row] = []
    for step in range(STEPS):
        plan.turn(model, step)
        state.begin_step()
        state.work.reduce(step, link, lambda: None)
        state.check_step()
        assert state.work.tally.read(step).counts.flatten().tolist() == [1.0] * COUNT
        state.work.buckets.expose(step)
        rows.append(read_gradients(model))
        state.update("reduced")
        state.work.give_out(link.members)
    return rows, [p.detach() for p in model.parameters()]


def run_world(size: int, member: Callable[[Link], Any]) -> list[Any]:
    """Return what each of `size` members makes, each in a thread."""
    world, found = World(size), list[Any]([None] * size)

    def run(me: int) -> None:
        with world.turn:
            try:
                found[me] = member(Link(world, me))
            except BaseException as error:
                found[me] = error
                world.barrier.abort()

    threads = [threading.Thread(target=run, args=(me,)) for me in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, threading.BrokenBarrierError):
            raise one
    return found


NONE = frozenset[int]()
plans = st.builds(
    Plan,
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5).map(tuple),
    shut=st.frozensets(st.integers(0, 4)),
    frozen=st.lists(
        st.tuples(st.integers(0, STEPS - 1), st.integers(0, 4)), max_size=3
    ).map(tuple),
    adam=st.booleans(),
    fused=st.booleans(),
    clip=st.sampled_from([0.0, 0.1]),
    exact=st.booleans(),
    bucket_bytes=st.sampled_from([1, 200, 1 << 20]),
)  # fmt: skip


def compare(mine: Row, true: Row, where: str, off: float) -> None:
    for number, (one, other) in enumerate(zip(mine, true, strict=True)):
        assert (one is None) == (other is None), f"{where}: parameter {number}"
        if one is not None and other is not None:
            close = torch.allclose(one.double(), other.double(), rtol=off, atol=off)
            assert close, f"{where}: parameter {number}: {one} is not {other}"


@settings(max_examples=examples(120), deadline=None, suppress_health_check=list(HealthCheck))
@given(plans, st.integers(1, 4))
@example(Plan(("turned",), NONE, (), True, True, 0.0, False, 200), 2)
@example(Plan(("unused", "rare"), NONE, (), True, False, 0.1, True, 1), 3)
@example(Plan(("twice",), NONE, ((1, 0), (3, 0)), False, False, 0.1, False, 1), 4)
@example(Plan(("plain",), frozenset([0]), ((2, 0),), True, False, 0.0, False, 1), 2)
def test_random_models_have_the_gradients_of_plain_pytorch(plan: Plan, size: int) -> None:
    rows, last = train_plainly(plan)
    off = 0.05 if "short" in plan.kinds else 1e-9  # bfloat16 rounds each sum.
    members = run_world(size, lambda link: train_member(plan, link))
    for mine, parameters in members:
        for step, (one, other) in enumerate(zip(mine, rows, strict=True)):
            compare(one, other, f"step {step}", off)
        compare(parameters, last, "at the end", off)
        for one, other in zip(parameters, members[0][1], strict=True):
            assert torch.equal(one, other), "members differ"
