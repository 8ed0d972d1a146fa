"""A death that was announced is evidence of the announcement, and no crash."""

from typing import Any

import pytest
from tests.journals import Story

from perdure.control.memory import Memory, decode_memory, encode_memory
from perdure.dash.text import render_text, render_windows
from perdure.model.events import (
    CommandReceived,
    NodeLost,
    PreemptionNoticed,
    PreemptionWithdrawn,
    RankExited,
)
from perdure.model.failures import ExitRecord
from perdure.model.report import Report
from perdure.model.signals.progress import RankAccount
from perdure.telemetry.accounting.history import History
from perdure.telemetry.accounting.incidents import list_recoveries
from perdure.telemetry.accounting.ledger import make_report
from perdure.telemetry.platforms import NoticeFold
from perdure.telemetry.verdicts import list_verdicts


def noticed(**more: Any) -> Story:
    """A job on two nodes, of which the second is noticed."""
    story = Story(nproc=1, nodes=2)
    story.start()
    story.train(12)
    known = {"grace_s": 30.0, "source": "aws", "id": "a", "reason": "spot terminate"}
    story.write(PreemptionNoticed(node=1, at_s=story.now, **known | more))
    return story


def causes(story: Story) -> list[tuple[str, str]]:
    history = History()
    for entry in story.entries:
        history.add(entry)
    return [(r.culprit, r.cause) for r in list_recoveries(history, story.now)]


def test_a_rank_that_is_taken_away_is_no_crash() -> None:
    story = noticed()
    died = story.crash(1)
    story.start()
    (verdict,) = list_verdicts(story.entries)
    assert (verdict.kind, verdict.culprit.node) == ("Preemption", 1)
    assert verdict.evidence["source"] == "aws"
    (death,) = verdict.evidence["deaths"]
    assert death["after_s"] == pytest.approx(died - verdict.first_seen_s, abs=1e-3)
    (cause,) = causes(story)
    assert cause[0] == "node 1"
    assert cause[1].startswith("Preemption (aws: spot terminate); rank 1 ended with signal 9")


def test_a_node_that_falls_silent_after_a_notice_is_no_lost_node() -> None:
    story = noticed()
    story.now += 31.0
    story.write(NodeLost(node=1, at_s=story.now, reason="node 1 is silent"))
    (verdict,) = list_verdicts(story.entries)
    assert verdict.evidence["deaths"][0]["what"] == "node 1 is silent"


@pytest.mark.parametrize("how", ["withdrawn", "risk", "other node", "exception"])
def test_other_deaths_are_crashes(how: str) -> None:
    story = noticed(certain=how != "risk")
    if how == "withdrawn":
        story.write(PreemptionWithdrawn(node=1, at_s=story.now, source="aws", id="a"))
    if how == "exception":
        story.exit(1, story.now + 0.1, code=1, error="ValueError: x")
    else:
        story.crash(0 if how == "other node" else 1)
    verdicts = list_verdicts(story.entries)
    assert "Crash" in [v.kind for v in verdicts]
    if how == "withdrawn":
        assert "withdrawn" in next(v for v in verdicts if v.kind == "Preemption").evidence


def test_a_notice_that_comes_again_is_one() -> None:
    story = noticed()
    story.write(PreemptionNoticed(node=1, at_s=story.now + 5, grace_s=1.0, source="aws", id="a"))
    (verdict,) = list_verdicts(story.entries)
    assert verdict.evidence["grace_s"] == 6.0


def test_what_was_announced_after_a_death_is_not_its_cause() -> None:
    fold = NoticeFold()
    fold.take(PreemptionNoticed(node=1, at_s=50.0, grace_s=30.0, source="aws"))
    record = ExitRecord(rank=1, generation=0, pid=7, at_s=49.0, signal=9)
    assert fold.explain(1, record) is None
    later = ExitRecord(rank=1, generation=0, pid=7, at_s=51.0, signal=9)
    assert fold.explain(1, later) is not None


def report_of(story: Story) -> Report:
    return make_report(story.entries, story.now)


def test_the_report_says_how_much_of_the_announced_time_was_used() -> None:
    story = noticed()
    begin_s = story.now
    noticed_again = PreemptionNoticed(node=1, at_s=begin_s + 1, grace_s=29.0, source="aws", id="a")
    story.write(noticed_again)
    assert not report_of(story).windows, "no rank has ended"
    story.exit(0, begin_s + 3, asked=True)
    story.exit(1, begin_s + 27, asked=True)
    story.exit(1, begin_s + 3000, signal=9)
    report = report_of(story)
    assert render_windows(report.windows) == (
        "Notice for node 1 (aws: spot terminate): ranks used 27.0 of 30.0 announced seconds"
    )


def test_the_report_says_how_much_of_a_stop_was_used() -> None:
    story = Story()
    story.start()
    args = {"window_s": 20.0}
    story.write(CommandReceived(id="s", kind="stop", args=args, who="SIGTERM", at_s=story.now))
    story.exit(0, story.now + 4, asked=True)
    story.exit(1, story.now + 12, asked=True)
    words = "Notice for SIGTERM: ranks used 12.0 of 20.0 announced seconds"
    assert render_windows(report_of(story).windows) == words


def test_the_report_names_a_rank_that_was_killed_while_it_saved() -> None:
    story = Story()
    story.start()
    record = ExitRecord(
        rank=1, generation=0, pid=1, at_s=story.now, signal=9, asked=True, saving="/w/out/ckpt.pt"
    )
    account = RankAccount()
    story.write(RankExited(node=0, record=record, account=account, detected_s=story.now))
    text = render_text(report_of(story))
    assert "is torn: rank 1 was killed while it wrote /w/out/ckpt.pt" in text


def test_a_later_controller_knows_the_notices() -> None:
    story = noticed()
    known = Memory(story.spec)
    for entry in story.entries:
        known.fold.add(entry)
    story.exit(1, story.now + 27, asked=True)
    again = decode_memory(encode_memory(known), story.spec)
    again.fold.add(story.entries[-1])
    (row,) = again.fold.certain.history.windows.values()
    assert (row.node, row.used_s) == (1, 27.0)
