"""What must hold of any simulation of policies on any trace (findings, "Sanity of a simulator")."""

import json
import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from bench.blind_plan import find_blind_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.examples import examples
from tests.traces import traces
from tests.waiting import PATIENCE_S

from perdure_lab.policies.oracle import ChangeCosts, compute_area, score_best_plan
from perdure_lab.policies.policies import POLICIES, Phases
from perdure_lab.policies.throughput import Shape, Throughput, make_linear, make_pipeline
from perdure_lab.report import Physics
from perdure_lab.simulation.compare import compare, derive_online_costs
from perdure_lab.simulation.engine import Replay
from perdure_lab.traces import AvailabilityTrace, Stay, TraceNode, list_intervals
from perdure_lab.traces.nouns import Builder
from perdure_lab.traces.transform import announce

ALL = list(POLICIES.values())


@st.composite
def tables(draw: st.DrawFn) -> Throughput:
    """Rates need not rise with nodes, and few shapes may be known."""
    kind = draw(st.sampled_from(["linear", "pipeline", "random"]))
    if kind != "random":
        return make_linear(12) if kind == "linear" else make_pipeline(12)
    shapes = draw(
        st.dictionaries(
            st.builds(Shape, st.integers(1, 6), st.integers(1, 4)),
            st.floats(1.0, 100.0),
            min_size=1,
            max_size=8,
        )
    )
    batch, state = draw(st.floats(1.0, 500.0)), draw(st.floats(1e6, 1e11))
    return Throughput("random", shapes, global_batch=batch, state_bytes=state, source="test")


def total(trace: AvailabilityTrace) -> float:
    slots = trace.slots
    return sum(i.length_s * sum(slots[n] for n in i.living) for i in list_intervals(trace))


@settings(max_examples=examples(80), deadline=None)
@given(traces(nodes_max=12, stays_max=9), tables())
def test_bounds_hold_and_ledgers_close(trace: AvailabilityTrace, table: Throughput) -> None:
    comparison, outcomes = compare(trace, table, ALL, Physics())
    u1, u2, online = comparison.u1, comparison.u2, comparison.u2_online
    assert online <= u2 * (1 + 1e-9)
    assert u2 <= u1 * (1 + 1e-9)
    for name, outcome in outcomes.items():
        assert outcome.committed <= u2 * (1 + 1e-9) + 1e-6, name
        assert outcome.slot_s == pytest.approx(total(trace))
        assert abs(outcome.ledger["unattributed"]) <= 1e-9, name
        assert min(outcome.ledger.values()) >= -1e-9, name
        assert sum(outcome.ledger.values()) == pytest.approx(1.0) or total(trace) == 0
    assert outcomes["perdure"].committed <= online * (1 + 1e-9) + 1e-6


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 12), tables())
def test_without_a_change_all_are_equal_but_for_their_steady_costs(
    nodes: int, table: Throughput
) -> None:
    stays = tuple(TraceNode(f"n{n}", (Stay(0.0),)) for n in range(nodes))
    trace = AvailabilityTrace("constant", 1000.0, stays)
    equal = [replace(policy, efficiency=1.0, save_s=0.0) for policy in ALL]
    comparison, outcomes = compare(trace, table, equal, Physics())
    assert comparison.u2 == pytest.approx(comparison.u1)
    assert comparison.u2_online == pytest.approx(comparison.u1)
    for outcome in outcomes.values():
        assert outcome.committed == pytest.approx(comparison.u1)
    for policy, row in zip(ALL, compare(trace, table, ALL, Physics())[0].policies, strict=True):
        if comparison.u1:
            steady = policy.efficiency * (
                1 - row.ledger["checkpoint"] * len(stays) / used(table, nodes)
            )
            assert row.fraction_of_u1 == pytest.approx(steady)


def used(table: Throughput, nodes: int) -> int:
    best = table.choose_fastest(nodes)
    return best.nodes if best else 1


@settings(deadline=None)
@given(traces(anchored=True), st.sampled_from([make_linear(12)]))
@pytest.mark.long
def test_changes_that_cost_nothing_leave_the_whole_area(
    trace: AvailabilityTrace, table: Throughput
) -> None:
    """r = 0, L = 0: no phase takes time, state moves at once, and a step is no time either."""
    short = Throughput("l", table.rates, global_batch=1e-9, state_bytes=1.0, source="test")
    free = Physics(bytes_per_s=1e30, detect_s=0.0)
    free_of = {"loss": Phases(), "join": Phases(), "announced": Phases(), "start_s": 0.0}
    policy = replace(POLICIES["perdure"], **free_of, save_s=0.0)
    intervals = list_intervals(trace)
    area = compute_area(intervals, short)
    assert Replay(policy, trace, short, free).run().committed == pytest.approx(area)
    assert score_best_plan(intervals, short, ChangeCosts(0.0, bytes_per_s=1e30)) == (
        pytest.approx(area)
    )


@settings(max_examples=80, deadline=None)
@given(traces(nodes_max=8, notices=(0.0,)), tables(), st.floats(0, 100), st.floats(0, 100))
@pytest.mark.long
def test_more_notice_never_hurts(
    trace: AvailabilityTrace, table: Throughput, one_s: float, other_s: float
) -> None:
    less, more = sorted((one_s, other_s))
    before, after = (
        compare(announce(trace, notice_s), table, ALL, Physics())[0] for notice_s in (less, more)
    )
    assert after.u1 == before.u1
    assert after.u2 >= before.u2 * (1 - 1e-9)
    assert after.u2_online >= before.u2_online * (1 - 1e-9)
    for low, high in zip(before.policies, after.policies, strict=True):
        assert high.committed >= low.committed * (1 - 1e-9) - 1e-6, low.policy


def each_choice(counts: list[int], gap_s: float) -> list[AvailabilityTrace]:
    """Return a trace for each choice of who leaves where so many nodes are there, in turn."""
    found = []
    gone = [counts[at] - counts[at + 1] for at in range(len(counts) - 1)]
    choices = [combinations(range(n), max(0, k)) for n, k in zip(counts[:-1], gone, strict=True)]
    for chosen in product(*choices):
        builder, here, born = Builder(), list[str](), 0
        for at, count in enumerate(counts):
            builder.go_to(at * gap_s)
            for index in sorted(chosen[at - 1], reverse=True) if at else ():
                builder.remove(here.pop(index), 0.0)
            while len(here) < count:
                here.append(f"n{born}")
                builder.add(here[-1])
                born += 1
        found.append(builder.finish("choice", len(counts) * gap_s))
    return found


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    tables(),
    st.floats(0.5, 60.0),
    st.floats(0.0, 3.0),
)
def test_nobody_has_more_in_the_mean_than_who_knows_all_but_who_leaves(
    counts: list[int], table: Throughput, gap_s: float, detect_s: float
) -> None:
    loss = replace(POLICIES["perdure"].loss, detect_s=detect_s)
    policy = replace(POLICIES["perdure"], loss=loss)
    costs = derive_online_costs(policy, Physics())
    choices = each_choice(counts, gap_s)
    made = [Replay(policy, trace, table, Physics()).run().committed for trace in choices]
    bound = find_blind_plan(list_intervals(choices[0]), table, costs)
    assert sum(made) / len(made) <= bound * (1 + 1e-9) + 1e-6
    assert bound <= score_best_plan(list_intervals(choices[0]), table, costs) * (1 + 1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(traces(nodes_max=8), tables())
def test_a_dearer_oracle_has_no_more(trace: AvailabilityTrace, table: Throughput) -> None:
    intervals = list_intervals(trace)
    plans = [
        score_best_plan(intervals, table, ChangeCosts(loss_s, loss_s / 2, loss_s / 2))
        for loss_s in (0.0, 0.1, 2.0, 30.0)
    ]
    assert plans == sorted(plans, reverse=True)


def test_the_same_seed_gives_the_same_figures_under_any_hash_seed(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"Time": 60 * i, "GPUs": 4 + i * 7 % 5} for i in range(30)]))
    command = [sys.executable, "-m", "perdure", "trace", "simulate", str(path), "--json"]
    answers = {
        subprocess.run(
            [*command, "--tau", "pipeline", "--seed", seed],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PERDURE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        ).stdout
        for seed, hash_seed in (("1", "0"), ("1", "12345"), ("2", "0"))
    }
    assert len(answers) == 2  # one for each seed of the victims
