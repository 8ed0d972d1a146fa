"""A death that was announced is evidence of the announcement, and no crash."""

from typing import Any

import pytest
from tests.journals import Story

from perdure.model.events import NodeLost, PreemptionNoticed, PreemptionWithdrawn
from perdure.model.failures import ExitRecord
from perdure.telemetry.history import History
from perdure.telemetry.incidents import list_recoveries
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
