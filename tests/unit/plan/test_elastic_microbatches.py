"""Every sample once, whoever lives; what is finished stays; one order of addition."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.model.errors import ConfigError
from perdure.plan.elastic.microbatches import (
    assign,
    cover,
    leaves_of,
    parent_of,
    plan_batches,
    reassign,
    root_of,
    sibling_of,
)


@given(st.integers(1, 40), st.sets(st.integers(0, 20), min_size=1, max_size=9))
def test_an_undisturbed_step_gives_each_micro_batch_to_one_rank(
    count: int, ranks: set[int]
) -> None:
    shares = assign(count, sorted(ranks))
    assert sorted(itertools.chain(*shares.values())) == list(range(count))
    sizes = [len(mine) for mine in shares.values()]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 24), st.integers(1, 6), st.data())
def test_what_is_finished_stays_and_only_the_rest_is_given_out(
    count: int, size: int, data: st.DataObject
) -> None:
    owner = data.draw(st.lists(st.integers(-1, size - 1), min_size=count, max_size=count))
    ranks = list(range(0, 2 * size, 2))
    kept = {r: [m for m in range(count) if owner[m] == i] for i, r in enumerate(ranks)}
    todo = reassign(count, ranks, kept)
    both = sorted([*itertools.chain(*kept.values()), *itertools.chain(*todo.values())])
    assert both == list(range(count))


def test_what_is_missing_goes_to_whoever_has_least() -> None:
    assert reassign(6, [0, 1], {0: [0, 1, 2], 1: [3]}) == {0: (), 1: (4, 5)}


def test_a_global_batch_is_a_whole_number_of_micro_batches() -> None:
    plan = plan_batches(12, 4)
    assert plan.count == 3
    assert [list(plan.positions(2, m)) for m in (0, 2)] == [[24, 25, 26, 27], [32, 33, 34, 35]]
    with pytest.raises(ConfigError):
        plan_batches(10, 4)


@given(st.integers(1, 33), st.data())
def test_a_cover_is_exact_and_as_coarse_as_can_be(count: int, data: st.DataObject) -> None:
    held = data.draw(st.sets(st.integers(0, count - 1)))
    nodes = cover(held, count)
    assert sorted(itertools.chain(*(leaves_of(n, count) for n in nodes))) == sorted(held)
    for node in nodes:
        sibling = sibling_of(node, count)
        assert node == root_of(count) or (sibling is not None and sibling not in nodes)


@given(st.integers(1, 20), st.lists(st.integers(0, 3), min_size=20, max_size=20))
def test_the_order_of_addition_does_not_depend_on_who_held_what(count: int, by: list[int]) -> None:
    def text(node: tuple[int, int]) -> str:
        level, index = node
        if level == 0:
            return str(index)
        left, right = (level - 1, 2 * index), (level - 1, 2 * index + 1)
        inner = text(left)
        return f"({inner}+{text(right)})" if len(leaves_of(right, count)) else inner

    sums: dict[tuple[int, int], str] = {}
    for rank in range(4):
        mine = [m for m in range(count) if by[m] == rank]
        sums |= {node: text(node) for node in cover(mine, count)}
    while root_of(count) not in sums:
        node = min(sums)
        sibling, value = sibling_of(node, count), sums.pop(node)
        if sibling is not None:
            pair = sorted([(node, value), (sibling, sums.pop(sibling))])
            value = f"({pair[0][1]}+{pair[1][1]})"
        sums[parent_of(node)] = value
    assert sums[root_of(count)] == text(root_of(count))
