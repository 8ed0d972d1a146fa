"""A CUDA error that no process survives: told first, then the device's, or the script's own."""

from typing import Any

import pytest
from tests.unit.control.driver import Driver, one
from tests.unit.control.test_placement import run

from perdure.control.recovery.devices import WINDOW_S
from perdure.model.events import RankExited
from perdure.model.failures import ExitRecord
from perdure.model.orders import AnyAction, AssignNodes, CordonNode, RestoreNode
from perdure.model.signals.progress import RankAccount

ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
PEER = "RuntimeError: Connection closed by peer"


def start(ids: str = "GPU", **spec: Any) -> Driver:
    driver = Driver(nodes=2, **{"spares": 2, "restart": {"max_restarts": 9}} | spec)
    for node in range(driver.spec.num_nodes):
        driver.register(node, device_ids=tuple(f"{ids}-{node}{slot}" for slot in range(2)))
    run(driver)
    return driver


def die(driver: Driver, node: int, rank: int, step: int, error: str = ILLEGAL) -> list[AnyAction]:
    driver.now += 60
    record = ExitRecord(
        rank, driver.controller.state.generation, 1, driver.now, code=1, error=error
    )
    return driver.do(
        RankExited(node=node, record=record, account=RankAccount(step=step), detected_s=driver.now)
    )


def find(actions: list[AnyAction], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def test_the_first_is_told_and_the_second_on_its_device_costs_it_its_place() -> None:
    driver = start()
    first = die(driver, 1, 3, 10)
    assert one(first, AssignNodes).assignment.placement == (0, 1)
    reason = driver.controller.state.book.newest[-1].reason
    assert "no process survives this CUDA error" in reason
    assert reason.endswith("it is the first on GPU-11 within an hour, and may be the script's own")
    run(driver)
    second = die(driver, 1, 3, 25)
    assert one(second, CordonNode).node == 1
    order = one(second, AssignNodes)
    assert order.assignment.placement == (0, 2)
    assert "the second on GPU-11 within an hour, and no other device had one" in order.reason


def test_it_is_the_scripts_where_another_device_had_one_and_the_node_is_used_again() -> None:
    driver = start()
    for step in (10, 25):
        last = die(driver, 1, 3, step)
        run(driver)
    assert find(last, CordonNode)
    third = die(driver, 2, 3, 40)  # The same rank, on the node that stood in.
    assert one(third, RestoreNode).node == 1
    assert not find(third, CordonNode)
    run(driver)
    fourth = die(driver, 2, 3, 55)
    assert not find(fourth, CordonNode) + find(fourth, RestoreNode)
    assert "GPU-11 had such an error as well" in driver.controller.state.book.newest[-1].reason


def test_ranks_that_have_it_at_once_blame_nobody() -> None:
    driver = start()
    for step in (10, 25, 40):
        actions = die(driver, 0, 0, step) + die(driver, 1, 3, step)
        assert not find(actions, CordonNode)
        run(driver)


@pytest.mark.parametrize(
    ("ids", "steps", "later_s", "error", "spec"),
    [
        ("GPU", (10, 10), 0.0, ILLEGAL, {}),
        ("GPU", (10, 25), WINDOW_S, ILLEGAL, {}),
        ("cpu", (10, 25), 0.0, ILLEGAL, {}),
        ("GPU", (10, 25), 0.0, "torch.OutOfMemoryError: CUDA out of memory", {}),
        ("GPU", (10, 25), 0.0, "ValueError: an illegal memory access was encountered", {}),
        ("GPU", (10, 25), 0.0, ILLEGAL, {"spares": 0}),
        ("GPU", (10, 25), 0.0, ILLEGAL, {"policy": {"unhealthy_device": "report"}}),
    ],
    ids=["same step", "an hour later", "no GPU", "memory", "other words", "no spare", "policy"],
)
def test_no_device_is_blamed(
    ids: str, steps: tuple[int, int], later_s: float, error: str, spec: dict[str, Any]
) -> None:
    driver = start(ids, **spec)
    assert not find(die(driver, 1, 3, steps[0], error), CordonNode)
    run(driver)
    driver.now += later_s
    again = die(driver, 1, 3, steps[1], error)
    assert not find(again, CordonNode)
    assert one(again, AssignNodes).assignment.placement == (0, 1), "it starts again all the same"


def test_a_peer_that_follows_is_no_such_error_and_an_exit_told_twice_counts_once() -> None:
    driver = start()
    die(driver, 1, 3, 10)
    die(driver, 0, 0, 10, PEER)
    again = driver.log[-2][1]
    driver.do(again)
    assert len(driver.controller.state.sticky_errors) == 1


def test_a_rank_that_the_watchdog_aborted_says_it_in_its_last_lines() -> None:
    said = ("[rank3] terminated with exception: CUDA error: unspecified launch failure",)
    record = ExitRecord(3, 0, 1, 0.0, signal=6, last_output=said)
    assert record.sticky_error == "unspecified launch failure"
    assert not ExitRecord(3, 0, 1, 0.0, code=1, last_output=said).sticky_error
    assert not ExitRecord(3, 0, 1, 0.0, signal=6, last_output=said, asked=True).sticky_error
