import math

import pytest
from msgspec.structs import replace
from tests.simulator.collectives import Layout, Noise, Training
from tests.unit.detect.drive import BEGIN_S, FAULT_S, Fault, Run, inject

from perdure.detect.slowness import slow
from perdure.detect.slowness.hosts import Neighbours
from perdure.model.events import ProbeJudged, VerdictReached, VerdictWithdrawn
from perdure.model.signals.links import ProbeFinding

FOUR_D = Layout(data=2, tensor=2, pipeline=2, context=2, nproc=4)


@pytest.mark.parametrize("lay", [Layout(2), Layout(4, nproc=2), FOUR_D])
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("slow-data", "data"),
        ("slow-forward", "forward"),
        ("slow-backward", "backward"),
        ("slow-optimizer", "optimizer"),
        ("slow-host", "compute"),
    ],
)
def test_a_straggler_is_named_with_its_stage_within_three_seconds(lay, kind, stage):
    run = inject(lay, kind, 1, 4, factor=1.6)
    verdict = run.verdicts[0]
    assert (verdict.kind, verdict.culprit.rank) == ("Straggler", 1)
    assert verdict.evidence["stage"] == stage
    if stage != "compute":
        assert stage in verdict.reason
    assert verdict.confirmed_s - FAULT_S <= 3.2
    assert not verdict.actionable


@pytest.mark.parametrize("lay", [Layout(2), FOUR_D])
def test_twenty_percent_is_found_within_thirty_seconds(lay):
    run = inject(lay, "slow-forward", 1, 30, factor=1.2)
    assert run.verdicts[0].culprit.rank == 1
    assert {v.kind for v in run.verdicts} == {"Straggler"}


def test_a_straggler_may_be_acted_upon_later_and_is_withdrawn_when_it_ends():
    run = inject(Layout(4), "slow-backward", 2, 55, factor=2.0, until_s=FAULT_S + 46)
    first, acted = run.verdicts
    assert (first.actionable, acted.actionable) == (False, True)
    assert 40 <= acted.evidence["acted_after_s"] <= 40.5
    assert [type(e) for _, e in run.said] == [VerdictReached, VerdictReached, VerdictWithdrawn]


def test_slowness_that_moves_about_is_told_once_and_not_acted_upon():
    """T6, T7: an expert in demand makes one rank twice as slow for a while, and then another.

    As nothing tells the first from a slow node, it is told; the next has to last for longer.
    """

    class Experts(Training):
        def _work(self, r, stage, seconds):
            hot = 1 if FAULT_S + 30.0 <= r.t < FAULT_S + 60.0 else 0
            slow = r.t >= FAULT_S and r.rank == hot
            super()._work(r, stage, seconds * (2.0 if slow else 1.0))

    run = Run(Layout(2))
    run.training = Experts(Layout(2), 1)
    run.run(FAULT_S - BEGIN_S + 60 + 75)
    assert {v.culprit.rank for v in run.verdicts} == {0}
    assert not run.acted
    run.run(600)
    assert [e.verdict.culprit.rank for e in run.acted] == [0], "what lasts is acted upon"


def test_what_is_slow_again_for_long_is_acted_upon_however_long_the_last_slowness_was(monkeypatch):
    monkeypatch.setattr(slow, "PASSING_S", 150.0)
    fault = Fault("slow-backward", FAULT_S, 2, 0, 2.0)
    run = Run(Layout(4), fault)
    run.detector._slow._passing.note(FAULT_S, 0.0, 3600.0)
    run.run(FAULT_S - BEGIN_S + 145.0)
    assert run.verdicts
    assert not run.acted
    run.run(10.0)
    assert [event.verdict.culprit.rank for event in run.acted] == [2]


def test_a_late_rank_that_is_not_compared_during_an_evaluation_is_not_said_to_have_recovered():
    """The next time it would have to be late for three times as long."""
    run = inject(Layout(4), "slow-forward", 2, 50, factor=2.0, stages=False)
    assert [verdict.actionable for verdict in run.verdicts] == [False, True]
    late = run.training.now + 300.0
    for event in run.detector._slow.look(late, run.detector._watches):
        run.take(late, event)
        run.detector.note(late, event)
    withdrawn = run.said[-1][1]
    assert isinstance(withdrawn, VerdictWithdrawn)
    assert withdrawn.reason.startswith(slow.EXPLAINED)
    assert not run.detector._slow._passing.longest_s(late, 0.0)


class Packed(Training):
    """Each rank's step takes another time, lognormal, and resembles its last one by `alike`."""

    sigma, alike = 0.6, 0.0

    def _run_step(self):
        known = getattr(self, "_lengths", [0.0] * len(self._ranks))
        left = (1.0 - self.alike**2) ** 0.5
        self._lengths = [self.alike * x + left * self._rng.gauss(0.0, 1.0) for x in known]
        super()._run_step()

    def _work(self, r, stage, seconds):
        super()._work(r, stage, seconds * math.exp(self.sigma * self._lengths[r.rank]))


class Drifting(Packed):
    sigma, alike = 0.4, 0.97


@pytest.mark.parametrize(
    ("kind", "lay", "step_s", "seed"),
    [
        (Packed, Layout(8, nproc=4), 1.0, 0),
        (Packed, Layout(8, nproc=4), 5.0, 0),
        (Drifting, Layout(2), 1.0, 4),
    ],
)
def test_sequences_of_unequal_length_cost_no_node_its_place(kind, lay, step_s, seed):
    """T6: no node is slow for long enough, drawn anew at each step or adrift."""
    run = Run(lay)
    run.training = kind(lay, seed, step_s=step_s)
    run.run(180 * step_s)
    worth = [e for e in run.acted if e.verdict.slowness.step_ratio_low >= 1.5]
    assert worth == []


@pytest.mark.parametrize("data", [1, 2])
def test_a_stage_of_a_pipeline_that_has_more_to_do_by_design_is_no_straggler(data):
    class Uneven(Training):
        def _work(self, r, stage, seconds):
            heavy = r.rank // self.layout.width == 1
            super()._work(r, stage, seconds * (2.5 if heavy else 1.0))

    lay = Layout(data=data, pipeline=2)
    run = Run(lay)
    run.training = Uneven(lay, 1)
    assert run.run(60).said == []


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e300, -5.0])
def test_durations_that_cannot_be_are_dropped(poison):
    """T1: a slow rank's heartbeat with such numbers ended the controller, or hid the slowness."""

    def change(beat):
        return replace(beat, ranks=tuple(map(spoil, beat.ranks)))

    def spoil(one):
        stages = [replace(s, forward_s=poison) for s in one.stages[::2]]
        stages += [replace(s, end_s=poison) for s in one.stages[::3]]
        spans = [replace(s, end_s=s.start_s + poison) for s in one.spans[::2]]
        return replace(one, stages=(*one.stages, *stages), spans=(*one.spans, *spans))

    run = Run(Layout(2), Fault("slow-forward", FAULT_S, 1, factor=2.0))
    run.run(FAULT_S - BEGIN_S + 60, change)
    assert {e.verdict.kind for _, e in run.said} == {"Straggler"}
    assert 1.5 < run.acted[0].verdict.slowness.ratio_high < 2.5


def test_all_ranks_of_one_node_are_that_node():
    class Host(Training):
        def _work(self, r, stage, seconds):
            slow = self.layout.node_of(r.rank) == 1 and r.t >= FAULT_S
            super()._work(r, stage, seconds * (1.8 if slow else 1.0))

    run = Run(Layout(8, nproc=2))
    run.training = Host(Layout(8, nproc=2), 1)
    run.run(FAULT_S - BEGIN_S + 6)
    assert str(run.standing.culprit) == "node 1"
    assert run.standing.kind == "Straggler"


def test_slow_from_the_first_step_is_found_too():
    run = Run(Layout(4), Fault("slow-forward", BEGIN_S, 3, factor=2.0)).run(20)
    assert (run.verdicts[0].kind, run.verdicts[0].culprit.rank) == ("Straggler", 3)


@pytest.mark.parametrize(("factor", "seconds"), [(4.0, 3.0), (29.0, 3.0)])
@pytest.mark.parametrize("lay", [Layout(2), Layout(4), FOUR_D])
def test_a_slow_link_is_pinned(lay, factor, seconds):
    peer = lay.tensor * lay.context
    run = inject(lay, "slow-link", 0, 5, peer=peer, factor=factor)
    assert (run.standing.kind, run.standing.culprit.link) == ("CommSlow", (0, peer))
    assert run.verdicts[0].confirmed_s - FAULT_S <= seconds
    assert run.suspected_s < run.verdicts[0].confirmed_s


def test_a_slow_link_whose_collectives_are_rare_is_acted_upon():
    """T6: seconds apart, too few lie in the 40 s after which others are acted upon."""

    def undeclare(beat):
        ranks = [replace(r, account=replace(r.account, step=-1)) for r in beat.ranks]
        return replace(beat, ranks=tuple(ranks))

    fault = Fault("slow-link", BEGIN_S + 400, 0, 1, 4.0)
    run = Run(Layout(4), fault, step_s=15.0, stages=False).run(900, undeclare)
    assert {str(e.verdict.culprit) for e in run.acted} == {"link 0->1"}
    assert 2.5 < run.acted[0].verdict.slowness.ratio_low < 4.5


def test_what_can_no_longer_be_measured_is_said_and_not_waited_for_without_end():
    """T6: the policy then says that it does nothing, and why."""

    def thin(beat):
        if beat.sent_s < FAULT_S + 6:
            return beat
        ranks = [replace(r, spans=[s for s in r.spans if s.seq % 40 == 0]) for r in beat.ranks]
        return replace(beat, ranks=tuple(ranks))

    run = Run(Layout(2), Fault("slow-link", FAULT_S, 0, 1, 4.0)).run(230, thin)
    (acted,) = [e.verdict for e in run.acted]
    assert (acted.kind, acted.slowness) == ("CommSlow", None)
    assert acted.evidence["acted_after_s"] >= 160.0


def test_a_slow_card_is_its_node_and_with_two_nodes_a_question_for_the_probe():
    run = inject(Layout(4), "slow-nic", 2, 5, factor=6.0)
    assert run.standing.culprit.node == 2
    run = inject(Layout(2), "slow-nic", 1, 5, factor=6.0)
    assert run.standing.confidence < 0.9
    assert sorted(run.standing.evidence["probe"]) == [0, 1]


def test_loss_is_told_by_what_was_sent_again():
    run = inject(Layout(4), "loss", 1, 6, peer=2, factor=1.6)
    assert run.standing.culprit.link == (1, 2)
    assert run.standing.evidence["links"][0]["retransmits"] > 20


def test_without_links_the_slow_communicator_is_still_found():
    run = inject(FOUR_D, "slow-link", 0, 5, peer=4, factor=5.0, links=False)
    assert run.standing.kind == "CommSlow"
    assert run.standing.evidence["communicator"] == "dp0"
    assert run.standing.confidence < 0.7
    assert run.standing.evidence["probe"]


def test_without_stages_the_late_rank_is_found_by_its_arrival():
    run = inject(Layout(4), "slow-forward", 2, 8, factor=2.0, stages=False)
    assert (run.standing.kind, run.standing.culprit.rank) == ("Straggler", 2)
    assert run.standing.confidence > 0.9  # As probable as its excess makes it, as with stages.


def test_a_status_recorder_says_nothing_about_slowness_and_still_finds_hangs():
    degraded = {"stages": False, "spans": False, "links": False, "recorder": "status"}
    assert inject(Layout(4), "slow-forward", 2, 10, factor=2.0, **degraded).verdicts == []
    run = inject(Layout(4), "spin", 2, 3, **degraded)
    assert (run.standing.kind, run.standing.culprit.rank) == ("ComputeHang", 2)


@pytest.mark.parametrize("lay", [Layout(2), Layout(4, nproc=2), FOUR_D])
def test_noise_is_no_verdict(lay):
    noise = Noise(
        jitter=0.05,
        hog_every_s=15,
        gc_every_s=8,
        checkpoint_every_s=30,
        evaluate_steps=200,
        resize_every_s=40,
        rebuild_step=2,
    )
    assert Run(lay, noise=noise, seed=3).run(300).said == []


def test_a_new_generation_learns_anew():
    run = inject(Layout(2), "slow-forward", 1, 6, factor=2.0)
    assert run.standing is not None
    said = len(run.said)
    run.training = Training(Layout(2), 5, begin_s=run.training.now + 1, generation=1)
    run.run(20)
    assert len(run.said) == said


def starve(share):
    """Return a change to heartbeats: from the fault on, all wait for a CPU for so much longer."""

    def change(beat):
        delay_s = 0.1 * (beat.sent_s - 900.0) + share * max(0.0, beat.sent_s - FAULT_S)
        ranks = tuple(replace(r, proc=replace(r.proc, run_delay_s=delay_s)) for r in beat.ranks)
        return replace(beat, ranks=ranks)

    return change


@pytest.mark.parametrize(("share", "said"), [(0.0, True), (0.02, True), (0.5, False)])
def test_slow_communication_of_ranks_without_a_cpu_is_their_neighbours(share, said):
    fault = Fault("slow-link", FAULT_S, 0, 1, 4.0)
    run = Run(Layout(2), fault).run(FAULT_S - BEGIN_S + 5, starve(share))
    assert bool(run.verdicts) == said


def judged(kind, **what):
    finding = ProbeFinding(kind=kind, reason="measured", confidence=0.9, **what)
    return ProbeJudged(id="p", at_s=1.0, finding=finding)


def test_a_probe_settles_link_card_or_host():
    def after(event):
        run = inject(Layout(4), "slow-link", 0, 5, peer=1, factor=4.0)
        assert run.standing.evidence["probe"]
        for e in run.detector.note(run.training.now, event):
            run.said.append((run.training.now, e))
        return run.standing

    link = after(judged("slow link", link=(0, 1)))
    assert link.culprit.link == (0, 1)
    assert link.confidence == 0.9
    assert "probe" not in link.evidence
    assert after(judged("slow NIC", node=0)).culprit.node == 0
    host = after(judged("slow host", node=1))
    assert (host.kind, host.culprit.node) == ("Straggler", 1)
    assert after(judged("nothing")).evidence["probe"]


def test_longer_work_of_all_and_collectives_hidden_behind_it_are_no_slow_communication():
    """The step grows, and so do collectives, but no rank waits any longer than before."""

    def change(beat):
        if beat.sent_s < FAULT_S:
            return beat
        stretch = 0.15
        ranks = tuple(
            replace(
                r,
                stages=tuple(
                    replace(s, end_s=s.end_s + stretch, backward_s=s.backward_s + stretch)
                    for s in r.stages
                ),
            )
            for r in beat.ranks
        )
        return replace(beat, ranks=ranks)

    run = Run(Layout(2))
    run.run(FAULT_S - BEGIN_S + 8, change)
    assert run.verdicts == []
    assert run.detector._slow.stages.exposed < 0.03


def test_neighbours_are_counted_beyond_the_usual_and_along_a_ring():
    neighbours = Neighbours()
    for second in range(30):
        for rank in range(6):
            extra = 0.2 * max(0, second - 20) if rank < 5 else 0.0
            neighbours.take(rank, float(second), 1.0 + 0.3 * second + extra)
    taken, most = neighbours.sum_up(set())
    assert 0.19 <= most <= 0.21
    assert 0.75 <= taken <= 0.85
    assert neighbours.take_more_from(0) == 0.0
    assert neighbours.take_more_from(5) < 0.0
