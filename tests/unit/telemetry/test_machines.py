"""What a platform says of a machine is the cause of its loss, before or after the loss is known."""

from dataclasses import dataclass, field

import pytest
from tests.journals import Story

from perdure.model.events import MachineReported, NodeLost, NodeRegistered
from perdure.model.job import JobSpec
from perdure.telemetry.accounting.history import History
from perdure.telemetry.accounting.incidents import list_recoveries
from perdure.telemetry.accounting.ledger import LedgerFold
from perdure.telemetry.accounting.segments import Presence, Segment, cut_idle
from perdure.telemetry.verdicts import list_verdicts

WORDS = "pod job-nodes-abcde: out of memory: OOMKilled"


@dataclass
class Loss:
    """Node 1 of two falls silent, and the platform says why."""

    story: Story = field(default_factory=lambda: Story(nproc=1, nodes=2))

    def train(self) -> float:
        self.story.start()
        self.story.train(12)
        return self.story.now

    def lose(self, at_s: float) -> None:
        lost = NodeLost(node=1, at_s=at_s + 1.0, reason="silent for 0.9 s", last_seen_s=at_s)
        self.story.write(lost)

    def report(self, node: int, ended_s: float) -> None:
        now = self.story.now
        told = MachineReported(node=node, at_s=now, reason=WORDS, source="k", ended_s=ended_s)
        self.story.write(told)


@pytest.mark.parametrize("earlier", [True, False])
def test_the_cause_of_a_lost_node_is_what_its_platform_says(earlier: bool) -> None:
    loss = Loss()
    at_s = loss.train()
    if earlier:
        loss.report(1, at_s)
    loss.lose(at_s)
    if not earlier:
        loss.report(1, at_s)
    (verdict,) = list_verdicts(loss.story.entries)
    assert (verdict.kind, verdict.culprit.node) == ("NodeLost", 1)
    assert verdict.reason.startswith(WORDS)
    history = History()
    for entry in loss.story.entries:
        history.add(entry)
    (found,) = list_recoveries(history, loss.story.now)
    assert (found.culprit, found.cause) == ("node 1", f"NodeLost ({WORDS})")


def test_another_nodes_end_and_an_old_one_explain_nothing_here() -> None:
    loss = Loss()
    at_s = loss.train()
    loss.lose(at_s)
    loss.report(0, at_s)
    loss.report(1, at_s - 1000.0)
    verdicts = {(v.culprit.node, v.reason) for v in list_verdicts(loss.story.entries)}
    assert (1, "silent for 0.9 s") in verdicts
    assert (0, WORDS) in verdicts, "an end that nobody saw is told as one of its own"


def test_a_place_is_paid_for_while_somebody_has_it() -> None:
    presence = Presence()
    for node, come_s, gone_s in ((1, 10.0, 20.0), (1, 30.0, 50.0)):
        presence.come(node, come_s)
        presence.come(node, come_s + 1.0)  # Its agent was started again.
        presence.go(node, gone_s)
    presence.come(2, 60.0)
    spec = JobSpec(script="t.py", nodes=1, nodes_max=4)
    gaps = presence.list_unpaid(spec, 0.0, 100.0)
    assert gaps[1] == [(0.0, 10.0), (20.0, 30.0), (50.0, 100.0)]
    assert gaps[2] == [(0.0, 60.0)]
    assert gaps[3] == [(0.0, 100.0)]
    assert presence.list_unpaid(JobSpec(script="t.py", nodes=4), 0.0, 100.0) == {}
    idle = Segment(1, 0, 5.0, 40.0, (("idle", 35.0),))
    assert [(s.begin_s, s.end_s) for s in cut_idle(idle, gaps[1])] == [(10.0, 20.0), (30.0, 40.0)]
    useful = Segment(1, 0, 5.0, 40.0, (("useful", 35.0),))
    assert cut_idle(useful, gaps[1]) == [useful]


def test_the_ledger_closes_over_the_places_that_were_there() -> None:
    story = Story(nproc=1, nodes=1, nodes_max=3)
    story.start()
    story.train(12)
    come_s = story.now
    registered = NodeRegistered(node=1, incarnation="a", host="h", boot_id="b", slots=1)
    story.write(registered)
    story.train(12)
    fold = LedgerFold()
    for entry in story.entries:
        fold.add(entry)
    report = fold.report(story.now)
    assert report.slot_s == pytest.approx(report.wall_s + story.now - come_s)
    assert sum(account.s for account in report.ledger.values()) == pytest.approx(report.slot_s)
