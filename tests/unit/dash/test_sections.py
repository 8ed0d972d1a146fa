"""What a page shows of very many nodes and incidents: what somebody should look at first."""

from tests.journals import Story, make_series

from perdure.dash.sections import INCIDENTS_MAX, Picture, list_nodes, render_section
from perdure.model.report import RankRow, Snapshot
from perdure.telemetry.accounting.ledger import LedgerFold


def test_nodes_in_trouble_come_before_the_others_and_all_are_there() -> None:
    ranks = tuple(
        RankRow(r, r // 2, 1, "suspected" if r == 7 else "running", "step", 1, 1.0, "", 0.0, 0)
        for r in range(12)
    )
    snapshot = Snapshot(
        1, "job", "running", 1.0, 0.0, 0, 0, 1, 1.0, 12, "resumable", "", ranks, cordoned=(5,)
    )
    views = list_nodes(snapshot)
    assert [view.node for view in views] == [3, 5, 0, 1, 2, 4]
    assert views[0].ranks == [6, 7]
    assert views[1].state == "cordoned"


def test_of_very_many_incidents_it_is_said_how_many_are_not_shown() -> None:
    story = Story()
    for _ in range(INCIDENTS_MAX + 3):
        story.start()
        story.train(1)
        story.crash(1)
    ledger = LedgerFold()
    for entry in story.entries:
        ledger.add(entry)
    report = ledger.report(story.now)
    picture = Picture(report, None, make_series(story.entries, story.now))
    html = render_section("incidents", picture, live=True)
    more = len(report.recoveries) - INCIDENTS_MAX
    assert more >= 1
    assert html.count("<tr>") == INCIDENTS_MAX + 1
    assert f"and {more} before them" in html
    assert render_section("incidents", picture).count("<tr>") == len(report.recoveries) + 1
