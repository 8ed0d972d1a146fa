"""Checkpoints of a torchft job by its own interval: when, by whom, and what ends the wait."""

from typing import Any

import msgspec
from tests.unit.control.groups_lab import Lab
from tests.unit.control.test_group_settings import reach, say, sent

from perdure.control.steering.saving import next_save_deadline
from perdure.model.events import (
    BoundaryAnswered,
    CheckpointFailed,
    CheckpointSaved,
    ControllerStarted,
    QuorumFormed,
    TimerFired,
)
from perdure.model.job import CheckpointConfig
from perdure.model.orders import AnswerCommand, SendBoundary


def saving(lighthouse: str = "perdure", spares: int = 0, **config: Any) -> Lab:
    """Return three groups that train; what the job's file says of checkpoints came with them."""
    lab = Lab(spares, lighthouse=lighthouse)
    state = lab.machine.state
    spec = state.the_spec()
    state.spec = msgspec.structs.replace(spec, checkpoint=CheckpointConfig(**config))
    lab.form(0, 1, 2)
    return lab


def fire(lab: Lab) -> dict[str, SendBoundary]:
    """Come to the machine's deadline; return what it asks then."""
    deadline = lab.machine.next_deadline()
    assert deadline is not None
    lab.now = max(lab.now, deadline)
    lab.add(TimerFired())
    return sent(lab, "prepare")


def save(lab: Lab, order: SendBoundary, stall_s: float = 0.0) -> None:
    """Have a group promise, come to the step, and save."""
    say(lab, order)
    reach(lab, order)
    saved = {"path": "p", "bytes": 9, "save_s": 0.1, "at_s": lab.now, "stall_s": stall_s}
    lab.add(CheckpointSaved(generation=order.generation, step=order.step, **saved))


def test_by_time_one_group_saves_again_and_again() -> None:
    lab = saving(every_s=30.0)
    began = lab.now
    for _ in range(3):
        (order,) = fire(lab).values()
        assert 30.0 <= lab.now - began < 30.2
        assert (order.kind, order.reason) == ("checkpoint", "the interval has passed")
        save(lab, order)
        began = lab.now
    assert lab.machine.state.saved_step == order.step
    assert lab.machine.state.answered == {}, "nobody has asked, so nobody is answered"


def test_a_script_that_was_told_nothing_of_checkpoints_gets_none() -> None:
    assert saving().machine.next_deadline() is None
    assert saving("stock", every_s=30.0).machine.next_deadline() is None


def test_with_a_place_and_no_interval_it_follows_from_cost_and_outages() -> None:
    lab = saving(url="/somewhere")
    (order,) = fire(lab).values()
    save(lab, order, stall_s=1.0)
    seldom = next_save_deadline(lab.machine.state)
    for group in range(3):
        lab.exit(group, signal=9)
    assert lab.machine.state.quorum.outages == 1, "that of the last group, not of each"
    often = next_save_deadline(lab.machine.state)
    assert seldom is not None
    assert often is not None
    assert often < seldom


def test_by_steps_the_next_multiple_is_agreed_on_and_leaves_room_for_other_agreements() -> None:
    lab = saving(every_steps=50)
    (order,) = sent(lab, "prepare").values()
    assert order.step == 50
    say(lab, order, step=12)
    lab.add(BoundaryAnswered(id=order.id, rank=0, ok=True, step=12, planned=True))
    assert lab.machine.state.boundary is None
    assert lab.ask("checkpoint", id_="mine") is None
    (mine,) = sent(lab, "prepare").values()
    assert mine.step < 50
    say(lab, mine, step=12)
    reach(lab, mine)
    saved = {"path": "p", "bytes": 9, "save_s": 0.1, "stall_s": 0.0, "at_s": lab.now}
    lab.add(CheckpointSaved(generation=0, step=mine.step, **saved))
    answer = lab.answer()
    assert answer is not None
    assert answer.ok
    reach(lab, order)
    lab.add(CheckpointSaved(generation=0, step=50, **saved))
    (later,) = sent(lab, "prepare").values()
    assert later.step == 100


def test_a_multiple_that_was_passed_is_left_for_a_later_one() -> None:
    lab = saving(every_steps=50)
    (order,) = sent(lab, "prepare").values()
    say(lab, order, ok=False, step=149, reason="already at step 149")
    (later,) = sent(lab, "prepare").values()
    assert later.step == 200, "150 may be passed by the time it is heard of"


def test_another_group_saves_where_the_one_asked_is_lost_or_has_missed_the_step() -> None:
    lab = saving(every_steps=50)
    (order,) = sent(lab, "prepare").values()
    say(lab, order)
    lab.exit(0, signal=9)
    lab.form(1, 2, step=40)
    (again,) = sent(lab, "prepare").values()
    assert (again.ranks, again.step) == ((1,), 50)
    say(lab, again)
    say(lab, again, planned=True)
    failed = {"error": "the group was left out", "at_s": lab.now}
    lab.add(CheckpointFailed(generation=1, step=50, **failed))
    assert len(sent(lab, "prepare")) == 1


def test_in_a_pause_nothing_is_saved_by_time() -> None:
    lab = saving(every_s=30.0)
    lab.ask("pause")
    assert fire(lab) == {}
    deadline = lab.machine.next_deadline()
    assert deadline is not None
    assert deadline > lab.now + 29.0


def test_a_new_interval_counts_from_the_last_checkpoint_on() -> None:
    lab = saving(every_s=30.0)
    since = lab.now
    answer = lab.ask("set", changes={"checkpoint.every_s": 5.0})
    assert answer is None or answer.ok
    deadline = lab.machine.next_deadline()
    assert deadline is not None
    assert deadline - since < 5.1


def test_a_controller_that_takes_over_asks_again_for_what_was_asked() -> None:
    lab = saving(every_s=30.0)
    (order,) = fire(lab).values()
    lab.add(ControllerStarted(incarnation="b"))
    assert list(sent(lab, "prepare")) == [order.id]


def test_who_was_to_heal_from_the_last_group_goes_on_from_the_checkpoint() -> None:
    lab = saving(every_s=30.0, spares=1)
    (order,) = fire(lab).values()
    save(lab, order)
    lab.exit(1, signal=9)  # The spare is released, and not in a quorum yet.
    lab.start(1)
    assert heals(lab, 1)
    lab.exit(2, signal=9)
    before = [lab.generation(g) for g in (1, 3)]
    lab.exit(0, signal=9)
    assert all(lab.generation(g) > old for g, old in zip((1, 3), before, strict=True))
    for group in range(4):
        lab.start(group)
    assert [heals(lab, g) for g in range(4)] == [False] * 4


def test_without_a_checkpoint_nobody_is_started_again_in_doubt() -> None:
    lab = saving(every_s=30.0, spares=1)
    for group in (1, 2):
        lab.exit(group, signal=9)
    before = lab.generation(3)
    lab.exit(0, signal=9)
    assert lab.machine.state.quorum.outages == 1
    assert lab.generation(3) == before, "it may have healed, and be all there is"


def heals(lab: Lab, group: int) -> bool:
    assignment = lab.machine.state.worlds[group].assignment
    assert assignment is not None
    assert assignment.phase == "run"
    return assignment.steering.heals


def test_at_the_end_nothing_is_due() -> None:
    lab = saving(every_s=30.0)
    lab.ask("kill")
    assert next_save_deadline(lab.machine.state) is None
    lab.add(QuorumFormed(quorum_id=6, step=60, members=(lab.name(0),), at_s=lab.now))
    assert not any(isinstance(a, SendBoundary | AnswerCommand) for a in lab.actions)
