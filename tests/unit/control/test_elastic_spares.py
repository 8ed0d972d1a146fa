"""Events in, orders out: spare slots, nodes that are lost and come back, and where members meet."""

import pytest
from tests.slowness import find_slowness, move_verdict

from perdure.control.machine import Controller
from perdure.model.events import (
    ControllerStarted,
    GenerationStopped,
    JobSubmitted,
    KeeperLost,
    MemberReady,
    NodeLost,
    NodeRegistered,
    RankExited,
    RankJoined,
    RanksStarted,
    StoreReady,
    TimerFired,
    VerdictReached,
    WorldBroken,
    WorldReformed,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec
from perdure.model.orders import AnyAction, AssignNodes, FollowWorld, InjectFault, ReformWorld
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Culprit


class Lab:
    """The controller of an elastic job, told what nodes and ranks would say."""

    def __init__(
        self,
        nproc: int = 1,
        nodes: int = 3,
        spares: int = 1,
        state_bytes: int = 0,
        nodes_max: int = 0,
    ) -> None:
        self.state_bytes = state_bytes
        self.machine, self.now, self.epoch = Controller(), 0.0, 0
        self.spec = JobSpec(
            name="job", script="train.py", nproc=nproc, nodes=nodes, spares=spares,
            nodes_max=nodes_max, remote=max(0, nodes_max - nodes),
        )  # fmt: skip
        self.say(JobSubmitted(spec=self.spec, at_s=0.0))
        for node in range(self.spec.first_nodes):
            self.register(node)
        for node in range(self.spec.first_nodes):
            self.say(GenerationStopped(node=node, generation=-1, at_s=0.2))
        self.say(StoreReady(generation=0, host="127.0.0.1", port=1, agent_store=True))
        for node in range(nodes):
            pids = {rank: 100 + rank for rank in self.spec.ranks_of(node)}
            self.say(RanksStarted(node=node, generation=0, pids=pids, at_s=0.4, warm=True))
        self.begun: list[AnyAction] = []
        for rank in range(self.spec.world_size):
            self.begun += self.ready(rank)

    def say(self, event: object) -> list[AnyAction]:
        self.now += 0.01
        return self.machine.handle(self.now, event)  # type: ignore[arg-type]

    def register(
        self, node: int, running: tuple[int, ...] = (), generation: int = -1
    ) -> list[AnyAction]:
        return self.say(
            NodeRegistered(
                node=node, incarnation="a", host="127.0.0.1", boot_id="b",
                slots=self.spec.nproc, running=running, generation=generation,
            )
        )  # fmt: skip

    def ready(self, rank: int) -> list[AnyAction]:
        store, feed = f"127.0.0.1:{9000 + rank}", f"127.0.0.1:{8000 + rank}"
        return self.say(
            RankJoined(
                generation=0, rank=rank, depth="elastic", store=store, feed=feed,
                state_bytes=self.state_bytes,
            )
        )  # fmt: skip

    def formed(self) -> list[AnyAction]:
        """All members of the newest order have formed their world."""
        actions: list[AnyAction] = []
        elastic = self.machine.state.world.elastic
        epoch = self.machine.state.world.epoch
        for rank in elastic.members:
            event = WorldReformed(
                generation=0, epoch=epoch, rank=rank, step=5, began_s=0.0, ordered_s=0.0,
                formed_s=0.0,
            )  # fmt: skip
            actions += self.say(event)
        return actions

    def die(self, rank: int, code: int = 0, step: int = 5) -> list[AnyAction]:
        record = ExitRecord(rank, 0, 100 + rank, self.now, code=code, signal=0 if code else 9)
        account = RankAccount(step=step)
        return self.say(RankExited(node=0, record=record, account=account, detected_s=self.now))

    def leave(self, rank: int) -> list[AnyAction]:
        """A member ends in good order."""
        record = ExitRecord(rank, 0, 100 + rank, self.now)
        exited = RankExited(node=0, record=record, account=RankAccount(step=5), detected_s=self.now)
        return self.say(exited)


def order_of(actions: list[AnyAction]) -> ReformWorld:
    (order,) = [a for a in actions if isinstance(a, ReformWorld)]
    return order


def started(actions: list[AnyAction]) -> dict[int, int]:
    """Return the newest members that nodes were asked to run, and where."""
    return next((dict(a.assignment.homes) for a in actions if isinstance(a, AssignNodes)), {})


def restarts(actions: list[AnyAction]) -> bool:
    return any(isinstance(a, AssignNodes) and a.assignment.generation == 1 for a in actions)


def test_spare_slots_are_filled_once_the_world_is_there_and_their_members_are_held() -> None:
    lab = Lab(spares=2)
    assert started(lab.begun) == {3: 3, 4: 4}
    assert lab.ready(3) == []
    assert lab.ready(4) == []
    assert lab.machine.state.world.epoch == 0


def test_spare_slots_that_make_no_node_are_beside_the_ranks() -> None:
    assert started(Lab(nproc=2, nodes=1, spares=1).begun) == {2: 0}


def test_a_spare_stands_in_at_once_and_the_lost_ones_successor_is_the_next_spare() -> None:
    lab = Lab()
    lab.ready(3)
    actions = lab.die(1)
    assert order_of(actions).ranks == (0, 2, 3)
    assert order_of(actions).urgent
    assert started(actions) == {3: 3, 5: 1}  # Slot 1 again, four slots on.
    assert lab.formed() == []
    assert lab.ready(5) == []
    assert order_of(lab.die(3)).ranks == (0, 2, 5)


def test_a_spare_on_another_node_than_the_dead_goes_first() -> None:
    lab = Lab(nproc=2, nodes=2, spares=2)
    lab.ready(4)
    lab.ready(5)
    lab.die(0)  # 4 stands in, and 6 is started in slot 0 on node 0.
    lab.formed()
    lab.ready(6)
    assert order_of(lab.die(4)).ranks == (1, 2, 3, 6)  # 5 is on node 2, as 4 was.


def test_a_late_spare_joins_a_world_that_has_room() -> None:
    lab = Lab()
    assert order_of(lab.die(1)).ranks == (0, 2)
    assert lab.ready(3) == []  # Not while a world is being formed.
    order = order_of(lab.formed())
    assert (order.ranks, order.urgent) == ((0, 2, 3), False)


def test_a_spare_that_dies_harms_nobody_and_is_started_again() -> None:
    lab = Lab()
    lab.ready(3)
    actions = lab.die(3)
    assert started(actions) == {3: 3, 7: 3}
    assert not [a for a in actions if isinstance(a, ReformWorld)]


def test_a_spare_that_never_gets_ready_is_not_started_for_ever() -> None:
    lab = Lab()
    assert started(lab.die(3, code=1)) == {3: 3, 7: 3}
    assert started(lab.die(7, code=1)) == {}
    lab.now += 1.0
    assert started(lab.say(TimerFired())) == {3: 3, 7: 3, 11: 3}
    assert started(lab.die(11, code=1)) == {}
    lab.now += 1000.0
    assert lab.say(TimerFired()) == []


@pytest.mark.parametrize("cause", ["node", "keeper"])
def test_a_lost_node_costs_its_members_and_the_spare_stands_in(cause: str) -> None:
    lab = Lab(nproc=2, nodes=2, spares=2)
    lab.ready(4)
    lab.ready(5)
    lost = (
        NodeLost(node=0, at_s=1.0, reason="silent")
        if cause == "node"
        else KeeperLost(node=0, generation=0, at_s=1.0)
    )
    actions = lab.say(lost)
    order = order_of(actions)
    assert order.ranks == (2, 3, 4, 5)
    assert order.store == "127.0.0.1:9002"  # The first node had the generation's.
    assert not restarts(actions)
    assert started(actions) == ({} if cause == "node" else {4: 2, 5: 2, 6: 0, 7: 0})


def test_a_node_that_comes_back_gets_new_members_and_they_join() -> None:
    lab = Lab(spares=0)
    assert order_of(lab.say(NodeLost(node=0, at_s=1.0, reason="silent"))).ranks == (1, 2)
    lab.formed()
    actions = lab.register(0)
    assert started(actions) == {3: 0}
    assert not restarts(actions)
    assert order_of(lab.ready(3)).ranks == (1, 2, 3)


def test_what_a_lost_node_still_runs_is_ended_before_its_slots_are_filled() -> None:
    lab = Lab(spares=0)
    lab.say(NodeLost(node=0, at_s=1.0, reason="cut off"))
    lab.formed()
    actions = lab.register(0, running=(0,), generation=0)
    assert [(a.rank, a.kind) for a in actions if isinstance(a, InjectFault)] == [(0, "crash")]
    assert started(actions) == {}
    actions = lab.die(0)
    assert started(actions) == {3: 0}
    assert not restarts(actions)


def test_a_node_whose_agent_and_keeper_died_is_told_of_twice_and_filled_once() -> None:
    lab = Lab(spares=0)
    actions = lab.register(0)
    assert (order_of(actions).ranks, started(actions)) == ((1, 2), {3: 0})
    late = KeeperLost(node=0, generation=0, at_s=1.0, begun=(0, 1, 2))
    assert lab.say(late) == []
    died = lab.say(KeeperLost(node=0, generation=0, at_s=2.0, begun=(0, 1, 2, 3)))
    assert started(died) == {3: 0, 6: 0}


def test_a_node_that_comes_back_again_has_lost_whom_it_had_in_the_place_of_the_first() -> None:
    """The ends of its first ranks are told by then, which says nothing of their successors."""
    lab = Lab(spares=0)
    lab.register(1)
    record = ExitRecord(1, 0, 101, lab.now, signal=9, asked=True, error="keeper lost")
    account = RankAccount(step=5)
    lab.say(RankExited(node=1, record=record, account=account, detected_s=lab.now))
    lab.say(KeeperLost(node=1, generation=0, at_s=lab.now, begun=(1,)))
    lab.formed()
    assert order_of(lab.ready(4)).ranks == (0, 2, 4)
    actions = lab.register(1)
    assert (order_of(actions).ranks, started(actions)) == ((0, 2), {4: 1, 7: 1})


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("nodes", [1, 2])
def test_members_that_were_ended_with_their_keeper_are_lost_with_it(
    nodes: int, finished: bool
) -> None:
    """An agent tells how each ended before it tells of the keeper: none of them has finished."""
    lab = Lab(nproc=2, nodes=nodes, spares=0)
    for rank in range(2 * nodes) if finished else ():
        event = WorldReformed(
            generation=0, epoch=0, rank=rank, step=9, began_s=0.0, ordered_s=0.0, formed_s=0.0,
            finished=True,
        )  # fmt: skip
        lab.say(event)
    for rank in (0, 1):
        record = ExitRecord(rank, 0, 100 + rank, lab.now, signal=9, asked=True)
        account = RankAccount(step=5)
        lab.say(RankExited(node=0, record=record, account=account, detected_s=lab.now))
    actions = lab.say(KeeperLost(node=0, generation=0, at_s=lab.now, begun=(0, 1)))
    if nodes == 1 or finished:
        assert restarts(actions)
    else:
        assert (order_of(actions).ranks, started(actions)) == ((2, 3), {4: 0, 5: 0})


def test_who_is_ready_between_a_members_end_and_word_of_its_keeper_does_not_merely_join() -> None:
    """The world was formed with the newcomer at once, and the keeper's loss never told."""
    lab = Lab()
    record = ExitRecord(1, 0, 101, lab.now, signal=9, asked=True, error="keeper lost")
    account = RankAccount(step=5)
    lab.say(RankExited(node=1, record=record, account=account, detected_s=lab.now))
    assert lab.ready(3) == []
    actions = lab.say(KeeperLost(node=1, generation=0, at_s=lab.now, begun=(0, 1, 2)))
    assert order_of(actions).ranks == (0, 2, 3)
    told = [(fact.cause, fact.culprit) for fact in lab.machine.facts(lab.now)]
    assert told == [("keeper lost", "node 1")]


def test_a_loss_that_is_told_twice_is_one() -> None:
    lab = Lab(spares=0)
    actions = lab.say(KeeperLost(node=1, generation=0, at_s=1.0))
    assert (order_of(actions).ranks, started(actions)) == ((0, 2), {4: 1})
    assert not restarts(lab.die(1))
    assert list(lab.machine.state.world.elastic.homes) == [4]


def test_a_lost_spare_node_costs_the_world_nothing() -> None:
    lab = Lab()
    lab.ready(3)
    assert lab.say(NodeLost(node=3, at_s=1.0, reason="silent")) == []
    assert order_of(lab.die(1)).ranks == (0, 2)
    assert started(lab.register(3)) == {3: 3, 5: 1, 7: 3}


LARGE = 1 << 30


def follows(actions: list[AnyAction]) -> list[tuple[int, int, list[int]]]:
    found = [a for a in actions if isinstance(a, FollowWorld)]
    return [(a.epoch, a.rank, sorted(a.donors)) for a in found]


def caught_up(lab: Lab, rank: int, step: int = 7) -> list[AnyAction]:
    return lab.say(MemberReady(generation=0, rank=rank, at_s=lab.now, step=step))


def test_with_a_large_state_a_spare_follows_the_survivors_before_it_joins_them() -> None:
    lab = Lab(state_bytes=LARGE)
    lab.ready(3)
    actions = lab.die(1)
    assert order_of(actions).ranks == (0, 2)
    assert follows(actions) == [(1, 3, [0, 2])]
    assert lab.formed() == []  # It has been told.
    order = order_of(caught_up(lab, 3))
    assert (order.ranks, order.urgent) == ((0, 2, 3), False)


def test_who_follows_is_told_who_was_told_before_it() -> None:
    lab = Lab(spares=2, state_bytes=LARGE)
    lab.ready(3)
    lab.ready(4)
    found = [a for a in lab.die(1) if isinstance(a, FollowWorld)]
    assert [(a.epoch, a.rank, a.ahead) for a in found] == [(1, 3, ())]
    lab.formed()
    found = [a for a in lab.die(2) if isinstance(a, FollowWorld)]
    assert [(a.epoch, a.rank, a.ahead) for a in found] == [(2, 3, ()), (2, 4, (3,))]


def test_who_follows_is_told_of_a_newer_world() -> None:
    lab = Lab(state_bytes=LARGE)
    lab.ready(3)
    lab.die(1)
    lab.formed()
    assert follows(lab.die(2)) == [(2, 3, [0])]
    assert caught_up(lab, 3) == []  # Not while a world is being formed.
    assert order_of(lab.formed()).ranks == (0, 3)


def test_who_cannot_follow_joins_and_gets_the_state_there() -> None:
    lab = Lab(state_bytes=LARGE)
    lab.ready(3)
    lab.die(1)
    lab.formed()
    assert order_of(caught_up(lab, 3, step=-1)).ranks == (0, 2, 3)


def test_another_follows_where_the_first_one_dies() -> None:
    lab = Lab(spares=2, state_bytes=LARGE)
    lab.ready(3)
    lab.ready(4)
    lab.die(1)
    lab.formed()
    assert follows(lab.die(3)) == [(1, 4, [0, 2])]


def test_a_new_controller_tells_again_who_follows() -> None:
    lab = Lab(state_bytes=LARGE)
    lab.ready(3)
    lab.die(1)
    lab.formed()
    assert follows(lab.say(ControllerStarted(incarnation="c"))) == [(1, 3, [0, 2])]
    caught_up(lab, 3)
    lab.formed()
    assert follows(lab.say(ControllerStarted(incarnation="d"))) == []


def test_a_world_that_breaks_again_meets_at_another_members_store() -> None:
    lab = Lab(spares=0)
    stores = []
    for epoch in range(3):
        broken = WorldBroken(generation=0, epoch=epoch, rank=1, at_s=lab.now, error="reset")
        assert lab.say(broken) == []
        lab.now = lab.machine.next_deadline() or 0.0
        stores.append(order_of(lab.machine.handle(lab.now, TimerFired())).store)
    assert len(set(stores)) == 3  # And each try broke while it was still being formed.


def test_a_node_lost_after_its_member_had_finished_starts_the_world_again() -> None:
    """How its script ended is not known; without an answer the job would wait for ever."""
    lab = Lab(spares=0)
    for rank in range(3):
        lab.say(
            WorldReformed(
                generation=0, epoch=0, rank=rank, step=9, began_s=lab.now, ordered_s=lab.now,
                formed_s=lab.now, finished=True,
            )
        )  # fmt: skip
    lab.leave(0)
    lab.leave(1)
    assert restarts(lab.say(KeeperLost(node=2, generation=0, at_s=lab.now, begun=(2,))))


def find_slow(lab: Lab, rank: int, *, after_s: float = 0.0) -> list[AnyAction]:
    """The detector has found `rank` two and a half times as slow; return what is done."""
    lab.now += after_s
    verdict = move_verdict(find_slowness(2.5), lab.now, Culprit(rank=rank))
    return lab.say(VerdictReached(verdict=verdict))


def ended(actions: list[AnyAction]) -> list[int]:
    return [a.rank for a in actions if isinstance(a, InjectFault)]


def test_a_slow_rank_gives_its_place_to_a_spare_that_stands_ready() -> None:
    """Row T6, in an elastic world."""
    lab = Lab()
    lab.ready(3)
    lab.machine.state.world.stepping_s = lab.now - 7200.0  # In place no step of it is lost.
    assert ended(find_slow(lab, 1)) == [1]
    assert order_of(lab.die(1)).ranks == (0, 2, 3)


def test_a_slow_rank_is_not_ended_where_no_spare_stands_ready() -> None:
    """Row T6: the spare is started yet, or lost; without one the world would only be smaller."""
    lab = Lab()
    assert ended(find_slow(lab, 1)) == []
    lab.ready(3)
    lab.say(NodeLost(node=0, at_s=lab.now, reason="silent"))  # Its member is in the world now.
    lab.formed()
    assert ended(find_slow(lab, 1)) == []
    assert lab.machine.state.cordoned == {}


def test_a_slow_node_is_the_last_to_be_called_upon_and_no_stand_in_for_itself() -> None:
    """Row T6: its slot is filled again as a spare one, which counts as a last resort."""
    lab = Lab(spares=2)
    lab.ready(3)
    lab.ready(4)
    find_slow(lab, 1)
    assert order_of(lab.die(1)).ranks == (0, 2, 3)
    lab.formed()
    lab.ready(6)  # In the slot of 1, on the slow node.
    assert order_of(lab.die(2, step=10)).ranks == (0, 3, 4)
    lab.formed()
    assert order_of(lab.die(4, step=15)).ranks == (0, 3, 6), "a slow member is better than none"
    lab.formed()
    assert ended(find_slow(lab, 6, after_s=300.0)) == [], "no spare but those that start yet"
    lab.ready(7)  # In the slot of 2.
    actions = find_slow(lab, 6, after_s=300.0)
    assert ended(actions) == [6]
    assert list(lab.machine.state.cordoned) == [1]
    actions = lab.die(6, step=20)
    assert order_of(actions).ranks == (0, 3, 7)
    assert 1 not in [home for rank, home in started(actions).items() if rank > 7]


def test_a_rank_that_is_slow_by_its_work_is_not_handed_from_node_to_node() -> None:
    """Row T6: who is as slow as the one that it has just stood in for has no slow node."""
    lab = Lab()
    lab.ready(3)
    find_slow(lab, 1)
    lab.die(1)
    lab.formed()
    lab.ready(5)
    assert ended(find_slow(lab, 3, after_s=30.0)) == []
    assert lab.machine.state.cordoned == {}


def test_slots_are_filled_as_fast_after_a_month_of_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slot looked through all members that there ever were: minutes, with 1,000 ranks."""
    looks = 0
    slot_of = JobSpec.slot_of

    def count(spec: JobSpec, rank: int) -> int:
        nonlocal looks
        looks += 1
        return slot_of(spec, rank)

    lab = Lab(nproc=4, nodes=4, spares=0)
    lab.formed()
    elastic = lab.machine.state.world.elastic
    later = [slot + 16 * life for life in range(1, 60) for slot in range(1, 16)]
    elastic.homes |= {member: member % 16 // 4 for member in later}
    lab.machine.state.world.exits |= {
        member: ExitRecord(member, 0, 1, 1.0, signal=9) for member in later[:-15]
    }
    monkeypatch.setattr(JobSpec, "slot_of", count)
    (told,) = [a for a in lab.die(0, step=50) if isinstance(a, AssignNodes)]
    assert 16 in told.assignment.homes
    assert looks < 2 * len(later)
