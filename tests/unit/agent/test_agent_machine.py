"""Inputs in, requests out: the agent's machine without a clock, a keeper or a bus."""

from typing import Any

import msgspec
import pytest

from perdure.agent.machine import Agent
from perdure.agent.messages import (
    AgentStarted,
    CollectStacks,
    KeeperGone,
    KeeperSaid,
    KeeperUp,
    Leave,
    OrderReceived,
    Report,
    Request,
    SpawnRanks,
    StacksCollected,
    StartKeeper,
    SupervisorGone,
    TellKeeper,
    TellWorker,
)
from perdure.agent.state import NodeIdentity
from perdure.model.bus.wire import (
    KeeperExit,
    KeeperKill,
    KeeperSpawned,
    KeeperState,
    KeeperStopped,
    KeeperStore,
    KeeperStoreReady,
    NodeOrder,
)
from perdure.model.events import (
    AnyEvent,
    GenerationStopped,
    KeeperLost,
    NodeRegistered,
    RankExited,
    RanksStarted,
    StacksTaken,
    StoreReady,
    TimerFired,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec
from perdure.model.orders import Assignment, TakeStacks
from perdure.model.signals.progress import RankAccount

NEW = KeeperState(pid=50, generation=-1, running={}, exits=())
MORE: Any = {"extra": (4, 6), "homes": {4: 0, 6: 1}}
PIDS = {0: 100, 1: 101}


class Node:
    """A machine and the number of the newest assignment."""

    def __init__(self, node: int = 0) -> None:
        spec = JobSpec(name="j", script="s.py", nproc=2, nodes=2)
        self.machine = Agent(spec, NodeIdentity(node=node, incarnation="a1"))
        self.number = 0

    def assign(self, generation: int, phase: Any, **fields: Any) -> list[Request]:
        self.number += 1
        assignment = Assignment(
            number=self.number,
            generation=generation,
            phase=phase,
            master_addr="127.0.0.1",
            master_port=29500 if phase == "run" else 0,
            agent_store=phase == "run",
            **fields,
        )
        return self.send(assignment)

    def send(self, assignment: Assignment, controller: str = "c1") -> list[Request]:
        order = NodeOrder(controller=controller, assignment=assignment)
        return self.machine.handle(10.0, OrderReceived(order=order))

    def hear(self, message: Any, **fields: Any) -> list[Request]:
        return self.machine.handle(11.0, KeeperSaid(message=message, **fields))

    def up(self, state: KeeperState = NEW, **fields: Any) -> list[Request]:
        return self.machine.handle(9.0, KeeperUp(state=state, **fields))

    def run_generation(self, generation: int) -> None:
        """Bring the node to running `generation`."""
        self.assign(generation, "store")
        if generation:
            self.hear(KeeperStopped(generation - 1))
        self.hear(KeeperStoreReady(generation, 29500))
        self.assign(generation, "run")
        self.hear(KeeperSpawned(generation, PIDS, 5.0, True))


@pytest.fixture
def node() -> Node:
    node = Node()
    assert node.machine.handle(0.0, AgentStarted()) == [StartKeeper()]
    return node


def events(requests: list[Request]) -> list[AnyEvent]:
    return [request.event for request in requests if isinstance(request, Report)]


def exit_of(rank: int, generation: int = 0) -> RankExited:
    record = ExitRecord(rank=rank, generation=generation, pid=100 + rank, at_s=7.0, signal=9)
    return RankExited(node=0, record=record, account=RankAccount(), detected_s=7.0)


def test_first_generation(node: Node) -> None:
    (hello,) = events(node.up())
    assert isinstance(hello, NodeRegistered)
    assert (hello.generation, hello.keeper_pid, hello.slots) == (-1, 50, 2)
    assert node.assign(0, "store") == [TellKeeper(KeeperStore(0, 4))]
    (ready,) = events(node.hear(KeeperStoreReady(0, 29500)))
    assert ready == StoreReady(generation=0, host="127.0.0.1", port=29500, agent_store=True)
    (spawn,) = node.assign(0, "run")
    assert isinstance(spawn, SpawnRanks)
    (started,) = events(node.hear(KeeperSpawned(0, PIDS, 5.0, True)))
    assert started == RanksStarted(node=0, generation=0, pids=PIDS, at_s=5.0, warm=True)


def test_next_generation_waits_until_nothing_older_lives(node: Node) -> None:
    node.up()
    node.run_generation(0)
    kill, store = node.assign(1, "store", grace_s=2.0)
    assert kill == TellKeeper(KeeperKill(0, 2.0))
    assert store == TellKeeper(KeeperStore(1, 4))
    assert node.assign(1, "run") == []
    (exited,) = events(node.machine.handle(11.0, exit_of(0)))
    assert isinstance(exited, RankExited)
    node.hear(KeeperStoreReady(1, 29500))
    stopped, spawn = node.hear(KeeperStopped(0))
    assert events([stopped]) == [GenerationStopped(node=0, generation=0, at_s=11.0)]
    assert isinstance(spawn, SpawnRanks)


def test_other_nodes_serve_no_store() -> None:
    node = Node(1)
    node.up()
    assert node.assign(0, "store") == []
    assert [type(r) for r in node.assign(0, "run")] == [SpawnRanks]


def test_repeated_orders_change_nothing(node: Node) -> None:
    node.up()
    node.run_generation(0)
    held = node.machine.state.assignment
    assert held is not None
    assert node.send(held) == []
    assert node.send(msgspec.structs.replace(held, number=held.number - 1, generation=7)) == []
    # A new number for the same thing (a new controller) starts nothing again either.
    assert node.assign(0, "run") == []
    assert node.hear(KeeperSpawned(0, PIDS, 5.0, True)) == []


def test_a_member_is_started_once_beside_the_ranks_that_live(node: Node) -> None:
    node.up()
    node.run_generation(0)
    (spawn,) = node.assign(0, "run", **MORE)  # 6 has the place of rank 2, on node 1.
    assert isinstance(spawn, SpawnRanks)
    assert spawn.members == (4,)
    assert node.assign(0, "run", **MORE) == []
    beside = KeeperSpawned(0, {4: 104}, 6.0, True, beside=True)
    (started,) = events(node.hear(beside))
    assert started == RanksStarted(node=0, generation=0, pids={4: 104}, at_s=6.0, warm=True)
    assert node.hear(beside) == []
    assert node.machine.state.keeper is not None
    assert node.machine.state.keeper.running == PIDS | {4: 104}
    assert len(events(node.machine.handle(7.0, exit_of(4)))) == 1
    assert node.assign(0, "run", **MORE) == []  # It has ended, and stays so.


def test_a_member_is_started_that_has_the_number_of_one_of_an_older_generation(node: Node) -> None:
    """Numbers begin again with a generation. The slot stayed empty for the rest of the job."""
    node.up()
    node.run_generation(0)
    assert spawned(node.assign(0, "run", **MORE)) == [((4,), True)]
    node.hear(KeeperSpawned(0, {4: 104}, 6.0, True, beside=True))
    node.assign(1, "store")
    node.hear(KeeperStoreReady(1, 29500))
    node.hear(KeeperStopped(0))
    node.assign(1, "run")
    node.hear(KeeperSpawned(1, PIDS, 8.0, True))
    assert spawned(node.assign(1, "run", **MORE)) == [((4,), True)]


def test_a_replaced_agent_asks_again_for_a_member_that_is_not_there(node: Node) -> None:
    node.up(KeeperState(pid=50, generation=0, running=dict(PIDS), exits=()), newest_on_disk=0)
    requests = node.assign(0, "run", extra=(4,), homes={4: 0})
    assert [r.members for r in requests if isinstance(r, SpawnRanks)] == [(4,)]


def test_registers_once_for_each_controller(node: Node) -> None:
    ask = OrderReceived(order=NodeOrder(controller="c2", register=True))
    assert node.machine.handle(1.0, ask) == []  # Not before it knows what its keeper holds.
    node.up()
    (again,) = events(node.machine.handle(2.0, ask))
    assert isinstance(again, NodeRegistered)
    assert node.machine.handle(3.0, ask) == []


def test_it_registers_again_where_the_same_controller_asks_again_later(node: Node) -> None:
    """It was cut off, and counted as lost: only a registration lets it back in."""
    node.up(KeeperState(pid=50, generation=0, running=dict(PIDS), exits=()))
    ask = OrderReceived(order=NodeOrder(controller="c1", register=True))
    node.machine.handle(10.0, ask)
    (again,) = events(node.machine.handle(20.0, ask))
    assert isinstance(again, NodeRegistered)
    assert again.running == tuple(sorted(PIDS))


def test_what_another_agent_of_the_node_shall_run_is_nothing_to_this_one(node: Node) -> None:
    node.up()
    assignment = Assignment(number=1, generation=0, phase="run", master_port=29500)
    order = NodeOrder(controller="c1", assignment=assignment, agent="a0")
    assert node.machine.handle(1.0, OrderReceived(order=order)) == []
    mine = NodeOrder(controller="c1", assignment=assignment, agent="a1")
    assert [type(r) for r in node.machine.handle(1.0, OrderReceived(order=mine))] == [SpawnRanks]


def test_who_was_cut_off_until_another_had_its_place_leaves_without_a_word(node: Node) -> None:
    """What it would say of the node would be taken for the other's."""
    node.up()
    assignment = Assignment(number=1, generation=0, phase="store")
    for agent in ("a1", "a2"):
        order = NodeOrder(controller="c1", assignment=assignment, agent=agent)
        requests = node.machine.handle(1.0, OrderReceived(order=order))
    assert [type(r) for r in requests] == [TellKeeper, Leave]


def test_cold_store_is_left_to_rank_0(node: Node) -> None:
    node.up()
    node.assign(0, "store")
    (ready,) = events(node.hear(KeeperStoreReady(0, 0, "cold"), free_port=41000))
    assert ready == StoreReady(generation=0, host="127.0.0.1", port=41000, agent_store=False)
    order = Assignment(number=9, generation=0, phase="run", master_port=41000)
    assert [type(r) for r in node.send(order)] == [SpawnRanks]


def test_replaced_agent_takes_over(node: Node) -> None:
    held = KeeperState(pid=50, generation=3, running={1: 101}, exits=(exit_of(0, 3).record,))
    told = events(node.up(held, exits=(exit_of(0, 3),), started_s=4.5, newest_on_disk=3))
    assert isinstance(told[0], NodeRegistered)
    assert (told[0].generation, told[0].running) == (3, (1,))
    assert isinstance(told[1], RankExited)
    assert events(node.assign(3, "run")) == [
        RanksStarted(node=0, generation=3, pids={1: 101}, at_s=4.5, warm=False)
    ]
    assert node.machine.handle(12.0, exit_of(0, 3)) == []


def test_takeover_in_the_middle_of_a_fork_waits_for_it(node: Node) -> None:
    node.up(KeeperState(pid=50, generation=3, running={}, exits=()), newest_on_disk=3)
    assert node.assign(3, "run") == []
    assert [type(e) for e in events(node.hear(KeeperSpawned(3, PIDS, 5.0, True)))] == [RanksStarted]


def test_lost_keeper_is_reported_at_once_and_at_its_own_time(node: Node) -> None:
    node.up()
    node.run_generation(0)
    rings = ((0, 0), (0, 1))
    gone = KeeperGone(at_s=19.5, exits=(exit_of(0), exit_of(1)), begun=rings)
    told = node.machine.handle(20.0, gone)
    assert [type(event) for event in events(told[:2])] == [RankExited, RankExited]
    lost = KeeperLost(node=0, generation=0, at_s=19.5, begun=(0, 1))
    assert told[2:] == [Report(lost), StartKeeper()]
    again = (exit_of(0), exit_of(1))
    assert node.up(msgspec.structs.replace(NEW, pid=51), exits=again) == []
    held = node.machine.state.assignment
    assert held is not None
    assert node.send(held) == []  # Generation 0 is never started again.
    assert node.assign(1, "store")[0] == TellKeeper(KeeperKill(0))


def test_generation_lost_with_keeper_and_agent_is_reported(node: Node) -> None:
    node.up(newest_on_disk=4)
    assert events(node.assign(4, "store")) == []
    node.hear(KeeperStopped(3))
    node.hear(KeeperStoreReady(4, 29500))
    assert events(node.assign(4, "run")) == [KeeperLost(node=0, generation=4, at_s=10.0)]
    assert node.assign(4, "run") == []


def test_store_lost_with_its_keeper_is_reported(node: Node) -> None:
    node.up()
    node.assign(0, "store")
    node.hear(KeeperStoreReady(0, 29500))
    lost, start = node.machine.handle(20.0, KeeperGone(at_s=19.5))
    assert events([lost]) == [KeeperLost(node=0, generation=0, at_s=19.5)]
    assert start == StartKeeper()
    assert node.up(msgspec.structs.replace(NEW, pid=51)) == [TellKeeper(KeeperStore(0, 4))]
    # The controller had switched to the old store in the meantime.
    assert events(node.assign(0, "run")) == [KeeperLost(node=0, generation=0, at_s=10.0)]


def test_end_leaves_when_the_controller_knows(node: Node) -> None:
    node.up()
    node.run_generation(0)
    assert node.assign(1, "end", reason="done") == [TellKeeper(KeeperKill(0))]
    (report,) = node.hear(KeeperStopped(0))
    assert isinstance(report, Report)
    assert report.event == GenerationStopped(node=0, generation=0, at_s=11.0)
    assert report.after == (TellKeeper(KeeperExit()), Leave("done"))
    assert node.machine.handle(12.0, KeeperGone(at_s=12.0)) == []


def test_end_has_a_bound(node: Node) -> None:
    node.up()
    node.run_generation(0)
    node.assign(1, "end", grace_s=2.0)
    deadline = node.machine.next_deadline()
    assert deadline == 62.0, "a rank may finish its checkpoint"
    assert node.machine.handle(31.0, TimerFired()) == []
    left = node.machine.handle(deadline, TimerFired())
    assert [type(r) for r in left] == [TellKeeper, Leave]
    assert node.machine.next_deadline() is None


def test_end_before_anything_began(node: Node) -> None:
    node.up()
    assert [type(r) for r in node.assign(0, "end")] == [TellKeeper, Leave]


def test_keeper_dies_during_the_end(node: Node) -> None:
    node.up()
    node.run_generation(0)
    node.assign(1, "end", reason="done")
    (report,) = node.machine.handle(12.0, KeeperGone(at_s=12.0))
    assert isinstance(report, Report)
    assert report.after == (Leave("done"),)


def test_supervisor_gone_ends_everything(node: Node) -> None:
    node.up()
    node.run_generation(0)
    assert node.machine.handle(12.0, SupervisorGone()) == [TellKeeper(KeeperExit())]
    assert node.assign(1, "store") == []
    (report,) = node.machine.handle(13.0, KeeperGone(at_s=13.0))
    assert isinstance(report, Report)
    assert report.event == GenerationStopped(node=0, generation=1, at_s=13.0)
    assert isinstance(report.after[0], Leave)


def test_stacks_of_its_own_ranks_only(node: Node) -> None:
    node.up()
    node.run_generation(0)
    wanted = TakeStacks(generation=0, ranks=(1, 2), reason="")
    ask = OrderReceived(order=NodeOrder(controller="c1", orders=(wanted,)))
    traces = [TellWorker(rank, wanted) for rank in (0, 1)]
    assert node.machine.handle(12.0, ask) == [*traces, CollectStacks(0, {1: 101})]
    collected = StacksCollected(generation=0, stacks={1: "main"}, traces="/j/traces/g0")
    assert events(node.machine.handle(13.0, collected)) == [
        StacksTaken(generation=0, at_s=13.0, stacks={1: "main"}, traces="/j/traces/g0")
    ]
    elsewhere = TakeStacks(generation=0, ranks=(5,), reason="")
    ask = OrderReceived(order=NodeOrder(controller="c1", orders=(elsewhere,)))
    assert node.machine.handle(13.5, ask) == [TellWorker(rank, elsewhere) for rank in (0, 1)]
    other = TakeStacks(generation=1, ranks=(1,), reason="")
    ask = OrderReceived(order=NodeOrder(controller="c1", orders=(other,)))
    assert node.machine.handle(14.0, ask) == []


def spawned(requests: list[Request]) -> list[tuple[tuple[int, ...], bool]]:
    return [(r.members, r.beside) for r in requests if isinstance(r, SpawnRanks)]


def test_a_spare_node_starts_the_spare_members_that_are_its_own() -> None:
    node = Node(2)
    node.up()
    world: Any = {"placement": (0, 1)}
    assert node.assign(0, "run", **world) == []  # Nothing to do for a spare node yet.
    more = world | {"extra": (4, 5), "homes": {4: 2, 5: 0}}
    assert spawned(node.assign(0, "run", **more)) == [((4,), False)]
    assert spawned(node.assign(0, "run", **more)) == []
    more = world | {"extra": (4, 5, 8), "homes": {4: 2, 5: 0, 8: 2}}
    assert spawned(node.assign(0, "run", **more)) == []  # One after another.
    assert spawned(node.hear(KeeperSpawned(0, {4: 104}, 5.0, True))) == [((8,), True)]


def test_after_a_keepers_end_only_new_members_are_started(node: Node) -> None:
    node.up()
    node.run_generation(0)
    node.machine.handle(20.0, KeeperGone(at_s=20.0, exits=(exit_of(0), exit_of(1))))
    node.up(msgspec.structs.replace(NEW, pid=51))
    more: Any = {"extra": (4, 5), "homes": {4: 0, 5: 0}}
    assert spawned(node.assign(0, "run", **more)) == [((4, 5), False)]
    assert spawned(node.assign(0, "run", **more)) == []


def test_what_died_with_keeper_and_agent_is_not_started_again() -> None:
    node = Node(2)
    node.up(begun=((0, 0), (0, 4)))
    more: Any = {"placement": (0, 1), "extra": (4,), "homes": {4: 2}}
    lost = KeeperLost(node=2, generation=0, at_s=10.0, begun=(0, 4))
    assert events(node.assign(0, "run", **more)) == [lost]
    assert node.assign(0, "run", **more) == []
    more = {"placement": (0, 1), "extra": (4, 8), "homes": {4: 2, 8: 2}}
    assert spawned(node.assign(0, "run", **more)) == [((8,), False)]


def test_a_machine_in_a_lost_ones_place_starts_new_members_only() -> None:
    node = Node(1)
    node.up()
    world: Any = {"gone": (2, 3), "placement": (0, 1)}
    assert spawned(node.assign(0, "run", **world)) == [], "ranks 2 and 3 were lost elsewhere"
    more = world | {"extra": (6, 7), "homes": {6: 1, 7: 1}}
    assert spawned(node.assign(0, "run", **more)) == [((6, 7), False)]
