from perdure.control.orders import REPEAT_S, OrderBook, Sending
from perdure.model.events import (
    BoundaryReached,
    FaultInjected,
    NodeLost,
    NodeRegistered,
    ProbeEnded,
    StacksTaken,
)
from perdure.model.job import JobSpec
from perdure.model.orders import (
    AnyOrder,
    Assignment,
    AssignNodes,
    InjectFault,
    RunProbe,
    SendBoundary,
    TakeStacks,
)


def book(nodes: int = 2) -> OrderBook:
    orders = OrderBook(JobSpec(script="x", nproc=2, nodes=nodes), "c1")
    assert [(to, order.register) for to, order in orders.start(0.0)] == [("all", True)]
    return orders


def assign(number: int, generation: int = 0, nodes: tuple[int, ...] = (0, 1)) -> AssignNodes:
    assignment = Assignment(number=number, generation=generation, phase="store")
    return AssignNodes(nodes=nodes, assignment=assignment, reason="r")


def boundary(move: str, generation: int = 0) -> SendBoundary:
    return SendBoundary(
        id="b1",
        move=move,  # type: ignore[arg-type]
        kind="checkpoint",
        step=5,
        ranks=(0, 1, 2, 3),
        generation=generation,
        reason="r",
    )


def register(node: int, agent: str = "a") -> NodeRegistered:
    return NodeRegistered(node=node, incarnation=agent, host="h", boot_id="b", slots=2)


def numbers(sendings: list[Sending]) -> list[tuple[int | str, int]]:
    return [(to, order.assignment.number) for to, order in sendings if order.assignment]


def told(sendings: list[Sending]) -> list[tuple[int | str, AnyOrder]]:
    return [(to, order) for to, message in sendings for order in message.orders]


def test_the_newest_assignment_is_repeated() -> None:
    orders = book()
    orders.note(register(0))
    orders.note(register(1))
    assert numbers(orders.take(assign(1))) == [("all", 1)]
    assert numbers(orders.take(assign(2, nodes=(1,)))) == [(1, 2)]
    assert orders.repeat(REPEAT_S / 2) == []
    assert numbers(orders.repeat(REPEAT_S)) == [(0, 1), (1, 2)]
    assert orders.next_deadline() == 2 * REPEAT_S


def test_nodes_that_have_not_registered_are_asked_again() -> None:
    orders = book()
    orders.note(register(0))
    assert [(to, order.register) for to, order in orders.repeat(REPEAT_S)] == [(1, True)]


def test_what_a_node_shall_run_is_repeated_to_the_agent_that_has_registered_alone() -> None:
    """A machine in the place of a lost one has none of its processes: it says so first."""
    orders = book()
    orders.note(register(0))
    orders.note(register(1, "a1"))
    orders.take(assign(1))
    assert [order.agent for _, order in orders.repeat(REPEAT_S)] == ["a", "a1"]
    orders.note(NodeLost(node=1, at_s=2.0, reason="silent"))
    _, (to, asked) = orders.repeat(2 * REPEAT_S)
    assert (to, asked.register, asked.assignment) == (1, True, None)
    orders.note(register(1, "a2"))
    orders.take(assign(2, nodes=(1,)))
    _, (to, told) = orders.repeat(3 * REPEAT_S)
    assert (to, told.agent, numbers([(to, told)])) == (1, "a2", [(1, 2)])


def test_where_machines_take_places_each_assignment_names_its_agent() -> None:
    orders = OrderBook(JobSpec(script="x", nodes=2, remote=1), "c1")
    orders.note(register(0, "a0"))
    orders.note(register(1, "a1"))
    sent = orders.take(assign(1))
    assert [(to, order.agent) for to, order in sent] == [(0, "a0"), (1, "a1")]


def test_a_boundary_is_repeated_until_every_rank_reached_it() -> None:
    orders = book()
    orders.take(boundary("prepare"))
    sent = orders.take(boundary("commit"))
    assert [to for to, _ in sent] == ["all"]
    for rank in (0, 1, 2):
        orders.note(BoundaryReached(id="b1", rank=rank, step=5, at_s=1.0))
    assert told(orders.repeat(REPEAT_S)) == [(1, boundary("commit"))]
    orders.note(BoundaryReached(id="b1", rank=3, step=5, at_s=1.0))
    assert told(orders.repeat(2 * REPEAT_S)) == []


def test_orders_of_an_older_generation_are_dropped() -> None:
    orders = book()
    orders.take(boundary("prepare"))
    orders.take(assign(1, generation=1))
    assert told(orders.repeat(REPEAT_S)) == []


def test_stacks_and_faults_are_repeated_until_answered() -> None:
    orders = book()
    stacks = TakeStacks(generation=0, ranks=(3,), reason="r")
    fault = InjectFault(id="i", generation=0, rank=0, kind="crash", reason="r")
    assert told(orders.take(stacks)) == [("all", stacks)]  # The others write their traces.
    orders.take(fault)
    assert told(orders.repeat(REPEAT_S)) == [(1, stacks), (0, fault)]
    orders.note(StacksTaken(generation=0, at_s=1.0, stacks={3: "..."}))
    orders.note(FaultInjected(id="i", rank=0, kind="crash", at_s=1.0))
    assert told(orders.repeat(2 * REPEAT_S)) == []


def test_a_round_of_a_probe_is_said_again_for_as_long_as_it_lasts() -> None:
    """A node that comes later does not take it up beside the training, long after its deadline."""
    orders = book()
    first = RunProbe(id="p", round=0, pairs=((0, 1),), reason="r")
    second = RunProbe(id="p", round=1, pairs=((1, 0),), reason="r")
    orders.take(first)
    orders.note(ProbeEnded(id="p", node=0, round=0, at_s=1.0))
    orders.take(second)  # The round before it is another matter.
    assert told(orders.repeat(REPEAT_S)) == [(1, first), (0, second), (1, second)]
    for times in range(2, 10):
        said = told(orders.repeat(times * REPEAT_S))
    assert said == []
