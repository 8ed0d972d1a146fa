"""Pipelines on real gloo connections between threads: what comes out is what one process makes."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gpipe import order_gpipe
from torch import Tensor, nn

from perdure.model.errors import ConfigError, SafetyError
from perdure.model.planning.pipeline import Action, Orders
from perdure.plan.elastic.microbatches import root_of
from perdure.plan.pipeline.orders import (
    join_replicas,
    order_1f1b,
    order_greedily,
    order_interleaved,
    order_zero_bubble,
    route_spread,
)
from perdure.plan.pipeline.simulate import FREE, DeadlockError, Pipe
from perdure.plan.worlds.chain import StageCost
from perdure.worker.elastic.communicators.gloo import connect
from perdure.worker.elastic.gradients import GradientTree
from perdure.worker.elastic.group import Broken, Group
from perdure.worker.pipeline import Runner, Schedule, StageBlocks

BLOCKS, WIDTH, WAIT_S = 6, 4, 60.0


class Both(nn.Module):
    """Hands on two tensors, one of which nobody trains, and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.tanh(self.linear(value))
        return made.unflatten(1, (2, 2)), torch.arange(len(made))


class Join(nn.Module):
    """Takes what `Both` hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(value[0].flatten(1)) * (1 + value[1])[:, None]


def make_blocks(dropout: float = 0.0) -> list[nn.Module]:
    plain = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in "abcd"]
    blocks = [plain[0], plain[1], Both(), Join(), plain[2], plain[3]]
    generator = torch.Generator().manual_seed(7)  # Not the one that all threads share.
    for parameter in nn.ModuleList(blocks).parameters():
        parameter.data.uniform_(-0.5, 0.5, generator=generator)
    return blocks


def load(step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Return samples whose number changes from step to step, and with the micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    rows = 1 + (step * 3 + micro_batch) % 4
    both = torch.randn(2, rows, WIDTH, generator=generator)
    return both[0], both[1]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def find_truth(steps: int, count: int) -> tuple[list[Tensor], list[float]]:
    """Return the gradients of all steps, summed, and all losses, of one process without stages."""
    blocks = make_blocks()
    model, losses = nn.Sequential(*blocks), []
    for step in range(steps):
        for m in range(count):
            inputs, targets = load(step, m)
            value = loss(model(inputs), targets)
            value.backward()
            losses.append(value.item())
    return [p.grad for p in model.parameters() if p.grad is not None], losses


def cut(stages: int) -> list[int]:
    return [BLOCKS * s // stages for s in range(stages + 1)]


class Cell:
    """One member in a thread of its own."""

    def __init__(
        self, schedule: Schedule, cell: int, group: Any, *,
        recompute: bool = False, count: int = 0, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        self.blocks = make_blocks(dropout)
        cuts = cut(schedule.stages)
        mine = sorted({action.stage for action in schedule.orders[cell]})
        parts = [
            StageBlocks(s, self.blocks[cuts[s] : cuts[s + 1]], cuts[s], recompute=recompute)
            for s in mine
        ]
        self.trees = {b: GradientTree(count) for b in range(BLOCKS)} if count else None
        self.runner = Runner(
            schedule, cell, parts, group, load=load, loss=loss, seed=3, trees=self.trees
        )
        self.losses: dict[tuple[int, int], float] = {}
        self.error: Exception | None = None

    def grads(self) -> list[Tensor]:
        model = nn.ModuleList(self.blocks)
        return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


def run_world(
    schedule: Schedule,
    steps: int,
    body: Callable[[Cell, int, Group], None] | None = None,
    **how: Any,
) -> list[Cell]:
    """Run all cells over gloo; `body` in place of running the steps."""
    store, size = dist.HashStore(), len(schedule.orders)
    cells: dict[int, Cell] = {}

    def live(number: int) -> None:
        group = Group(schedule.members, schedule.members[number], store, connect)
        cell = cells[number] = Cell(schedule, number, group, **how)
        try:
            if body is not None:
                body(cell, number, group)
                return
            for step in range(steps):
                found = cell.runner.run(step)
                cell.losses |= {(step, m): value for m, value in found.items()}
            group.meet()
        except Exception as error:
            cell.error = error
        finally:
            group.give_up()

    threads = [threading.Thread(target=live, args=(n,), daemon=True) for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a cell waits for ever"
    return [cells[n] for n in range(size)]


def check_world(schedule: Schedule, steps: int, count: int, **how: Any) -> list[Cell]:
    cells = run_world(schedule, steps, **how)
    assert [cell.error for cell in cells] == [None] * len(cells)
    truth, losses = find_truth(steps, count)
    for found, wanted in zip(zip(*(c.grads() for c in cells), strict=True), truth, strict=True):
        torch.testing.assert_close(sum(found), wanted)
    together = {key: value for cell in cells for key, value in cell.losses.items()}
    assert [together[key] for key in sorted(together)] == pytest.approx(losses, rel=1e-5)
    assert all(not cell.runner._sent and not cell.runner._passes for cell in cells)
    return cells


def make_orders(kind: str, p: int, shares: Sequence[int]) -> tuple[Orders, int]:
    starts = [sum(shares[:i]) for i in range(len(shares))]
    mine = [range(a, a + n) for a, n in zip(starts, shares, strict=True)]
    pipe = Pipe([StageCost(1.0, 2.0, 0.0, 0, 0, 0.0)] * p, lambda *_: FREE, [0.0] * p)
    match kind:
        case "interleaved":
            mine = [range(p * a, p * (a + n)) for a, n in zip(starts, shares, strict=True)]
            return join_replicas([order_interleaved(p, 2, each) for each in mine]), 2 * p
        case "spread":
            numbers = iter(range(p + len(shares)))
            copies = [
                [next(numbers)] + ([next(numbers)] if s < len(shares) else []) for s in range(p)
            ]
            routes = route_spread(copies[:p], sum(shares))
            cells = sum(map(len, copies))
            return order_greedily(routes, cells, pipe, [p - s for s in range(p)]), p
    order = {"1f1b": order_1f1b, "gpipe": order_gpipe, "zero-bubble": order_zero_bubble}[kind]
    return join_replicas([order(p, each) for each in mine]), p


def name_members(orders: Orders) -> list[int]:
    return [2 * cell + 1 for cell in range(len(orders))]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["1f1b", "gpipe", "zero-bubble", "interleaved", "spread"]),
    st.integers(1, 3),
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.booleans(),
    st.data(),
)
def test_any_world_makes_the_gradients_of_one_process(
    kind: str, p: int, shares: list[int], recompute: bool, data: st.DataObject
) -> None:
    orders, stages = make_orders(kind, p, shares)
    count = sum(shares) * (p if kind == "interleaved" else 1)
    schedule = Schedule(orders, stages, name_members(orders))
    check_world(schedule, 2, count, recompute=recompute)


def sum_up(cells: list[Cell], schedule: Schedule, count: int) -> list[Tensor]:
    """Return the gradients that the trees of all cells make, in order of blocks."""
    found = []
    cuts = cut(schedule.stages)
    for block in range(BLOCKS):
        stage = next(s for s in range(schedule.stages) if cuts[s] <= block < cuts[s + 1])
        total = GradientTree(count)
        for number in {schedule.homes[stage, m] for m in range(count)}:
            for node, value in cells[number].trees[block]._sums.items():
                total.add(node, [t.clone() for t in value])
        found += total._sums[root_of(count)]
    return found


def test_sums_in_trees_are_bitwise_the_same_in_every_world() -> None:
    count, found = 4, []
    for p, shares in ((1, [4]), (2, [4]), (3, [2, 2]), (2, [1, 3])):
        schedule = Schedule(*make_orders("1f1b", p, shares), range(p * len(shares)))
        cells = run_world(schedule, 1, count=count)
        assert [cell.error for cell in cells] == [None] * len(cells)
        found.append(sum_up(cells, schedule, count))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("split", [False, True])
def test_what_a_block_draws_depends_on_its_number_alone(split: bool) -> None:
    """One cell has all stages: however many there are, recomputed or not."""
    found = []
    for stages, recompute in ((1, False), (3, False), (3, True), (6, True)):
        actions = []
        for m in range(2):
            actions += [Action("F", s, m) for s in range(stages)]
            actions += [Action("B", s, m) for s in reversed(range(stages))]
            actions += [Action("W", s, m) for s in range(stages) if split]
        schedule = Schedule((tuple(actions),), stages, [0])
        found.append(run_world(schedule, 1, recompute=recompute, dropout=0.5)[0])
    for other in found:
        assert other.losses == found[0].losses
        for a, b in zip(other.grads(), found[0].grads(), strict=True):
            torch.testing.assert_close(a, b)
    assert found[0].losses[0, 0] != run_world(schedule, 1)[0].losses[0, 0]


def test_a_split_backward_adds_only_weights_and_only_later() -> None:
    schedule = Schedule(join_replicas([order_zero_bubble(2, range(3))]), 2, [0, 1])
    seen = []

    def body(cell: Cell, number: int, group: Group) -> None:
        def note(action: Action) -> None:
            if action.kind == "W" and action.micro_batch == 0:
                seen.append(any(bool(g.any()) for g in cell.grads()))
                assert (action.stage, 0) not in cell.runner.done

        cell.runner.before = note
        cell.runner.run(0)
        assert cell.runner.done == {(number, m) for m in range(3)}
        assert [e.action for e in cell.runner.executed] == list(schedule.orders[number])

    assert [cell.error for cell in run_world(schedule, 1, body)] == [None, None]
    assert seen == [False, False]


def test_what_nobody_needs_any_more_is_freed_during_the_step() -> None:
    """1F1B over two cells, ten micro-batches: P - stage are held, not ten."""
    schedule = Schedule(join_replicas([order_1f1b(2, range(10))]), 2, [0, 1])
    held: dict[int, int] = {}
    sent: dict[int, int] = {}

    def body(cell: Cell, number: int, group: Group) -> None:
        def note(action: Action) -> None:
            held[number] = max(held.get(number, 0), len(cell.runner._passes))
            sent[number] = max(sent.get(number, 0), len(cell.runner._sent))

        cell.runner.before = note
        cell.runner.run(0)

    assert [cell.error for cell in run_world(schedule, 1, body)] == [None, None]
    assert held == {0: 2, 1: 1}
    assert max(sent.values()) <= 3


def test_what_was_counted_before_is_not_added_again() -> None:
    """A second attempt: stage 1 has micro-batch 0 already, stage 0 nothing."""
    schedule = Schedule(join_replicas([order_1f1b(2, range(2))]), 2, [0, 1])

    def body(cell: Cell, number: int, group: Group) -> None:
        cell.runner.run(0, counted={(1, 0)})
        assert cell.runner.done == ({(0, 0), (0, 1)} if number == 0 else {(1, 1)})

    cells = run_world(schedule, 1, body)
    assert [cell.error for cell in cells] == [None, None]
    both, only = find_truth(1, 2)[0], make_blocks()
    inputs, targets = load(0, 1)
    loss(nn.Sequential(*only)(inputs), targets).backward()
    half = len(both) // 2
    wanted = both[:half] + [p.grad for p in nn.Sequential(*only).parameters()][half:]
    for found, truth in zip(zip(*(c.grads() for c in cells), strict=True), wanted, strict=True):
        torch.testing.assert_close(sum(found), truth)


def test_a_newer_order_ends_the_attempt_of_all_and_keeps_what_was_finished() -> None:
    """The second of three stages is overtaken at its fifth action; the others wait for it."""
    schedule = Schedule(join_replicas([order_1f1b(3, range(6))]), 3, [0, 1, 2])

    def body(cell: Cell, number: int, group: Group) -> None:
        asked = iter([False] * 5 + [True] * 99)
        with pytest.raises(Broken):
            cell.runner.run(0, (lambda: next(asked)) if number == 1 else (lambda: False))
        done = cell.runner.done
        kept = make_blocks()
        for m in sorted(m for _, m in done):
            inputs, targets = load(0, m)
            loss(nn.Sequential(*kept)(inputs), targets).backward()
        cuts, model = cut(3), nn.ModuleList(kept)
        for block in range(cuts[number], cuts[number + 1]):
            for p, q in zip(
                cell.blocks[block].parameters(), model[block].parameters(), strict=True
            ):
                torch.testing.assert_close(p.grad, q.grad)

    cells = run_world(schedule, 1, body)
    assert [cell.error for cell in cells] == [None] * 3
    assert cells[1].runner.done == {(1, 0), (1, 1)}  # F0 F1 B0 F2 B1, and no more
    assert len(cells[0].runner.done) < 6


def test_weights_that_cannot_be_put_off_are_refused() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(WIDTH))

        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            return value, self.bias * 2

    class Add(nn.Module):
        def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
            return value[0] + value[1]

    schedule = Schedule(join_replicas([order_zero_bubble(3, [0])]), 3, [0, 1, 2])
    orders = (tuple(a for s in range(3) for a in schedule.orders[s] if a.kind == "F"),)
    orders = ((*orders[0], *(a for s in (2, 1, 0) for a in schedule.orders[s] if a.kind != "F")),)
    blocks = [nn.Linear(WIDTH, WIDTH), Beside(), Add()]
    parts = [StageBlocks(s, [block], s) for s, block in enumerate(blocks)]
    alone = Group((0,), 0, None, None)
    runner = Runner(Schedule(orders, 3, [0]), 0, parts, alone, load=load, loss=loss, seed=0)
    with pytest.raises(ConfigError, match="cannot be put off"):
        runner.run(0)
    assert runner._passes == {}


def test_orders_that_are_no_step_are_refused() -> None:
    f, b = Action("F", 0, 0), Action("B", 0, 0)
    for orders in (((f,),), ((f, b), (b,)), ((f, f, b),), ((b, Action("W", 0, 1), f),)):
        with pytest.raises(SafetyError):
            Schedule(orders, 1, range(len(orders)))
    with pytest.raises(DeadlockError):
        Schedule(((b, f),), 1, [0])


def test_only_tensors_go_from_stage_to_stage() -> None:
    class Words(nn.Module):
        def forward(self, value: Tensor) -> dict[str, Tensor]:
            return {"value": value}

    schedule = Schedule(join_replicas([order_1f1b(1, [0])]), 1, [0])
    parts = [StageBlocks(0, [Words(), nn.Linear(WIDTH, WIDTH)], 0, recompute=True)]
    runner = Runner(schedule, 0, parts, Group((0,), 0, None, None), load=load, loss=loss, seed=0)
    with pytest.raises(ConfigError, match="a block returned dict"):
        runner.run(0)
