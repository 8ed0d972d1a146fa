"""The planner's worlds as a table by shape."""

from pathlib import Path

import pytest

from perdure.model.errors import ConfigError
from perdure.model.planning.costs import read_profile
from perdure.model.planning.world import Stage, World, make_devices
from perdure.plan.worlds.planner import Request, plan_worlds
from perdure_lab.policies.throughput import Shape, shape_of, tabulate

PROFILE = Path(__file__).resolve().parents[3] / "examples" / "cost_profile.json"


def test_each_shape_has_the_pace_of_the_planners_best_world_of_it() -> None:
    profile = read_profile(PROFILE.read_text(), str(PROFILE))
    table = tabulate(profile, 6, 80 * 10**9, 64)
    assert {shape.stages for shape in table.rates} > {1, 2}
    assert all(shape.nodes <= 6 for shape in table.rates)
    devices = make_devices(6, 1, 80 * 10**9)
    best = plan_worlds(profile, devices, Request(64, schedules=("1f1b", "interleaved"))).options[0]
    shape = shape_of(best.world)
    assert shape is not None
    assert table.rates[shape] == pytest.approx(best.samples_per_s)
    assert table.choose_fastest(6) == shape


def test_what_fits_nowhere_is_said() -> None:
    profile = read_profile(PROFILE.read_text(), str(PROFILE))
    with pytest.raises(ConfigError, match="no world fits"):
        tabulate(profile, 2, 10, 64)


def test_a_world_with_uneven_stages_has_no_shape() -> None:
    def make(*copies: int) -> World:
        stages = tuple(
            Stage(i, i + 1, False, tuple(f"n{i}/{c}" for c in range(count)))
            for i, count in enumerate(copies)
        )
        return World("rerouted", 1, 8, 1, stages)

    assert shape_of(make(2, 2)) == Shape(2, 2)
    assert shape_of(make(2, 1)) is None
