"""Each incident is told once, in one line, while the job runs."""

import msgspec

from perdure.dash.stories import StoryTeller
from perdure.model.report import IncidentRow, Snapshot
from perdure.model.verdicts import Culprit, Verdict

BASE = Snapshot(1, "d", "running", 0.0, 0.0, 1, 0, 10, 1.0, 2, "resumable", "")


def picture(at_s: float, *rows: IncidentRow) -> Snapshot:
    return msgspec.structs.replace(BASE, at_s=at_s, recent=rows)


def test_a_quick_one_is_one_line() -> None:
    teller = StoryTeller()
    opened = IncidentRow(5.0, "signal 9 (SIGKILL)", "rank 1", "restart", None, 200)
    closed = msgspec.structs.replace(opened, total_s=0.38, lost_steps=1)
    assert teller.tell(picture(5.2, opened)) == []
    assert teller.tell(picture(5.6, closed)) == [
        "▲ rank 1: signal 9 (SIGKILL) at step 200 · back in 0.38 s · 1 step lost · "
        "perdure diagnose d"
    ]
    assert teller.tell(picture(6.0, closed)) == []


def test_a_long_one_is_told_before_it_is_over() -> None:
    teller = StoryTeller()
    opened = IncidentRow(5.0, "lost", "node 1", "restart", None)
    told = [teller.tell(picture(5.0 + second, opened)) for second in range(9)]
    assert [bool(lines) for lines in told] == [False, False, True] + [False] * 6
    closed = msgspec.structs.replace(opened, total_s=9.0, lost_steps=None)
    (line,) = teller.tell(picture(14.0, closed))
    assert line == "▲ node 1: lost · back in 9.00 s · lost steps unknown · perdure diagnose d"


def test_parts_and_the_end() -> None:
    teller = StoryTeller()
    part = IncidentRow(5.0, "signal 9 (SIGKILL)", "controller", "none", 0.0)
    end = IncidentRow(6.0, "exit code 1", "rank 0", "give up", 1.0, 3)
    first, second = teller.tell(picture(7.0, part, end))
    assert "training did not stop" in first
    assert "given up" in second


def test_poison_and_growth() -> None:
    teller = StoryTeller()
    for number in range(3000):
        (line,) = teller.tell(
            picture(1e9, IncidentRow(number, "\x1b[2J" * 99, "r", "restart", 1.0))
        )
        assert "\x1b" not in line
        assert len(line) < 400
    assert len(teller._told) <= 1000


HANG = Verdict(
    kind="ComputeHang",
    culprit=Culprit(rank=1),
    generation=1,
    first_seen_s=20.0,
    confirmed_s=21.5,
    confidence=0.95,
    reason="rank 1 has not entered allreduce #67 of 0",
    ground="timeout",
    acts_s=1821.0,
)


def hanging(at_s: float, verdict: Verdict, *, observed: bool = False) -> Snapshot:
    return msgspec.structs.replace(BASE, at_s=at_s, verdicts=(verdict,), observed=observed)


def test_a_hang_that_is_left_alone_is_told_once_with_what_ends_it() -> None:
    teller = StoryTeller()
    told = [teller.tell(hanging(20.0 + second, HANG)) for second in range(1, 60)]
    (lines,) = [lines for lines in told if lines]
    assert lines == [
        "▲ rank 1: ComputeHang for 10 s: rank 1 has not entered allreduce #67 of 0 · "
        "perdure diagnose d",
        "  it is left alone for 1791 s more at least (detect.hang_action_s of the job file); "
        "perdure restart d --now --rank 1 has it restarted now",
    ]
    gone = msgspec.structs.replace(HANG, evidence={"withdrawn": "rank 1 moves"})
    assert teller.tell(hanging(90.0, gone)) == ["▲ rank 1: ComputeHang is over; nothing was done"]
    assert teller.tell(hanging(91.0, gone)) == []


def test_a_hang_that_is_acted_upon_soon_or_short_is_no_story_of_its_own() -> None:
    teller = StoryTeller()
    soon = msgspec.structs.replace(HANG, acts_s=33.0)
    acted = msgspec.structs.replace(HANG, actionable=True)
    slow = msgspec.structs.replace(HANG, kind="Straggler")
    old = msgspec.structs.replace(HANG, generation=0)
    for verdict in (soon, acted, slow, old):
        assert [teller.tell(hanging(20.0 + second, verdict)) for second in range(30)] == [[]] * 30
    short = msgspec.structs.replace(HANG, evidence={"withdrawn": "rank 1 moves"})
    assert teller.tell(hanging(25.0, HANG)) + teller.tell(hanging(40.0, short)) == []


def test_who_only_observes_is_told_of_a_hang_and_of_nothing_to_do() -> None:
    (line,) = StoryTeller().tell(hanging(40.0, HANG, observed=True))
    assert "ComputeHang for 20 s" in line
