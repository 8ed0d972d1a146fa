"""Operators' verbs on replica groups: done and answered once, refused with the reason, undone."""

from typing import Any

from tests.unit.control.groups_lab import Lab

from perdure.control.job import JobState
from perdure.control.steering.verbs import preview_verb
from perdure.model.codec import decode, encode
from perdure.model.events import ControllerStarted, JobPaused, NodeCordoned, TimerFired
from perdure.model.orders import (
    AssignNodes,
    CordonNode,
    EvictReplica,
    FenceAbort,
    HoldReplicas,
    NoteDraining,
    RecordEvent,
    RestoreNode,
)


def held(lab: Lab) -> dict[int, tuple[bool, bool]]:
    """Return group -> (held, spare) of the newest order to the lighthouse."""
    hold = [a for a in lab.actions if isinstance(a, HoldReplicas)][-1]
    return {g.group: (g.held, g.spare) for g in hold.groups}


def test_a_drain_lets_the_others_go_on_without_it_and_then_ends_it() -> None:
    lab = Lab()
    assert lab.ask("drain", "replica:1") is None
    assert held(lab) == {0: (False, False), 1: (True, False), 2: (False, False)}
    assert lab.find(EvictReplica) is None
    assert lab.phases() == ["running"] * 3
    lab.form(0, 2, step=12)
    assert lab.phases() == ["running", "parked", "running"]
    assert lab.find(CordonNode).node == 1
    stop = lab.find(AssignNodes)
    assert (stop.nodes, stop.assignment.phase) == ((1,), "stop")
    assert stop.assignment.grace_s > 0
    assert lab.find(FenceAbort) is None, "a quorum without it needs no interruption"
    answer = lab.stop(1)
    assert answer is not None
    assert answer.ok
    assert (answer.result["step"], answer.result["steps_lost"]) == (12, 0)
    assert lab.machine.state.moves == {}


def test_a_spare_stands_in_within_the_same_order() -> None:
    lab = Lab(spares=1)
    lab.ask("drain", "rank:0")
    assert held(lab)[0] == (True, False)
    assert held(lab)[3] == (False, False)
    lab.form(1, 2, 3)
    answer = lab.stop(0)
    assert answer is not None
    assert answer.result["stand_ins"] == [3]
    assert "replica 3 stood in" in answer.reason


def test_an_evict_interrupts_the_others_and_ends_it_at_once() -> None:
    lab = Lab()
    name = lab.name(2)
    lab.ask("evict", "2")
    assert lab.find(EvictReplica).replica == name
    assert lab.find(FenceAbort).groups == (0, 1)
    assert lab.phases()[2] == "parked"
    answer = lab.stop(2)
    assert answer is not None
    assert answer.ok
    again = lab.ask("evict", "2")
    assert again is not None
    assert again.ok
    assert "already" in again.reason


def test_what_would_leave_too_few_is_refused_for_all_targets() -> None:
    lab = Lab(min_replicas=2)
    answer = lab.ask("drain", "replica:0", "replica:1")
    assert answer is not None
    assert not answer.ok
    assert "1 replicas would train, and at least 2 are needed" in answer.reason
    assert lab.phases() == ["running"] * 3
    assert lab.ask("drain", "replica:0") is None
    second = lab.ask("evict", "replica:1")
    assert second is not None
    assert not second.ok, "the first is as good as gone"
    cordon = lab.ask("cordon", "replica:1", "replica:2")
    assert cordon is not None
    assert not cordon.ok


def test_the_last_one_with_the_state_is_never_left() -> None:
    lab = Lab(spares=1)
    for verb in ("drain", "evict"):
        answer = lab.ask(verb, "replica:0", "replica:1", "replica:2", wait=True)
        assert answer is not None
        assert "it would be lost" in answer.reason


def test_with_wait_a_drain_begins_once_a_spare_stands_ready() -> None:
    lab = Lab(spares=1)
    lab.exit(1, signal=9)  # The spare stands in, and nobody stands by.
    lab.form(0, 2, 3)
    assert lab.ask("drain", "replica:0", wait=True) is None
    assert not lab.machine.state.worlds[0].replica.leaving
    lab.start(1)
    lab.see(1)
    assert held(lab)[0] == (True, False)
    assert held(lab)[1] == (False, False)
    assert lab.machine.state.worlds[0].replica.leaving


def test_a_drain_that_is_overdue_is_taken_back() -> None:
    lab = Lab(spares=1)
    lab.ask("drain", "replica:0", deadline_s=5)
    deadline = lab.machine.next_deadline()
    assert deadline is not None
    lab.now = deadline
    lab.add(TimerFired())
    answer = lab.answer()
    assert answer is not None
    assert not answer.ok
    assert "nothing was moved" in answer.reason
    assert held(lab)[0] == (False, False)
    assert held(lab)[3] == (True, True)
    assert lab.find(NoteDraining).over


def test_a_restore_takes_a_drain_back_and_starts_what_was_left() -> None:
    lab = Lab(spares=1)
    lab.ask("drain", "replica:0", id_="d")
    lab.ask("restore", "replica:0", id_="r")
    answered = lab.machine.state.answered
    assert (answered["d"][0], answered["r"][0]) == (False, True)
    assert lab.machine.state.worlds[0].replica.active
    lab.ask("evict", "replica:0")
    lab.form(1, 2, 3)
    lab.stop(0)
    before = lab.generation(0)
    answer = lab.ask("restore", "replica:0")
    assert answer is not None
    assert answer.ok
    assert lab.find(RestoreNode).node == 0
    assert lab.generation(0) > before
    assert lab.phases()[0] == "forming"
    assert not lab.machine.state.worlds[0].replica.active, "the others are at full strength"
    again = lab.ask("restore", "replica:1")
    assert again is not None
    assert again.ok
    assert "already" in again.reason


def test_a_cordoned_group_trains_on_and_is_not_started_again() -> None:
    lab = Lab()
    answer = lab.ask("cordon", "replica:1")
    assert answer is not None
    assert answer.ok
    assert lab.phases()[1] == "running"
    lab.add(NodeCordoned(node=1, at_s=lab.now, reason="x", who="me"))
    lab.exit(1, signal=9)
    assert lab.phases()[1] == "parked"
    assert lab.machine.state.phase == "running"
    lab.ask("restore", "replica:1")
    assert lab.phases()[1] == "forming"


def test_a_death_during_a_drain_is_the_end_that_was_asked_for() -> None:
    lab = Lab()
    lab.ask("drain", "replica:1")
    lab.exit(1, signal=9)
    assert lab.phases()[1] == "parked"
    answer = lab.stop(1)
    assert answer is not None
    assert answer.ok


def test_a_dry_run_says_the_same_and_changes_nothing() -> None:
    lab = Lab(spares=1)
    before = repr(lab.machine.state)
    found = preview_verb(lab.machine.state, "drain", {"targets": ["replica:1"], "dry_run": True})
    assert found is not None
    ok, words, result = found
    assert ok
    assert "replica 3 stands in" in words
    assert (result["replicas"], result["stand_ins"], result["left"]) == ([1], [3], 3)
    assert repr(lab.machine.state) == before
    answer = lab.ask("evict", "replica:1", dry_run=True)
    assert answer is not None
    assert answer.result["dry_run"]
    assert lab.phases() == ["running"] * 4


def test_unknown_targets_and_the_stock_lighthouse_are_refused() -> None:
    answer = Lab().ask("drain", "replica:7")
    assert answer is not None
    assert "the replicas are 0 to 2" in answer.reason
    stock = Lab(lighthouse="stock")
    for kind, targets in (("drain", ("replica:1",)), ("pause", ())):
        refused = stock.ask(kind, *targets)
        assert refused is not None
        assert not refused.ok
        assert "perdure's own lighthouse" in refused.reason


def test_a_repeated_command_is_not_begun_again() -> None:
    lab = Lab()
    lab.ask("drain", "replica:1", id_="d")
    assert lab.ask("drain", "replica:1", id_="d") is None
    lab.form(0, 2)
    first = lab.stop(1)
    second = lab.ask("drain", "replica:1", id_="d")
    assert first is not None
    assert second is not None
    assert second.result == first.result


def test_a_drain_and_a_pause_survive_being_written_down() -> None:
    lab = Lab(spares=1)
    lab.ask("drain", "replica:1")
    lab.ask("pause")
    state = lab.machine.state
    assert repr(decode(encode(state), JobState)) == repr(state)


def test_a_new_controller_goes_on_with_a_drain() -> None:
    lab = Lab()
    lab.ask("drain", "replica:1")
    lab.add(ControllerStarted(incarnation="c2"))
    assert held(lab)[1] == (True, False)
    assert lab.find(NoteDraining).node == 1


def test_a_pause_is_answered_once_all_stand_and_a_drain_goes_on_in_it() -> None:
    lab = Lab()
    assert lab.ask("pause", why="look") is None
    assert all(is_held for is_held, _ in held(lab).values())
    records = [a.event for a in lab.actions if isinstance(a, RecordEvent)]
    assert isinstance(records[0], JobPaused)
    pause = lab.machine.state.steering.pause
    assert pause is not None
    number = pause.hold

    def stand(group: int, **more: Any) -> None:
        lab.see(group, held=True, **{"hold": number, "step": 14, **more})

    stand(0)
    stand(1)
    stand(2, hold=number - 1)
    assert lab.answer() is None, "that was said before the pause"
    stand(2)
    answer = lab.answer()
    assert answer is not None
    assert answer.ok
    assert (answer.result["step"], answer.result["paused"]) == (14, True)
    lab.ask("drain", "replica:1")
    assert lab.phases()[1] == "parked"
    resumed = lab.ask("resume")
    assert resumed is not None
    assert resumed.ok
    assert not any(is_held for is_held, _ in held(lab).values())
    again = lab.ask("resume")
    assert again is not None
    assert again.reason == "it is not paused"


def test_a_restart_is_refused_for_there_is_no_world_of_all_ranks() -> None:
    refused = Lab().ask("restart", rank=0)
    assert refused is not None
    assert (refused.ok, "restart is not for a torchft job" in refused.reason) == (False, True)
