from collections.abc import Callable
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.model.job import CheckpointConfig, RestartConfig
from perdure.plan.checkpoints import young
from perdure.policy import (
    Failure,
    FailureLog,
    SlotEnd,
    decide_checkpoint_interval,
    decide_recovery,
    decide_slot,
    trim_ends,
)

decide_interval = partial(decide_checkpoint_interval, optimum=young)


def failure(at_s: float = 0.0, **changes: object) -> Failure:
    fields = {"cause": "signal 9 (SIGKILL)", "culprit": "rank 1", "generation": 0, "step": 10}
    return Failure(at_s=at_s, **({"progress_max": 10} | fields | changes))  # type: ignore[arg-type]


def past(*failures: Failure, config: RestartConfig | None = None) -> FailureLog:
    """Return what is remembered of `failures`, the oldest first."""
    log = FailureLog()
    for one in failures:
        log.add(one, config or RestartConfig())
    return log


def test_a_month_of_failures_is_decided_upon_as_by_all_of_them_and_costs_no_more_than_a_day() -> (
    None
):
    random, config = Random(7), RestartConfig(window_max=8, window_s=50.0, max_restarts=2)
    log, whole, gave_up = FailureLog(), FailureLog(), 0
    now, step = 0.0, 0
    for number in range(3000):
        now += random.choice((1.0, 10.0, 10.0, 100.0))
        step += random.choice((0, 0, 1, 5))
        cause = random.choice(("signal 9 (SIGKILL)", "exit code 1: E", "exit code 1: E"))
        preempted = random.random() < 0.1
        best = random.choice((step, step, 0))
        one = failure(now, step=step, progress_max=best, cause=cause, preempted=preempted)
        decision = decide_recovery(one, log, config)
        assert decision.rung == decide_recovery(one, whole, config).rung
        gave_up += decision.rung == "give up"
        log.add(one, config)
        whole.kept.append(one)
        whole.counted += not preempted
        assert log.kept[-1] == one
        assert log.total == number + 1
    assert 0 < gave_up < 3000
    assert len(log.kept) <= 10


def test_progress_makes_kills_free() -> None:
    earlier = tuple(failure(float(i), step=i * 10, progress_max=i * 10) for i in range(1, 40))
    decision = decide_recovery(
        failure(41.0, step=400, progress_max=400), past(*earlier), RestartConfig()
    )
    assert decision.rung == "restart"


def test_failures_without_progress_use_the_budget_up() -> None:
    config = RestartConfig(max_restarts=2)
    rungs = []
    earlier = FailureLog()
    for i in range(4):
        one = failure(float(i), progress_max=10)
        rungs.append(decide_recovery(one, earlier, config).rung)
        earlier.add(one, config)
    # The first failure came after progress (from 0 to 10): it and two more are restarted.
    assert rungs == ["restart", "restart", "give up", "give up"]


def test_same_fault_at_the_same_step_is_the_users() -> None:
    one = failure(cause="exit code 1: ValueError: bad", error="ValueError: bad", code=1)
    config = RestartConfig(max_restarts=100)
    assert decide_recovery(one, past(one, config=config), config).rung == "restart"
    decision = decide_recovery(one, past(one, one, config=config), config)
    assert decision.rung == "give up"
    assert "rank 1" in decision.reason
    assert "step 10" in decision.reason


@pytest.mark.parametrize("error", ["ModuleNotFoundError: No module named 'x'", "SyntaxError: bad"])
def test_import_error_before_any_progress_is_not_retried(error: str) -> None:
    one = failure(progress_max=0, step=-1, error=error, cause=f"exit code 1: {error}", code=1)
    assert decide_recovery(one, FailureLog(), RestartConfig()).rung == "give up"


def test_import_error_after_progress_is_retried() -> None:
    one = failure(progress_max=5, error="ImportError: lazily", code=1)
    assert decide_recovery(one, FailureLog(), RestartConfig()).rung == "restart"


def test_a_checkpoint_that_does_not_fit_is_tried_once() -> None:
    error = "perdure.model.errors.UnfitError: step-00000040 does not fit the script: why"
    decision = decide_recovery(
        failure(progress_max=40, error=error, code=1), FailureLog(), RestartConfig()
    )
    assert decision.rung == "give up"
    assert decision.reason == "rank 1: step-00000040 does not fit the script: why"


def test_window_bounds_a_job_that_is_killed_all_the_time() -> None:
    config = RestartConfig(window_max=5, window_s=100.0)
    failures = (failure(float(i), step=i, progress_max=i) for i in range(5))
    earlier = past(*failures, config=config)
    assert decide_recovery(failure(6.0, progress_max=9, step=9), earlier, config).rung == "give up"
    assert (
        decide_recovery(failure(300.0, progress_max=9, step=9), earlier, config).rung == "restart"
    )


def test_checkpoint_interval_follows_young() -> None:
    config = CheckpointConfig()
    # C = 0.5 s; one hour without a failure on top of the prior's hour: M = 7200 s.
    interval_s = decide_interval(config, stall_s=0.5, failures=0, elapsed_s=3600.0)
    assert interval_s == pytest.approx((2 * 0.5 * 7200) ** 0.5)
    often = decide_interval(config, stall_s=0.5, failures=9, elapsed_s=3600.0)
    assert often is not None
    assert interval_s is not None
    assert often < interval_s


def test_steps_and_seconds_of_the_user_win() -> None:
    by_steps = CheckpointConfig(every_steps=10)
    assert decide_interval(by_steps, stall_s=1.0, failures=0, elapsed_s=1.0) is None
    by_time = CheckpointConfig(every_s=7.0)
    assert decide_interval(by_time, stall_s=1.0, failures=0, elapsed_s=1.0) == 7.0


def end(at_s: float, cause: str = "exit code 1", *, trained: bool = False) -> SlotEnd:
    return SlotEnd(at_s, cause, trained)


@pytest.mark.parametrize(
    ("cause", "pauses"),
    [
        (lambda _: "exit code 1: OSError: x", [0.0, 1.0]),
        (lambda number: f"exit code 1: OSError: process {number}", [0.0, 1.0, 2.0]),
        (lambda _: "signal 9 (SIGKILL)", [0.0, 1.0, 2.0]),
    ],
)
def test_a_slot_whose_processes_never_train_is_given_up_after_growing_pauses(
    cause: Callable[[int], str], pauses: list[float]
) -> None:
    ends = [end(0.0, trained=True)]
    for number, pause_s in enumerate(pauses):
        ends.append(end(float(number), cause(number)))
        assert decide_slot(ends, RestartConfig()).pause_s == pause_s
        assert not decide_slot(ends, RestartConfig()).empty
    ends.append(end(9.0, cause(9)))
    row = len(pauses) + 1
    assert decide_slot(ends, RestartConfig()).empty == (
        f"{row} processes in a row ended before a step was committed: {cause(9)}"
    )


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans()), min_size=1, max_size=60))
def test_what_is_trimmed_of_a_slots_past_changes_no_decision(
    past: list[tuple[float, bool]],
) -> None:
    config = RestartConfig(window_max=4, window_s=200.0, max_restarts=50, same_fault_max=50)
    kept: list[SlotEnd] = []
    ends: list[SlotEnd] = []
    now = 0.0
    for pause_s, trained in past:
        now += pause_s
        ends.append(end(now, trained=trained))
        kept = trim_ends([*kept, ends[-1]], config)
        assert decide_slot(kept, config) == decide_slot(ends, config)


def test_a_failure_that_others_outlived_counts_until_the_world_achieves_more() -> None:
    config, log = RestartConfig(window_max=2, max_restarts=2), FailureLog()
    for step in range(10):
        log.add(failure(progress_max=step, outlived=True), config)
    assert decide_recovery(failure(progress_max=10), log, config).rung == "restart"
    for _ in range(2):
        log.add(failure(progress_max=10, outlived=True), config)
    assert decide_recovery(failure(progress_max=10), log, config).rung == "give up"
