import re
from html.parser import HTMLParser

from tests.journals import Story, make_series, tell

from perdure.dash.page import render_html
from perdure.dash.svg import POINTS_MAX, choose_ticks, thin
from perdure.dash.text import render_chart, render_text
from perdure.model.events import CheckpointFailed, StacksTaken
from perdure.telemetry.accounting.ledger import LedgerFold
from perdure.telemetry.live.snapshot import SnapshotFold


def fold(story):
    ledger, snapshot = LedgerFold(), SnapshotFold(story.spec)
    for entry in story.entries:
        ledger.add(entry)
        snapshot.add(entry)
    series = make_series(story.entries, story.now, story.curves)
    return ledger.report(story.now), snapshot.snapshot(story.now), series


class Balance(HTMLParser):
    """Fails on a tag that is never closed."""

    VOID = frozenset({"meta", "wbr"})

    def __init__(self):
        super().__init__()
        self.open = []
        self.text = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_needs_nothing_from_outside():
    story = tell(Story())
    story.write(StacksTaken(generation=1, at_s=story.now, stacks={0: "train.py:3 <module>"}))
    story.write(CheckpointFailed(generation=2, step=100, error="no space left", at_s=story.now))
    page = render_html(*fold(story))
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    text = " ".join(balance.text)
    for word in ("rank 1", "SIGKILL", "ComputeHang", "train.py:3", "no space left", "loss"):
        assert word in text
    assert not re.search(r"(?:src|href)=|url\(|@import|<script", page)
    assert page.count("<polyline") == 1


def test_the_users_words_are_escaped():
    story = Story()
    story.start()
    story.train(3)
    story.exit(0, story.now, code=1, error="<script>alert(1)</script>")
    page = render_html(*fold(story))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_job_that_has_just_begun_has_screens_too():
    story = Story(resumable=False)
    report, snapshot, series = fold(story)
    assert "pending" in render_html(report, snapshot, series)
    assert "No incidents." in render_text(report, series)
    assert "pending" in render_text(report)


def test_the_text_names_incidents_curve_and_ledger():
    report, _, series = fold(tell(Story()))
    text = render_text(report, series, width=110)
    assert max(len(line) for line in text.splitlines()) <= 110
    assert "rank 1: signal 9 (SIGKILL) at step 23 -> restart" in text
    assert re.search(r"detect 0\.01 +decide 0\.01 +abort 0\.10", text)
    assert "3 steps lost" in text
    assert "training did not stop" in text
    assert re.search(r"unattributed +\d\.\d\d s +0\.\d\d%", text)
    assert "█" in text
    assert text.count("^") == 3  # Two incidents with a step, and the caption.


def test_a_chart_goes_from_its_lowest_to_its_highest():
    top, bottom = render_chart([0.0, 1.0], height=2)
    assert (top, bottom) == (" █", "▁█")


def test_a_long_curve_is_thinned_but_keeps_its_spike():
    rows = [(float(i), 0.0) for i in range(100_000)]
    rows[5000] = (5000.0, 9.0)
    thinned = thin(rows)
    assert len(thinned) <= POINTS_MAX < 65_535
    assert max(y for _, y in thinned) == 9.0


def test_ticks_are_round():
    assert choose_ticks(0.0, 10.0, 5) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert choose_ticks(3.0, 3.0, 5) == [3.0]
