"""Schedules: closed forms of the literature, and what must hold of any of them."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.gpipe import order_gpipe

from perdure.model.planning.pipeline import Action, Executed, Orders, Timeline
from perdure.plan.pipeline.orders import (
    join_replicas,
    order_1f1b,
    order_greedily,
    order_interleaved,
    order_zero_bubble,
    route_spread,
)
from perdure.plan.pipeline.simulate import FREE, DeadlockError, Pipe, simulate
from perdure.plan.worlds.chain import StageCost

PUBLISHED = [order_gpipe, order_1f1b, order_zero_bubble]
ranks = st.integers(1, 6)
counts = st.integers(1, 12)
seconds = st.integers(1, 8).map(float)


def free(_stage: int, _here: int, _there: int) -> tuple[float, float]:
    return FREE


def uniform(stages: int, f: float, b: float, w: float = 0.0) -> Pipe:
    cost = StageCost(f, b, w, 0, 0, 0.0)
    return Pipe([cost] * stages, free, [0.0] * stages)


def check(orders: Orders, line: Timeline, pipe: Pipe) -> None:
    """Every action once, on time, after what it needs, in the order of its cell."""
    when: dict[Action, Executed] = {}
    for cell, (mine, times) in enumerate(zip(orders, line.cells, strict=True)):
        assert tuple(entry.action for entry in times.executed) == mine
        free_s = 0.0
        for entry in times.executed:
            assert entry.action not in when
            assert entry.begin_s >= free_s
            assert entry.end_s == pytest.approx(entry.begin_s + pipe.work_s(entry.action, cell))
            free_s = entry.end_s
            when[entry.action] = entry
    last = len(pipe.stages) - 1
    for action, entry in when.items():
        needs = {
            "F": [Action("F", action.stage - 1, action.micro_batch)] if action.stage else [],
            "B": [
                Action("F", action.stage, action.micro_batch),
                *(
                    [Action("B", action.stage + 1, action.micro_batch)]
                    if action.stage < last
                    else []
                ),
            ],
            "W": [Action("B", action.stage, action.micro_batch)],
        }[action.kind]
        for needed in needs:
            assert when[needed].end_s <= entry.begin_s
    assert line.step_s >= max((e.end_s for e in when.values()), default=0.0)


def held(orders: Orders) -> list[int]:
    """Return the most micro-batches that a cell has in flight, over its stages."""
    most = []
    for mine in orders:
        now = top = 0
        for action in mine:
            now += {"F": 1, "B": -1, "W": 0}[action.kind]
            top = max(top, now)
        most.append(top)
    return most


# --- closed forms --------------------------------------------------------------------------------


@given(ranks, counts, seconds, seconds, st.sampled_from([order_gpipe, order_1f1b]))
def test_equal_stages(p: int, m: int, f: float, b: float, order: Callable[..., list]) -> None:
    """(m + p - 1)(f + b), bubble (p - 1)/(m + p - 1): Narayanan et al., SC 2021, section 2.2."""
    line = simulate(join_replicas([order(p, range(m))]), uniform(p, f, b))
    assert line.step_s == pytest.approx((m + p - 1) * (f + b))
    assert line.bubble == pytest.approx((p - 1) / (m + p - 1))


@given(ranks, st.integers(1, 4), st.integers(1, 3), seconds, seconds)
def test_interleaved_stages(p: int, groups: int, chunks: int, f: float, b: float) -> None:
    """m (f + b) + (p - 1)(f + b)/v for m a multiple of p: the same section."""
    m = groups * p
    line = simulate(
        join_replicas([order_interleaved(p, chunks, range(m))]),
        uniform(p * chunks, f / chunks, b / chunks),
    )
    assert line.step_s == pytest.approx(m * (f + b) + (p - 1) * (f + b) / chunks)


@given(ranks, st.integers(0, 10), seconds)
def test_zero_bubble(p: int, more: int, unit: float) -> None:
    """Bubble (p - 1)(f + b - w) with f = b = w: Qi et al., ICLR 2024, table 2 (ZB-H1)."""
    m = 2 * p + more
    line = simulate(join_replicas([order_zero_bubble(p, range(m))]), uniform(p, unit, unit, unit))
    assert line.step_s == pytest.approx(3 * m * unit + (p - 1) * unit)


@given(ranks, counts)
def test_gpipe_with_slow_links(p: int, m: int) -> None:
    """Latency alone delays the first and the last of equal stages: 2 (p - 1) times."""
    pipe = Pipe([StageCost(1.0, 2.0, 0.0, 0, 0, 0.0)] * p, lambda *_: (0.5, 0.0), [0.0] * p)
    line = simulate(join_replicas([order_gpipe(p, range(m))]), pipe)
    assert line.step_s == pytest.approx((m + p - 1) * 3.0 + 2 * (p - 1) * 0.5)


def test_a_narrow_link_is_what_takes_time() -> None:
    """Ten messages of 3 s after each other, behind a forward of 1 s; then the last one's way."""
    pipe = Pipe([StageCost(1.0, 1.0, 0.0, 0, 0, 0.0)] * 2, lambda *_: (0.0, 3.0), [0.0] * 2)
    line = simulate(join_replicas([order_gpipe(2, range(10))]), pipe)
    assert [e.begin_s for e in line.cells[1].executed[:10]] == [4.0 + 3 * i for i in range(10)]


def test_gradients_of_weights_wait_for_no_message() -> None:
    pipe = Pipe([StageCost(1.0, 1.0, 1.0, 0, 0, 0.0)] * 2, lambda *_: (50.0, 0.0), [0.0] * 2)
    line = simulate(join_replicas([order_zero_bubble(2, [0])]), pipe)
    assert [e.begin_s for e in line.cells[1].executed] == [51.0, 52.0, 53.0]


def test_all_reduce_begins_when_all_copies_of_the_stage_are_done() -> None:
    """Two stages: the last is done first, and its sum hides behind the first one's backward."""
    stage = StageCost(1.0, 2.0, 0.0, 0, 0, 0.25)
    pipe = Pipe([stage] * 2, free, [1.0, 1.5], slowdowns=[1.0, 1.0, 2.0, 2.0])
    orders = join_replicas([order_1f1b(2, [0]), order_1f1b(2, [1])])
    line = simulate(orders, pipe)
    assert [cell.executed[-1].end_s for cell in line.cells] == [6.0, 4.0, 12.0, 8.0]
    assert [cell.end_s for cell in line.cells] == [13.25, 9.75, 13.25, 9.75]
    assert line.step_s == 13.25
    for share, wanted in ((1.0, 12.25), (0.5, 12.75)):
        hidden = Pipe([stage] * 2, free, [1.0, 1.5], [1.0, 1.0, 2.0, 2.0], [share] * 2)
        assert simulate(orders, hidden).step_s == wanted


def test_a_cell_s_stages_are_reduced_together_once_all_are_done() -> None:
    stage = StageCost(1.0, 2.0, 0.0, 0, 0, 0.0)
    pipe = Pipe([stage] * 4, free, [1.0, 1.5, 2.0, 2.5], overlap=[1.0] * 4)
    line = simulate(join_replicas([order_interleaved(2, 2, [0, 1])]), pipe)
    for cell, (done, reduce_s) in enumerate(zip(line.cells, (3.0, 4.0), strict=True)):
        assert done.reduce_s == reduce_s
        assert done.end_s == line.cells[cell].executed[-1].end_s + reduce_s


def test_what_stages_share_is_reduced_after_all_else_over_all_that_have_it() -> None:
    stage = StageCost(1.0, 2.0, 0.0, 0, 0, 0.25)
    pipe = Pipe([stage] * 3, free, [0.0, 0.0, 0.0], ties=[((0, 2), 1.0)])
    line = simulate(join_replicas([order_1f1b(3, [0])]), pipe)
    assert [cell.end_s for cell in line.cells] == [10.25, 7.25, 10.25]
    assert [cell.reduce_s for cell in line.cells] == [1.0, 0.0, 1.0]


# --- any schedule --------------------------------------------------------------------------------


@st.composite
def pipes(draw: st.DrawFn, stages: int, cells: int) -> Pipe:
    costs = [
        StageCost(draw(seconds), draw(seconds), draw(seconds), 0, 0, 0.0) for _ in range(stages)
    ]
    latency_s, occupied_s = draw(st.sampled_from([(0.0, 0.0), (0.5, 0.0), (0.25, 3.0)]))
    slow = [draw(st.sampled_from([1.0, 1.0, 1.5, 4.0])) for _ in range(cells)]
    return Pipe(costs, lambda *_: (latency_s, occupied_s), [1.0] * stages, slow)


@settings(deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(0, 7), min_size=1, max_size=3), st.data())
def test_published_orders_are_schedules(p: int, shares: list[int], data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(PUBLISHED))
    starts = [sum(shares[:i]) for i in range(len(shares))]
    replicas = [order(p, range(a, a + n)) for a, n in zip(starts, shares, strict=True)]
    orders = join_replicas(replicas)
    pipe = data.draw(pipes(p, len(orders)))
    line = simulate(orders, pipe)
    check(orders, line, pipe)
    kinds = Counter((a.kind, a.stage) for mine in orders for a in mine)
    assert set(kinds.values()) <= {sum(shares)}
    if order is not order_gpipe:
        assert all(most <= p - cell % p for cell, most in enumerate(held(orders)))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.data())
def test_interleaved_orders_are_schedules(
    p: int, chunks: int, groups: int, size: int, data: st.DataObject
) -> None:
    m = groups * size
    assume(m % max(1, m // p) == 0)
    orders = join_replicas([order_interleaved(p, chunks, range(m))])
    pipe = data.draw(pipes(p * chunks, p))
    check(orders, simulate(orders, pipe), pipe)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 12), st.data())
def test_stages_with_different_copies(copies: list[int], count: int, data: st.DataObject) -> None:
    numbers = iter(range(sum(copies)))
    cells = [[next(numbers) for _ in range(n)] for n in copies]
    routes = route_spread(cells, count)
    pipe = data.draw(pipes(len(copies), sum(copies)))
    caps = [len(copies) - s for s in range(len(copies))]
    orders = order_greedily(routes, sum(copies), pipe, caps)
    check(orders, simulate(orders, pipe), pipe)


def test_orders_that_wait_in_a_ring_are_told() -> None:
    orders = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    with pytest.raises(DeadlockError, match=r"cell 0 waits for ever to do B0\.0"):
        simulate(orders, uniform(2, 1.0, 1.0))
