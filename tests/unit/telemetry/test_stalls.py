"""What a re-formation cost a rank, phase by phase, and from which of its accounts it is taken."""

import pytest

from perdure.model.events import FailureDecided
from perdure.telemetry.accounting.reforms import Stall, split_stall, take_stalls

RE = "reconfiguration."
STALL = Stall(1, waited_s=9.5, began_s=10.3, ordered_s=10.4, connected_s=10.7, formed_s=11.0)
REFORM = FailureDecided(
    id="f", world=0, cause="SIGKILL", culprit="rank 1", at_step=5, failure_s=10.0,
    detected_s=10.1, at_s=10.2, rung="reform", reason="", epoch=1,
)  # fmt: skip


def test_the_wait_for_one_who_still_lived_is_no_stall() -> None:
    phases, in_step_s, in_overhead_s = split_stall(STALL, REFORM)
    assert phases == pytest.approx(
        {
            RE + "detect": 0.1,
            RE + "decide": 0.1,
            RE + "abort": 0.2,
            RE + "communicator": 0.3,
            RE + "state": 0.3,
        }
    )
    assert (in_step_s, in_overhead_s) == pytest.approx((0.3, 0.7))


def test_who_computed_when_the_peer_died_was_stalled_only_once_it_left() -> None:
    late = Stall(1, waited_s=10.3, began_s=10.3, ordered_s=10.3, connected_s=10.7, formed_s=11.0)
    phases, in_step_s, _ = split_stall(late, REFORM)
    assert in_step_s == 0
    assert sum(phases.values()) == pytest.approx(0.7)
    assert phases[RE + "detect"] == phases[RE + "decide"] == 0


def test_a_join_has_no_failure() -> None:
    phases, in_step_s, _ = split_stall(STALL, None)
    assert set(phases) == {RE + "abort", RE + "communicator", RE + "state"}
    assert in_step_s == 0
    assert sum(phases.values()) == pytest.approx(0.7)


def test_nothing_is_made_or_lost() -> None:
    pieces = {"useful": 8.0, "lost_work": 0.0, "steady_overhead": 0.9}
    moved = take_stalls(pieces, [(STALL, REFORM)])
    assert sum(moved.values()) == pytest.approx(8.9)
    assert moved["useful"] == pytest.approx(7.7)
    assert moved["steady_overhead"] == pytest.approx(0.2)


def test_no_more_is_moved_than_the_rank_has_counted() -> None:
    moved = take_stalls({"useful": 8.0, "steady_overhead": 0.1}, [(STALL, REFORM)])
    assert sum(moved.values()) == pytest.approx(8.1)
    assert moved["steady_overhead"] == 0
