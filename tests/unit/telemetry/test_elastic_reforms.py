"""A death after which the others went on in place: an incident that ends no generation."""

from perdure.model.events import (
    AnyEvent,
    Decision,
    ExitRecord,
    JobEnded,
    JobSubmitted,
    JournalEntry,
    ProgressNoted,
    RankExited,
    RanksStarted,
    WorldReformed,
)
from perdure.model.job import JobSpec
from perdure.model.progress import RankAccount
from perdure.telemetry.ledger import LedgerFold


def account(step: int, last_step_s: float) -> RankAccount:
    return RankAccount(
        step=step, start_step=0, init_s=1.0, group_s=1.1, restored_s=1.2, first_step_s=1.3,
        last_step_s=last_step_s, step_s=last_step_s - 1.3,
    )  # fmt: skip


def test_it_is_over_when_the_last_member_is_in_the_new_world() -> None:
    died = ExitRecord(1, 0, 11, 5.0, signal=9)
    formed = [
        WorldReformed(
            generation=0, epoch=1, rank=rank, step=40, began_s=5.0, ordered_s=5.03,
            formed_s=5.05 + rank / 100, redo=2,
        )
        for rank in (0, 2)
    ]  # fmt: skip
    accounts = {rank: account(90, 9.0) for rank in (0, 2)}
    entries: list[tuple[float, AnyEvent | Decision]] = [
        (0.0, JobSubmitted(spec=JobSpec(name="j", script="t.py", nproc=3), at_s=0.0)),
        (0.5, RanksStarted(node=0, generation=0, pids={0: 1, 1: 2, 2: 3}, at_s=0.5, warm=True)),
        (5.01, RankExited(node=0, record=died, account=account(40, 4.9), detected_s=5.01)),
        (5.02, Decision(action="ReformWorld", summary="epoch 1", reason="rank 1 died")),
        *((event.formed_s, event) for event in formed),
        (9.0, ProgressNoted(generation=0, at_s=9.0, step=90, accounts=accounts)),
        (9.5, JobEnded(status="done", exit_code=0, reason="all done", at_s=9.5)),
    ]
    fold = LedgerFold()
    for seq, (at_s, body) in enumerate(entries, 1):
        fold.add(JournalEntry(seq, at_s, body))
    report = fold.report(9.5)
    (recovery,) = report.recoveries
    assert (recovery.rung, recovery.culprit, recovery.lost_steps) == ("reform", "rank 1", 0)
    assert recovery.lost_microbatches == 4
    phases = [recovery.detect_s, recovery.decide_s, recovery.abort_s, recovery.communicator_s]
    assert [round(s, 3) for s in phases] == [0.01, 0.01, 0.01, 0.04]
    assert round(recovery.total_s, 3) == 0.07
    assert report.steps_committed == 90
    assert abs(sum(line.s for line in report.ledger.values()) - report.slot_s) < 1e-6
