"""A job that was to be saved and never was has not ended well."""

import pytest
from tests.unit.control.driver import Driver, started

from perdure.control.agreement.changes import keep_change
from perdure.model.events import (
    CheckpointFailed,
    CheckpointSaved,
    CommandReceived,
    GenerationStopped,
)
from perdure.model.job import CheckpointConfig
from perdure.model.orders import EndJob
from perdure.model.steering import Change


def fail(driver: Driver, step: int, error: str) -> None:
    driver.do(CheckpointFailed(generation=0, step=step, error=error, at_s=driver.now))


def save(driver: Driver, step: int) -> None:
    saved = CheckpointSaved(
        generation=0, step=step, path="/x", bytes=1, stall_s=0.0, save_s=0.1, at_s=driver.now
    )
    driver.do(saved)


def end(driver: Driver) -> EndJob:
    for rank in range(2):
        driver.exit(rank)
    driver.do(GenerationStopped(node=0, generation=driver.controller.state.generation, at_s=0.0))
    ending = driver.controller.state.ending
    assert ending is not None
    return ending


def test_a_job_of_which_every_save_failed_does_not_end_with_0() -> None:
    driver = started(checkpoint=CheckpointConfig(every_steps=10))
    fail(driver, 10, "No space left on device")
    fail(driver, 20, "Input/output error")
    ending = end(driver)
    assert (ending.status, ending.exit_code) == ("failed", 3)
    assert ending.reason.endswith("and every checkpoint failed: Input/output error")


def test_checkpoints_that_perdure_chose_to_make_are_no_result() -> None:
    """They were for a restart, and the job has ended without one."""
    driver = started()
    fail(driver, 10, "No space left on device")
    ending = end(driver)
    assert (ending.status, ending.exit_code) == ("done", 0)


def test_an_interval_that_was_set_later_saves_no_end() -> None:
    """D4: ranks save the end by the job file, so no save of the end has failed."""
    driver = started()
    change = Change(epoch=1, step=5, values={"checkpoint.every_steps": 10})
    keep_change(driver.controller.state, change)
    fail(driver, 10, "No space left on device")
    ending = end(driver)
    assert (ending.status, ending.exit_code) == ("done", 0)


@pytest.mark.parametrize("first", ["saved", "failed"])
def test_one_checkpoint_is_enough(first: str) -> None:
    driver = started(checkpoint=CheckpointConfig(every_steps=10))
    if first == "saved":
        save(driver, 10)
    fail(driver, 20, "No space left on device")
    if first == "failed":
        save(driver, 30)
    ending = end(driver)
    assert (ending.status, ending.exit_code) == ("done", 0)


def test_a_stop_that_saved_nothing_does_not_end_with_0() -> None:
    driver = started()
    fail(driver, 10, "No space left on device")
    driver.do(CommandReceived(kind="stop", args={}, id="c1", who="me", at_s=driver.now))
    ending = driver.controller.state.ending or end(driver)
    assert (ending.status, ending.exit_code) == ("stopped", 3)
