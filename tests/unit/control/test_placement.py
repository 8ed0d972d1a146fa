"""A node that is blamed or lost gives its place to a spare one, and only then."""

from typing import Any

from tests.slowness import find_slowness, move_verdict
from tests.unit.control.driver import Driver, one

from perdure.model.events import (
    GenerationStepping,
    GenerationStopped,
    NodeCordoned,
    NodeLost,
    NodeRestored,
    RankJoined,
    RanksStarted,
    StoreReady,
    TimerFired,
    VerdictReached,
)
from perdure.model.orders import Assignment, AssignNodes, CordonNode, EndJob, InterruptCollectives
from perdure.model.verdicts import Culprit, Verdict


def start(nodes: int = 2, spares: int = 2, **spec: Any) -> Driver:
    """Bring a job of `nodes` nodes of two ranks, and one spare node, to its first step."""
    driver = Driver(nodes=nodes, spares=spares, **spec)
    for node in range(driver.spec.num_nodes):
        driver.register(node)
    run(driver)
    return driver


def run(driver: Driver, silent: frozenset[int] = frozenset()) -> Assignment:
    """Answer for every node but `silent` until the newest generation trains."""
    state = driver.controller.state
    generation = state.generation
    for node in range(driver.spec.num_nodes):
        if node not in silent:
            driver.do(GenerationStopped(node=node, generation=generation - 1, at_s=driver.now))
    driver.do(StoreReady(generation=generation, host="h", port=7, agent_store=True))
    assert state.world.phase == "starting", "nobody else is waited for"
    for node in state.world.placement:
        driver.do(
            RanksStarted(node=node, generation=generation, pids={}, at_s=driver.now, warm=True)
        )
    for rank in state.ranks:
        driver.do(RankJoined(generation=generation, rank=rank))
    driver.do(GenerationStepping(generation=generation, at_s=driver.now + 1.0, step=5))
    assert state.world.phase == "running"
    assert state.assignment is not None
    return state.assignment


def blame(
    driver: Driver, culprit: Culprit, kind: str = "CommHang", ground: Any = "", **evidence: Any
) -> Any:
    driver.now += 20.0
    verdict = Verdict(
        kind=kind,  # type: ignore[arg-type]
        culprit=culprit,
        generation=driver.controller.state.generation,
        first_seen_s=driver.now - 2,
        confirmed_s=driver.now - 1,
        confidence=0.9,
        reason="r",
        actionable=True,
        activity="quiet",
        evidence=evidence,
        ground=ground,
    )
    actions = driver.do(VerdictReached(verdict=verdict))
    driver.now += 5.0
    held = driver.controller.state.world.stacks
    if held is None or held.held is None:
        return actions
    return driver.do(TimerFired())


def test_comm_hang_forms_the_next_world_without_the_blamed_node() -> None:
    driver = start()
    assert driver.controller.state.world.placement == (0, 1)
    actions = blame(driver, Culprit(node=1))
    order = one(actions, AssignNodes)
    assert order.assignment.placement == (0, 2)
    assert order.nodes == (0, 1, 2), "the one that is left out must end its ranks as well"
    assert "node 2 stands in for node 1" in order.reason
    assert run(driver).group_of(2) == 1
    assert driver.controller.state.spares == (1,)


def test_second_blame_cordons_and_an_operator_restores() -> None:
    driver = start()
    blame(driver, Culprit(rank=3), kind="ComputeHang")
    run(driver)
    actions = blame(driver, Culprit(rank=2), kind="ComputeHang")
    assert one(actions, CordonNode).node == 1
    assert one(actions, AssignNodes).assignment.placement == (0, 2)
    driver.do(NodeCordoned(node=1, at_s=driver.now, reason="r"))
    run(driver)
    assert driver.controller.state.spares == (), "a cordoned node stands in for nobody"
    driver.do(NodeRestored(node=1, at_s=driver.now, reason="mended", who="me"))
    assert driver.controller.state.spares == (1,)
    assert driver.controller.state.blames.get(1) is None


def test_without_a_spare_the_same_nodes_go_on() -> None:
    driver = start(spares=0)
    order = one(blame(driver, Culprit(node=1)), AssignNodes)
    assert order.assignment.placement == (0, 1)
    assert "no spare node" in order.reason


def test_lost_node_is_not_waited_for_where_a_spare_stands_in() -> None:
    driver = start()
    driver.now += 5
    lost = NodeLost(node=0, at_s=driver.now, reason="silent")
    assert one(driver.do(lost), AssignNodes).assignment.placement == (2, 1)
    assert run(driver, silent=frozenset({0})).group_of(2) == 0
    driver.register(0)
    assert driver.controller.state.spares == (0,), "back, and ready"


def test_loss_of_a_spare_node_changes_nothing() -> None:
    driver = start()
    assert driver.do(NodeLost(node=2, at_s=driver.now, reason="silent")) == []
    assert driver.controller.state.world.phase == "running"


def tell_slow(driver: Driver, verdict: Verdict, culprit: Culprit) -> Any:
    """Have the controller hear a verdict that the detector made, of another culprit."""
    driver.now += 20.0
    generation = driver.controller.state.generation
    moved = move_verdict(verdict, driver.now - 1, culprit, generation)
    return driver.do(VerdictReached(verdict=moved))


def test_slow_link_blames_the_end_that_was_blamed_before() -> None:
    driver = start()
    blame(driver, Culprit(node=1), kind="ComputeHang")
    run(driver)
    link = find_slowness(20.0, "slow-link")
    actions = tell_slow(driver, link, Culprit(link=(0, 2)))
    assert one(actions, AssignNodes).assignment.placement == (0, 2)


def test_slow_link_whose_end_cannot_be_told_is_only_reported() -> None:
    driver = start()
    link = find_slowness(20.0, "slow-link")
    (record,) = tell_slow(driver, link, Culprit(link=(0, 2)))
    assert "nobody is to blame for certain" in record.reason
    assert driver.controller.state.world.phase == "running"


def test_a_dead_link_is_left_out_with_one_of_its_ends_and_then_with_the_end_that_both_share() -> (
    None
):
    """T5: it stays dead, so a restart on the same nodes would wait for it again."""
    driver = start(nodes=3)
    actions = blame(driver, Culprit(link=(0, 2)), ground="link")
    assert one(actions, AssignNodes).assignment.placement == (0, 3, 2)
    run(driver)
    actions = blame(driver, Culprit(link=(2, 0)), ground="link")  # Now of nodes 3 and 0.
    assert one(actions, AssignNodes).assignment.placement == (1, 3, 2)
    assert one(actions, CordonNode).node == 0


def test_a_dead_link_without_a_spare_restarts_the_same_nodes() -> None:
    driver = start(nodes=3, spares=0)
    actions = blame(driver, Culprit(link=(0, 2)), ground="link")
    assert one(actions, AssignNodes).assignment.placement == (0, 1, 2)


def test_interrupt_gives_the_script_a_word_before_its_end() -> None:
    driver = start(policy={"interrupt_s": 2.0})
    actions = blame(driver, Culprit(node=1))
    assert one(actions, InterruptCollectives).ranks == (0, 1, 2, 3)
    assert one(actions, AssignNodes).assignment.grace_s == 2.0


def test_world_without_a_spare_waits_for_its_lost_node_and_gives_up_in_the_end() -> None:
    driver = start(spares=0, restart={"node_wait_s": 300.0})
    driver.now += 5
    lost_s = driver.now
    driver.do(NodeLost(node=1, at_s=lost_s, reason="silent"))
    state = driver.controller.state
    driver.do(GenerationStopped(node=0, generation=0, at_s=driver.now))
    driver.now = state.world.deadline_s or 0.0
    assert driver.do(TimerFired()) == []
    assert state.world.phase == "forming"
    driver.now = state.world.deadline_s or 0.0
    assert driver.now == lost_s + 300.0
    driver.do(TimerFired())
    assert state.ending is not None
    assert "node 1 did not come back within 300 s" in state.ending.reason


def test_lost_node_that_comes_back_in_time_is_used_again() -> None:
    driver = start(spares=0)
    driver.now += 5
    driver.do(NodeLost(node=1, at_s=driver.now, reason="silent"))
    driver.now += 200
    driver.register(1)
    assert run(driver).placement == (0, 1)


def test_rank_that_dies_of_its_device_takes_its_node_with_it() -> None:
    driver = start()
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    order = one(driver.exit(3, code=1, error=error), AssignNodes)
    assert order.assignment.placement == (0, 2)
    assert "died of its device: uncorrectable ECC error" in order.reason
    again = one(
        start().exit(3, code=1, error="RuntimeError: CUDA error: launch failure"), AssignNodes
    )
    assert again.assignment.placement == (0, 1), "an error that may be the script's own"


def test_a_cordoned_node_stands_in_for_a_lost_one_unless_an_operator_barred_it() -> None:
    for who, placement in (("", (2, 1)), ("me", (0, 1))):
        driver = start()
        driver.do(NodeCordoned(node=2, at_s=driver.now, reason="r", who=who))
        driver.do(NodeLost(node=0, at_s=driver.now, reason="silent"))
        assert driver.controller.state.world.placement == placement


def test_the_least_blamed_spare_stands_in() -> None:
    driver = start(spares=4)
    blame(driver, Culprit(node=1))
    run(driver)
    assert driver.controller.state.world.placement == (0, 2)
    assert driver.controller.state.spares == (3, 1)


def test_the_end_does_not_wait_for_a_node_that_is_lost() -> None:
    """Neither for one that was lost before, nor for one that is while the others end."""
    driver = start(nodes=2, spares=2)
    driver.do(NodeLost(node=3, at_s=driver.now, reason="silent"))
    for rank in driver.controller.state.ranks:
        driver.exit(rank)
    driver.do(GenerationStopped(node=0, generation=0, at_s=driver.now))
    driver.do(GenerationStopped(node=1, generation=0, at_s=driver.now))
    assert driver.controller.state.phase == "ending", "node 2 has not said that it is empty"
    one(driver.do(NodeLost(node=2, at_s=driver.now, reason="silent")), EndJob)
