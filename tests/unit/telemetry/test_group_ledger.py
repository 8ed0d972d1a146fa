"""The ledger of a torchft job: each group's own timeline, with nothing left over."""

import cProfile
import pstats
from typing import Any

import pytest
from msgspec import structs
from tests.decider import feed

from perdure.model.events import (
    AnyEvent,
    FailureDecided,
    GenerationStopped,
    JobEnded,
    JobResumed,
    JobSubmitted,
    JournalEntry,
    KeysDeclared,
    NodeRestored,
    QuorumFormed,
    RankExited,
    RanksStarted,
    ReplicaSeen,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.signals.progress import RankAccount
from perdure.telemetry.accounting.ledger import LedgerFold


class Journal:
    def __init__(self, spares: int = 0) -> None:
        spec = JobSpec(script="x.py", nodes=2, spares=spares, torchft=TorchftConfig(replicas=2))
        self.fold, self.seq = LedgerFold(), 0
        self.at(0, JobSubmitted(spec=spec, at_s=0.0))

    def at(self, at_s: float, event: AnyEvent) -> None:
        self.seq += 1
        feed(self.fold, JournalEntry(seq=self.seq, at_s=at_s, body=event), groups=True)

    def start(self, at_s: float, group: int, generation: int) -> None:
        pids = {group: 9}
        self.at(
            at_s, RanksStarted(node=group, generation=generation, pids=pids, at_s=at_s, warm=True)
        )

    def see(self, at_s: float, group: int, life: str = "a", **more: Any) -> None:
        self.at(at_s, ReplicaSeen(replica=f"{group}:{life}", group=group, at_s=at_s, **more))

    def form(self, at_s: float, *names: str, step: int = 0) -> None:
        self.at(at_s, QuorumFormed(quorum_id=1, step=step, members=names, at_s=at_s))

    def exit(
        self, at_s: float, group: int, generation: int, account: RankAccount, **how: Any
    ) -> None:
        record = ExitRecord(rank=group, generation=generation, pid=9, at_s=at_s, **how)
        end = RankExited(node=group, record=record, account=account, detected_s=at_s + 0.25)
        self.at(at_s + 0.5, end)

    def stop(self, at_s: float, group: int, generation: int) -> None:
        self.at(at_s, GenerationStopped(node=group, generation=generation, at_s=at_s))

    def end(self, at_s: float) -> dict[str, float]:
        ended = JobEnded(status="stopped", exit_code=0, reason="", at_s=at_s)
        self.at(at_s, ended)
        ledger = self.fold.report(at_s).ledger
        return {name: account.s for name, account in ledger.items() if account.s}


def account(first: float, last: float, **parts: float) -> RankAccount:
    spent = sum(parts.values())
    return RankAccount(
        step=10, first_step_s=first, last_step_s=last, step_s=last - first - spent, **parts
    )


def fail(group: int, *, at_step: int) -> FailureDecided:
    return FailureDecided(
        id=f"failure-{group}", world=group, group=group, cause="signal 9 (SIGKILL)",
        culprit=f"group {group}", at_step=at_step, failure_s=13.0, detected_s=13.25, at_s=13.5,
        rung="restart", reason="",
    )  # fmt: skip


def test_a_death_and_a_return_are_split_by_their_stamps() -> None:
    journal = Journal()
    for group in range(2):
        journal.start(1.0, group, group)
        journal.see(2.0, group)
    journal.form(3.0, "0:a", "1:a")
    lost = account(3.0, 9.0, heal_s=0.5)
    journal.exit(10.0, 1, 1, lost, signal=9)
    journal.stop(11.0, 1, 1)
    journal.start(11.5, 1, 2)
    journal.see(12.0, 1, "b")
    journal.form(13.0, "0:a", "1:b", step=20)
    journal.exit(20.0, 1, 2, account(13.0, 20.0, heal_s=1.0), signal=15, asked=True)
    survivor = account(3.0, 20.0, lost_s=1.0, reform_s=0.5, boundary_s=0.25)
    journal.exit(20.0, 0, 0, survivor, signal=15, asked=True)
    ledger = journal.end(20.0)
    assert "unattributed" not in ledger
    assert ledger["useful"] == pytest.approx(5.5 + 6.0 + 15.25)
    assert ledger["startup"] == pytest.approx(3.0 + 3.0 + 0.5)
    assert ledger["lost_work"] == pytest.approx(1.0 + 1.0)
    assert ledger["reconfiguration.detect"] == pytest.approx(0.25)
    assert ledger["reconfiguration.decide"] == pytest.approx(0.25)
    assert ledger["reconfiguration.abort"] == pytest.approx(0.5)
    assert ledger["reconfiguration.communicator"] == pytest.approx(2.0 + 0.5)
    assert ledger["reconfiguration.state"] == pytest.approx(1.0)
    for segment in journal.fold.segments(20.0):
        drawn = [name for name, _ in segment.seconds]
        joining = {"startup", "reconfiguration.state"}.intersection(drawn)
        assert not joining or drawn[0] in joining, "drawn where it was: before the steps"
    (loss,) = journal.fold.report(20.0).recoveries
    assert (loss.culprit, loss.rung) == ("group 1, rank 1", "restart")
    assert loss.total_s == pytest.approx(3.0)


def test_spares_pauses_and_groups_that_have_left_are_idle() -> None:
    journal = Journal(spares=1)
    for group in range(3):
        journal.start(1.0, group, group)
        journal.see(2.0, group)
    journal.see(2.0, 2, held=True)
    journal.form(3.0, "0:a", "1:a")
    for group in range(2):
        journal.see(5.0, group, held=True)
    journal.at(8.0, JobResumed(id="p", step=4, at_s=8.0))
    journal.form(8.0, "0:a", "2:a", step=5)  # Group 1 was drained.
    journal.exit(8.5, 1, 1, account(3.0, 8.5), signal=15, asked=True)
    journal.stop(9.0, 1, 1)
    journal.at(15.0, NodeRestored(node=1, at_s=15.0, reason=""))
    journal.start(16.0, 1, 3)
    for group, generation, first in ((0, 0, 3.0), (2, 2, 8.0)):
        journal.exit(20.0, group, generation, account(first, 20.0), signal=15, asked=True)
    journal.exit(20.0, 1, 3, RankAccount(), signal=15, asked=True)
    ledger = journal.end(20.0)
    assert "unattributed" not in ledger
    held, pauses, left = 8.0 - 2.0, 3.0 + 3.0, 15.0 - 8.5
    assert ledger["idle"] == pytest.approx(held + pauses + left)
    assert ledger["reconfiguration.communicator"] == pytest.approx(5.0)
    assert ledger["useful"] == pytest.approx((17.0 - 3.0) + (5.5 - 3.0) + 12.0)


def test_a_hung_group_is_being_detected_until_it_is_left_out() -> None:
    journal = Journal()
    for group in range(2):
        journal.start(1.0, group, group)
        journal.see(2.0, group)
    journal.form(3.0, "0:a", "1:a")
    journal.see(8.0, 1, gone=True, reason="late")
    journal.exit(12.0, 1, 1, account(3.0, 6.0), signal=9, asked=True)
    journal.stop(12.5, 1, 1)
    ledger = journal.end(12.5)
    assert ledger["reconfiguration.detect"] == pytest.approx(2.0)
    assert ledger["reconfiguration.abort"] == pytest.approx(4.5)
    (loss,) = journal.fold.report(12.5).recoveries
    assert (loss.cause, loss.culprit) == ("late", "group 1")
    assert ledger["useful"] == pytest.approx(3.0 + 9.5), "what runs is in its quorum"
    assert "unattributed" not in ledger


def test_at_another_lighthouse_a_recovery_ends_with_the_first_commit() -> None:
    journal = Journal()
    for group in range(2):
        journal.start(1.0, group, group)
        journal.at(3.0, KeysDeclared(generation=group, keys=(), values={}, step=1))
    journal.exit(10.0, 1, 1, RankAccount(step=20, first_step_s=2.0), signal=9)
    journal.stop(11.0, 1, 1)
    journal.start(12.0, 1, 2)
    journal.at(15.0, KeysDeclared(generation=2, keys=(), values={}, step=30))
    journal.end(90.0)
    (recovery,) = journal.fold.report(90.0).recoveries
    assert recovery.total_s == pytest.approx(5.0)
    assert recovery.communicator_s == pytest.approx(4.0)


def test_who_stood_still_is_no_incident_once_it_moves_where_nobody_tells_of_quorums() -> None:
    journal = Journal()
    for group in range(2):
        journal.start(1.0, group, group)
        journal.at(3.0, KeysDeclared(generation=group, keys=(), epoch=0, values={}, step=1))
    stopped = ReplicaSeen(replica="", group=1, at_s=5.0, gone=True, reason="stopped", step=4)
    journal.at(5.0, stopped)
    (there,) = journal.fold.report(6.0).recoveries
    assert (there.culprit, there.rung) == ("group 1", "left out")
    journal.at(7.0, ReplicaSeen(replica="", group=1, at_s=7.0, step=9))
    assert journal.fold.report(8.0).recoveries == ()


def test_steps_that_are_made_once_more_since_all_groups_had_died_are_lost_work() -> None:
    journal = Journal()
    for group in range(2):
        journal.start(1.0, group, group)
        journal.see(2.0, group)
    journal.form(3.0, "0:a", "1:a")
    for group in range(2):
        journal.exit(13.0, group, group, account(3.0, 13.0), signal=9)
        journal.at(13.5, fail(group, at_step=10))
        journal.stop(14.0, group, group)
        journal.start(14.0, group, group + 2)
        journal.see(15.0, group, "b")
    journal.form(16.0, "0:b", "1:b", step=6)
    for group in range(2):
        journal.exit(20.0, group, group + 2, account(16.0, 20.0), signal=15, asked=True)
    ledger = journal.end(20.0)
    assert ledger["lost_work"] == pytest.approx(2 * 0.4 * 10.0)
    assert ledger["useful"] == pytest.approx(2 * (0.6 * 10.0 + 4.0))
    losses = journal.fold.report(20.0).recoveries
    assert [loss.lost_steps for loss in losses] == [4, 4]
    assert {loss.reason for loss in losses} == {"all had to go back to step 6"}


def test_four_times_as_many_deaths_of_groups_cost_four_times_as_much() -> None:
    """Each entry looked through all lives of all groups, and each death once more."""

    def live(deaths: int) -> None:
        journal, newest = Journal(), [0, 1]
        for group in newest:
            journal.start(0.1, group, group)
            journal.see(0.2, group)
        journal.form(0.3, "0:a", "1:a")
        for death in range(deaths):
            at_s, group = 1.0 + death, death % 2
            journal.exit(at_s, group, newest[group], account(at_s - 0.5, at_s), signal=9)
            failed = structs.replace(fail(group, at_step=death), world=newest[group])
            journal.at(at_s + 0.1, failed)
            journal.stop(at_s + 0.2, group, newest[group])
            newest[group] = 2 + death
            journal.start(at_s + 0.3, group, newest[group])
            journal.see(at_s + 0.4, group, f"{newest[group]}")
            members = (f"{n}:{life}" if life > 1 else f"{n}:a" for n, life in enumerate(newest))
            journal.form(at_s + 0.5, *members, step=death)
        journal.end(deaths + 2.0)
        assert len(journal.fold.report(deaths + 2.0).recoveries) == deaths

    costs = []
    for deaths in (100, 400):
        profile = cProfile.Profile()
        profile.runcall(live, deaths)
        costs.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    assert costs[1] < 4.4 * costs[0], costs
