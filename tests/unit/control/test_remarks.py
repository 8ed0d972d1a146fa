"""`perdure note`: journaled as an event of its own in every depth, and nothing follows from it."""

import pytest
from tests.unit.control.driver import Driver
from tests.unit.control.groups_lab import Lab

from perdure.control.machine import Controller
from perdure.model.events import CommandReceived, JobSubmitted, OperatorNoted
from perdure.model.job import JobSpec
from perdure.model.orders import AnswerCommand, AnyAction, RecordEvent
from perdure.model.steering import Pace


def remark(machine: Controller, text: object, now: float = 500.0) -> list[AnyAction]:
    event = CommandReceived(id=f"note-{now}", kind="note", args={"text": text}, who="me")
    return machine.handle(now, event)


def make_machines() -> list[Controller]:
    """Return one that waits for its nodes, one of one world, and one of replica groups."""
    waiting = Controller()
    waiting.handle(0.0, JobSubmitted(spec=JobSpec(script="x.py"), at_s=0.0))
    driver = Driver()
    driver.register()
    driver.run()
    return [waiting, driver.controller, Lab().machine]


def test_it_is_journaled_in_every_depth_and_changes_nothing() -> None:
    for machine in make_machines():
        before, step = machine.next_deadline(), machine.state.step
        record, told = remark(machine, "new data from here on")
        assert isinstance(record, RecordEvent)
        assert record.event == OperatorNoted(
            id="note-500.0", text="new data from here on", step=step, at_s=500.0, who="me"
        )
        assert isinstance(told, AnswerCommand)
        assert (told.ok, told.result) == (True, {"step": step})
        assert machine.handle(501.0, record.event) == []
        assert machine.next_deadline() == before
        (again,) = remark(machine, "new data from here on")
        assert again == told, "a command that is repeated is not remarked twice"


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "is empty"), (" \n", "is empty"), (None, "is empty"), (7, "is empty"),
     ("x" * 501, "501 characters, and 500"), ("\ud800", "is no text")],
)  # fmt: skip
def test_what_is_no_remark_is_refused_in_a_line(text: object, why: str) -> None:
    for machine in make_machines():
        (told,) = remark(machine, text)
        assert isinstance(told, AnswerCommand)
        assert not told.ok
        assert why in told.reason


def test_its_step_is_the_one_that_heartbeats_tell_of() -> None:
    *_, groups = make_machines()
    pace = Pace(generation=-1, step=40, at_s=500.0, step_s=0.1)
    event = CommandReceived(id="note", kind="note", args={"text": "now"}, who="me", pace=pace)
    record, _ = groups.handle(500.0, event)
    assert isinstance(record, RecordEvent)
    assert isinstance(record.event, OperatorNoted)
    assert record.event.step == 40
