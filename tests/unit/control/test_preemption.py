"""Notices in, moves out: together, once, in time, taken back, and a death that is no failure."""

from typing import Any

import pytest
from tests.unit.control.driver import Driver, one
from tests.unit.control.test_elastic_leaving import find, promise, reach, train
from tests.unit.control.test_elastic_spares import Lab, order_of, started
from tests.unit.control.test_placement import run
from tests.unit.control.test_placement import start as start_placed
from tests.unit.control.test_verbs import agree, ask, hold, save

from perdure.control.machine import Controller
from perdure.model.codec import decode, encode
from perdure.model.events import (
    ControllerStarted,
    GenerationStepping,
    GenerationStopped,
    NodeCordoned,
    NodeLost,
    PreemptionNoticed,
    PreemptionWithdrawn,
    RankExited,
    RanksStarted,
    StoreReady,
    TimerFired,
)
from perdure.model.failures import ExitRecord
from perdure.model.orders import (
    AnyAction,
    AssignNodes,
    CordonNode,
    EndJob,
    RestoreNode,
    SendBoundary,
)
from perdure.model.signals.progress import RankAccount
from perdure.model.steering import Pace


def start(**spec: Any) -> Driver:
    """Return a job that saves only when it is asked to."""
    return start_placed(**{"checkpoint": {"every_steps": 10**6}} | spec)


def notice(driver: Driver, node: int, grace_s: float = 30.0, **more: Any) -> list[AnyAction]:
    known = {"source": "spot", "id": "a"} | more
    return driver.do(PreemptionNoticed(node=node, at_s=driver.now, grace_s=grace_s, **known))


def withdraw(driver: Driver, node: int) -> list[AnyAction]:
    return driver.do(PreemptionWithdrawn(node=node, at_s=driver.now, source="spot", id="a"))


def wait(driver: Driver, seconds: float = 1.0) -> list[AnyAction]:
    """Let time pass, with every timer that falls due in it."""
    actions: list[AnyAction] = []
    until_s = driver.now + seconds
    for _ in range(20):
        due_s = driver.controller.next_deadline()
        if due_s is None or due_s > until_s:
            break
        driver.now = max(driver.now, due_s)
        actions += driver.do(TimerFired())
    driver.now = until_s
    return actions


def exit_of(driver: Driver, node: int, rank: int, **how: Any) -> list[AnyAction]:
    generation = driver.controller.state.generation
    record = ExitRecord(rank=rank, generation=generation, pid=1, at_s=driver.now, **how)
    return driver.do(
        RankExited(node=node, record=record, account=RankAccount(step=9), detected_s=driver.now)
    )


def test_a_notice_drains_within_its_grace() -> None:
    driver = start()
    assert notice(driver, 1) == [], "a moment is waited for what comes with it"
    sent = one(wait(driver), SendBoundary)
    assert sent.kind == "drain"
    assert "spot" in sent.reason
    assert notice(driver, 1) == wait(driver) == [], "the same notice"
    agree(driver, sent)
    hold(driver, sent)
    assert one(save(driver, sent.step), AssignNodes).assignment.placement == (0, 2)
    assert driver.controller.state.barred == set(), "the platform is no operator"


def test_notices_that_come_together_are_one_move() -> None:
    driver = start(nodes=3, spares=4)
    notice(driver, 1, 30.0)
    driver.now += 0.1
    notice(driver, 2, 20.0)
    sent = one(wait(driver), SendBoundary)
    (move,) = driver.controller.state.moves.values()
    assert move.nodes == [1, 2]
    assert move.deadline_s < driver.now + 20.0
    agree(driver, sent)
    hold(driver, sent)
    assert one(save(driver, sent.step), AssignNodes).assignment.placement == (0, 3, 4)


def test_the_shortest_grace_bounds_the_wait_for_others() -> None:
    driver = start()
    notice(driver, 1, 0.5)
    assert wait(driver, 0.06) != []


def test_without_grace_the_node_is_left_at_once() -> None:
    driver = start()
    order = one(notice(driver, 1, 0.0), AssignNodes)
    assert order.assignment.placement == (0, 2)


def test_at_the_deadline_it_is_evicted() -> None:
    driver = start()
    notice(driver, 1, 10.0)
    assert not [a for a in wait(driver, 1.0) if isinstance(a, AssignNodes)]
    assert one(wait(driver, 9.0), AssignNodes).assignment.placement == (0, 2)


def test_a_deadline_that_comes_nearer_is_kept() -> None:
    driver = start()
    notice(driver, 1, 60.0)
    wait(driver)
    notice(driver, 1, 5.0)
    assert one(wait(driver, 5.0), AssignNodes).assignment.placement == (0, 2)


def test_a_far_notice_leaves_time_to_train() -> None:
    driver = start()
    notice(driver, 1, 600.0)
    assert wait(driver, 500.0) == []
    assert one(wait(driver, 41.0), SendBoundary).kind == "drain"


def test_without_a_spare_node_it_is_saved_at_once_and_just_before_the_end() -> None:
    driver = start(spares=0)
    notice(driver, 1)
    sent = one(wait(driver), SendBoundary)
    assert sent.kind == "checkpoint"
    agree(driver, sent)
    hold(driver, sent)
    save(driver, sent.step)
    assert not [a for a in wait(driver, 18.0) if isinstance(a, SendBoundary)]
    late = [a for a in wait(driver, 5.0) if isinstance(a, SendBoundary)]
    assert late[0].kind == "checkpoint"
    wait(driver, 10.0)
    state = driver.controller.state
    assert (state.moves, state.world.placement, list(state.cordoned)) == ({}, (0, 1), [1])


def test_a_withdrawn_notice_is_taken_back_and_its_node_free() -> None:
    driver = start()
    notice(driver, 1)
    sent = one(wait(driver), SendBoundary)
    actions = withdraw(driver, 1)
    assert one(actions, SendBoundary).move == "abort"
    assert one(actions, RestoreNode).node == 1
    state = driver.controller.state
    assert (state.moves, state.cordoned, state.world.placement) == ({}, {}, (0, 1))
    assert withdraw(driver, 1) == []
    notice(driver, 1)
    assert one(wait(driver), SendBoundary).id != sent.id


def test_of_two_noticed_together_one_stays() -> None:
    driver = start(nodes=3, spares=4)
    notice(driver, 1)
    notice(driver, 2)
    wait(driver)
    withdraw(driver, 2)
    wait(driver)
    assert [move.nodes for move in driver.controller.state.moves.values()] == [[1]]
    assert 2 not in driver.controller.state.cordoned


def test_a_node_left_for_nothing_is_a_spare_again() -> None:
    driver = start()
    notice(driver, 1, 0.0)
    run(driver)
    assert driver.controller.state.spares == ()
    driver.do(PreemptionWithdrawn(node=1, at_s=driver.now - 1.0, source="spot", id="a"))
    assert driver.controller.state.spares == (1,)


def test_a_higher_risk_is_left_where_a_spare_stands_ready() -> None:
    driver = start()
    notice(driver, 1, 0.0, certain=False)
    assert one(wait(driver), SendBoundary).kind == "drain"
    alone = start(spares=0)
    notice(alone, 1, 0.0, certain=False)
    assert one(wait(alone), SendBoundary).kind == "checkpoint"
    silent = start(preemption={"rebalance": "report"})
    notice(silent, 1, 0.0, certain=False)
    assert wait(silent) == []


def test_a_death_with_a_notice_counts_as_no_failure() -> None:
    driver = start(spares=0, restart={"max_restarts": 0})
    notice(driver, 1)
    wait(driver)
    actions = exit_of(driver, 1, 2, signal=9)
    assert not [a for a in actions if isinstance(a, EndJob)]
    (failure,) = driver.controller.state.failures.kept
    assert failure.preempted
    assert failure.culprit == "node 1"
    assert "Preemption (spot)" in failure.cause
    run(driver)
    exit_of(driver, 0, 0, signal=9)
    assert driver.controller.state.phase == "ending", "node 0 has no notice, and no restart is left"


def test_an_exception_on_a_noticed_node_is_a_crash() -> None:
    for how in ({"code": 1, "error": "ValueError: x"}, {"signal": 9, "oom": True}, {"signal": 11}):
        driver = start(spares=0)
        notice(driver, 1)
        wait(driver)
        exit_of(driver, 1, 2, **how)
        assert not driver.controller.state.failures.kept[0].preempted


def test_a_peer_that_loses_the_noticed_node_is_no_crash() -> None:
    driver = start(spares=0)
    notice(driver, 1, 10.0)
    wait(driver, 9.0)
    exit_of(driver, 0, 0, code=1, error="RuntimeError: Connection closed by peer")
    (failure,) = driver.controller.state.failures.kept
    assert (failure.preempted, failure.culprit) == (True, "node 1")


def test_a_new_machine_in_the_place_of_the_lost_one_may_run_ranks() -> None:
    driver = start()
    notice(driver, 1, 5.0)
    wait(driver)
    driver.do(NodeLost(node=1, at_s=driver.now, reason="silent"))
    assert driver.controller.state.blames == {}
    run(driver, frozenset({1}))
    driver.register(1, boot_id="b", incarnation="a1x")
    assert 1 in driver.controller.state.cordoned, "the same machine, and its time has not come"
    assert one(driver.register(1, boot_id="another"), RestoreNode).node == 1
    assert driver.controller.state.spares == (1,)
    assert driver.controller.state.notices == {}


def test_a_place_that_is_asked_for_after_a_notice_may_run_ranks() -> None:
    driver = start()
    notice(driver, 1, 5.0)
    wait(driver)
    driver.do(NodeLost(node=1, at_s=driver.now, reason="silent"))
    run(driver, frozenset({1}))
    driver.controller.state.claims[1] = ("a second allocation", driver.now)
    assert one(driver.register(1, boot_id="b", incarnation="a1x"), RestoreNode).node == 1
    assert driver.controller.state.notices == {}


def elastic_notice(lab: Lab, node: int, grace_s: float) -> list[AnyAction]:
    event = PreemptionNoticed(node=node, at_s=lab.now, grace_s=grace_s, source="aws", id="a")
    actions = lab.say(event)
    lab.now += 0.3
    return [*actions, *lab.say(TimerFired())]


def test_elastic_members_leave_at_a_step() -> None:
    lab = train()
    prepare = find(elastic_notice(lab, 1, 30.0), SendBoundary)
    assert prepare.leaves == (2, 3)
    promise(lab, prepare, 0, 1, 2, 3)
    actions = reach(lab, prepare, 0, 1, 2, 3)
    assert order_of(actions).ranks == (0, 1)
    assert find(actions, CordonNode).node == 1
    for rank in (2, 3):
        assert started(lab.leave(rank)) == {}


def fire(lab: Lab) -> list[AnyAction]:
    """Let the next deadline come, with what heartbeats say of a job of half a second a step."""
    due_s = lab.machine.next_deadline()
    assert due_s is not None
    lab.now = max(lab.now, due_s)
    pace = Pace(generation=lab.machine.state.generation, step=5, at_s=lab.now, step_s=0.5)
    return lab.say(TimerFired(pace=pace))


def fire_until_asked(lab: Lab, before_s: float) -> SendBoundary:
    """Let deadlines come until the members are asked to leave; it has to be before `before_s`."""
    while lab.now < before_s:
        sent = [a for a in fire(lab) if isinstance(a, SendBoundary)]
        if sent:
            return sent[0]
    raise AssertionError(f"nobody was asked by {before_s}")


def test_elastic_members_train_as_long_as_is_safe() -> None:
    lab = train()
    gone_s = lab.now + 30.0
    lab.say(PreemptionNoticed(node=1, at_s=lab.now, grace_s=30.0, source="aws", id="a"))
    sent = fire_until_asked(lab, gone_s)
    assert sent.leaves == (2, 3)
    assert gone_s - 2.5 < lab.now < gone_s - 1.0, "a second in reserve, and two steps"
    ends_s = lab.now + (sent.step - 5) * 0.5  # Step 5 was applied just then.
    assert gone_s - 1.6 < ends_s < gone_s - 0.9, "at the last step before the reserve"


@pytest.mark.parametrize("why", ["a spare stands in", "somebody waits"])
def test_elastic_members_that_are_of_no_use_any_more_leave_at_once(why: str) -> None:
    lab = train(nproc=1, nodes=3, spares=1)
    if why == "a spare stands in":
        lab.ready(3)
    began_s = lab.now
    known = {"source": "SIGTERM", "id": "a", "waits": why == "somebody waits"}
    lab.say(PreemptionNoticed(node=1, at_s=lab.now, grace_s=30.0, **known))
    assert fire_until_asked(lab, began_s + 30.0).kind == "drain"
    assert lab.now < began_s + 1.0


def test_where_all_are_noticed_the_state_is_saved_at_once() -> None:
    lab = train()
    began_s = lab.now
    for node in (0, 1):
        lab.say(PreemptionNoticed(node=node, at_s=lab.now, grace_s=30.0, source="aws", id="a"))
    assert fire_until_asked(lab, began_s + 30.0).kind == "checkpoint"
    assert lab.now < began_s + 1.0


def test_elastic_members_that_have_no_time_are_left_out() -> None:
    lab = train()
    assert order_of(elastic_notice(lab, 1, 0.0)).ranks == (0, 1)


def test_the_last_elastic_node_saves() -> None:
    lab = train(nodes=1)
    assert find(elastic_notice(lab, 0, 30.0), SendBoundary).kind == "checkpoint"


def test_notices_survive_the_controller() -> None:
    driver = start()
    notice(driver, 1)
    known = decode(encode(driver.controller.state), type(driver.controller.state))
    assert repr(known) == repr(driver.controller.state)
    heir = Controller()
    for at_s, event in driver.log:
        heir.handle(at_s, event)
    driver.controller = heir
    driver.do(ControllerStarted(incarnation="c2"))
    assert one(wait(driver), SendBoundary).kind == "drain"
    driver.do(ControllerStarted(incarnation="c3"))
    assert one(driver.do(ControllerStarted(incarnation="c3")), SendBoundary).kind == "drain"


def test_a_notice_before_the_world_trains_waits_for_it() -> None:
    driver = Driver(nodes=2, spares=2)
    for node in range(3):
        driver.register(node)
    notice(driver, 1, 30.0)
    wait(driver)
    run(driver)
    generation = driver.controller.state.generation
    actions = driver.do(GenerationStepping(generation=generation, at_s=driver.now, step=6))
    sent = [a for a in actions if isinstance(a, SendBoundary)]
    move = driver.controller.state.moves["preemption-1"]
    assert sent or move.stage in ("agreeing", "held")


def test_what_fails_in_the_moment_before_the_decision_is_placed_elsewhere_already() -> None:
    driver = start()
    notice(driver, 1)
    order = one(exit_of(driver, 0, 0, code=1, error="ValueError"), AssignNodes)
    assert order.assignment.placement == (0, 2)


def test_a_withdrawal_does_not_let_in_what_an_operator_has_barred() -> None:
    driver = start()
    notice(driver, 2)
    assert one(wait(driver), CordonNode).node == 2
    ask(driver, "cordon", "2")
    driver.do(NodeCordoned(node=2, at_s=driver.now, reason="r", who="ada"))
    assert not [a for a in withdraw(driver, 2) if isinstance(a, RestoreNode)]
    assert 2 in driver.controller.state.cordoned


def start_plain(**spec: Any) -> Driver:
    """Return a job of two nodes without a spare, whose script does not call `perdure.init`."""
    driver = Driver(nodes=2, **spec)
    for node in range(2):
        driver.register(node)
    run_plain(driver)
    return driver


def stop_plain(driver: Driver) -> list[AnyAction]:
    """Say for all nodes that the older generation has ended, and that the store is served."""
    generation, actions = driver.controller.state.generation, list[AnyAction]()
    for node in range(2):
        stopped = GenerationStopped(node=node, generation=generation - 1, at_s=driver.now)
        actions += driver.do(stopped)
    return actions + driver.do(
        StoreReady(generation=generation, host="h", port=7, agent_store=True)
    )


def run_plain(driver: Driver) -> None:
    stop_plain(driver)
    start_ranks(driver)


def start_ranks(driver: Driver) -> None:
    generation = driver.controller.state.generation
    for node in range(2):
        driver.do(
            RanksStarted(node=node, generation=generation, pids={}, at_s=driver.now, warm=True)
        )
    driver.do(GenerationStepping(generation=generation, at_s=driver.now, step=-1))
    assert driver.controller.state.world.phase == "running"


def test_a_script_that_saves_itself_gets_the_announced_time() -> None:
    driver = start_plain()
    notice(driver, 1, 30.0, handled=True)
    order = one(wait(driver), AssignNodes)
    assert order.nodes == (0, 1)
    assert order.assignment.phase == "store"
    assert 26.0 < order.assignment.grace_s < 28.0, "less a reserve"
    state = driver.controller.state
    assert stop_plain(driver) == [], "nothing is started on a machine that goes away"
    assert not state.failures.total, "it is no failure"
    (again, *_) = [a for a in wait(driver, 30.0) if isinstance(a, AssignNodes)]
    assert again.assignment.phase == "run", "it has not gone"
    start_ranks(driver)


def test_a_script_that_saved_itself_goes_on_once_the_notice_is_withdrawn() -> None:
    driver = start_plain()
    notice(driver, 1, 30.0, handled=True)
    wait(driver)
    stop_plain(driver)
    again = [a for a in withdraw(driver, 1) if isinstance(a, AssignNodes)]
    assert [a.assignment.phase for a in again] == ["run"]


def hold_plain() -> Driver:
    """Return a job whose script has saved itself, and waits for node 1 to go away in 100 s."""
    driver = start_plain()
    notice(driver, 1, 100.0, handled=True)
    assert one(wait(driver), AssignNodes).assignment.phase == "store"
    assert stop_plain(driver) == []
    return driver


def list_phases(actions: list[AnyAction]) -> list[str]:
    return [a.assignment.phase for a in actions if isinstance(a, AssignNodes)]


@pytest.mark.parametrize(
    "other", [{"node": 0, "id": "b"}, {"node": 1, "source": "signal"}], ids=["node", "source"]
)
def test_a_script_that_saved_itself_is_held_for_a_later_notice_as_well(
    other: dict[str, Any],
) -> None:
    driver = hold_plain()
    notice(driver, grace_s=140.0, handled=True, **other)
    wait(driver, 120.0)
    assert not driver.controller.state.moves, "no rank is there that could save"
    assert driver.controller.state.world.phase == "forming", "no rank starts to be killed at once"
    assert list_phases(wait(driver, 30.0)) == ["run"]


def test_a_script_that_saved_itself_is_held_until_the_nearer_end() -> None:
    driver = hold_plain()
    notice(driver, 1, 40.0, handled=True)
    assert list_phases(wait(driver, 45.0)) == ["run"]
    assert not driver.controller.state.moves


def test_a_withdrawn_notice_holds_nothing_beside_a_mere_risk() -> None:
    driver = start_plain()
    notice(driver, 1, 0.0, certain=False, source="risk")
    notice(driver, 1, 100.0, handled=True)
    wait(driver)
    stop_plain(driver)
    assert list_phases(withdraw(driver, 1)) == ["run"]


def test_a_script_that_saved_itself_waits_for_the_node_that_went() -> None:
    driver = start_plain()
    notice(driver, 1, 30.0, handled=True)
    wait(driver)
    stop_plain(driver)
    driver.now += 25.0
    driver.do(NodeLost(node=1, at_s=driver.now, last_seen_s=driver.now, reason="silent"))
    assert not [a for a in wait(driver, 60.0) if isinstance(a, (AssignNodes, EndJob))]
    actions = driver.register(1, boot_id="b2", incarnation="a1b", generation=-1)
    actions += driver.do(
        GenerationStopped(
            node=1, generation=driver.controller.state.generation - 1, at_s=driver.now
        )
    )
    phases = [a.assignment.phase for a in actions if isinstance(a, AssignNodes)]
    assert "run" in phases


@pytest.mark.parametrize("more", [{}, {"handled": True, "certain": False}])
def test_a_script_that_handles_no_sigterm_is_left_alone(more: dict[str, Any]) -> None:
    driver = start_plain()
    notice(driver, 1, 30.0, **more)
    assert not [a for a in wait(driver) if isinstance(a, AssignNodes)]


def test_a_script_that_saves_itself_has_all_of_a_spot_notice_and_not_an_hour() -> None:
    driver = start_plain()
    notice(driver, 1, 120.0, handled=True)
    assert one(wait(driver), AssignNodes).assignment.grace_s > 115.0
    driver = start_plain()
    notice(driver, 1, 3600.0, handled=True)
    assert not [a for a in wait(driver, 3000.0) if isinstance(a, AssignNodes)]
    assert one(wait(driver, 500.0), AssignNodes).assignment.grace_s > 140.0
