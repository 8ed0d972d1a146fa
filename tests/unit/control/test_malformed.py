"""Arguments of a command are anybody's: none ends the controller, and none is taken for its own."""

import math
from typing import Any

import pytest
from tests.unit.control.driver import Driver, agree, one, started

from perdure.model.codec import decode, encode
from perdure.model.events import AnyEvent, BoundaryReached, CommandReceived, TimerFired
from perdure.model.orders import AnswerCommand, SendBoundary


def ask(driver: Driver, kind: str, **args: Any) -> list[Any]:
    command = CommandReceived(id="x", kind=kind, args=args)  # type: ignore[arg-type]
    return driver.do(decode(encode(command), AnyEvent))


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("inject", {"rank": math.inf}),
        ("inject", {"rank": 0, "at_step": math.nan}),
        ("set", {"changes": {"checkpoint.every_steps": 5}, "at": math.inf}),
        ("set", {"changes": {"checkpoint.every_steps": 5}, "at": "soon"}),
        ("drain", {"targets": ["1"], "wait": True, "deadline_s": math.nan}),
        ("drain", {"targets": ["1"], "wait": True, "deadline_s": "inf"}),
    ],
)
def test_what_cannot_be_read_is_refused_and_nothing_waits_for_it(
    kind: str, args: dict[str, Any]
) -> None:
    driver = started(nodes=2, nproc=1)
    before = driver.controller.next_deadline()
    answer = one(ask(driver, kind, **args), AnswerCommand)
    assert not answer.ok
    assert "malformed arguments" in answer.reason
    assert not driver.controller.state.commands
    assert driver.controller.next_deadline() == before


def test_what_cannot_be_read_is_refused_also_where_it_is_read_later() -> None:
    driver = Driver()
    driver.register()
    assert not ask(driver, "set", changes={"checkpoint.every_steps": 5}, at="soon")
    driver.run()
    assert not driver.controller.state.commands
    assert "malformed" in driver.controller.state.answered["x"].reason


def test_a_step_in_the_arguments_is_not_taken_for_the_one_agreed_upon() -> None:
    """The stop was never begun, and never answered."""
    driver = started()
    commit = agree(driver, one(ask(driver, "stop", at_step=3, generation=[]), SendBoundary))
    for rank in (0, 1):
        driver.do(BoundaryReached(id=commit.id, rank=rank, step=commit.step, at_s=1.0))
        driver.exit(rank, step=commit.step)
    assert driver.controller.state.answered["x"].ok
    driver.do(TimerFired())
