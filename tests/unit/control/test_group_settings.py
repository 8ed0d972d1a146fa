"""`perdure set` in a torchft job: all who train promise one step, whoever joins or dies."""

from typing import Any

from tests.unit.control.groups_lab import Lab

from perdure.control.job import JobState
from perdure.model.codec import decode, encode
from perdure.model.events import (
    BoundaryAnswered,
    BoundaryReached,
    CheckpointSaved,
    ControllerStarted,
    KeysDeclared,
    QuorumFormed,
    SettingsChanged,
    TimerFired,
)
from perdure.model.orders import AnyAction, AssignNodes, HoldReplicas, RecordEvent, SendBoundary
from perdure.model.steering import KeySpec, Pace

LR = KeySpec(name="lr", type="float", default=0.1, min=0.0, max=1.0)


def training(spares: int = 0) -> Lab:
    lab = Lab(spares=spares)
    lab.add(KeysDeclared(generation=0, keys=(LR,), values={"lr": 0.1}, step=10))
    return lab


def sent(lab: Lab, move: str) -> dict[str, SendBoundary]:
    """Return what was sent, by the id of its group."""
    found = [a for a in lab.actions if isinstance(a, SendBoundary) and a.move == move]
    return {order.id: order for order in found}


def say(lab: Lab, order: SendBoundary, ok: bool = True, **more: Any) -> list[AnyAction]:
    rank = order.ranks[0]
    known = {"step": order.step - 2, "quorum_id": 5} | more
    return lab.add(BoundaryAnswered(id=order.id, rank=rank, ok=ok, **known))


def reach(lab: Lab, order: SendBoundary) -> None:
    rank = order.ranks[0]
    lab.add(BoundaryReached(id=order.id, rank=rank, step=order.step, at_s=lab.now))


def agreed(lab: Lab, value: float = 0.2, **args: Any) -> dict[str, SendBoundary]:
    """Have all ranks promise; return the decisions."""
    assert lab.ask("set", id_="s", changes={"lr": value}, **args) is None
    for order in sent(lab, "prepare").values():
        say(lab, order)
    return sent(lab, "commit")


def test_a_change_is_promised_by_all_then_decided_and_answered_once_in_force() -> None:
    lab = training()
    decided = agreed(lab)
    assert sorted(decided) == ["b1.1@0", "b1.1@1", "b1.1@2"]
    assert {order.generation for order in decided.values()} == {0, 1, 2}
    record = lab.find(RecordEvent).event
    assert isinstance(record, SettingsChanged)
    assert (record.change.values, record.change.before) == ({"lr": 0.2}, {"lr": 0.1})
    for order in decided.values():
        assert lab.answer() is None
        reach(lab, order)
    answer = lab.answer()
    assert answer is not None
    assert answer.ok
    assert answer.result["applied_at_step"] == record.change.step
    assert answer.result["ranks"] == [0, 1, 2]
    undone = agreed_undo(lab)
    assert undone == {"lr": 0.1}


def test_a_rank_that_could_not_carry_a_change_out_is_named_and_the_set_has_failed() -> None:
    lab = training()
    first, *others = agreed(lab).values()
    lab.add(
        BoundaryReached(
            id=first.id, rank=0, step=first.step, at_s=lab.now, error="on_change: ValueError"
        )
    )
    answer = lab.answer()
    assert answer is not None
    assert (answer.ok, answer.reason) == (False, "rank 0: on_change: ValueError")
    for order in others:
        reach(lab, order)
        assert lab.answer() is None


def test_the_lighthouse_is_told_of_the_patience_that_is_set() -> None:
    """T5: it went by the job file for ever, and nobody said so."""
    lab = training()
    lab.ask("set", id_="s", changes={"detect.phase_allowance_s": 300.0})
    assert (lab.answer().ok, lab.find(HoldReplicas).startup_s) == (True, 300.0)
    lab.ask("set", id_="t", changes={"lr": 0.2, "detect.hang_action_s": 900.0})
    for order in sent(lab, "prepare").values():
        say(lab, order)
    for order in sent(lab, "commit").values():
        assert lab.find(HoldReplicas) is None
        reach(lab, order)
    hold = lab.find(HoldReplicas)
    assert (hold.startup_s, hold.alone_s) == (300.0, 900.0)


def test_the_step_is_the_one_that_the_groups_come_to_next() -> None:
    lab = training()
    pace = Pace(generation=-1, step=40, at_s=lab.now, step_s=0.1)
    lab.ask("set", id_="s", changes={"lr": 0.2}, pace=pace)
    orders = sent(lab, "prepare")
    assert {order.step for order in orders.values()} == {41}
    say(lab, orders["b1.1@1"], ok=False, step=60)  # It was far too low.
    assert {order.step for order in sent(lab, "prepare").values()} == {62}
    for order in sent(lab, "prepare").values():
        say(lab, order)
    assert lab.machine.state.steering.answer_s > 0.01  # Four answers, 10 ms apart each.


def agreed_undo(lab: Lab) -> dict[str, Any]:
    lab.ask("set", undo=True)
    orders = sent(lab, "prepare")
    change = next(iter(orders.values())).change
    assert change is not None
    assert change.undoes
    return change.values


def test_one_who_has_passed_the_step_makes_all_try_a_later_one() -> None:
    lab = training()
    lab.ask("set", changes={"lr": 0.2})
    first = sent(lab, "prepare")["b1.1@0"]
    say(lab, first, ok=False, step=500, reason="already at step 500")
    assert len(sent(lab, "abort")) == 3
    again = sent(lab, "prepare")
    assert all(order.step > 500 for order in again.values())
    assert {order.change.epoch for order in again.values() if order.change} == {2}


def test_a_veto_and_a_wrong_value_refuse_it_for_all() -> None:
    lab = training()
    lab.ask("set", id_="s", changes={"lr": 0.2})
    order = sent(lab, "prepare")["b1.1@1"]
    say(lab, order, ok=False, refused=True, reason="lr: not while warming up")
    answer = lab.answer()
    assert answer is not None
    assert "rank 1: lr: not while warming up" in answer.reason
    assert len(sent(lab, "abort")) == 3
    refused = lab.ask("set", changes={"lr": 5.0})
    assert refused is not None
    assert "above 1" in refused.reason
    unknown = lab.ask("set", changes={"nope": 1})
    assert unknown is not None
    assert "has declared: lr" in unknown.reason


def test_a_promise_from_a_newer_quorum_is_void_until_that_quorum_is_known() -> None:
    lab = training(spares=1)
    lab.ask("set", changes={"lr": 0.2})
    orders = sent(lab, "prepare")
    assert sorted(orders) == ["b1.1@0", "b1.1@1", "b1.1@2"], "the spare is not asked"
    say(lab, orders["b1.1@0"])
    say(lab, orders["b1.1@2"], quorum_id=6)
    assert sorted(sent(lab, "abort")) == ["b1.1@0", "b1.1@1", "b1.1@2", "b1.1@3"]
    assert not sent(lab, "prepare")
    lab.add(TimerFired())
    assert not sent(lab, "prepare")
    names = tuple(lab.name(g) for g in (0, 2, 3))
    lab.form(0, 2, 3)  # Quorum 5 once more.
    assert not sent(lab, "prepare")
    lab.add(QuorumFormed(quorum_id=6, step=12, members=names))
    assert sorted(sent(lab, "prepare")) == ["b2.1@0", "b2.1@2", "b2.1@3"]


def test_one_who_dies_without_an_answer_may_have_healed_others_so_it_is_begun_again() -> None:
    lab = training()
    lab.ask("set", changes={"lr": 0.2})
    orders = sent(lab, "prepare")
    say(lab, orders["b1.1@0"])
    say(lab, orders["b1.1@2"])
    lab.exit(1, signal=9)
    assert sorted(sent(lab, "abort")) == ["b1.1@0", "b1.1@2"]
    assert not sent(lab, "prepare")
    lab.form(0, 2)
    assert sorted(sent(lab, "prepare")) == ["b2.1@0", "b2.1@2"]


def test_one_who_dies_after_its_promise_is_no_hindrance_and_its_next_life_is_told() -> None:
    lab = training()
    lab.ask("set", id_="s", changes={"lr": 0.2})
    orders = sent(lab, "prepare")
    say(lab, orders["b1.1@1"])
    lab.exit(1, signal=9)
    say(lab, orders["b1.1@0"])
    say(lab, orders["b1.1@2"])
    decided = sent(lab, "commit")
    assert sorted(decided) == ["b1.1@0", "b1.1@2"]
    run = next(a for a in lab.start(1) if isinstance(a, AssignNodes)).assignment
    assert [c.values for c in run.steering.changes] == [{"lr": 0.2}]
    reach(lab, decided["b1.1@0"])
    reach(lab, decided["b1.1@2"])
    answer = lab.answer()
    assert answer is not None
    assert answer.result["ranks"] == [0, 2]


def test_a_decision_goes_to_spares_and_a_set_in_a_pause_is_answered_at_once() -> None:
    lab = training(spares=1)
    lab.ask("pause")
    decided = agreed(lab)
    assert sorted(decided) == ["b1.1@0", "b1.1@1", "b1.1@2", "b1.1@3"]
    for order in list(decided.values())[:3]:
        say(lab, order, planned=True)
    answer = lab.answer()
    assert answer is not None
    assert answer.ok
    assert "the job is paused" in answer.reason


def test_a_new_controller_repeats_what_was_decided() -> None:
    lab = training()
    agreed(lab)
    state = lab.machine.state
    assert repr(decode(encode(state), JobState)) == repr(state)
    lab.add(ControllerStarted(incarnation="c2"))
    assert len(sent(lab, "commit")) == 3
    assert isinstance(lab.find(RecordEvent).event, SettingsChanged)


def test_silence_is_tried_again_and_perdures_own_keys_need_no_step() -> None:
    lab = training()
    own = lab.ask("set", changes={"detect.quiet_action_s": 12.0})
    assert own is not None
    assert own.ok
    assert lab.machine.state.the_spec().detect.quiet_action_s == 12.0
    lab.ask("set", changes={"lr": 0.3})
    deadline = lab.machine.next_deadline()
    assert deadline is not None
    lab.now = deadline
    lab.add(TimerFired())
    assert sorted(sent(lab, "prepare")) == ["b1.2@0", "b1.2@1", "b1.2@2"]


def test_before_a_script_has_trained_a_set_waits() -> None:
    lab = Lab()
    assert lab.ask("set", changes={"lr": 0.3}) is None
    lab.add(KeysDeclared(generation=0, keys=(LR,), values={"lr": 0.1}, step=1))
    assert len(sent(lab, "prepare")) == 3


def test_one_group_saves_for_all_and_another_where_it_is_lost() -> None:
    lab = training()
    assert lab.ask("checkpoint", id_="c") is None
    order = sent(lab, "prepare")["b1.1@0"]
    assert len(sent(lab, "prepare")) == 1
    say(lab, order)
    assert sorted(sent(lab, "commit")) == ["b1.1@0"]
    lab.exit(0, signal=9)
    lab.form(1, 2)
    again = sent(lab, "prepare")["b2.1@1"]
    say(lab, again)
    reach(lab, again)
    saved = {"path": "p", "bytes": 9, "stall_s": 0.0, "save_s": 0.1, "at_s": lab.now}
    lab.add(CheckpointSaved(generation=1, step=again.step, **saved))
    answer = lab.answer()
    assert answer is not None
    assert answer.ok
    assert answer.result["step"] == again.step
    assert lab.machine.state.boundary is None
