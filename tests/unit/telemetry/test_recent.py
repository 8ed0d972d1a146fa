"""The incidents on a screen: each once, told while it lasts, bounded however long the job runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.journals import Story, tell

from perdure.model.events import GenerationStepping
from perdure.telemetry.accounting.history import History
from perdure.telemetry.accounting.incidents import KEPT, RecentFold
from perdure.telemetry.accounting.ledger import LedgerFold, make_report
from perdure.telemetry.live.snapshot import SnapshotFold


class Told:
    """A history and its incidents, entry by entry."""

    def __init__(self):
        self.history, self.recent = History(), RecentFold()

    def add(self, entries):
        for entry in entries:
            self.history.add(entry)
            self.recent.add(entry, self.history)
        return self

    def rows(self, now):
        return self.recent.list_incident_rows(self.history, now)


def began():
    story = Story()
    story.start()
    story.train(7)
    return story


def test_none_where_nothing_went_wrong():
    story = began()
    assert Told().add(story.entries).rows(story.now) == ()


def test_one_that_lasts_has_no_length_and_one_that_is_over_keeps_its_own():
    story = began()
    story.crash()
    told = Told().add(story.entries)
    (row,) = told.rows(story.now)
    assert (row.culprit, row.cause, row.rung) == ("rank 0", "signal 9 (SIGKILL)", "restart")
    assert row.total_s is None
    seen = len(story.entries)
    story.start()
    story.train(3)
    told.add(story.entries[seen:])
    (over,) = told.rows(story.now)
    assert over.at_s == row.at_s
    assert over.total_s is not None
    assert told.rows(story.now + 1000.0) == (over,)


def test_what_a_ledger_says_of_them():
    story = tell(Story())
    ledger = LedgerFold()
    for entry in story.entries:
        ledger.add(entry)
    rows = Told().add(story.entries).rows(story.now)
    recoveries = ledger.report(story.now).recoveries
    assert [(r.cause, r.culprit, r.rung) for r in rows] == [
        (r.cause, r.culprit, r.rung) for r in recoveries
    ]
    assert [r.total_s for r in rows] == pytest.approx([r.total_s for r in recoveries], abs=0.5)


def test_the_end_of_the_job_ends_them():
    story = began()
    story.crash()
    story.finish("failed")
    (row,) = Told().add(story.entries).rows(story.now)
    assert row.rung == "give up"
    assert row.total_s is not None


def test_a_hang_in_which_the_job_was_ended_is_told():
    story = began()
    story.suspect(1)
    assert Told().add(story.entries).rows(story.now) == ()
    story.now += 60.0
    story.stop()
    told = Told().add(story.entries)
    (row,) = told.rows(story.now)
    assert (row.culprit, row.rung) == ("rank 1", "stop")
    assert row.total_s == pytest.approx(61.3, abs=0.2)
    assert told.history.num_incidents == 1


def test_a_recovery_that_failed_itself_is_over_when_the_next_begins():
    story = began()
    story.crash()
    first = len(story.entries)
    story.start()
    story.crash()
    later = [e for e in story.entries[first:] if not isinstance(e.body, GenerationStepping)]
    told = Told().add(story.entries[:first]).add(later)
    assert [row.total_s is None for row in told.rows(story.now)] == [True, True]
    seen = len(story.entries)
    story.start()
    begun = [e for e in story.entries[seen:] if not isinstance(e.body, GenerationStepping)]
    told.add(begun)
    assert [row.total_s is None for row in told.rows(story.now)] == [False, True]


@settings(max_examples=40, deadline=None)
@given(
    acts=st.lists(st.sampled_from(["train", "crash", "early", "part"]), max_size=60),
    condense=st.booleans(),
)
def test_each_incident_is_told_once_and_few_are_kept(acts, condense):
    story, told, wrong = Story(), Told(), 0
    story.start()
    seen = 0
    for act in acts:
        if act == "train":
            story.train(3)
        elif act == "part":
            story.train(1)
            story.lose_controller()
            wrong += 1
        else:  # A generation that ends before its first step is one more.
            if act == "crash":
                story.train(1)
            story.crash()
            story.start()
            wrong += 1
        told.add(story.entries[seen:])
        seen = len(story.entries)
        if condense and told.history.newest is not None:
            told.history.condense(told.history.newest.number - 1, 5)
        rows = told.rows(story.now)
        assert len(rows) == min(wrong, KEPT)
        assert len(told.recent.closed) <= KEPT
        assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
        assert len({(row.at_s, row.culprit) for row in rows}) == len(rows)


def test_a_picture_holds_them_after_the_past_is_forgotten():
    story = began()
    for _ in range(KEPT + 5):
        story.crash()
        story.start()
        story.train(2)
    fold = SnapshotFold(story.spec)
    for entry in story.entries:
        fold.add(entry)
    picture = fold.snapshot(story.now)
    assert (picture.incidents, len(picture.recent)) == (KEPT + 5, KEPT)
    assert all(row.total_s is not None for row in picture.recent)
    assert len(fold.certain.recent.closed) == KEPT


@pytest.mark.parametrize("resumable", [True, False])
def test_a_month_of_failures_is_counted_and_costs_a_picture_nothing(resumable: bool) -> None:
    """10,000 of them: what is kept of each would be sent, written and read for ever."""
    sizes = []
    for failures in (30, 300):
        story = Story(resumable=resumable)
        story.start()
        for _ in range(failures):
            story.train(5)
            story.crash()
            story.lose_controller()
            story.start()
        fold = SnapshotFold(story.spec)
        for entry in story.entries:
            fold.add(entry)
        picture = fold.snapshot(story.now)
        assert (picture.restarts, picture.incidents) == (failures, 2 * failures)
        assert picture.depth == ("resumable" if resumable else "supervised")
        committed = make_report(story.entries, story.now).steps_committed
        assert picture.step == (-1 if committed is None else committed)
        sizes.append(len(fold.certain.history.generations) + len(fold.certain.history.lost_parts))
    assert sizes[0] == sizes[1] < 5
