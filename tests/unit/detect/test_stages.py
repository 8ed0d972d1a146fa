import pytest

from perdure.detect.stages import find_frontier


def test_the_frontier_is_an_exact_additive_account():
    row = {0: (1.0, 2.0, 0.5, 0.1), 1: (0.5, 4.0, 0.1, 0.1), 2: (2.0, 1.0, 1.0, 0.4)}
    increments = find_frontier(row)
    assert increments == pytest.approx((2.0, 2.5, 0.1, 0.1))
    assert sum(increments) == pytest.approx(max(sum(parts) for parts in row.values()))
