"""Verdict, situation and policy to a reaction."""

from typing import Any

import pytest
from msgspec import convert
from msgspec.structs import replace
from tests.slowness import find_slowness

from perdure.model.job import PolicyConfig
from perdure.model.verdicts import Culprit, Verdict
from perdure.policy import Situation, estimate_restart_cost_s, react


def verdict(kind: str, **evidence: Any) -> Verdict:
    return Verdict(
        kind=kind,  # type: ignore[arg-type]
        culprit=Culprit(rank=1),
        generation=0,
        first_seen_s=1.0,
        confirmed_s=2.0,
        confidence=0.9,
        reason="r",
        actionable=True,
        evidence=evidence,
    )


def test_hang_leaves_its_node_out_where_a_spare_stands_ready() -> None:
    reaction = react(verdict("CommHang"), PolicyConfig(), Situation(node=1, spares=(2, 3)))
    assert (reaction.rung, reaction.leave_out, reaction.cordon) == ("restart", True, False)
    assert "node 2 stands in" in reaction.reason


def test_hang_without_a_spare_or_a_culprit_restarts_the_same_world() -> None:
    for situation in (Situation(node=1), Situation(node=None, spares=(2,))):
        reaction = react(verdict("CommHang"), PolicyConfig(), situation)
        assert (reaction.rung, reaction.leave_out) == ("restart", False)


def test_second_blame_cordons_whatever_the_kind_of_hang() -> None:
    config, kind = PolicyConfig(), verdict("ComputeHang")
    first = react(kind, config, Situation(node=1, spares=(2,)))
    second = react(kind, config, Situation(node=1, spares=(2,), blames=1))
    never = react(kind, PolicyConfig(cordon_after=0), Situation(node=1, spares=(2,), blames=9))
    assert (first.leave_out, first.cordon) == (False, False)
    assert (second.leave_out, second.cordon) == (True, True)
    assert (never.leave_out, never.cordon) == (False, False)


def test_straggler_is_replaced_only_where_that_pays() -> None:
    """T6: the verdicts are what the detector makes of a simulated slow rank."""
    ready = Situation(node=1, spares=(2,), restart_s=3.0)
    assert react(find_slowness(1.3), PolicyConfig(), ready).rung == "none"
    slow = find_slowness(2.5)
    reaction = react(slow, PolicyConfig(), ready)
    assert reaction.rung == "restart"
    assert reaction.leave_out
    # Four fifths of a step were work: now it takes 2.0 and the rest at most 0.2; 1.2 can be won.
    assert slow.slowness is not None
    assert slow.slowness.share_low == pytest.approx(1.2 / 2.2, abs=0.03)
    assert "of every step: repaid after 5 s" in reaction.reason
    slow_to_repay = react(slow, PolicyConfig(payback_s=4.0), ready)
    assert (slow_to_repay.rung, slow_to_repay.ground) == ("none", "payback")
    alone = react(slow, PolicyConfig(), Situation(node=1))
    assert (alone.rung, "no spare node" in alone.reason) == ("none", True)


def test_slowness_that_came_up_elsewhere_soon_after_a_replacement_is_only_reported() -> None:
    """T6: where the work moves about, each replacement would be followed by another."""
    ready = Situation(node=1, spares=(2,), restart_s=3.0, replaced_s=100.0)
    slow = find_slowness(2.5)
    reaction = react(slow, PolicyConfig(), ready)
    assert (reaction.rung, reaction.ground) == ("none", "moved")
    assert react(slow, PolicyConfig(), replace(ready, replaced_s=601.0)).rung == "restart"


def test_it_is_the_step_that_counts_and_the_lower_end_of_what_was_measured() -> None:
    """A link three times as slow costs a step little, and noise widens what is known."""
    ready = Situation(node=1, spares=(2,), restart_s=3.0)
    link = find_slowness(3.0, "slow-link", 4)
    assert link.kind == "CommSlow"
    assert link.slowness is not None
    assert link.slowness.ratio > 2.5
    assert link.slowness.share < 0.3
    assert react(link, PolicyConfig(), ready).ground == "factor"
    quiet, noisy = find_slowness(2.0).slowness, find_slowness(2.0, jitter=0.12).slowness
    assert quiet is not None
    assert noisy is not None
    assert quiet.share - quiet.share_low < noisy.share - noisy.share_low


def test_slowness_of_somebody_unsure_or_unmeasured_is_only_reported() -> None:
    ready = Situation(node=1, spares=(2,), restart_s=3.0)
    slow = find_slowness(2.5)
    assert react(replace(slow, confidence=0.6), PolicyConfig(), ready).ground == "confidence"
    assert react(replace(slow, slowness=None), PolicyConfig(), ready).ground == "unmeasured"
    again = replace(ready, replaced=True)
    assert react(slow, PolicyConfig(), again).ground == "work"


def test_desync_stops_and_an_unknown_kind_is_only_reported() -> None:
    situation = Situation(node=1, spares=(2,))
    assert react(verdict("Desync"), PolicyConfig(), situation).rung == "stop"
    assert react(verdict("Preemption"), PolicyConfig(), situation).rung == "none"


@pytest.mark.parametrize("response", ["restart", "evict", "stop"])
def test_slowness_that_could_not_be_measured_ends_nothing(response: Any) -> None:
    """T6: neither a node's place nor the job."""
    config = PolicyConfig(straggler=response, comm_slow=response)
    for kind in ("Straggler", "CommSlow"):
        reaction = react(verdict(kind), config, Situation(node=1, spares=(2,)))
        assert (reaction.rung, reaction.ground) == ("none", "unmeasured")


@pytest.mark.parametrize("response", ["report", "restart", "evict", "stop"])
def test_policy_is_plain_data(response: str) -> None:
    config = convert({"compute_hang": response}, PolicyConfig)
    rung = react(verdict("ComputeHang"), config, Situation(node=1, spares=(2,))).rung
    assert rung == {"report": "none", "stop": "stop"}.get(response, "restart")


def test_restart_cost_is_the_median_of_what_was_measured() -> None:
    assert estimate_restart_cost_s(()) == 10.0
    assert estimate_restart_cost_s((1.0, 9.0, 2.0)) == 2.0


def test_failed_device_cordons_its_node_at_once() -> None:
    ready = Situation(node=1, spares=(2,))
    reaction = react(verdict("UnhealthyDevice"), PolicyConfig(), ready)
    assert (reaction.leave_out, reaction.cordon) == (True, True)
    assert not react(verdict("UnhealthyDevice"), PolicyConfig(cordon_after=0), ready).cordon
