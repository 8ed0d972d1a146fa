import pytest

from perdure.plan.checkpoints import daly, young


def lost_fraction(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Cost of saving plus half an interval lost a failure: the first-order model."""
    return cost_s / interval_s + interval_s / (2 * mtbf_s)


def test_young_minimises_the_first_order_loss() -> None:
    best = young(2.0, 3600.0)
    here = lost_fraction(best, 2.0, 3600.0)
    assert here < lost_fraction(best * 1.1, 2.0, 3600.0)
    assert here < lost_fraction(best * 0.9, 2.0, 3600.0)


def test_published_example() -> None:
    # 30 s a save, three hours between preemptions: 805 s (platform profile, spot resilience).
    assert young(30.0, 3 * 3600.0) == pytest.approx(805, abs=1)


def test_daly_is_young_for_cheap_saves_and_the_mtbf_for_absurd_ones() -> None:
    assert daly(0.001, 1e6) == pytest.approx(young(0.001, 1e6), rel=1e-3)
    assert daly(100.0, 50.0) == 50.0
