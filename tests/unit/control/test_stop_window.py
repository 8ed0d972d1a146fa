"""At a stop, ranks have what the platform leaves them, less a reserve."""

import math
from typing import Any

import pytest
from tests.unit.control.driver import Driver, started

from perdure.model.events import CommandReceived, TimerFired


def stop(driver: Driver, **args: Any) -> float:
    """Stop a job whose script does not take part; return the grace of its ranks."""
    driver.do(CommandReceived(kind="stop", args=args, id="c1", who="SIGTERM", at_s=driver.now))
    farewell = driver.controller.state.farewell
    assert farewell is not None
    return farewell.grace_s


def plain(**spec: Any) -> Driver:
    driver = started(**spec)
    driver.controller.state.world.joined = set()
    return driver


def test_without_an_announcement_it_is_that_of_torchrun() -> None:
    assert stop(plain()) == 30.0


def test_an_announced_time_is_used_less_a_reserve() -> None:
    assert stop(plain(), window_s=120.0) == 108.0


def test_a_shorter_one_as_well() -> None:
    assert stop(plain(), window_s=10) == 9.0


def test_the_job_file_may_ask_for_less() -> None:
    assert stop(plain(restart={"grace_s": 5.0}), window_s=120.0) == 5.0


@pytest.mark.parametrize("given", [math.nan, math.inf, -1.0, 0, True, "soon", [1], None])
def test_what_is_no_time_counts_as_none(given: Any) -> None:
    assert stop(plain(), window_s=given) == 30.0


def test_ranks_that_agree_on_no_step_leave_half_of_the_window() -> None:
    driver = started()
    command = CommandReceived(
        kind="stop", args={"window_s": 20.0}, id="c1", who="SIGTERM", at_s=driver.now
    )
    driver.do(command)
    began_s = driver.now
    while driver.controller.state.farewell is None:
        due_s = driver.controller.next_deadline()
        assert due_s is not None
        driver.now = max(due_s, driver.now)
        assert driver.now <= began_s + 10.0
        driver.do(TimerFired())
    assert driver.controller.state.farewell.grace_s == 8.0
