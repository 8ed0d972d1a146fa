"""Which entries are told of, in which words, and only once."""

from perdure.model.events import (
    AnyEvent,
    Decision,
    JobEnded,
    JournalEntry,
    ProgressNoted,
    RankExited,
    RoomNoted,
    VerdictReached,
)
from perdure.model.failures import ExitRecord
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Culprit, Verdict
from perdure.telemetry.alerts import Alert, AlertFold


def fold(*wanted: str) -> AlertFold:
    return AlertFold("job", frozenset(wanted))


def add(alerts: AlertFold, *bodies: AnyEvent | Decision) -> list[Alert]:
    entries = [JournalEntry(seq=n, at_s=float(n), body=body) for n, body in enumerate(bodies, 1)]
    return [alert for alert in map(alerts.add, entries) if alert is not None]


def death(rank: int, *, generation: int = 0, code: int = 1) -> RankExited:
    record = ExitRecord(rank=rank, generation=generation, pid=9, at_s=1.0, code=code, signal=0)
    return RankExited(node=0, record=record, account=RankAccount(), detected_s=1.0)


def verdict(*, actionable: bool) -> VerdictReached:
    found = Verdict(
        kind="ComputeHang", culprit=Culprit(rank=2), generation=0, first_seen_s=3.0,
        confirmed_s=4.0, confidence=0.9, reason="it did not arrive", actionable=actionable,
    )  # fmt: skip
    return VerdictReached(verdict=found)


def test_a_verdict_is_told_of_once_although_it_comes_twice() -> None:
    (alert,) = add(fold("verdict"), verdict(actionable=False), verdict(actionable=True))
    assert (alert.kind, alert.seq) == ("verdict", 1)
    assert alert.summary == "ComputeHang of rank 2: it did not arrive"


def test_of_a_dying_world_the_first_death_is_told_of() -> None:
    found = add(fold("failure"), death(1), death(0), death(0, generation=1), death(1, code=0))
    assert [(a.seq, a.summary) for a in found] == [
        (1, "rank 1 failed: exit code 1"),
        (3, "rank 0 failed: exit code 1"),
    ]


def test_what_nobody_wants_is_not_told() -> None:
    ended = JobEnded(status="done", exit_code=0, reason="all is well", at_s=9.0)
    decision = Decision(action="EndJob", summary="s", reason="r")
    noted = ProgressNoted(generation=0, at_s=1.0, step=3, accounts={})
    assert add(fold("verdict"), ended, death(0), decision, noted) == []
    (alert,) = add(fold("ended"), ended, decision, noted)
    assert alert.summary == "done, exit code 0: all is well"


def test_each_change_of_the_room_for_checkpoints_is_told() -> None:
    low = RoomNoted(grade="low", reason="2 more fit", place="/c", at_s=1.0)
    well = RoomNoted(grade="ok", reason="9 more fit", place="/c", at_s=2.0)
    found = add(fold("storage"), low, well, low)
    assert [a.summary for a in found] == [
        "room for checkpoints at /c is low: 2 more fit",
        "room for checkpoints at /c is ok: 9 more fit",
        "room for checkpoints at /c is low: 2 more fit",
    ]
