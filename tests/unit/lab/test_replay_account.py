"""What a live replay was worth, from commits whose every second is known."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from perdure.model.errors import PlatformError
from perdure.model.report import ACCOUNTS, Recovery
from perdure_lab.live.ledger import (
    Run,
    close_ledger,
    count_changes,
    count_committed,
    join_steps,
    measure_costs,
    refresh_rates,
)
from perdure_lab.live.live import Played
from perdure_lab.live.session import Reference, Say, Wish, compare_played, measure_again
from perdure_lab.policies.throughput import Shape, Throughput
from perdure_lab.report import MadeStep
from perdure_lab.traces import AvailabilityTrace, Stay, TraceNode

RATES = {1: 10.0, 2: 20.0, 3: 30.0}
"""Of a step of 30 samples: 3, 1.5 and 1 s."""


def step(at_s: float, number: int, *places: int, samples: int = 30) -> MadeStep:
    return MadeStep(at_s, number, samples, places)


def recovery(at_s: float, **phases: float) -> Recovery:
    names = ("detect_s", "decide_s", "abort_s", "communicator_s", "state_s", "warmup_s")
    times = {name: phases.get(name, 0.0) for name in names}
    return Recovery(
        cause="crash", culprit="rank 2", at_step=2, at_s=at_s, total_s=sum(times.values()),
        lost_steps=0, lost_microbatches=1, rung="shrink", **times,
    )  # fmt: skip


def lose_one() -> Run:
    """Three train; at 2.5, half a step done, one is killed, and r is 0.8 s."""
    # Half of step 2 is done, of which two of three remain: two thirds of it are left at 1.5 s.
    at_s = 2.5 + 0.8 + (1 - 0.5 * 2 / 3) * 1.5
    after = [step(at_s, 2, 0, 1), step(at_s + 1.5, 3, 0, 1)]
    steps = [step(0.0, -1, 0, 1, 2), step(1.0, 0, 0, 1, 2), step(2.0, 1, 0, 1, 2), *after]
    present = [(0.0, frozenset({0, 1, 2})), (2.5, frozenset({0, 1}))]
    known = [recovery(2.5, detect_s=0.6, communicator_s=0.2)]
    return Run(steps, present, at_s + 1.5, RATES, recoveries=known)


def test_a_loss_costs_what_the_step_took_beyond_its_rest() -> None:
    costs = measure_costs(lose_one(), "a test")
    assert costs.losses == 1
    assert costs.loss.detect_s == pytest.approx(0.6)
    assert costs.loss.communicator_s == pytest.approx(0.2)
    assert count_changes(lose_one())[:2] == (1, 0)


def test_the_ledger_closes_and_has_each_second_where_it_belongs() -> None:
    run = lose_one()
    ledger = close_ledger(run)
    slot_s = 2.5 * 3 + (run.end_s - 2.5) * 2
    assert tuple(ledger) == ACCOUNTS
    assert sum(ledger.values()) == pytest.approx(1.0)
    assert ledger["unattributed"] == pytest.approx(0.0)
    assert ledger["lost_work"] * slot_s == pytest.approx(0.5)  # The dead one's half second.
    assert ledger["reconfiguration.detect"] > ledger["reconfiguration.communicator"] > 0


def test_what_was_made_again_is_lost_work_and_no_commit() -> None:
    steps = [step(0.0, -1, 0), *(step(3.0 * n, n % 2, 0) for n in range(1, 5))]
    run = Run(steps, [(0.0, frozenset({0}))], 12.0, RATES)
    assert count_committed(run) == (60.0, 2)
    assert close_ledger(run)["useful"] == pytest.approx(0.5)
    assert close_ledger(run)["lost_work"] == pytest.approx(0.5)


def test_a_node_that_starts_or_was_told_to_leave_has_accounts_of_its_own() -> None:
    steps = [step(0.0, -1, 0, 1), step(1.5, 0, 0, 1), step(4.5, 1, 0), step(6.0, 2, 0, 1)]
    present = [(0.0, frozenset({0, 1})), (4.5, frozenset({0})), (5.0, frozenset({0, 1}))]
    run = Run(steps, present, 6.0, RATES, told=[(1, 1.0, 4.5)])
    ledger = close_ledger(run)
    slot_s = 4.5 * 2 + 0.5 + 1.0 * 2
    assert ledger["idle"] * slot_s == pytest.approx(3.0)
    assert measure_costs(run, "a test").start_s == pytest.approx(1.0)
    assert ledger["unattributed"] == pytest.approx(0.0)


def test_parts_of_a_step_by_several_groups_are_one_commit() -> None:
    rows = [step(1.0, 5, 0, samples=10), step(1.1, 5, 1, samples=10), step(2.0, 6, 0, samples=10)]
    assert [(s.samples, s.places) for s in join_steps(rows)] == [(20, (0, 1)), (10, (0,))]


def test_the_steady_cost_is_what_undisturbed_steps_take_beyond_their_reference() -> None:
    """Those that are early make up for those that are late."""
    walls = [1.4, 1.6] * 15 + [1.8] * 10
    at_s = [0.5 + sum(walls[:n]) for n in range(len(walls) + 1)]
    steps = [step(t, n, 0, 1) for n, t in enumerate(at_s)]
    run = Run(steps, [(0.0, frozenset({0, 1}))], at_s[-1], RATES)
    assert measure_costs(run, "a test").steady == pytest.approx(1 - 40 * 1.5 / sum(walls))
    assert refresh_rates(run)[2] == pytest.approx(30 / 1.6)


@pytest.mark.parametrize(("beside_ddp", "pace", "share"), [(True, 1.25, 0.8), (False, 1.0, 1.0)])
def test_slowness_all_the_time_shows_beside_plain_ddp(
    tmp_path: Path, beside_ddp: bool, pace: float, share: float
) -> None:
    """It cannot show where the reference is made of the system's own steps, as it once was."""
    made = [step(1.25 * n, n, 0, 1, 2) for n in range(41)]  # A step of DDP's takes 1 s.
    present = [(0.0, frozenset({0, 1, 2}))]
    run = Run(made, present, 50.0, RATES)
    nodes = tuple(TraceNode(f"n{n}", (Stay(0.0),)) for n in range(3))
    trace = AvailabilityTrace("t", 50.0, nodes)
    wish = Wish(trace, ("perdure",), str(tmp_path), 0.04, 1, False, 1.0, 0.0, None)
    rates = {Shape(n, 1): rate for n, rate in RATES.items()}
    table = Throughput("r", rates, global_batch=30.0, state_bytes=1.0, source="test")
    reference = Reference(tmp_path, 0.04, tmp_path / "tau.json") if beside_ddp else None
    result = compare_played(wish, table, {"perdure": Played(run, True, 1.0)}, reference)
    (row,) = result.systems
    assert row.pace == pytest.approx(pace)
    assert row.fraction_of_u1 == pytest.approx(share)
    assert result.costs is not None
    assert result.costs.steady == pytest.approx(1 - share)
    assert result.reference == ("plain DDP" if beside_ddp else "perdure itself")


@pytest.mark.parametrize(
    ("ended", "goes_on"), [(KeyboardInterrupt(), False), (PlatformError("too busy"), True)]
)
def test_what_was_played_is_kept_where_ddp_cannot_be_timed_again(
    tmp_path: Path, ended: BaseException, goes_on: bool
) -> None:
    class Broken(Reference):
        def measure(self, counts: Sequence[int], say: Say) -> Throughput:
            raise ended

    said: list[str] = []
    reference = Broken(tmp_path, 0.04, tmp_path / "tau.json")
    assert measure_again(reference, [1, 2], lambda *words: said.append(words[2])) is goes_on
    assert said == (["too busy"] if goes_on else [])
