"""What a command would do, said before: true, and without a trace."""

import pytest
from tests.unit.control.groups_lab import Lab
from tests.unit.control.test_placement import start
from tests.unit.control.test_verbs import ask

from perdure.control.machine import Controller
from perdure.control.steering.preview import preview
from perdure.model.events import CommandReceived, JobSubmitted, KeysDeclared
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.orders import AnswerCommand, SendBoundary
from perdure.model.steering import KeySpec


def say(driver, verb, **args):
    state = driver.controller.state
    before = repr(state)
    told = preview(state, "preview", {"verb": verb, "args": args})
    assert told is not None
    assert repr(state) == before, "nothing follows from it"
    return told.ok, told.reason


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("stop", "save a checkpoint at one step, and the job ends"),
        ("kill", "killed now"),
        ("checkpoint", "save a checkpoint"),
        ("pause", "stand still before one step"),
        ("resume", "not paused"),
    ],
)
def test_each_verb_is_said(verb, words):
    ok, text = say(start(), verb)
    assert ok
    assert words in text


def test_a_fault_is_said_with_what_it_is():
    driver = start()
    ok, text = say(driver, "inject", rank=1, kind="crash")
    assert ok
    assert text.startswith("rank 1 is harmed now: crash (SIGKILL); what was made since ")
    assert "made again" not in say(driver, "inject", rank=1, kind="sleep")[1]
    assert say(driver, "inject", rank=99, kind="crash") == (
        False,
        "there is no rank 99 at the moment",
    )


def test_a_place_is_said_as_by_a_dry_run():
    ok, text = say(start(), "cordon", targets=["node:1"])
    assert ok
    assert text
    ok, text = say(start(), "drain", targets=["node:9"])
    assert not ok
    assert "node 9" in text


def test_what_would_be_refused_is_refused_with_the_same_words():
    driver = start()
    lr = KeySpec(name="lr", type="float", default=1.0, min=0.0, max=2.0)
    driver.do(KeysDeclared(generation=0, keys=(lr,)))
    assert say(driver, "set", changes={"lr": 0.5}) == (
        True,
        "lr=0.5, on all ranks from one step on; a rank may refuse it",
    )
    for changes in ({"lr": 9.0}, {"nothing": 1}, {}):
        ok, text = say(driver, "set", changes=changes)
        asked = CommandReceived(
            id=f"s{changes}", kind="set", args={"changes": changes}, who="ada", at_s=driver.now
        )
        answers = [a for a in driver.do(asked) if isinstance(a, AnswerCommand)]
        assert not ok
        assert [a.reason for a in answers if not a.ok] == [text]


@pytest.mark.parametrize(
    "args", [{}, {"verb": 3}, {"verb": "explode"}, {"verb": "set", "args": {"changes": 3}},
             {"verb": "drain", "args": {"targets": 7}}, {"verb": "note", "args": {"text": 9}},
             {"verb": "stop", "args": []}, {"verb": "preview"}],
)  # fmt: skip
def test_whatever_is_asked_there_is_an_answer(args):
    told = preview(start().controller.state, "preview", args)
    assert told is not None
    assert args.get("verb") == "stop" or not told.ok


def test_it_is_no_command_of_the_machine():
    driver = start()
    sent = ask(driver, "preview", verb="stop")
    assert not [a for a in sent if isinstance(a, SendBoundary)]
    assert preview(driver.controller.state, "drain", {"targets": ["1"]}) is None


def test_replica_groups_are_paused_without_an_agreement():
    """The lighthouse holds each before its next step: nobody has to promise a step."""
    lab = Lab()
    group = lab.machine.state.worlds[0]
    told = preview(lab.machine.state, "preview", {"verb": "pause", "args": {}})
    assert told is not None
    assert told.ok
    assert "lighthouse holds each group" in told.reason
    assert lab.ask("pause") is None or group.alive
    assert lab.machine.state.steering.pause is not None


def test_of_groups_that_others_start_it_is_said_that_they_go_on():
    spec = JobSpec(
        name="j", script="x.py", nodes=2, torchft=TorchftConfig(replicas=2, elsewhere=True)
    )
    lab = Controller()
    lab.handle(1.0, JobSubmitted(spec=spec, at_s=1.0))
    for verb in ("stop", "kill"):
        told = preview(lab.state, "preview", {"verb": verb, "args": {}})
        assert told is not None
        assert "go on alone" in told.reason
        assert "SIGTERM" not in told.reason


def test_what_the_script_has_yet_to_declare_is_waited_for_as_it_is_said():
    driver = start()
    ok, text = say(driver, "set", changes={"lr": 0.5})
    asked = CommandReceived(
        id="s", kind="set", args={"changes": {"lr": 0.5}}, who="ada", at_s=driver.now
    )
    assert not [a for a in driver.do(asked) if isinstance(a, AnswerCommand)]
    assert ok
    assert "waits until the script has declared" in text
