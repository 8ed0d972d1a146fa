"""Replica groups in the controller: one fails and restarts, the others are left alone."""

from tests.unit.control.groups_lab import Lab

from perdure.model.events import (
    CommandReceived,
    ControllerStarted,
    GenerationStopped,
    KeysDeclared,
    TimerFired,
)
from perdure.model.orders import (
    AssignNodes,
    EndJob,
    EvictReplica,
    FenceAbort,
    HoldReplicas,
    InjectFault,
)


def test_each_group_has_a_generation_and_a_store_of_its_own() -> None:
    lab = Lab()
    assert [lab.generation(g) for g in range(3)] == [0, 1, 2]
    groups = lab.machine.state.worlds
    assert [g.phase for g in groups.values()] == ["running"] * 3
    assignments = [g.assignment for g in groups.values()]
    assert [a.replica for a in assignments if a] == [0, 1, 2]
    assert [a.master_port for a in assignments if a] == [4000, 4001, 4002]


def test_a_death_restarts_its_group_and_releases_the_others() -> None:
    lab = Lab()
    before = lab.name(1)
    lab.exit(1, signal=9)
    assert lab.find(EvictReplica).replica == before
    fence = lab.find(FenceAbort)
    assert (fence.quorum_id, fence.groups) == (5, (0, 2))
    assigned = [a for a in lab.actions if isinstance(a, AssignNodes)]
    assert [a.nodes for a in assigned] == [(1,)]
    assert assigned[0].assignment.phase == "store"
    assert lab.generation(1) == 3
    ready = lab.start(1)
    assert [type(a) for a in ready] == [HoldReplicas, AssignNodes]
    hold = ready[0]
    assert isinstance(hold, HoldReplicas)
    assert {g.group: g.store for g in hold.groups}[1] == "127.0.0.1:4003"


def test_a_spare_takes_the_place_and_the_lost_group_becomes_the_spare() -> None:
    lab = Lab(spares=1)
    assert [g.replica.active for g in lab.machine.state.worlds.values()] == [
        True,
        True,
        True,
        False,
    ]
    lab.exit(0, signal=9)
    hold = lab.find(HoldReplicas)
    assert {g.group: g.held for g in hold.groups} == {1: False, 2: False, 3: False}
    ready = lab.start(0)
    assert isinstance(ready[0], HoldReplicas)
    assert {g.group: g.spare for g in ready[0].groups} == {0: True, 1: False, 2: False, 3: False}


def test_one_left_out_while_it_lives_gets_time_and_a_stopped_one_little() -> None:
    """T9: one that is late may validate for twenty minutes, and is no fact to act upon."""
    lab = Lab()
    lab.see(2, gone=True, reason="late")
    lab.now += 1200.0
    lab.add(TimerFired())
    assert lab.generation(2) == 2, "it was ended while it validated"
    lab.form(0, 1, 2)
    assert lab.machine.next_deadline() is None
    lab.see(2, gone=True, reason="stopped", stopped=True)
    deadline = lab.machine.next_deadline()
    assert deadline is not None
    assert deadline - lab.now < 1.0
    lab.now = deadline
    lab.add(TimerFired())
    assert lab.generation(2) == 3


def test_the_job_ends_when_all_that_trained_have_finished() -> None:
    lab = Lab(spares=1)
    assert lab.exit(0) == []
    lab.exit(1, code=1, error="a peer left")
    assert lab.machine.state.worlds[1].phase == "failed"
    lab.exit(2)
    assert lab.machine.state.phase == "ending"
    for node in range(4):
        lab.add(GenerationStopped(node=node, generation=lab.machine.state.generation, at_s=1.0))
    end = lab.find(EndJob)
    assert (end.status, end.exit_code) == ("done", 0)


def test_a_group_that_fails_again_and_again_is_given_up_and_the_others_go_on() -> None:
    lab = Lab()
    for _ in range(4):
        lab.exit(1, code=1, error="RuntimeError: no")
        if lab.machine.state.worlds[1].phase == "forming":
            lab.start(1)
    assert lab.machine.state.worlds[1].phase == "failed"
    assert lab.machine.state.phase == "running"


def test_a_new_controller_says_everything_again() -> None:
    lab = Lab()
    lab.add(ControllerStarted(incarnation="c2"))
    assigned = [a for a in lab.actions if isinstance(a, AssignNodes)]
    assert [a.nodes for a in assigned] == [(0,), (1,), (2,)]
    assert all(a.assignment.phase == "run" for a in assigned)
    assert lab.find(HoldReplicas) is not None


def test_a_fault_goes_to_the_generation_of_its_own_group() -> None:
    lab = Lab()
    lab.add(CommandReceived(id="i", kind="inject", args={"rank": 1, "kind": "crash"}))
    assert lab.find(InjectFault).generation == 1


def test_with_another_lighthouse_ranks_tell_of_progress_and_the_last_one_ends_the_job() -> None:
    lab = Lab(lighthouse="stock")
    for kill in range(1, 7):  # Twice as often as without any progress in between.
        lab.exit(1, step=100 * kill, signal=9)
        lab.start(1)
        assert lab.phases() == ["running"] * 3
    for group in range(3):
        lab.add(KeysDeclared(generation=lab.generation(group), keys=(), values={}, step=600))
    for group in (0, 2):
        lab.exit(group, step=900, code=0)
        assert lab.find(EndJob) is None
        assert lab.machine.state.phase == "running"
    lab.exit(1, step=900, code=0)
    assert lab.machine.state.phase == "ending"


def test_with_another_lighthouse_a_group_that_achieves_nothing_is_given_up() -> None:
    lab = Lab(lighthouse="stock")
    for _ in range(4):
        lab.start(1)
        lab.exit(1, signal=9)
    assert lab.phases() == ["running", "failed", "running"]
