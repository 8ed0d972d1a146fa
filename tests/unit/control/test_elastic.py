"""Events in, orders out: who is in the next epoch, and when a restart is taken instead."""

import pytest

from perdure.control.machine import Controller
from perdure.control.membership.elastic import REFORM_TIMEOUT_S, RETRIES_MAX, RETRY_S
from perdure.model.events import (
    CommandReceived,
    ControllerStarted,
    GenerationStopped,
    JobSubmitted,
    NodeRegistered,
    RankExited,
    RankJoined,
    RanksStarted,
    SlotLeftEmpty,
    StoreReady,
    TimerFired,
    VerdictReached,
    WorldBroken,
    WorldReformed,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, RestartConfig
from perdure.model.orders import (
    AnyAction,
    AssignNodes,
    InjectFault,
    RecordEvent,
    ReformWorld,
    RestoreNode,
)
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Culprit, Verdict


def train(
    ranks: int = 3, *, agent_store: bool = True, elastic: bool = True, replace: bool = True
) -> Controller:
    """Return the controller of a world of `ranks` ranks on one node, which trains."""
    machine = Controller()
    restart = RestartConfig(replace=replace)
    spec = JobSpec(name="job", script="train.py", nproc=ranks, restart=restart)
    machine.handle(0.0, JobSubmitted(spec=spec, at_s=0.0))
    node = NodeRegistered(node=0, incarnation="a", host="127.0.0.1", boot_id="b", slots=ranks)
    machine.handle(0.1, node)
    begin(machine, 0, ranks, agent_store=agent_store, elastic=elastic)
    return machine


def begin(
    machine: Controller,
    number: int,
    ranks: int,
    *,
    agent_store: bool = True,
    elastic: bool = True,
) -> None:
    """Bring a generation to where it trains."""
    machine.handle(0.2, GenerationStopped(node=0, generation=number - 1, at_s=0.2))
    ready = StoreReady(generation=number, host="127.0.0.1", port=1, agent_store=agent_store)
    machine.handle(0.3, ready)
    pids = {rank: 100 + rank for rank in range(ranks)}
    machine.handle(0.4, RanksStarted(node=0, generation=number, pids=pids, at_s=0.4, warm=True))
    for rank in range(ranks if elastic else 0):
        machine.handle(0.5, RankJoined(generation=number, rank=rank, depth="elastic"))


def die(
    machine: Controller, now: float, rank: int, step: int = 5, code: int = 0
) -> list[AnyAction]:
    record = ExitRecord(rank, 0, 100 + rank, now, code=code, signal=0 if code else 9)
    account = RankAccount(step=step)
    return machine.handle(now, RankExited(node=0, record=record, account=account, detected_s=now))


def leave(machine: Controller, now: float, rank: int, start_step: int = 0) -> list[AnyAction]:
    record = ExitRecord(rank, 0, 100 + rank, now)
    account = RankAccount(step=9, start_step=start_step)
    return machine.handle(now, RankExited(node=0, record=record, account=account, detected_s=now))


def reformed(rank: int, epoch: int, *, finished: bool = False, step: int = 5) -> WorldReformed:
    return WorldReformed(
        generation=0, epoch=epoch, rank=rank, step=step, began_s=0.0, ordered_s=0.0, formed_s=0.0,
        finished=finished,
    )  # fmt: skip


def orders(actions: list[AnyAction]) -> list[tuple[int, tuple[int, ...]]]:
    return [(a.epoch, a.ranks) for a in actions if isinstance(a, ReformWorld)]


def restarts(actions: list[AnyAction]) -> bool:
    return any(isinstance(a, AssignNodes) and a.assignment.generation == 1 for a in actions)


def test_the_others_form_the_next_epoch_of_the_same_generation() -> None:
    machine = train()
    actions = die(machine, 1.0, 1)
    assert orders(actions) == [(1, (0, 2))]
    assert not restarts(actions)
    assert "SIGKILL" in actions[-1].reason
    assert machine.state.generation == 0
    assert machine.next_deadline() == 1.0 + REFORM_TIMEOUT_S
    for rank in (0, 2):
        machine.handle(1.1, reformed(rank, 1))
    assert machine.next_deadline() is None


def extra(actions: list[AnyAction]) -> list[tuple[int, ...]]:
    return [a.assignment.extra for a in actions if isinstance(a, AssignNodes)]


def test_a_new_member_takes_the_place_of_each_lost_one() -> None:
    machine = train()
    assert extra(die(machine, 1.0, 1)) == [(4,)]
    for rank in (0, 2):
        machine.handle(1.1, reformed(rank, 1))
    ready = RankJoined(generation=0, rank=4, depth="elastic")
    (join,) = machine.handle(2.0, ready)
    assert isinstance(join, ReformWorld)
    assert (join.ranks, join.urgent) == ((0, 2, 4), False)
    for rank in (0, 2, 4):
        machine.handle(2.1, reformed(rank, 2))
    actions = die(machine, 3.0, 4)  # And of that one.
    assert orders(actions) == [(3, (0, 2))]
    assert extra(actions) == [(4, 7)]
    again = machine.handle(3.1, ControllerStarted(incarnation="c"))
    assert extra(again) == [(4, 7)]


def train_a_while() -> Controller:
    """Return the controller of a world of three whose ranks have committed steps."""
    machine = train()
    for rank in range(3):
        machine.handle(0.6, reformed(rank, 0, step=0))
    return machine


def left_empty(actions: list[AnyAction]) -> list[SlotLeftEmpty]:
    events = [a.event for a in actions if isinstance(a, RecordEvent)]
    return [event for event in events if isinstance(event, SlotLeftEmpty)]


def fail_in_slot(
    machine: Controller, now: float, rank: int, *, joins: bool = True, error: str = "OSError: x"
) -> list[AnyAction]:
    """Have the newcomer `rank` end before it commits a step, within the world or before it."""
    if joins:
        machine.handle(now, RankJoined(generation=0, rank=rank, depth="elastic"))
        epoch = machine.state.world.epoch
        for member in machine.state.world.elastic.members:
            machine.handle(now, reformed(member, epoch, step=int(now)))
    record = ExitRecord(rank, 0, 100 + rank, now, code=1, error=error)
    account = RankAccount(step=int(now), start_step=int(now))
    actions = machine.handle(
        now, RankExited(node=0, record=record, account=account, detected_s=now)
    )
    for member in machine.state.world.elastic.members:
        machine.handle(now, reformed(member, machine.state.world.epoch, step=int(now)))
    return actions


def test_members_that_differ_count_for_no_slot_if_none_is_known_to_be_wrong() -> None:
    machine = train_a_while()
    die(machine, 1.0, 1)
    for rank in (0, 2):
        machine.handle(1.1, reformed(rank, 1))
    error = "perdure.model.errors.DifferError: elastic: members differ"
    for number in range(5):
        rank = 4 + 3 * number
        assert extra(fail_in_slot(machine, 2.0 + number, rank, error=error))[0][-1] == rank + 3
    assert machine.state.world.elastic.ends.keys() == {1}
    assert len(machine.state.world.elastic.ends[1]) == 1, "the first one's, of another cause"


@pytest.mark.parametrize("joins", [True, False])
def test_a_slot_whose_processes_never_train_is_filled_later_each_time_and_then_left_empty(
    joins: bool,
) -> None:
    machine = train_a_while()
    assert extra(die(machine, 1.0, 1)) == [(4,)]
    for rank in (0, 2):
        machine.handle(1.1, reformed(rank, 1))
    assert extra(fail_in_slot(machine, 2.0, 4, joins=joins)) == [(4, 7)]  # At once.
    assert extra(fail_in_slot(machine, 3.0, 7, joins=joins)) == []
    assert machine.next_deadline() == 4.0
    assert extra(machine.handle(4.0, TimerFired())) == [(4, 7, 10)]
    actions = fail_in_slot(machine, 5.0, 10, joins=joins)
    assert extra(actions) == []
    (left,) = left_empty(actions)
    assert (left.slot, left.node) == (1, 0)
    assert left.reason.startswith("3 processes in a row ended before a step was committed")
    assert machine.next_deadline() is None
    assert extra(die(machine, 6.0, 2, step=9)) == [(4, 7, 10, 5)]  # Another slot is filled.


def test_errors_that_differ_in_words_leave_a_slot_empty_too() -> None:
    machine, now = train_a_while(), 1.0
    actions = die(machine, now, 1)
    for member in (0, 2):
        machine.handle(now, reformed(member, 1))
    for rank in (4, 7, 10, 13):
        assert not left_empty(actions)
        now += 100.0
        machine.handle(now, TimerFired())
        actions = fail_in_slot(machine, now, rank, error=f"OSError: not by process {rank}")
    assert len(left_empty(actions)) == 1
    assert machine.state.phase == "running"


def test_processes_that_train_before_they_die_are_replaced_at_once_and_end_no_other() -> None:
    machine, rank, now = train(2), 1, 1.0
    for _ in range(59):
        actions = die(machine, now, rank, step=5 + int(now))
        rank += 2
        assert rank in extra(actions)[0]
        machine.handle(now + 0.1, reformed(0, machine.state.world.epoch, step=int(now)))
        machine.handle(now + 0.1, RankJoined(generation=0, rank=rank, depth="elastic"))
        for member in (0, rank):
            machine.handle(now + 0.2, reformed(member, machine.state.world.epoch, step=int(now)))
        now += 1.0
    die(machine, now, rank, step=5 + int(now))
    actions = fail_in_slot(machine, now + 1.0, rank + 2)
    assert [event.reason for event in left_empty(actions)] == [
        "61 processes ended within 600 s: exit code 1: OSError: x"
    ]
    assert machine.state.phase == "running"
    assert machine.state.generation == 0


def test_restore_has_an_empty_slot_tried_again() -> None:
    machine = train_a_while()
    die(machine, 1.0, 1)
    for now, rank in ((2.0, 4), (3.0, 7), (5.0, 10)):
        machine.handle(now - 0.5, TimerFired())
        fail_in_slot(machine, now, rank)
    command = CommandReceived(id="r", at_s=6.0, kind="restore", args={"targets": ["0"]}, who="ann")
    actions = machine.handle(6.0, command)
    assert [a for a in actions if isinstance(a, RestoreNode)]
    assert extra(actions) == [(4, 7, 10, 13)]
    assert extra(fail_in_slot(machine, 7.0, 13)) == [(4, 7, 10, 13, 16)]  # As the first time.


def test_a_fault_that_all_meet_ends_the_job_as_soon_as_nobody_outlives_it() -> None:
    """Each one dies alone at the same step, and the others outlive it for a moment."""
    machine, ended = train(2), []
    for generation in range(2):
        for rank in (0, 1):
            record = ExitRecord(rank, generation, 100, 1.0, code=1, error="ValueError: bad sample")
            exited = RankExited(node=0, record=record, account=RankAccount(step=7), detected_s=1.0)
            ended = machine.handle(1.0 + generation, exited)
        if generation == 0:
            begin(machine, 1, 2)
    assert [a.assignment.phase for a in ended if isinstance(a, AssignNodes)] == ["end"]
    assert "3 restarts in a row without progress are used up" in ended[-1].reason


def test_nobody_takes_a_place_where_that_is_not_wanted() -> None:
    machine = train(replace=False)
    assert extra(die(machine, 1.0, 1)) == []


def test_a_death_while_a_world_is_formed_is_left_out_of_the_next_one() -> None:
    machine = train(4)
    assert orders(die(machine, 1.0, 1)) == [(1, (0, 2, 3))]
    assert orders(die(machine, 1.1, 3)) == [(2, (0, 2))]
    assert orders(machine.handle(1.2, ControllerStarted(incarnation="c"))) == [(2, (0, 2))]


def test_a_script_that_is_not_elastic_is_restarted() -> None:
    assert restarts(die(train(elastic=False), 1.0, 1))


def test_a_world_whose_store_is_a_ranks_own_is_restarted() -> None:
    assert restarts(die(train(agent_store=False), 1.0, 1))


def test_the_last_ones_death_is_a_restart() -> None:
    machine = train(2)
    assert orders(die(machine, 1.0, 1)) == [(1, (0,))]
    assert restarts(die(machine, 1.1, 0))


def test_a_formation_that_does_not_end_becomes_a_restart() -> None:
    machine = train()
    die(machine, 1.0, 1)
    machine.handle(1.1, reformed(0, 1))
    actions = machine.handle(1.0 + REFORM_TIMEOUT_S, TimerFired())
    assert restarts(actions)
    assert "ranks [2] did not form epoch 1 in time" in actions[-1].reason


def test_who_is_busy_as_declared_is_waited_for_and_then_as_long_as_any_other() -> None:
    machine = train()
    die(machine, 1.0, 1)
    machine.handle(1.1, reformed(0, 1))
    now = 1.0
    for busy in ((2,), (0, 2), ()):
        now += REFORM_TIMEOUT_S
        assert machine.handle(now, TimerFired(busy=busy)) == []
        assert machine.next_deadline() == now + REFORM_TIMEOUT_S
    assert restarts(machine.handle(now + REFORM_TIMEOUT_S, TimerFired(busy=(0,))))


def test_a_busy_phase_excuses_nobody_else() -> None:
    machine = train(4)
    die(machine, 1.0, 1)
    machine.handle(1.1, reformed(0, 1))
    machine.handle(1.1, reformed(2, 1))
    assert restarts(machine.handle(1.0 + REFORM_TIMEOUT_S, TimerFired(busy=(0, 2))))


def test_a_world_that_broke_without_a_loss_is_formed_again_but_not_for_ever() -> None:
    machine, now = train(2), 1.0
    for epoch in range(RETRIES_MAX):
        for rank in (0, 1):
            broken = WorldBroken(generation=0, epoch=epoch, rank=rank, at_s=now, error="reset")
            assert machine.handle(now, broken) == []
        assert machine.next_deadline() == now + RETRY_S
        now += RETRY_S
        assert orders(machine.handle(now, TimerFired())) == [(epoch + 1, (0, 1))]
        for rank in (0, 1):
            machine.handle(now, reformed(rank, epoch + 1, step=0))
    epoch = RETRIES_MAX
    machine.handle(now, WorldBroken(generation=0, epoch=epoch, rank=0, at_s=now, error="reset"))
    assert machine.handle(now + RETRY_S, TimerFired()) == []  # A silent node may be the reason.
    assert restarts(machine.handle(now + 10.0, TimerFired()))


def test_a_loss_explains_the_tries_before_it() -> None:
    machine, now = train(), 1.0
    for epoch in range(RETRIES_MAX):
        broken = WorldBroken(generation=0, epoch=epoch, rank=0, at_s=now, error="reset")
        machine.handle(now, broken)
        now += RETRY_S
        machine.handle(now, TimerFired())
    assert machine.state.world.elastic.retries == RETRIES_MAX
    die(machine, now, 2)
    epoch = machine.state.world.epoch
    machine.handle(now, WorldBroken(generation=0, epoch=epoch, rank=0, at_s=now, error="reset"))
    assert machine.next_deadline() == now + RETRY_S
    assert orders(machine.handle(now + RETRY_S, TimerFired())) == [(epoch + 1, (0, 1))]


def test_a_known_death_goes_before_a_retry() -> None:
    machine = train()
    machine.handle(1.0, WorldBroken(generation=0, epoch=0, rank=0, at_s=1.0, error="reset"))
    assert orders(die(machine, 1.1, 2)) == [(1, (0, 1))]
    assert machine.state.world.elastic.retry_s is None


def test_a_late_rank_joins_between_two_micro_batches() -> None:
    machine = train(2)
    die(machine, 1.0, 1)
    ready = RankJoined(generation=0, rank=3, depth="elastic")
    assert machine.handle(1.05, ready) == []
    actions = machine.handle(1.1, reformed(0, 1))
    assert orders(actions) == [(2, (0, 3))]
    assert isinstance(actions[0], ReformWorld)
    assert not actions[0].urgent


def test_a_hung_rank_is_ended_and_the_others_go_on() -> None:
    machine = train()
    verdict = Verdict(
        kind="ComputeHang", culprit=Culprit(rank=1), generation=0, first_seen_s=1.0,
        confirmed_s=2.0, confidence=0.9, reason="rank 1 never came", step=5, actionable=True,
        activity="stopped",
    )  # fmt: skip
    machine.handle(3.0, VerdictReached(verdict=verdict))  # Stacks are waited for.
    due_s = machine.next_deadline()
    assert due_s is not None
    actions = machine.handle(due_s, TimerFired())
    faults = [a for a in actions if isinstance(a, InjectFault)]
    assert [(a.rank, a.kind) for a in faults] == [(1, "crash")]
    assert not restarts(actions)
    assert machine.next_deadline() is None  # It is ended once.
    assert orders(die(machine, due_s + 0.1, 1)) == [(1, (0, 2))]


def test_the_job_is_done_when_every_member_has_ended_well() -> None:
    machine = train()
    die(machine, 1.0, 1)
    for rank in (0, 2):
        machine.handle(1.1, reformed(rank, 1))
        machine.handle(2.0, reformed(rank, 1, finished=True, step=9))
    assert leave(machine, 3.0, 0) == []
    actions = leave(machine, 3.1, 2)
    assert [a.assignment.phase for a in actions if isinstance(a, AssignNodes)] == ["end"]


def test_who_has_finished_is_not_waited_for() -> None:
    machine = train()
    machine.handle(1.0, reformed(0, 0, finished=True, step=9))
    assert orders(die(machine, 1.1, 1, step=9)) == [(1, (2,))]


def end_early(
    machine: Controller, now: float, rank: int, left: tuple[int, ...], start_step: int = 0
) -> list[AnyAction]:
    """A member ends with exit code 0, the others go on, and that is acted upon."""
    epoch = machine.state.world.epoch
    leave(machine, now, rank, start_step)
    broken = WorldBroken(generation=0, epoch=epoch, rank=left[0], at_s=now, error="reset")
    machine.handle(now, broken)
    machine.handle(now + RETRY_S, TimerFired())
    for other in left:
        machine.handle(now + 1.0, reformed(other, epoch + 1, step=int(now)))
    verdict = Verdict(
        kind="EarlyExit", culprit=Culprit(rank=rank), generation=0, first_seen_s=now,
        confirmed_s=now + 1.0, confidence=0.9, reason="it ended", step=5, actionable=True,
        certain=True, ground="ended",
    )  # fmt: skip
    machine.handle(now + 5.0, VerdictReached(verdict=verdict))  # Stacks are waited for.
    return machine.handle(now + 7.0, TimerFired())


def test_a_member_that_ended_early_is_replaced_and_the_others_are_left_alone() -> None:
    machine = train()
    actions = end_early(machine, 1.0, 1, (0, 2))
    assert extra(actions) == [(4,)]
    assert not restarts(actions)
    assert orders(actions) == []
    (join,) = machine.handle(9.0, RankJoined(generation=0, rank=4, depth="elastic"))
    assert isinstance(join, ReformWorld)
    assert join.ranks == (0, 2, 4)
    for rank in join.ranks:
        machine.handle(9.1, reformed(rank, join.epoch))
    assert orders(die(machine, 10.0, 2)) == [(join.epoch + 1, (0, 4))]


def test_a_slot_whose_members_always_end_early_stays_empty() -> None:
    machine, rank = train(), 1
    for turn in range(2):
        now = 20.0 * turn + 1.0
        end_early(machine, now, rank, (0, 2), start_step=9)
        machine.handle(now + 9.0, TimerFired())
        rank += 3
        assert rank in machine.state.world.elastic.homes
        machine.handle(now + 9.0, RankJoined(generation=0, rank=rank, depth="elastic"))
        for member in (0, 2, rank):
            machine.handle(now + 9.1, reformed(member, machine.state.world.epoch, step=int(now)))
    actions = end_early(machine, 51.0, rank, (0, 2), start_step=9)
    assert [event.slot for event in left_empty(actions)] == [1]
    assert machine.state.phase == "running"
