"""What outside monitors say: answered, journaled, and acted upon as the policy says."""

from typing import Any

import pytest
from tests.unit.control.driver import Driver, one
from tests.unit.control.test_placement import start

from perdure.control.records import make_journal_event
from perdure.model.events import CommandReceived, DeviceReported, PreemptionNoticed, VerdictReached
from perdure.model.orders import AnswerCommand, AnyAction, AssignNodes, CordonNode, RecordEvent


def notify(driver: Driver, **args: Any) -> tuple[AnswerCommand, list[AnyAction]]:
    """Send a notice, then journal what follows as the shell does; return answer and the rest."""
    id_ = f"n{len(driver.log)}"
    todo = driver.do(CommandReceived(id=id_, kind="notify", args=args, who="dcgm", at_s=driver.now))
    done: list[AnyAction] = []
    while todo:
        action = todo.pop(0)
        done.append(action)
        event = make_journal_event(driver.now, action)
        if event is not None:
            todo += driver.do(event)
    return one(done, AnswerCommand), done


def devices(driver: Driver) -> None:
    for node in range(driver.spec.num_nodes):
        ids = (f"GPU-{node}a", f"GPU-{node}b")
        driver.register(node, device_ids=ids, generation=driver.controller.state.generation)


def recorded(actions: list[AnyAction], kind: type) -> list[Any]:
    found = [a.event for a in actions if isinstance(a, RecordEvent)]
    return [event for event in found if isinstance(event, kind)]


def test_failed_device_takes_its_node_out_of_the_world() -> None:
    driver = start()
    devices(driver)
    answer, done = notify(driver, kind="device-failed", device="GPU-1b", reason="XID 79")
    assert answer.ok
    assert answer.result == {"node": 1, "kind": "device-failed", "device": "GPU-1b"}
    (reported,) = recorded(done, DeviceReported)
    assert (reported.node, reported.source, reported.healthy) == (1, "dcgm", False)
    (reached,) = recorded(done, VerdictReached)
    assert str(reached.verdict.culprit) == "device GPU-1b"
    assert reached.verdict.reason == "GPU-1b on node 1: XID 79 (dcgm)"
    assert one(done, AssignNodes).assignment.generation == 1
    assert one(done, CordonNode).node == 1
    assert driver.controller.state.world.placement == (0, 2)
    again, more = notify(driver, kind="device-failed", device="GPU-1a")
    assert again.ok
    assert not recorded(more, VerdictReached)


def test_without_a_spare_the_ranks_go_on() -> None:
    driver = start(spares=0)
    answer, done = notify(driver, kind="device-failed", node=1)
    assert answer.ok
    assert len(recorded(done, VerdictReached)) == 1
    assert not [a for a in done if isinstance(a, AssignNodes | CordonNode)]


def test_policy_report_only_reports() -> None:
    driver = start(policy={"unhealthy_device": "report"})
    _, done = notify(driver, kind="device-failed", node=1)
    assert len(recorded(done, VerdictReached)) == 1
    assert not [a for a in done if isinstance(a, AssignNodes | CordonNode)]


def test_failed_device_of_a_spare_node_is_cordoned_and_ends_nothing() -> None:
    driver = start()
    _, done = notify(driver, kind="device-failed", node=2)
    assert one(done, CordonNode).node == 2
    assert not [a for a in done if isinstance(a, AssignNodes)]
    assert driver.controller.state.spares == ()


def test_a_device_that_is_well_is_noted_and_no_more() -> None:
    _, done = notify(start(), kind="device-ok", node=1)
    assert recorded(done, DeviceReported)[0].healthy
    assert not recorded(done, VerdictReached)


def test_preemption_becomes_an_event() -> None:
    answer, done = notify(start(), kind="preemption", node=0, grace_s=30.0, source="spot")
    assert answer.ok
    (noticed,) = recorded(done, PreemptionNoticed)
    assert (noticed.node, noticed.grace_s, noticed.source) == (0, 30.0, "spot")


def test_what_names_nothing_is_refused_and_changes_nothing() -> None:
    driver = start()
    devices(driver)
    before = driver.controller.state.world.placement
    for args, words in (
        ({"kind": "device-failed"}, "of what?"),
        ({"kind": "device-failed", "device": "GPU-9"}, "there is no device `GPU-9`"),
        ({"kind": "device-failed", "device": "GPU-1a", "node": 0}, "GPU-1a is on node 1, not 0"),
        ({"kind": "preemption", "node": 7}, "there is no node 7"),
        ({"kind": "preemption", "node": 0, "grace_s": -1.0}, "grace_s of -1 s"),
        ({"kind": "preemption", "node": "x"}, "malformed notice"),
        ({"kind": "explode"}, "malformed notice"),
    ):
        answer, done = notify(driver, **args)
        assert not answer.ok
        assert words in answer.reason
        assert done == [answer]
    assert driver.controller.state.world.placement == before


@pytest.mark.parametrize("kind", ["inject", "drain", "evict", "restore", "set", "probe", "notify"])
@pytest.mark.parametrize("replicas", [0, 2])
def test_arguments_of_a_wrong_type_refuse_a_command_and_end_no_controller(
    kind: str, replicas: int
) -> None:
    driver = start() if not replicas else Driver(nodes=2, torchft={"replicas": replicas})
    for value in (7, "x", [1], {"a": 1}, None, 1e300):
        args = {"rank": value, "node": value, "targets": value, "deadline_s": value}
        event = CommandReceived(id=f"{kind} {value}", kind=kind, args=args, who="w", at_s=1.0)  # type: ignore[arg-type]
        driver.do(event)
    assert driver.controller.state.generation <= 0
