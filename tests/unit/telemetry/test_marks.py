"""Marks follow from the journal alone, each once, and an incident when its cost is known."""

from perdure.model.events import (
    ControllerLost,
    FailureDecided,
    GenerationStepping,
    JobSubmitted,
    JournalEntry,
    OperatorNoted,
    ProgressNoted,
    RankExited,
    RanksStarted,
    SettingsChanged,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec
from perdure.model.signals.progress import RankAccount
from perdure.model.steering import Change
from perdure.telemetry.accounting.ledger import LedgerFold
from perdure.telemetry.marks import Mark, MarkFold

SPEC = JobSpec(name="j", script="x.py", nproc=2)
CRASH = FailureDecided(
    id="f", world=0, cause="signal 9 (SIGKILL)", culprit="rank 1", at_step=40, failure_s=20.0,
    detected_s=20.1, at_s=20.2, rung="restart", reason="r",
)  # fmt: skip
CHANGE = Change(
    epoch=1, step=43, values={"lr": 0.5}, before={"lr": 0.1}, who="ann", why="a\nplateau", at_s=15.0
)
BODIES = [
    JobSubmitted(spec=SPEC, at_s=0.0),
    RanksStarted(node=0, generation=0, pids={0: 1, 1: 2}, at_s=1.0, warm=True),
    ProgressNoted(generation=0, at_s=10.0, step=12, accounts={}),
    SettingsChanged(change=CHANGE),
    OperatorNoted(id="n", text="looks \x1b[31mbad", step=14, at_s=16.0, who="ben"),
    RankExited(
        node=0,
        record=ExitRecord(rank=1, generation=0, pid=2, at_s=20.0, signal=9),
        account=RankAccount(step=40),
        detected_s=20.1,
    ),
    CRASH,
    RanksStarted(node=0, generation=1, pids={0: 3, 1: 4}, at_s=21.0, warm=True),
    GenerationStepping(generation=1, at_s=23.5, step=40),
    ControllerLost(part="controller", at_s=30.0, pid=9, cause="signal 9", restarted_s=30.2),
]  # fmt: skip
ENTRIES = [JournalEntry(seq=n, at_s=float(n), body=body) for n, body in enumerate(BODIES, 1)]


def fold(entries: list[JournalEntry], known: int = 0) -> list[Mark]:
    """Return the marks of entries, one batch each, beyond the first `known` entries."""
    ledger = LedgerFold()
    marks = MarkFold("j", ledger)
    found: list[Mark] = []
    for entry in entries:
        ledger.add(entry)
        mark = marks.add(entry)
        of_entry = [mark] if mark is not None else []
        if entry.seq >= known:
            of_entry += marks.list_over(entry.seq)
        if entry.seq > known:
            found += of_entry
    return found


def test_each_is_told_once_with_its_step_and_cost() -> None:
    marks = fold(ENTRIES)
    assert [(mark.seq, mark.kind, mark.step) for mark in marks] == [
        (4, "setting", 43), (5, "remark", 14), (6, "failure", 40), (9, "incident", 40),
        (10, "part", 40),
    ]  # fmt: skip
    setting, remark, failure, incident, part = (mark.text for mark in marks)
    assert setting == "lr 0.1 -> 0.5 from step 43 on, by ann: a\\nplateau"
    assert remark == "ben: looks \\x1b[31mbad"
    assert failure == "rank 1 failed: signal 9 (SIGKILL)"
    assert incident.startswith("rank 1: signal 9 (SIGKILL) at step 40; restart, 3.50 s lost")
    assert "training did not stop" in part
    assert marks[3].values["seconds_lost"] == 3.5
    assert not marks[4].values


def test_whoever_begins_later_tells_the_rest_and_nothing_twice() -> None:
    whole = fold(ENTRIES)
    for known in range(len(ENTRIES) + 1):
        before = [mark for mark in whole if mark.seq <= known]
        assert before + fold(ENTRIES, known) == whole


def test_an_incident_that_is_not_over_is_no_mark_yet() -> None:
    assert [mark.kind for mark in fold(ENTRIES[:8])] == ["setting", "remark", "failure"]
