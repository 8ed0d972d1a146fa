"""Figures of a trace, and traces drawn from a model that was fitted to one."""

import pytest

from perdure_lab.traces import AvailabilityTrace, Stay, TraceNode, list_intervals
from perdure_lab.traces.figures import (
    AvailabilityModel,
    describe_availability,
    draw_victims,
    fit_availability,
    generate,
)

HOUR = 3600.0


def test_figures() -> None:
    nodes = (
        TraceNode("a", (Stay(0.0, HOUR, 30.0), Stay(2 * HOUR))),
        TraceNode("b", (Stay(0.0, HOUR),), slots=4),
        TraceNode("c", (Stay(0.0),)),
    )
    figures = describe_availability(AvailabilityTrace("t", 4 * HOUR, nodes))
    assert (figures.nodes_min, figures.nodes_max, figures.slots_max) == (1, 3, 6)
    assert figures.node_hours == pytest.approx(3 + 1 + 2 * 2)
    assert figures.availability == pytest.approx(8 / 12)
    assert (figures.changes, figures.changes_per_h) == (2, 0.5)
    assert figures.node_mtbf_s == pytest.approx(4 * HOUR)
    assert figures.job_mtbf_s == pytest.approx(4 * HOUR)
    assert (figures.announced, figures.notice_s) == (0.5, 30.0)
    assert (figures.losses, figures.gains) == ({2: 1}, {1: 1})


MODEL = AvailabilityModel(
    32, 24, 0.3, 0.9, ((1, 3), (4, 1)), ((1, 3), (3, 1)), announced=0.5, notice_s=120.0
)


def test_a_fitted_model_has_the_rates_it_was_drawn_from() -> None:
    fitted = fit_availability(generate(MODEL, 2000 * HOUR, seed=3))
    assert fitted.losses_per_node_h == pytest.approx(0.3, rel=0.05)
    # A model knows no vacancies beyond the most nodes that were there.
    assert fitted.gains_per_vacancy_h == pytest.approx(0.9, rel=0.15)
    assert fitted.announced == pytest.approx(0.5, abs=0.05)
    large = dict(fitted.loss_sizes)[4] / sum(times for _, times in fitted.loss_sizes)
    assert large == pytest.approx(0.25, abs=0.03)


def test_the_same_seed_gives_the_same_trace() -> None:
    assert generate(MODEL, 20 * HOUR, seed=1) == generate(MODEL, 20 * HOUR, seed=1)
    assert generate(MODEL, 20 * HOUR, seed=1) != generate(MODEL, 20 * HOUR, seed=2)


def test_drawn_victims_change_who_and_never_how_many() -> None:
    trace = generate(MODEL, 20 * HOUR, seed=1)
    drawn = draw_victims(trace, seed=5)
    assert [(i.begin_s, len(i.living)) for i in list_intervals(drawn)] == [
        (i.begin_s, len(i.living)) for i in list_intervals(trace)
    ]
    assert find_notices(drawn) == find_notices(trace)
    assert draw_victims(trace, seed=6) != drawn


def find_notices(trace: AvailabilityTrace) -> list[list[float]]:
    return [sorted(d.notice_s for d in i.change.left) for i in list_intervals(trace)]
