import msgspec
import pytest
from tests.journals import Story, tell

from perdure.model.events import (
    JournalEntry,
    KeeperLost,
    NodeLost,
    RankExited,
    StacksTaken,
    VerdictReached,
    VerdictWithdrawn,
    WorldReformed,
)
from perdure.model.failures import ExitRecord
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Culprit, Verdict
from perdure.telemetry.verdicts import VerdictFold, list_verdicts


def test_crash_and_hang_are_found_in_order_of_time():
    first, second = list_verdicts(tell(Story()).entries)
    assert (first.kind, first.culprit.rank, first.step) == ("Crash", 1, 23)
    assert first.evidence["signal"] == 9
    assert first.reason == "rank 1 ended with signal 9 (SIGKILL) at step 23"
    assert (second.kind, second.actionable) == ("ComputeHang", True)


def test_the_first_exit_is_the_culprit_and_the_others_are_its_consequences():
    story = Story(nproc=3)
    story.start()
    story.train(2)
    story.exit(0, story.now + 0.05, code=1, error="RuntimeError: Connection closed by peer")
    story.exit(2, story.now, code=1, error="ValueError: bad lr")
    (verdict,) = list_verdicts(story.entries)
    assert verdict.culprit.rank == 2
    assert verdict.evidence["error"] == "ValueError: bad lr"
    assert [c["rank"] for c in verdict.evidence["consequences"]] == [0]


def test_ranks_that_die_of_a_known_hang_are_no_crash():
    story = Story()
    story.start()
    story.train(2)
    story.hang(1)
    story.exit(0, story.now + 1, code=1, error="RuntimeError: Timed out")
    assert [v.kind for v in list_verdicts(story.entries)] == ["ComputeHang"]


@pytest.mark.parametrize(("kind", "withdrawn"), [("Straggler", False), ("ComputeHang", True)])
def test_a_crash_is_told_though_the_rank_was_slow_or_had_stood_before(kind, withdrawn):
    story = Story()
    story.start()
    story.train(2)
    verdict = Verdict(
        kind=kind, culprit=Culprit(rank=0), generation=0, first_seen_s=story.now - 0.2,
        confirmed_s=story.now - 0.1, confidence=0.9, reason="slow", actionable=True,
    )  # fmt: skip
    story.write(VerdictReached(verdict=verdict))
    if withdrawn:
        story.write(VerdictWithdrawn(verdict=verdict, at_s=story.now, reason="it moved"))
    story.crash(1)
    assert [v.kind for v in list_verdicts(story.entries)] == [kind, "Crash"]


def test_stacks_and_withdrawals_become_evidence():
    story = Story()
    story.start()
    story.hang(0)
    verdict = next(e.body for e in story.entries if isinstance(e.body, VerdictReached)).verdict
    suspicion = msgspec.structs.replace(verdict, first_seen_s=verdict.first_seen_s - 5)
    story.write(VerdictReached(verdict=suspicion))
    story.write(VerdictWithdrawn(verdict=suspicion, at_s=story.now, reason="it moved"))
    story.write(StacksTaken(generation=0, at_s=story.now, stacks={0: "train.py:3"}))
    withdrawn, hang = list_verdicts(story.entries)
    assert withdrawn.evidence["withdrawn"] == "it moved"
    assert not withdrawn.actionable
    assert hang.evidence["stacks"] == {"0": "train.py:3"}


def test_lost_nodes_and_keepers_are_verdicts_on_the_node():
    entries = [
        JournalEntry(1, 30.0, NodeLost(node=3, at_s=30.0, reason="silent", last_seen_s=15.0)),
        JournalEntry(2, 31.0, KeeperLost(node=1, generation=0, at_s=30.5)),
    ]
    lost, keeper = list_verdicts(entries)
    assert (lost.kind, lost.culprit.node, lost.first_seen_s) == ("NodeLost", 3, 15.0)
    assert (keeper.kind, keeper.culprit.node) == ("Crash", 1)


def test_who_dies_after_the_others_went_on_in_place_dies_of_something_else():
    story = Story(nproc=4)
    story.start()
    story.train(2)
    story.exit(2, story.now, signal=9)
    story.exit(1, story.now + 0.01, code=1, error="RuntimeError: Connection closed by peer")
    for rank in (0, 3):
        story.write(
            WorldReformed(
                generation=0, epoch=1, rank=rank, step=2, began_s=story.now,
                ordered_s=story.now, formed_s=story.now + 0.1, redo=1,
            )
        )  # fmt: skip
    story.exit(0, story.now + 5, signal=9)
    first, second = list_verdicts(story.entries)
    assert (first.culprit.rank, second.culprit.rank) == (2, 0)
    assert [c["rank"] for c in first.evidence["consequences"]] == [1]
    assert "consequences" not in second.evidence


def test_a_month_of_lost_members_is_told_as_ever_and_looked_through_no_more() -> None:
    """All that happens in one generation, if it is an elastic one: each picture judged all anew."""
    whole, bounded = VerdictFold(), VerdictFold()
    seq = 0
    for loss in range(1, 101):
        at_s = 100.0 * loss
        record = ExitRecord(loss, 0, 9, at_s, code=1, error=f"Error: {loss}")
        account = RankAccount(step=loss)
        died = RankExited(node=0, record=record, account=account, detected_s=at_s)
        formed = WorldReformed(
            generation=0, epoch=loss, rank=0, step=loss, began_s=at_s, ordered_s=at_s, formed_s=at_s
        )
        for body in (died, formed):
            seq += 1
            for fold in (whole, bounded):
                fold.add(JournalEntry(seq, at_s, body))
        bounded.condense(-1, 20)
    assert bounded.verdicts()[-20:] == whole.verdicts()[-20:]
    assert len(bounded.verdicts()) <= 42
    assert len(bounded.exits[0]) <= 22
