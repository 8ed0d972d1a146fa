"""What a repetition of the matrix counts as, and how sure a share of ten is."""

from typing import Any

import pytest
from bench.matrix_table import compute_wilson, name_end, render_tables

RIGHT = {"kind": "ComputeHang", "kind_right": True, "culprit_right": True, "confirm_s": 1.2}


def row(**changes: Any) -> dict[str, Any]:
    """Return a repetition that went well, with changes."""
    cell = {"fault": "stop", "severity": 4.0, "world": 4, "rep": 0, "load": 2.5, "seed": 7}
    said: dict[str, Any] = {"passing": [], "after": [], "idle": [], "commit": "abc", **RIGHT}
    return cell | said | {"thresholds": "0123abcd", "piece": 1} | changes


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, "found"),
        ({"confirm_s": 2.0}, "late"),
        ({"culprit_right": False}, "wrong culprit"),
        ({"kind": "CommSlow", "kind_right": False, "culprit_right": False}, "another verdict"),
        ({"kind": "none", "kind_right": False, "culprit_right": False}, "missed"),
        ({"fault": "memory", "kind": "none", "kind_right": False}, "found"),
        ({"fault": "slow-data", "severity": 1.2, "confirm_s": 29.0}, "found"),
        ({"fault": "slow-data", "severity": 2.0, "confirm_s": 29.0}, "late"),
    ],
)
def test_what_a_fault_came_to(changes: dict[str, Any], end: str) -> None:
    assert name_end(row(**changes)) == end


def test_ten_of_ten_is_no_certainty() -> None:
    """Against tables of Wilson's interval (Newcombe 1998: 81/263, 15/148, 0/20, 1/29)."""
    known = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
             (1, 29, 0.0061, 0.1718)]  # fmt: skip
    for hits, trials, low, high in known:
        assert compute_wilson(hits, trials) == pytest.approx((low, high), abs=1e-4)
    assert compute_wilson(10, 10)[0] == pytest.approx(0.722, abs=1e-3)
    assert compute_wilson(0, 0) == (0.0, 1.0)


def test_a_table_says_what_it_was_measured_with() -> None:
    missed = row(kind="none", kind_right=False, culprit_right=False, confirm_s=-1.0, load=9.0)
    text = render_tables([row(), missed, {"fault": "stop", "error": "no job"}])
    assert "| stop | 4 | 1/2 [9, 91] % |" in text
    assert "2 repetitions, and 1 that the laboratory itself failed." in text
    for word in ("seed: 7", "commit: abc", "thresholds: 0123abcd", "load: 2.5 to 9.0"):
        assert word in text
