"""Cuts of a chain against all cuts that there are."""

import math
from itertools import combinations, pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.profiles import make_block

from perdure.model.planning.costs import CostProfile
from perdure.plan.worlds.chain import Chain, Cutter

times = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    blocks = tuple(
        make_block(
            f"b{i}", float(draw(st.integers(1, 9))), state=draw(st.integers(0, 40)),
            stored=draw(st.integers(4, 20)), inputs=draw(st.integers(1, 4)),
        )
        for i in range(draw(st.integers(1, 7)))
    )  # fmt: skip
    return Chain(CostProfile("m", "x", 0, blocks), 1)


def cost_of(
    chain: Chain, room: int, allowed: tuple[bool, ...], first: int, stop: int, place: int
) -> float:
    """What sending a stage's input takes does not fall where the stage begins later."""
    recompute = chain.decide_recompute(first, stop, place, room, allowed)
    if recompute is None:
        return math.inf
    return max(chain.work(first, stop, recompute), 3.0 * chain.costs[first].input_bytes)


@settings(deadline=None)
@given(chains(), st.integers(10, 200), st.sampled_from([(False,), (False, True), (True,)]))
def test_no_cut_is_better(chain: Chain, room: int, allowed: tuple[bool, ...]) -> None:
    def cost(first: int, stop: int, place: int) -> float:
        return cost_of(chain, room, allowed, first, stop, place)

    cutter = Cutter(len(chain), cost)
    for stages in range(1, len(chain) + 2):
        found = cutter.cut(stages)
        best = min(
            (
                max(cost(a, b, stages - i) for i, (a, b) in enumerate(pairwise(cut)))
                for inner in combinations(range(1, len(chain)), stages - 1)
                for cut in [(0, *inner, len(chain))]
            ),
            default=math.inf,
        )
        if found is None:
            assert best == math.inf
            continue
        worst, cuts, extras = found
        assert worst == best
        assert (cuts[0], cuts[-1], len(cuts), any(extras)) == (0, len(chain), stages + 1, False)
        assert max(cost(a, b, stages - i) for i, (a, b) in enumerate(pairwise(cuts))) == best


@settings(deadline=None)
@given(times, st.integers(1, 5), st.integers(1, 3), st.integers(1, 12), st.data())
def test_no_cut_with_extra_copies_is_better(
    work: list[int], stages: int, copies: int, count: int, data: st.DataObject
) -> None:
    extra = data.draw(st.integers(0, stages))
    loads = (float(math.ceil(count / copies)), float(math.ceil(count / (copies + 1))))
    cutter = Cutter(len(work), lambda a, b, _: float(sum(work[a:b])), loads)
    found = cutter.cut(stages, extra)
    best = min(
        (
            max(loads[h] * sum(work[a:b]) for h, a, b in zip(has, cut, cut[1:], strict=False))
            for inner in combinations(range(1, len(work)), stages - 1)
            for cut in [(0, *inner, len(work))]
            for has in product((0, 1), repeat=stages)
            if sum(has) == extra
        ),
        default=math.inf,
    )
    if found is None:
        assert best == math.inf
        return
    worst, cuts, extras = found
    assert worst == best
    assert sum(extras) == extra
    assert best == max(
        loads[h] * sum(work[a:b]) for h, a, b in zip(extras, cuts, cuts[1:], strict=False)
    )
