"""Small traces whose outcome can be computed by hand."""

from functools import reduce

import pytest
from bench.policy_ranges import RANGES, take_end
from msgspec.structs import replace

from perdure_lab.policies.oracle import ChangeCosts, compute_area, score_best_plan
from perdure_lab.policies.policies import ENDED_PROCESS, POLICIES, Policy
from perdure_lab.policies.throughput import Shape, Throughput, make_linear
from perdure_lab.report import Physics
from perdure_lab.simulation.engine import Outcome, Replay
from perdure_lab.traces import AvailabilityTrace, Stay, TraceNode, list_intervals

GRID = Throughput(
    "grid",
    {Shape(1, 2): 2.0, Shape(2, 2): 4.0, Shape(3, 2): 6.0},
    global_batch=8.0,
    state_bytes=20e9,
    source="test",
)
"""Two stages; a slice of 10 GB takes 8 s at 10 Gbit/s; a step on six nodes takes 4/3 s."""


def run(policy: Policy | str, nodes: dict[str, tuple[Stay, ...]], table: Throughput) -> Outcome:
    if isinstance(policy, str):
        known = ENDED_PROCESS if policy == ENDED_PROCESS.name else POLICIES[policy]
        policy = replace(known, save_interval_s=1e9, save_s=0.0)
    trace = AvailabilityTrace(
        "t", 200.0, tuple(TraceNode(name, stays) for name, stays in nodes.items())
    )
    return Replay(policy, trace, table, Physics()).run()


def four(end_s: float | None = 100.0, notice_s: float = 0.0) -> dict[str, tuple[Stay, ...]]:
    return {name: (Stay(0.0),) for name in "abc"} | {"d": (Stay(0.0, end_s, notice_s),)}


def test_a_step_and_five_seconds_are_lost() -> None:
    """Linear: a step of 64 samples takes 16 s on four nodes, so 100 s are six steps and 4 s."""
    outcome = run("oobleck", four(), make_linear(4))
    # Nobody can know sooner than the oracle, which needs 5 ms.
    assert outcome.committed == pytest.approx(400 - 16 + 94.995 * 3)
    slot_s = 400 + 300
    assert outcome.slot_s == slot_s
    assert outcome.ledger["useful"] * slot_s == pytest.approx(384 + 94.995 * 3)
    assert outcome.ledger["lost_work"] * slot_s == pytest.approx(16)
    assert outcome.ledger["reconfiguration.communicator"] * slot_s == pytest.approx(5 * 3)
    assert outcome.ledger["reconfiguration.detect"] * slot_s == pytest.approx(0.005 * 3)


def test_perdure_loses_the_dead_nodes_share_of_the_step_and_0_089_s() -> None:
    outcome = run("perdure-exit", four(), make_linear(4))
    assert outcome.committed == pytest.approx(400 - 16 / 4 + (100 - 0.089) * 3)


def test_a_node_that_vanishes_costs_its_silence_and_a_communicator_of_gpus() -> None:
    outcome = run("perdure", four(), make_linear(4))
    assert outcome.committed == pytest.approx(400 - 16 / 4 + (100 - 15.3 - 0.005 - 1.74) * 3)


def test_every_assumed_cost_has_a_range_around_it() -> None:
    """And each end of all of them is worth more, or less, than what is likely."""
    assert set(RANGES) == set(POLICIES)
    for name, policy in POLICIES.items():
        for known in RANGES[name]:
            values = {reduce(getattr, path.split("."), policy) for path in known.fields}
            assert len(values) == 1, (name, known.fields)
            assert min(known.low, known.high) <= values.pop() <= max(known.low, known.high)
            assert known.source
        ends = [take_end(policy, "low"), policy, take_end(policy, "high")]
        nodes = tuple(TraceNode(n, s) for n, s in (four() | {"e": (Stay(2000.0),)}).items())
        trace = AvailabilityTrace("t", 4000.0, nodes)
        low, likely, high = (
            Replay(replace(end, save_interval_s=300.0), trace, make_linear(5), Physics())
            .run().committed for end in ends
        )  # fmt: skip
        assert low > high, name
        assert low >= likely >= high, name


def test_an_announced_loss_costs_the_switch_only() -> None:
    outcome = run("perdure-exit", four(notice_s=30.0), make_linear(4))
    assert outcome.committed == pytest.approx(400 + (100 - 0.024) * 3)
    assert outcome.ledger["lost_work"] == 0.0


def test_who_comes_is_sent_the_state_beside_training() -> None:
    """Linear: 5.44 GB take 4.352 s; the three train on, and the newcomer waits."""
    nodes = four(None) | {"d": (Stay(100.0),)}
    outcome = run("perdure-exit", nodes, make_linear(4))
    assert outcome.committed == pytest.approx(300 + 4.352 * 3 + (100 - 4.352 - 0.024) * 4)
    assert outcome.ledger["reconfiguration.state"] * outcome.slot_s == pytest.approx(4.352)


def test_a_restart_loses_all_since_the_checkpoint() -> None:
    policy = replace(POLICIES["restart"], save_interval_s=30.0, save_s=5.0)
    outcome = run(policy, four(40.0), make_linear(4))
    # 30 s and a save of 5 s; 5 s lost; 120 s of restart, then 40 s in which it saves once.
    assert outcome.committed == pytest.approx(30 * 4 + 35 * 3, rel=1e-3)
    assert outcome.ledger["lost_work"] * outcome.slot_s == pytest.approx(5 * 4)
    assert outcome.ledger["checkpoint"] * outcome.slot_s == pytest.approx(5 * 4 + 5 * 3, rel=1e-3)


def test_varuna_saves_on_notice_where_there_is_time() -> None:
    policy = replace(POLICIES["varuna"], save_interval_s=1e9)
    for notice_s, kept in ((0.0, 0.0), (10.0, 0.0), (30.0, 26.0)):
        outcome = run(policy, four(40.0, notice_s), make_linear(4))
        assert outcome.committed == pytest.approx(kept * 4 + 40 * 3, rel=1e-3)


def six(*ends_s: float | None) -> dict[str, tuple[Stay, ...]]:
    return {f"n{at}": (Stay(0.0, end_s),) for at, end_s in enumerate(ends_s)}


def test_torchft_loses_the_group_and_refills_it_from_two_losses() -> None:
    """Six nodes, three groups of two; n0 and n2 are of different groups: one group can be made."""
    outcome = run("torchft", six(100.0, None, 100.0, None, None, None), GRID)
    # 75 steps are whole at 100 s; the group made of what is left is sent 8 s of state.
    assert outcome.committed == pytest.approx(600 + (100 - 10 - 8) * 4)
    alone = run("torchft", six(100.0, None, None, None, None, None), GRID)
    assert alone.committed == pytest.approx(600 + (100 - 10) * 4)
    assert alone.ledger["packing"] * alone.slot_s == pytest.approx(100.0)


def test_a_stage_without_a_copy_goes_back_to_the_checkpoint() -> None:
    table = Throughput("g", {Shape(2, 2): 4.0, Shape(1, 2): 2.0}, global_batch=8.0,
                       state_bytes=20e9, source="test")  # fmt: skip
    # Rows are (n0, n1) and (n2, n3): n0 and n2 hold the first stage.
    alone = replace(POLICIES["perdure"], copies="stage", save_interval_s=1e9)
    gone = run(alone, six(100.0, None, 100.0, None), table)
    assert gone.restarts == 1
    assert gone.ledger["lost_work"] * gone.slot_s == pytest.approx(400)
    assert run(alone, six(100.0, None, None, 100.0), table).restarts == 0


def test_a_neighbours_snapshot_goes_back_ten_steps_at_the_most() -> None:
    table = Throughput("g", {Shape(2, 2): 4.0, Shape(1, 2): 2.0}, global_batch=8.0,
                       state_bytes=20e9, source="test")  # fmt: skip
    # Steps of 2 s, and 8 s to send a snapshot: one at 80 s, so 14 s of four nodes are done again.
    back = run("perdure", six(94.0, None, 94.0, None), table)
    assert back.restarts == 0
    assert back.ledger["lost_work"] * back.slot_s == pytest.approx(14 * 4)
    assert run("perdure", six(94.0, 94.0, 94.0, None), table).restarts == 1
    # A small state has one at each step: a second of four nodes.
    light = Throughput("g", table.rates, global_batch=8.0, state_bytes=1e6, source="test")
    small = run("perdure", six(95.0, None, 95.0, None), light)
    assert small.ledger["lost_work"] * small.slot_s == pytest.approx(1 * 4)


def test_neighbours_that_leave_together_end_bamboo() -> None:
    assert run("bamboo", six(100.0, 100.0, None, None, None, None), GRID).restarts == 1
    assert run("bamboo", six(100.0, None, 100.0, None, None, None), GRID).restarts == 0
    # Replicas of one stage each hold all of the state.
    assert run("bamboo", six(100.0, 100.0, None), make_linear(3)).restarts == 0


def test_a_hang_is_found_once_for_all_who_left_in_it() -> None:
    nodes = {name: (Stay(0.0),) for name in "ab"}
    nodes |= {"c": (Stay(0.0, 10.0),), "d": (Stay(0.0, 100.0),)}
    policy = replace(POLICIES["restart-hang"], save_interval_s=1e9)
    trace = AvailabilityTrace("t", 4000.0, tuple(TraceNode(n, s) for n, s in nodes.items()))
    outcome = Replay(policy, trace, make_linear(4), Physics()).run()
    # All 10 s are lost, 600 s are waited for the time-out, 120 s for the restart.
    assert outcome.committed == pytest.approx((4000 - 10 - 720) * 2)


def test_oracles() -> None:
    trace = AvailabilityTrace("t", 200.0, tuple(TraceNode(n, s) for n, s in four().items()))
    intervals, table = list_intervals(trace), make_linear(4)
    assert compute_area(intervals, table) == 700
    # A loss among equals: nothing to move, the least time to know.
    assert score_best_plan(intervals, table, ChangeCosts(2.0)) == pytest.approx(400 + 98 * 3)
    # Who waits beside the shape may leave for free.
    spare = AvailabilityTrace(
        "t", 200.0, (*trace.nodes, *(TraceNode(n, (Stay(0.0),)) for n in "ef"), TraceNode(
            "g", (Stay(0.0, 50.0),)))
    )  # fmt: skip
    intervals = list_intervals(spare)
    assert score_best_plan(intervals, GRID, ChangeCosts(2.0)) == pytest.approx(6 * 100 + 98 * 4)
