"""Measurements to figures: outliers, lines, and what a live run adds to a profile."""

import pytest
from tests.profiles import make_profile

from perdure.model.errors import MeasureError
from perdure.model.planning.costs import BlockCost
from perdure.model.planning.pipeline import Action, Executed
from perdure.plan.worlds.measures import StageTimes, collect_times, fit_line, refresh, settle


def test_disturbed_measurements_do_not_move_a_figure() -> None:
    quiet = [1.0, 1.01, 0.99, 1.02, 1.0]
    figure = settle([*quiet, *(5.0 for _ in range(9))], "x")
    assert figure.value == pytest.approx(1.0, rel=0.03)
    assert figure.spread > 1.0
    assert settle(quiet, "x").spread < 0.03


@pytest.mark.parametrize("samples", [[], [1.0], [0.0, 0.0, 0.0]])
def test_what_was_not_measured_is_an_error_and_not_a_zero(samples: list[float]) -> None:
    with pytest.raises(MeasureError, match="forward of block 3"):
        settle(samples, "forward of block 3")


def test_a_line_through_messages_gives_latency_and_bandwidth() -> None:
    points = [(size, 2e-4 + size / 1e9) for size in (1e3, 1e5, 1e6, 1e7)]
    latency_s, bytes_per_s = fit_line(points, "message")
    assert latency_s == pytest.approx(2e-4)
    assert bytes_per_s == pytest.approx(1e9)


def test_a_latency_is_never_negative() -> None:
    latency_s, bytes_per_s = fit_line([(1e3, 1e-6), (1e6, 3e-3), (2e6, 7e-3)], "message")
    assert latency_s == 0.0
    assert bytes_per_s > 0.0


@pytest.mark.parametrize("points", [[(1e3, 1.0)], [(1e3, 1.0), (1e6, 0.5)]])
def test_points_that_are_no_line_are_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(MeasureError, match="message"):
        fit_line(points, "message")


def times(
    device: str, forward_s: float, backward_s: float, weight_s: float = 0.0, *,
    stop: int = 2, recompute: bool = False, count: int = 6,
) -> StageTimes:  # fmt: skip
    late = (weight_s,) * count if weight_s else ()
    return StageTimes(device, 0, stop, recompute, (forward_s,) * count, (backward_s,) * count, late)


def test_a_stage_that_is_slower_than_profiled_makes_its_blocks_so_in_proportion() -> None:
    """Blocks of 1 and 3 s; the stage's forward takes 8 s, its backward the 8 s that it should."""
    profile = make_profile([1.0, 3.0, 1.0], sizes=(1, 2))
    found = refresh(profile, 1, [times("n0/0", 8.0, 8.0)], weight=1.0)
    costs = [[b.costs[size].forward_s for b in found.profile.blocks] for size in (1, 2)]
    assert costs == [[2.0, 6.0, 1.0], [4.0, 12.0, 2.0]]
    assert [b.costs[1].backward_s for b in found.profile.blocks] == [2.0, 6.0, 2.0]
    assert found.unseen == ("b2",)
    half = refresh(profile, 1, [times("n0/0", 8.0, 8.0)], weight=0.5)
    assert half.profile.blocks[0].costs[1].forward_s == 1.5


def test_a_recomputed_backward_is_compared_with_what_it_contains() -> None:
    profile = make_profile([1.0, 3.0])
    found = refresh(profile, 1, [times("n0/0", 4.0, 12.0, recompute=True)], weight=1.0)
    assert found.profile == profile


def test_a_split_backward_is_folded_in_part_by_part() -> None:
    profile = make_profile([1.0, 3.0], weight=0.5)  # backward 2, 6 s, of it weights .5, 1.5 s
    found = refresh(profile, 1, [times("n0/0", 4.0, 12.0, 2.0)], weight=1.0)
    assert [b.costs[1].backward_s for b in found.profile.blocks] == pytest.approx([3.5, 10.5])
    assert [b.costs[1].weight_s for b in found.profile.blocks] == pytest.approx([0.5, 1.5])


def test_a_straggler_is_slow_and_its_blocks_are_not() -> None:
    profile = make_profile([1.0, 3.0])
    copies = [times("n0/0", 4.0, 8.0), times("n1/0", 8.0, 16.0), times("n2/0", 4.0, 8.0)]
    found = refresh(profile, 1, copies, weight=1.0)
    assert found.profile == profile
    assert found.slowdowns == {"n0/0": 1.0, "n1/0": 2.0, "n2/0": 1.0}


def test_a_few_measurements_change_nothing() -> None:
    profile = make_profile([1.0, 3.0])
    found = refresh(profile, 1, [times("n0/0", 9.0, 9.0, count=4)])
    assert found.profile == profile
    assert found.unseen == ("b0", "b1")


def test_a_timeline_is_collected_by_stage_and_kind() -> None:
    line = [
        Executed(Action("F", 2, 0), 0.0, 1.0),
        Executed(Action("B", 2, 0), 1.0, 3.0),
        Executed(Action("F", 2, 1), 4.0, 5.5),
    ]
    (found,) = collect_times("n0/0", {2: (4, 6, True)}, line)
    assert found == StageTimes("n0/0", 4, 6, True, (1.0, 1.5), (2.0,), ())


def test_a_block_cost_keeps_its_bytes() -> None:
    profile = make_profile([1.0], stored=7, inputs=3)
    cost = refresh(profile, 1, [times("n0/0", 2.0, 2.0, stop=1)]).profile.blocks[0].costs[1]
    assert isinstance(cost, BlockCost)
    assert (cost.input_bytes, cost.stored_bytes) == (3, 7)
