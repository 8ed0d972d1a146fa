"""`--observe`: every decision is made and journaled, and none becomes an action."""

from typing import Any

import pytest
from tests.slowness import find_slowness, move_verdict
from tests.unit.control.driver import Driver, one
from tests.unit.control.groups_lab import Lab
from tests.unit.control.test_outstanding import replayed
from tests.unit.control.test_placement import run, start

from perdure.model.events import (
    ActionWithheld,
    BoundaryAnswered,
    BoundaryReached,
    CommandReceived,
    ControllerStarted,
    DeviceReported,
    GenerationStopped,
    KeeperLost,
    NodeLost,
    PreemptionNoticed,
    RankExited,
    RankJoined,
    RanksStarted,
    ReplicaSeen,
    StacksTaken,
    StoreReady,
    TimerFired,
    VerdictReached,
    WorldBroken,
)
from perdure.model.failures import ExitRecord
from perdure.model.orders import (
    AnyAction,
    AssignNodes,
    CordonNode,
    EndJob,
    EvictReplica,
    FenceAbort,
    InjectFault,
    InterruptCollectives,
    RecordEvent,
    ReformWorld,
    RunProbe,
    SendBoundary,
)
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Culprit, Verdict

ACTS = (AssignNodes, CordonNode, InterruptCollectives, ReformWorld, RunProbe, EndJob)


def withheld(actions: list[AnyAction]) -> list[ActionWithheld]:
    events = [a.event for a in actions if isinstance(a, RecordEvent)]
    return [event for event in events if isinstance(event, ActionWithheld)]


def acted(actions: list[AnyAction]) -> list[AnyAction]:
    return [action for action in actions if isinstance(action, ACTS)]


def hang(driver: Driver, kind: str, culprit: Culprit, **how: Any) -> list[AnyAction]:
    driver.now += 20.0
    verdict = Verdict(
        kind=kind, culprit=culprit, generation=0, first_seen_s=driver.now - 2,  # type: ignore[arg-type]
        confirmed_s=driver.now - 1, confidence=0.9, reason="r", actionable=True,
        activity="stopped", **how,
    )  # fmt: skip
    actions = driver.do(VerdictReached(verdict=verdict))
    driver.now += 5.0
    return [*actions, *driver.do(StacksTaken(generation=0, at_s=driver.now, stacks={2: "", 0: ""}))]


@pytest.mark.parametrize(
    ("kind", "would"),
    [
        ("CommHang", "restarted the world"),
        ("ComputeHang", "restarted the world"),
        ("Desync", "stopped the job"),
        ("UnhealthyDevice", "restarted the world"),
    ],
)
def test_a_verdict_ends_nothing_and_says_what_it_would_have(kind: str, would: str) -> None:
    driver = start(observe=True, policy={"interrupt_s": 2.0, "cordon_after": 1})
    actions = hang(driver, kind, Culprit(rank=2))
    assert acted(actions) == []
    (event,) = withheld(actions)
    assert (event.would, event.culprit) == (would, "rank 2")
    assert driver.controller.state.world.phase == "running"
    stacks = driver.controller.state.world.stacks
    assert stacks is None or stacks.held is None, "nothing waits for what never comes"


def test_slowness_is_told_once_however_long_it_lasts() -> None:
    driver = start(observe=True)
    driver.now += 20
    verdict = move_verdict(find_slowness(2.5), driver.now, Culprit(rank=2))
    actions: list[AnyAction] = []
    for _ in range(5):
        driver.now += 10
        actions += driver.do(VerdictReached(verdict=verdict))
    assert acted(actions) == []
    (event,) = withheld(actions)
    assert "node 2 stands in for node 1" in event.reason


def test_a_rank_that_dies_ends_the_job_with_its_code() -> None:
    driver = start(observe=True)
    actions = driver.exit(2, code=7)
    (event,) = withheld(actions)
    assert (event.would, event.cause) == ("restarted the world", "Crash")
    assert one(actions, AssignNodes).assignment.phase == "end"
    for node in range(3):
        actions = driver.do(GenerationStopped(node=node, generation=0, at_s=driver.now))
    assert one(actions, EndJob).exit_code == 7


def test_a_silent_node_is_left_alone_and_a_dead_keeper_ends_the_job() -> None:
    driver = start(observe=True)
    actions = driver.do(NodeLost(node=1, at_s=driver.now, reason="silent"))
    assert acted(actions) == []
    assert [e.cause for e in withheld(actions)] == ["NodeLost"]
    driver.now += 60.0
    again = NodeLost(node=1, at_s=driver.now, reason="silent")
    (told,) = withheld(driver.do(again))
    assert (told.cause, told.first_seen_s) == ("NodeLost", again.at_s), "another silence"
    assert driver.controller.state.world.phase == "running"
    actions = driver.do(KeeperLost(node=0, generation=0, at_s=driver.now))
    assert one(actions, AssignNodes).assignment.phase == "end"


def test_nobody_is_drained_cordoned_or_probed() -> None:
    driver = start(observe=True)
    driver.do(PreemptionNoticed(node=1, at_s=driver.now, grace_s=30.0, source="aws"))
    driver.now += 5
    actions = driver.do(TimerFired())
    assert acted(actions) == []
    assert [e.would for e in withheld(actions)] == ["left it at a step that all agree on"]
    sick = DeviceReported(device="node 2", node=2, at_s=driver.now, healthy=False, reason="XID 79")
    assert acted(driver.do(sick)) == []
    slow = find_slowness(6.0, "slow-nic", 2)
    asks = {"probe": [0, 1]}
    verdict = move_verdict(slow, driver.now, Culprit(node=1))
    from msgspec.structs import replace

    actions = driver.do(VerdictReached(verdict=replace(verdict, actionable=False, evidence=asks)))
    assert acted(actions) == []
    assert [e.would for e in withheld(actions)] == ["probed the links"]


def test_an_operator_s_word_is_done() -> None:
    driver = start(observe=True)
    evict = CommandReceived(id="c", kind="evict", args={"targets": ["node:1"], "force": True})
    actions = driver.do(evict)
    assert one(actions, CordonNode).node == 1
    assert one(actions, AssignNodes).assignment.placement == (0, 2)
    assert run(driver).group_of(2) == 1


@pytest.mark.parametrize("kind", ["pause", "stop", "checkpoint"])
def test_what_an_operator_asks_of_all_ranks_is_agreed_upon(kind: Any) -> None:
    driver = start(observe=True)
    sent = one(driver.do(CommandReceived(id="c", kind=kind, who="me")), SendBoundary)
    assert (sent.kind, sent.move) == (kind, "prepare")


def test_a_policy_set_live_and_another_controller_change_nothing() -> None:
    driver = start(observe=True, policy={"desync": "report"})
    args = {"changes": {"policy.desync": "restart", "policy.comm_hang": "stop"}}
    sent = one(driver.do(CommandReceived(id="c", kind="set", args=args, who="me")), SendBoundary)
    for rank in range(4):
        driver.do(BoundaryAnswered(id=sent.id, rank=rank, ok=True, step=5))
    for rank in range(4):
        driver.do(BoundaryReached(id=sent.id, rank=rank, step=sent.step, at_s=driver.now))
    assert driver.controller.state.the_spec().policy.comm_hang == "stop"
    driver.controller = replayed(driver)
    driver.do(ControllerStarted(incarnation="c2"))
    assert [e.would for e in withheld(hang(driver, "Desync", Culprit(rank=2)))] == [
        "restarted the world"
    ]
    actions = hang(driver, "CommHang", Culprit(rank=2))
    assert acted(actions) == []
    assert [e.would for e in withheld(actions)] == ["stopped the job"]


def test_an_elastic_world_is_not_formed_again() -> None:
    driver = Driver(nodes=2, spares=2, observe=True)
    for node in range(3):
        driver.register(node)
    driver.run()
    for rank in range(4):
        joined = RankJoined(generation=0, rank=rank, depth="elastic", store=f"h:{rank}")
        assert acted(driver.do(joined)) == [], "no spare is started beside it"
    assert driver.controller.state.world.elastic.members
    driver.do(WorldBroken(generation=0, rank=0, epoch=0, error="reset", at_s=driver.now))
    record = ExitRecord(rank=3, generation=0, pid=1, at_s=driver.now, signal=9)
    account = RankAccount(step=4)
    died = RankExited(node=1, record=record, account=account, detected_s=driver.now)
    actions = driver.do(died)
    assert one(actions, AssignNodes).assignment.phase == "end"
    assert [e.would for e in withheld(actions)] == ["restarted the world"]


def test_members_on_a_node_that_was_silent_are_not_ended_when_it_is_back() -> None:
    driver = Driver(nodes=2, observe=True)
    for node in range(2):
        driver.register(node)
    driver.run()
    for rank in range(4):
        driver.do(RankJoined(generation=0, rank=rank, depth="elastic", store=f"h:{rank}"))
    silent = driver.do(NodeLost(node=1, at_s=driver.now, reason="silent"))
    assert [e.cause for e in withheld(silent)] == ["NodeLost"]
    back = driver.register(1, incarnation="b1", generation=0, running=(2, 3))
    assert not [a for a in back if isinstance(a, InjectFault)], "they train"


def test_a_world_whose_start_nobody_tells_of_is_left_alone() -> None:
    driver = Driver(nodes=2, observe=True)
    for node in range(2):
        driver.register(node)
        driver.do(GenerationStopped(node=node, generation=-1, at_s=driver.now))
    driver.do(StoreReady(generation=0, host="h", port=7, agent_store=True))
    assert driver.controller.state.world.phase == "starting"
    driver.now += 1000.0
    actions = driver.do(TimerFired())
    assert acted(actions) == []
    assert [e.would for e in withheld(actions)] == ["restarted the world"]
    assert driver.controller.next_deadline() is None
    for node in range(2):
        driver.do(RanksStarted(node=node, generation=0, pids={}, at_s=driver.now, warm=True))
    assert driver.controller.state.world.phase == "running"


def test_a_broken_elastic_world_whose_members_live_ends_as_well() -> None:
    driver = Driver(nodes=2, observe=True)
    for node in range(2):
        driver.register(node)
    driver.run()
    for rank in range(4):
        driver.do(RankJoined(generation=0, rank=rank, depth="elastic", store=f"h:{rank}"))
    driver.do(WorldBroken(generation=0, rank=0, epoch=0, error="reset", at_s=driver.now))
    driver.now += 1
    assert one(driver.do(TimerFired()), AssignNodes).assignment.phase == "end"


def test_a_torchft_group_that_dies_stays_away_and_nobody_else_is_touched() -> None:
    lab = Lab(observe=True, lighthouse="stock")
    actions = lab.exit(1, signal=9, step=7)
    assert [(e.would, e.culprit) for e in withheld(actions)] == [
        ("restarted the group", "group 1, rank 1")
    ]
    assert not [a for a in actions if isinstance(a, EvictReplica | FenceAbort)]
    order = one(actions, AssignNodes)
    assert (order.nodes, order.assignment.phase) == ((1,), "stop"), "what is left of it is ended"
    assert lab.machine.next_deadline() is None, "nothing is to come of it later"
    assert withheld(lab.add(KeeperLost(node=1, generation=1, at_s=lab.now))) == []
    assert not [a for a in lab.exit(0, step=9) if isinstance(a, EndJob)], "group 2 trains on"


def test_a_torchft_group_whose_start_nobody_tells_of_is_left_alone() -> None:
    lab = Lab(observe=True, lighthouse="stock")
    group = lab.machine.state.worlds[2]
    group.phase, group.deadline_s = "starting", lab.now + 1.0
    lab.now += 2.0
    actions = lab.add(TimerFired())
    assert acted(actions) == []
    assert [e.would for e in withheld(actions)] == ["restarted the group"]
    assert lab.machine.next_deadline() is None


def test_a_torchft_group_that_is_merely_silent_is_left_alone() -> None:
    lab = Lab(observe=True, lighthouse="stock")
    actions = lab.add(NodeLost(node=2, at_s=lab.now, reason="silent"))
    assert acted(actions) == []
    assert [e.would for e in withheld(actions)] == ["restarted the group"]
    assert lab.machine.state.worlds[2].phase == "running"
    noticed = PreemptionNoticed(node=1, at_s=lab.now, grace_s=30.0, source="aws")
    actions = lab.add(noticed)
    assert acted(actions) == []
    assert [e.cause for e in withheld(actions)] == ["Preemption"]
    assert lab.machine.state.moves == {}


def test_a_torchft_group_that_is_never_formed_is_given_up_even_if_its_node_was_silent() -> None:
    lab = Lab(observe=True, lighthouse="stock")
    group = lab.machine.state.worlds[2]
    group.phase, group.deadline_s = "forming", lab.now + 100.0
    lab.add(NodeLost(node=2, at_s=lab.now, reason="silent"))
    assert group.phase == "forming", "it may come yet"
    lab.now += 101.0
    actions = lab.add(TimerFired())
    assert [e.cause for e in withheld(actions)] == ["forming took too long"]
    assert (group.phase, one(actions, AssignNodes).assignment.phase) == ("failed", "stop")


def test_what_was_withheld_is_remembered_up_to_a_bound() -> None:
    """T12: a group is left out and comes back for weeks, in one generation."""
    lab = Lab(observe=True, lighthouse="stock")
    sizes = []
    for _ in range(2000):
        lab.add(ReplicaSeen(replica="", group=1, at_s=lab.now, gone=True, reason="why"))
        lab.add(ReplicaSeen(replica="", group=1, at_s=lab.now))
        sizes.append(len(lab.machine.state.world.withheld))
    assert sizes[-1] == sizes[-500]
