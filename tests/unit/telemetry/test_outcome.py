"""Finished, dead, stalled, running: by artifacts on both sides of each line."""

from perdure.model.events import JobEnded, JournalEntry, RankAccount, RankExited
from perdure.model.failures import ExitRecord
from perdure.telemetry.outcome import Signs, collect_last_words, judge_outcome

ENDED = [
    JournalEntry(
        seq=1,
        at_s=1.0,
        body=JobEnded(status="failed", exit_code=1, reason="x", at_s=1.0),
    )
]


def judge(entries: list[JournalEntry], *, alive: bool, **signs: float) -> str:
    return judge_outcome(entries, Signs(now_s=1000.0, alive=alive, **signs), 300.0).state


def test_only_the_journal_says_that_a_job_has_finished() -> None:
    assert judge(ENDED, alive=False, outputs_s=999.0) == "finished"
    assert judge([], alive=False, outputs_s=999.0) == "dead"


def test_a_job_that_lives_stalls_when_no_artifact_moves() -> None:
    assert judge([], alive=True, outputs_s=699.0, checkpoints_s=10.0) == "stalled"
    assert judge([], alive=True, outputs_s=701.0) == "running"
    assert judge([], alive=True, outputs_s=5.0, loops_s=999.0) == "running"
    assert judge([], alive=True, outputs_s=5.0, checkpoints_s=999.0) == "running"


def test_a_job_that_has_yet_to_show_anything_has_not_stalled() -> None:
    assert judge([], alive=True) == "running"


def test_the_reason_names_the_newest_artifact() -> None:
    signs = Signs(now_s=1000.0, alive=False, outputs_s=900.0, checkpoints_s=940.0)
    assert "a checkpoint, 60 s ago" in judge_outcome([], signs, 300.0).reason


def test_last_words_are_those_of_ranks_that_failed() -> None:
    def exited(rank: int, code: int, error: str) -> JournalEntry:
        record = ExitRecord(
            rank=rank, generation=0, pid=1, at_s=1.0, code=code, error=error, last_output=("end",)
        )
        body = RankExited(node=0, record=record, account=RankAccount(), detected_s=1.0)
        return JournalEntry(seq=rank + 1, at_s=1.0, body=body)

    entries = [exited(0, 0, "CUDA out of memory"), exited(1, 1, "No space left on device")]
    assert collect_last_words(entries) == ["end", "No space left on device"]
