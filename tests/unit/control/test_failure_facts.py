"""A failure is one fact, written down once, before what follows from it, by who is in charge."""

from typing import Any

from tests.unit.control.driver import Driver, started
from tests.unit.control.groups_lab import Lab

from perdure.control.failures import FailureBook
from perdure.control.memory import Memory, decode_memory, encode_memory
from perdure.model.events import (
    ControllerStarted,
    FailureDecided,
    JournalEntry,
    KeeperLost,
    NodeLost,
)
from perdure.model.failures import Cause


def facts(driver: Driver) -> list[FailureDecided]:
    """Return what the shell would write down now, and write it down."""
    told: list[Any] = driver.controller.facts(driver.now)
    for fact in told:
        assert driver.do(fact) == []
    return told


def test_an_exit_is_told_once_with_its_world_its_times_and_what_follows() -> None:
    driver = started()
    driver.run()
    driver.now += 5.0
    driver.exit(1, step=7, signal=9)
    (fact,) = facts(driver)
    assert (fact.world, fact.cause, fact.culprit) == (0, "signal 9 (SIGKILL)", "rank 1")
    assert (fact.at_step, fact.failure_s, fact.at_s, fact.rung) == (7, 105.0, 105.0, "restart")
    assert fact.reason == "rank 1 ended with signal 9 (SIGKILL) at step 7"
    assert facts(driver) == []


def test_what_failed_first_corrects_the_same_fact() -> None:
    driver = started()
    driver.run()
    driver.now += 5.0
    driver.exit(1, signal=6)
    (first,) = facts(driver)
    driver.now += 1.0
    driver.do(KeeperLost(node=0, generation=0, at_s=104.0))
    (second,) = facts(driver)
    assert second.id == first.id
    assert (second.cause, second.culprit, second.failure_s) == ("keeper lost", "node 0", 104.0)
    assert second.at_s == first.at_s
    driver.do(KeeperLost(node=0, generation=0, at_s=106.0))
    assert facts(driver) == []


def test_a_silent_node_is_found_to_be_why_its_peers_died() -> None:
    driver = started(nodes=2, nproc=1)
    driver.run()
    driver.now += 5.0
    driver.exit(0, code=1, error="Connection closed by peer")
    facts(driver)
    driver.now += 3.0
    driver.do(NodeLost(node=1, at_s=driver.now, reason="silent", last_seen_s=104.5))
    (fact,) = facts(driver)
    assert (fact.cause, fact.culprit, fact.failure_s) == ("NodeLost", "node 1", 104.5)


def test_a_stop_by_giving_up_is_told_too() -> None:
    driver = started(restart={"max_restarts": 0})
    driver.run()
    driver.exit(1, signal=6)
    assert [fact.rung for fact in facts(driver)] == ["give up"]


def test_what_a_controller_could_not_write_its_successor_writes() -> None:
    driver = started()
    driver.do(ControllerStarted(incarnation="c1"))
    driver.run()
    driver.exit(1, signal=9)  # Then it is killed, before anything of it was written.
    memory = Memory(driver.spec)
    for seq, (at_s, event) in enumerate(driver.log, 1):
        memory.replay(JournalEntry(seq=seq, at_s=at_s, body=event))
    again = decode_memory(encode_memory(memory), driver.spec)
    for each in (memory, again):
        each.machine.handle(200.0, ControllerStarted(incarnation="c2"))
        (fact,) = each.machine.facts(200.0)
        assert isinstance(fact, FailureDecided)
        assert (fact.culprit, fact.at_s) == ("rank 1", 200.0)


def lose_two_groups() -> Lab:
    """Kill rank 0 of two groups at once; their peers, which follow, are heard of first."""
    lab = Lab(nproc=2)
    lab.add(ControllerStarted(incarnation="c1"))
    generations = [lab.generation(group) for group in (0, 1)]
    for group in (0, 1):
        lab.exit(group, local=1, code=1, error="Connection closed by peer", at_s=50.2 + group)
    for group in (0, 1):
        lab.exit(group, generation=generations[group], signal=9, at_s=50.0 + group)
    return lab


RIGHT = [("group 0, rank 0", "signal 9 (SIGKILL)"), ("group 1, rank 2", "signal 9 (SIGKILL)")]


def test_two_groups_that_fail_at_once_are_two_facts_each_with_who_failed_first() -> None:
    lab = lose_two_groups()
    told = [fact for fact in lab.machine.facts(lab.now) if isinstance(fact, FailureDecided)]
    assert [(fact.culprit, fact.cause) for fact in told] == RIGHT
    assert [(fact.group, fact.world, fact.rung) for fact in told] == [
        (0, 0, "restart"), (1, 1, "restart"),
    ]  # fmt: skip


def test_what_was_told_of_two_groups_is_corrected_after_the_death_of_a_controller() -> None:
    lab = Lab(nproc=2)
    for group in (0, 1):
        lab.exit(group, local=1, code=1, at_s=50.2)
    first = lab.machine.facts(lab.now)
    for fact in first:
        lab.add(fact)
    memory = Memory(lab.spec)
    for seq, (at_s, event) in enumerate(lab.log, 1):
        memory.replay(JournalEntry(seq=seq, at_s=at_s, body=event))
    lab.machine = decode_memory(encode_memory(memory), lab.spec).machine
    assert lab.machine.facts(lab.now) == []
    lab.exit(0, generation=0, signal=9, at_s=50.0)
    lab.add(KeeperLost(node=1, generation=1, at_s=50.1))
    told = [fact for fact in lab.machine.facts(lab.now) if isinstance(fact, FailureDecided)]
    assert [(fact.culprit, fact.cause) for fact in told] == [
        RIGHT[0], ("group 1", "its keeper died"),
    ]  # fmt: skip
    ids = [fact.id for fact in first if isinstance(fact, FailureDecided)]
    assert [fact.id for fact in told] == ids


def test_a_loss_that_had_broken_the_world_takes_the_place_of_the_break() -> None:
    book = FailureBook()
    book.decide(make_cause("the world broke", 10.0), "retry", 0, epoch=1)
    book.decide(make_cause("signal 9", 10.5), "reform", 0, epoch=2)
    (fact,) = book.pending(11.0)
    assert (fact.cause, fact.epoch, fact.failure_s) == ("signal 9", 2, 10.5)
    book.decide(make_cause("in vain", 12.0), "restart", 0)
    (fact,) = book.pending(12.0)
    assert (fact.cause, fact.epoch, fact.rung) == ("signal 9", -1, "restart")
    book.close(0, 2)
    assert book.is_open(0)  # A generation that is ended is not over it by an epoch.


def make_cause(cause: str, at_s: float) -> Cause:
    return Cause(
        cause=cause, culprit="rank 1", at_step=1, failure_s=at_s, detected_s=at_s, reason="r"
    )
