"""T16: a host that is busy with others' work is said to be so, and nothing on it is blamed."""

import pytest
from msgspec.structs import replace
from tests.unit.detect.drive import BEGIN_S, FAULT_S, Fault, Layout, Run

from perdure.model.events import VerdictWithdrawn
from perdure.model.job import PolicyConfig
from perdure.model.signals.progress import HostLoad
from perdure.policy.response import Situation, react


def load(nodes, *, others=1.1, own=0.9, host="", until_s=float("inf"), delay=0.5, starve=True):
    """Return a change to heartbeats: others take so many of two cores from the fault on."""

    def change(beat):
        struck = FAULT_S <= beat.sent_s < until_s and beat.node in nodes
        used = others if struck else 0.0
        waited = delay if struck else 0.0
        look = HostLoad(host or f"boot{beat.node}", 2, min(used + own, 2.0), own, waited)
        late_s = (0.02 if starve else 0.5) * (beat.sent_s - 900.0)
        late_s += waited * max(0.0, beat.sent_s - FAULT_S) if starve else 0.0
        ranks = tuple(replace(r, proc=replace(r.proc, run_delay_s=late_s)) for r in beat.ranks)
        return replace(beat, ranks=ranks, host=look)

    return change


def told(run):
    return {(v.kind, str(v.culprit)) for v in run.verdicts}


def play(fault, lay, change, seconds=12.0):
    return Run(lay, fault).run(FAULT_S - BEGIN_S + seconds, change)


@pytest.mark.parametrize("kind", ["slow-link", "slow-backward"])
def test_what_is_slow_on_a_host_that_is_busy_with_others_work_is_only_its_host(kind):
    fault = Fault(kind, FAULT_S, 0, 1, 4.0)
    run = play(fault, Layout(2), load({0}, starve=False))
    assert told(run) == {("HostBusy", "node 0")}
    verdict = run.standing
    assert not run.acted
    assert verdict.confirmed_s - FAULT_S < 5.0
    assert "2.0 of 2 cores are in use, 1.1 of them by processes" in verdict.reason
    assert "wait for a CPU for 0.50 s of every second" in verdict.reason
    assert verdict.evidence["others_cores"] == 1.1


def test_it_is_described_by_the_moment_at_which_it_was_seen():
    busy = load({0}, starve=False)
    last = {}

    def change(beat):
        beat = busy(beat)
        if beat.node == 0 and beat.sent_s >= FAULT_S:
            last["count"] = last.get("count", 0) + 1
            if last["count"] % 3:  # Moments with an idle core between any two.
                beat = replace(beat, host=replace(beat.host, busy=0.9))
        return beat

    run = play(Fault("slow-link", FAULT_S + 5.0, 0, 1, 4.0), Layout(2), change)
    assert "2.0 of 2 cores are in use, 1.1 of them by processes" in run.standing.reason


def test_it_is_withdrawn_when_the_load_is_gone_and_a_link_that_stays_slow_is_found_then():
    fault = Fault("slow-link", FAULT_S, 0, 1, 4.0)
    run = play(fault, Layout(2), load({0}, until_s=FAULT_S + 12, starve=False), 40.0)
    gone_s = next(now for now, e in run.said if isinstance(e, VerdictWithdrawn))
    assert gone_s - FAULT_S < 20.0
    assert run.standing.kind == "CommSlow"
    assert run.standing.confirmed_s >= gone_s - 1.0


def test_a_moment_of_others_work_does_not_hide_a_slow_link():
    """One command of a user's when the link turns slow: it was told 5 s later than the link."""
    fault = Fault("slow-link", FAULT_S, 0, 1, 4.0)
    run = play(fault, Layout(2), load({0, 1}, until_s=FAULT_S + 0.5, starve=False))
    assert run.standing.kind == "CommSlow"
    assert run.standing.confirmed_s - FAULT_S < 4.0


def test_where_all_nodes_share_the_load_nobody_is_blamed():
    run = play(Fault("slow-link", FAULT_S, 0, 1, 4.0), Layout(2), load({0, 1}, starve=False))
    assert run.standing.culprit.node is None
    assert "all 2 nodes are busy with others' work" in run.standing.reason
    assert {v.kind for v in run.verdicts} == {"HostBusy"}


@pytest.mark.parametrize(
    "change",
    [
        load({0}, others=0.1, own=1.9, starve=False),
        load({0, 1}, others=0.0, own=1.0, host="one", starve=False),
        load({0}, others=0.5, starve=False),
        load({0}, delay=0.0, starve=False),
    ],
    ids=["its own ranks", "its own ranks, by two nodes", "a core is idle", "no rank waits"],
)
@pytest.mark.parametrize("kind", ["slow-link", "slow-backward"])
def test_a_host_that_others_do_not_fill_hides_no_fault(kind, change):
    run = play(Fault(kind, FAULT_S, 0, 1, 4.0), Layout(2), change, 6.0)
    assert run.standing is not None
    assert run.standing.kind == {"slow-link": "CommSlow", "slow-backward": "Straggler"}[kind]


def test_a_rank_that_gets_its_cpu_all_the_same_is_a_straggler():
    busy = load({1})

    def change(beat):
        beat = busy(beat)
        ranks = tuple(
            replace(r, proc=replace(r.proc, run_delay_s=0.01 * (beat.sent_s - 900.0)))
            for r in beat.ranks
        )
        return replace(beat, ranks=ranks)

    run = play(Fault("slow-backward", FAULT_S, 1, 1, 3.0), Layout(2), change, 6.0)
    assert ("Straggler", "rank 1") in told(run)


def test_a_slow_link_between_other_hosts_is_found_and_a_busy_host_that_costs_nothing_is_not_told():
    run = play(Fault("slow-link", FAULT_S, 2, 3, 4.0), Layout(4), load({0}, starve=False), 8.0)
    assert told(run) == {("CommSlow", "link 2->3")}


@pytest.mark.parametrize("host", ["", "one"], ids=["each with a machine", "on one machine"])
def test_a_link_that_is_slow_alone_is_not_put_down_to_its_busy_machine(host):
    change = load({0, 1, 2, 3}, others=1.6, own=0.1, host=host, starve=False)
    run = play(Fault("slow-link", FAULT_S, 2, 3, 8.0), Layout(4), change, 12.0)
    assert ("CommSlow", "link 2->3") in told(run)
    assert run.standing.kind == "CommSlow"
    assert run.standing.confirmed_s - FAULT_S < 4.0


def test_a_busy_host_on_which_nothing_is_slow_is_no_verdict():
    assert not play(None, Layout(2), load({0})).verdicts


@pytest.mark.parametrize("kind", ["slow-link", "slow-backward"])
def test_what_ranks_lose_that_wait_for_a_cpu_is_their_hosts_where_others_fill_it(kind):
    """The neighbours explain it, so that no link and no rank is blamed: their machine is told."""
    run = play(Fault(kind, FAULT_S, 0, 1, 4.0), Layout(2), load({0}))
    assert told(run) == {("HostBusy", "node 0")}
    assert run.standing.confirmed_s - FAULT_S < 8.0
    idle = play(Fault(kind, FAULT_S, 0, 1, 4.0), Layout(2), load({0}, others=0.5))
    assert "HostBusy" not in {v.kind for v in idle.verdicts}


def test_a_machine_of_several_nodes_is_busy_as_a_whole():
    """One of its nodes may be seen to be busy a moment before the other, or wait for no CPU."""
    busy = load({0, 1}, host="one", others=1.55, own=0.45)

    def change(beat):
        beat = busy(beat)
        return replace(beat, host=replace(beat.host, waited=0.0)) if beat.node else beat

    run = play(Fault("slow-link", FAULT_S, 0, 1, 4.0), Layout(2), change)
    assert told(run) == {("HostBusy", "the job")}
    assert "all 2 nodes are busy with others' work: on node 0" in run.standing.reason


def test_a_host_that_stays_busy_slows_like_a_slow_one_and_is_acted_upon_alike():
    """T8: later, because others' work ends by itself more often; and with what it costs."""
    fault = Fault("slow-host", FAULT_S, 0, 1, 2.5)
    run = play(fault, Layout(4), load({0}), 100.0)
    assert told(run) == {("HostBusy", "node 0")}
    assert not run.acted
    run.run(60.0, load({0}))
    (acted,) = {e.verdict.kind: e.verdict for e in run.acted}.values()
    assert (acted.kind, acted.culprit.node) == ("HostBusy", 0)
    assert acted.slowness.share_low > 0.3
    assert react(acted, PolicyConfig(), Situation(node=0, spares=(4,))).leave_out


def test_load_that_all_nodes_share_is_never_acted_upon():
    fault = Fault("slow-link", FAULT_S, 0, 1, 4.0)
    run = play(fault, Layout(2), load({0, 1}, starve=False), 200.0)
    assert run.standing.kind == "HostBusy"
    assert not run.acted


@pytest.mark.parametrize("nodes", [{0}, {0, 1}], ids=["one host", "all hosts"])
def test_others_work_explains_no_more_than_ranks_waited_for_a_cpu(nodes):
    """T8: a job that hardly waits for its CPUs is not slowed down four times by its neighbours."""
    fault = Fault("slow-link", FAULT_S, 0, 1, 20.0)
    run = play(fault, Layout(2), load(nodes, delay=0.12, starve=False))
    assert run.standing.kind == "CommSlow"


def test_what_was_taken_back_as_a_busy_hosts_is_not_told_again_with_each_pause_of_the_load():
    """What the last second explains the last few may not: a link came and went 19 times in 40 s."""
    busy, free = load({0}, delay=0.2, starve=False), load({0}, delay=0.0, starve=False)

    def change(beat):
        return busy(beat) if (beat.sent_s - FAULT_S) % 1.5 < 0.45 else free(beat)

    run = play(Fault("slow-link", FAULT_S, 0, 1, 3.0), Layout(2), change, 40.0)
    said = [v.kind for v in run.verdicts if v.kind != "HostBusy"]
    assert 1 <= len(said) <= 2


def test_a_straggler_that_its_cpu_limit_stops_is_said_to_be_stopped_by_it():
    def change(beat):
        struck = beat.sent_s >= FAULT_S and beat.node == 1
        look = HostLoad(f"boot{beat.node}", 64, 2.0, 1.9, throttled=0.7 if struck else 0.04)
        return replace(beat, host=look)

    fault = Fault("slow-backward", FAULT_S, 1, 1, 3.0)
    verdict = play(fault, Layout(2), change, 8.0).standing
    assert (verdict.kind, str(verdict.culprit)) == ("Straggler", "rank 1")
    assert "the CPU limit of its cgroup stopped it in" in verdict.reason
    assert verdict.evidence["cpu_throttled"] >= 0.1
    other = play(Fault("slow-backward", FAULT_S, 0, 1, 3.0), Layout(2), change, 8.0).standing
    assert "CPU limit" not in other.reason, "it is the other one's"
    assert "cpu_throttled" not in other.evidence
