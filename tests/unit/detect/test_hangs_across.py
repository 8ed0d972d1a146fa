"""Hangs in several communicators at once: the root is named, never those that wait behind it."""

import pytest
from tests.simulator.collectives import Layout
from tests.unit.detect.drive import BEGIN_S, FAULT_S, Fault, Run, inject

from perdure.model.events import ProbeJudged, VerdictWithdrawn
from perdure.model.signals.links import ProbeFinding

LAYOUTS = [
    Layout(2),
    Layout(8, nproc=2),
    Layout(data=2, tensor=2, pipeline=2, nproc=2),
    Layout(data=2, tensor=2, pipeline=2, context=2, nproc=4),
    Layout(data=4, tensor=2, pipeline=4, nproc=8),
]


@pytest.mark.parametrize("lay", LAYOUTS)
@pytest.mark.parametrize("kind", ["stop", "spin", "sleep"])
def test_the_rank_that_hangs_is_named_and_not_those_behind_it(lay, kind):
    rank = lay.size - 1
    run = inject(lay, kind, rank, 3.5)
    assert {(v.kind, v.culprit.rank) for v in run.verdicts} == {("ComputeHang", rank)}
    assert run.verdicts[0].confirmed_s - FAULT_S <= 1.0 + 0.36 + 0.7
    if lay.pipeline > 1:
        waits = run.verdicts[0].evidence.get("waits", [])
        assert kind == "stop" or any(edge[1] == rank for edge in waits)


@pytest.mark.parametrize("lay", LAYOUTS[1:])
def test_a_link_that_drops_everything_is_pinned(lay):
    peer = lay.tensor * lay.context
    run = inject(lay, "drop-link", 0, 4, peer=peer)
    assert (run.standing.kind, run.standing.culprit.link) == ("CommHang", (0, peer))


@pytest.mark.parametrize("lay", LAYOUTS[1:])
def test_a_dead_card_is_its_node(lay):
    run = inject(lay, "drop-nic", lay.nproc, 4)
    assert (run.standing.kind, run.standing.culprit.node) == ("CommHang", 1)


def test_without_links_a_communication_hang_asks_for_a_probe():
    run = inject(LAYOUTS[3], "drop-link", 0, 4, peer=4, links=False)
    assert run.standing.kind == "CommHang"
    assert run.standing.culprit.rank is None
    assert run.standing.evidence["communicator"] == "dp0"
    assert run.standing.evidence["probe"] == [0, 1]


def test_a_send_and_its_receive_in_flight_are_their_link():
    lay = Layout(data=1, tensor=2, pipeline=2, nproc=2)
    run = inject(lay, "drop-link", 0, 4, peer=2, links=False)
    assert (run.standing.kind, run.standing.culprit.link) == ("CommHang", (0, 2))


@pytest.mark.parametrize("lay", LAYOUTS)
@pytest.mark.parametrize("kind", ["other-bytes", "other-op"])
def test_another_collective_is_a_desync_of_its_rank(lay, kind):
    run = inject(lay, kind, 1, 8)
    assert {(v.kind, v.culprit.rank) for v in run.verdicts} == {("Desync", 1)}
    assert [v.actionable for v in run.verdicts] == [False, True]
    assert run.verdicts[0].confirmed_s - FAULT_S <= 1.5


def test_a_communication_hang_with_a_known_link_is_acted_upon():
    """Once the kernel has tried again in vain, which it does 6.2 and 12.6 s after the first time.

    In between, a link that has come back looks the same.
    """
    run = inject(Layout(4), "drop-link", 0, 12.4, peer=1)
    assert run.acted == []
    acted = [v for v in run.run(1.0).verdicts if v.actionable]
    assert [str(v.culprit) for v in acted] == ["link 0->1"]
    acted_s = acted[0].confirmed_s + acted[0].evidence["acted_after_s"]
    assert 12.6 <= acted_s - FAULT_S <= 13.0


def probe(run: Run, kind: str, **what) -> None:
    finding = ProbeFinding(kind=kind, reason="measured", confidence=0.9, **what)
    event = ProbeJudged(id="p", at_s=run.training.now, finding=finding)
    for said in run.detector.note(run.training.now, event):
        run.take(run.training.now, said)


@pytest.mark.parametrize("lay", [Layout(2), Layout(4)])
def test_a_dead_link_that_a_probe_confirms_is_dead_since_its_first_report(lay):
    """Its verdict stands; the end that is to blame may be told more exactly."""
    for finding, culprit in (
        ({"kind": "slow link", "link": (0, 1)}, "link 0->1"),
        ({"kind": "slow NIC", "node": 1}, "node 1"),
    ):
        run = inject(lay, "drop-link", 0, 5.6, peer=1)
        (first,) = run.verdicts
        assert first.evidence["probe"] == [0, 1]
        probe(run, **finding)
        withdrawn = [e for _, e in run.said if isinstance(e, VerdictWithdrawn)]
        assert len(withdrawn) == (str(first.culprit) != culprit)
        assert run.run(8.0).standing.actionable
        assert str(run.standing.culprit) == culprit
        assert run.standing.confirmed_s == first.confirmed_s
        acted_s = first.confirmed_s + run.standing.evidence["acted_after_s"]
        assert 12.6 <= acted_s - FAULT_S <= 13.0


def test_what_a_probe_has_settled_is_a_ground_to_act_upon_from_then_on():
    """The journal went on to say `timeout`, and acted upon the link."""
    run = inject(Layout(2), "drop-nic", 0, 5.6)
    assert (run.standing.confidence, run.standing.ground) == (0.6, "timeout")
    probe(run, "slow NIC", node=1)
    assert run.standing.ground == "link"


def test_what_a_probe_finds_elsewhere_is_known_since_then():
    run = inject(Layout(4), "drop-link", 0, 5.6, peer=1)
    probe(run, "slow link", link=(2, 3))
    assert run.standing.confirmed_s == run.training.now
    assert run.run(8.0).acted == []


def test_a_node_that_is_cut_off_is_named_long_before_it_is_lost():
    """Neither its heartbeats nor its acknowledgements come any more."""
    lay = Layout(4)
    run = Run(lay, Fault("drop-nic", FAULT_S, 2))
    last_s = 0.0
    for now, beat in run.training.run(FAULT_S - BEGIN_S + 4):
        if now > FAULT_S and beat.node == 2:
            continue
        for event in [
            *run.detector.take_beat(now, beat),
            *(run.detector.tick(now) if now > last_s else []),
        ]:
            run.take(now, event)
        last_s = now
    assert (run.standing.kind, run.standing.culprit.node) == ("CommHang", 2)
    assert run.standing.confirmed_s - FAULT_S < 2.5
