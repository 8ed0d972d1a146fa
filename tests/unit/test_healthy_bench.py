"""The benchmark of harm in its short form: it runs, counts what was said, and can say something."""

import random

import pytest
from bench.healthy import workloads
from bench.healthy.faults import (
    KINDS,
    draw_case,
    is_right,
    render_calibration,
    render_faults,
    run_fault,
)
from bench.healthy.judge import BEGIN_S, Job, Told, run_healthy
from bench.healthy.noise import Autoregressive, Lognormal, Pareto, Recorded, Shared
from bench.healthy.picture import compute_curve, render_picture
from bench.healthy.real import judge_entries
from bench.healthy.reproduce import pause_group
from bench.healthy.results import bound_count, render_table, render_trees
from bench.healthy.training import Fault, Load, Shape, World
from bench.healthy.workloads import HELD_OUT, TUNED, WORKLOADS, WORLDS, draw_shape

from perdure.model.events import (
    Decision,
    JournalEntry,
    NodeLost,
    VerdictReached,
    VerdictWithdrawn,
)
from perdure.model.verdicts import Culprit, Verdict

MINUTE_S = 60.0


@pytest.mark.parametrize("name", TUNED)
def test_a_healthy_minute_is_acted_upon_by_nobody(name):
    _, outcome = run_healthy(name, 0, "short", MINUTE_S)
    assert outcome.actions == [], outcome.actions
    assert outcome.simulated_s >= MINUTE_S - 0.5
    assert not outcome.ended


@pytest.mark.parametrize(("name", "number"), [("garbage collections", 7), ("long pauses", 3)])
def test_heartbeats_of_different_moments_blame_nobody_who_went_on_since(name, number):
    """T5: a rank that is alone for long may be named; the others, as it comes back, may not."""
    _, outcome = run_healthy(name, number, "tuning", 10 * MINUTE_S)
    assert [told for told in outcome.told if not told.silent and not told.right] == []


def test_on_devices_their_times_alone_name_a_slow_rank_and_nobody_in_health(monkeypatch):
    monkeypatch.setattr(workloads, "everybody_on_devices", True)
    for name in ("DDP", "FSDP2", "pipeline"):
        assert run_healthy(name, 0, "short", MINUTE_S)[1].told == []
    case, outcome, row = run_fault(1, "tuning", names=("DDP",))
    assert (case.kind, row["wrong"], row["acted"]) == ("slow data", [], [])
    assert row["in_time"], outcome.told


@pytest.mark.parametrize("name", sorted(HELD_OUT))
def test_what_is_held_out_runs_and_is_not_looked_at(name):
    assert run_healthy(name, 0, "short", 10.0)[1].simulated_s >= 9.5


def test_confidence_is_compared_with_how_often_it_was_right():
    row = {
        "tree": "a" * 12,
        "said": [["CommSlow", 0.95, True], ["CommSlow", 0.92, False], ["Straggler", 0.4, False]],
    }
    told = {"kind": "NodeLost", "right": False}
    calm = {"tree": "a" * 12, "simulated_s": 7200.0, "told": [told, told, {"right": True}]}
    table = render_calibration([row, {"tree": "a" * 12, "said": []}], [calm])
    assert "| CommSlow | 1 of 2 (50%) | 0 (0 to 1.8) |" in table
    assert "| NodeLost |  | 1 (0.12 to 3.6) |" in table
    assert "| 0.9 to 1.0 | 1 of 2 (50%) |" in table
    assert "| 0.4 to 0.5 | 0 of 1 (0%) |" in table


def test_a_run_is_the_same_again():
    said = [run_healthy("hot experts, lognormal", 0, "again", 30.0)[1].told for _ in range(2)]
    assert said[0] == said[1]


def test_a_third_is_held_out_by_its_names_alone():
    assert len(HELD_OUT) == len(WORKLOADS) // 3
    assert HELD_OUT.isdisjoint(TUNED)
    assert not HELD_OUT - set(WORKLOADS)


def test_one_run_in_twenty_has_512_ranks_and_three_have_64():
    assert (len(WORLDS), WORLDS.count(512), WORLDS.count(64)) == (20, 1, 3)
    for number in range(40):
        shape = draw_shape("DDP", number, random.Random(number))
        assert shape.step_s >= 0.3 or shape.ranks <= 8


@pytest.mark.parametrize(
    ("kind", "verdict", "culprit"),
    [
        ("slow rank", "Straggler", "rank 1"),
        ("stop", "ComputeHang", "rank 1"),
        ("sleep", "ComputeHang", "rank 1"),
    ],
)
def test_what_is_broken_is_said(kind, verdict, culprit):
    """A benchmark in which nothing is ever said would count no harm either."""
    fault = Fault(kind, BEGIN_S + 40.0, 1, factor=3.0)
    outcome = Job("DDP", Shape(4, 1, 0.3), "broken", fault).run(70.0)
    said = [told for told in outcome.told if told.at_s > fault.at_s]
    assert (said[0].kind, said[0].culprit) == (verdict, culprit)
    assert said[0].at_s - fault.at_s < 8.0


def test_a_stopped_rank_is_acted_upon_and_the_next_world_trains():
    fault = Fault("stop", BEGIN_S + 30.0, 1)
    job = Job("DDP", Shape(2, 1, 0.3), "stopped", fault)
    outcome = job.run(90.0)
    assert [action.kind for action in outcome.actions][:1] == ["restart"]
    assert job.generation >= 1


def test_load_is_told_truly_and_only_where_it_is():
    job = Job("DDP", Shape(2, 1, 0.3), "load")
    job.run(20.0)
    now = job.clock.now
    job.world.loads.append(Load(1, now, now + 30.0, 2.0))
    told = {node: job.judge_load(now + 5.0, "HostBusy", node=node, rank=None) for node in (0, 1)}
    assert told == {0: False, 1: True}
    assert not job.judge_load(now + 5.0, "CommSlow", node=1, rank=None)
    assert not job.judge_load(now + 60.0, "HostBusy", node=1, rank=None)


@pytest.mark.parametrize(
    ("noise", "low", "high"),
    [
        (Lognormal(random.Random(1), 4, 0.25), 0.95, 1.05),
        (Pareto(random.Random(1), 4, 2.0), 0.95, 1.05),
        (Autoregressive(random.Random(1), 4, 0.2, 0.95), 0.8, 1.2),
        (Shared(random.Random(1), 4), 0.9, 2.6),
        (Recorded(random.Random(1), 4, [[1.0, 1.1, 0.9, 1.0] * 40], 10), 0.95, 1.05),
    ],
)
def test_noise_has_its_median_where_work_is_usual(noise, low, high):
    drawn = sorted(factor for _ in range(500) for factor in noise.draw(0.0))
    assert low <= drawn[len(drawn) // 2] <= high


def test_intervals_are_the_exact_ones():
    """Garwood's, from the chi-squared quantiles in any table."""
    assert bound_count(0) == pytest.approx((0.0, 3.68888), abs=1e-4)
    assert bound_count(1) == pytest.approx((0.02532, 5.57164), abs=1e-4)
    assert bound_count(10) == pytest.approx((4.79539, 18.39036), abs=1e-4)


def test_the_table_has_a_line_for_each_workload():
    said = {"kind": "Straggler", "right": False, "silent": False}
    row = {
        "workload": "DDP", "tree": "0" * 12, "ranks": 2, "simulated_s": 3600.0, "wall_s": 10.0,
        "told": [said, {**said, "right": True}, {**said, "silent": True}], "actions": [],
    }  # fmt: skip
    line = next(x for x in render_table([row]).splitlines() if x.startswith("| DDP |"))
    assert "Straggler 1" in line
    assert "1 of 1" in line


def test_a_fault_is_found_in_time_with_its_culprit():
    case, _, row = run_fault(9, "tuning")
    assert (case.kind, row["fault"]) == ("stop", "stop")
    assert row["in_time"]
    assert row["acted"]
    assert "stop" in render_faults([{**row, "tree": "0" * 12}])


def test_all_kinds_of_faults_are_drawn_in_turn():
    cases = [draw_case(number, "s", final=False) for number in range(5 * len(KINDS))]
    assert {case.kind for case in cases} == set(KINDS)
    assert {case.factor for case in cases} == {1.2, 1.5, 2.0, 3.0, 4.0}
    assert all(case.rank != case.peer for case in cases)


def test_only_the_right_culprit_counts():
    case = next(
        c
        for c in (draw_case(n, "s", final=False) for n in range(500))
        if c.kind == "slow rank" and c.shape.nproc == 1
    )
    right = Told(0.0, "Straggler", "", "", rank=case.rank)
    assert is_right(case, right)
    assert not is_right(case, Told(0.0, "Straggler", "", "", rank=case.peer))
    assert not is_right(case, Told(0.0, "CommSlow", "", "", rank=case.rank))


def test_a_paused_group_is_left_alone():
    """T9: on d36469f it is left out fifteen times."""
    assert pause_group(2, 0)["left out"] == 0


def test_trees_stand_side_by_side_over_the_runs_that_both_have_had():
    row = {
        "workload": "DDP", "number": 0, "seed": "s", "simulated_s": 3600.0, "wall_s": 1.0,
        "told": [], "actions": [],
    }  # fmt: skip
    false = {"kind": "Straggler", "right": False, "silent": False}
    rows = [{**row, "tree": "a"}, {**row, "tree": "b", "told": [false] * 3}]
    rows.append({**row, "tree": "b", "number": 1, "told": [false] * 9})
    line = render_trees(rows).splitlines()[-1]
    assert line == "| DDP | 1 | 0 (0 to 3.7) | 0 | 3 (0.62 to 8.8) | 0 |"
    assert render_trees(rows[:1]) == ""


def test_the_picture_has_a_curve_for_each_tree_with_both():
    told = {"kind": "Straggler", "right": False, "silent": False, "lasted_s": 3.0}
    healthy = {"number": 0, "tree": "a", "simulated_s": 3600.0, "told": [told, told]}
    fault = {"fault": "stop", "tree": "a", "limit_s": 3.0, "right_at_s": [1.0], "stood_s": [None]}
    missed = {**fault, "right_at_s": [], "stood_s": []}
    curve = compute_curve([healthy], [fault, missed])
    assert curve[0] == (2.0, 50.0)
    assert curve[-1] == (0.001, 50.0)
    svg = render_picture([healthy, fault, missed, {**healthy, "tree": "b"}])
    assert svg.count("<polyline") == 1
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')


def test_a_slow_link_slows_what_goes_over_it_alone():
    fault = Fault("slow link", 1000.0, 1, 2, 10.0)
    world = World(Shape(4, 1, 1.0), random.Random(1), 1000.0, fault)
    assert world.time_of((1, 2), 1.0, 1001.0) > 5.0
    assert world.time_of((0, 1), 1.0, 1001.0) < 2.0
    assert world.time_of((1, 2), 1.0, 999.0) < 2.0


def test_what_a_pair_sends_is_its_own():
    world = World(Shape(4, 1, 1.0), random.Random(1), 1000.0)
    group = world.add_group("0", range(4), 1000, p2p=True)
    world.pass_on(group, 0, 1, 0.1)
    world.pass_on(group, 0, 1, 0.1)
    world.pass_on(group, 2, 3, 0.1)
    sent = {(src, dst): traffic.sent_by(2000.0) for src, dst, traffic in group.list_links()}
    assert sent == {(0, 1): 2000, (2, 3): 1000}


class Idle:
    """A machine on which nobody else works."""

    def was_busy(self, at_s: float) -> bool:
        return False


def test_real_verdicts_are_judged_by_when_their_rank_was_alone():
    def verdict(kind: str, rank: int) -> Verdict:
        return Verdict(
            kind=kind, culprit=Culprit(rank=rank), generation=0, first_seen_s=0.0,
            confirmed_s=0.0, confidence=0.9, reason="",
        )  # fmt: skip

    def assign(number: int, generation: int) -> Decision:
        summary = f"#{number} store generation {generation}, nodes (0,)"
        return Decision(action="AssignNodes", summary=summary, reason="why")

    bodies = [
        assign(1, 0),
        assign(1, 0),
        VerdictReached(verdict=verdict("ComputeHang", 0)),
        VerdictReached(verdict=verdict("ComputeHang", 1)),
        VerdictWithdrawn(verdict=verdict("ComputeHang", 0), at_s=0.0, reason=""),
        VerdictReached(verdict=verdict("HostBusy", 0)),
        NodeLost(node=1, at_s=0.0, reason=""),
        assign(2, 1),
    ]
    entries = [JournalEntry(n, 100.0 + n, body) for n, body in enumerate(bodies)]
    rows = judge_entries(entries, Idle(), [(0, 101.0, 110.0)])
    assert [row["kind"] for row in rows] == [
        "ComputeHang", "ComputeHang", "HostBusy", "NodeLost", "restart"
    ]  # fmt: skip
    assert [row.get("silent") for row in rows[:3]] == [True, False, False]
    assert rows[0]["lasted_s"] == 2.0
    assert not any(row.get("right") for row in rows)
