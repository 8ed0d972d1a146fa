import pytest
from tests.journals import Story, tell

from perdure.model.events import VerdictWithdrawn
from perdure.model.report import ACCOUNTS
from perdure.telemetry.accounting.ledger import LedgerFold


def report_of(story):
    fold = LedgerFold()
    for entry in story.entries:
        fold.add(entry)
    return fold.report(story.now)


def check_sum(report):
    assert tuple(report.ledger) == ACCOUNTS
    assert all(account.s >= 0 for account in report.ledger.values())
    assert sum(a.s for a in report.ledger.values()) == pytest.approx(report.slot_s)
    assert sum(a.fraction for a in report.ledger.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("resumable", [True, False])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_with_faults_closes(resumable, nodes):
    report = report_of(tell(Story(resumable=resumable, nodes=nodes, spares=1)))
    check_sum(report)
    assert report.ledger["unattributed"].fraction <= 0.005
    assert report.ledger["idle"].s >= report.wall_s
    assert report.state == "done"
    assert report.steps_committed == (105 if resumable else None)
    assert report.goodput == report.ledger["useful"].fraction > 0


def test_useful_is_committed_steps_times_the_step_time():
    story = tell(Story())
    report = report_of(story)
    # 105 kept, of which one in five carries a checkpoint stall, less overhead.
    expected = 2 * 105 * (0.2 - 0.001 - 0.002)
    assert report.ledger["useful"].s == pytest.approx(expected, rel=0.02)
    assert report.step_s == pytest.approx(0.2, rel=0.02)


def test_what_the_first_steps_compiled_is_start_up_and_later_warm_up():
    before, after = (report_of(tell(Story(compile_s=s))) for s in (0.0, 0.15))
    check_sum(after)
    moved = {name: after.ledger[name].s - a.s for name, a in before.ledger.items()}
    each_s = 2 * 0.15  # Of two ranks, in a generation.
    assert moved["startup"] == pytest.approx(each_s)
    assert moved["reconfiguration.warmup"] == pytest.approx(2 * each_s)
    assert moved["useful"] == pytest.approx(-3 * each_s)
    assert sum(map(abs, moved.values())) == pytest.approx(6 * each_s)


def test_where_no_step_was_kept_what_they_compiled_is_no_lost_work():
    lost = []
    for compile_s in (0.0, 0.15):
        story = Story(compile_s=compile_s, checkpoint_every=0)
        story.start()
        story.train(5)
        story.crash()
        story.start()
        story.train(5)
        story.finish()
        report = report_of(story)
        check_sum(report)
        lost.append(report.ledger["lost_work"].s)
    assert lost[0] - lost[1] == pytest.approx(2 * 0.15)


def test_lost_work_is_the_steps_since_the_checkpoint_and_the_step_in_progress():
    report = report_of(tell(Story()))
    # Steps 21..23 and 46, 47 of two ranks, and two half steps.
    lost_steps, halves = 3 + 2, 2
    assert report.ledger["lost_work"].s == pytest.approx(
        2 * (lost_steps * 0.199 + halves * 0.1), rel=0.02
    )


def test_recoveries_have_their_phases():
    report = report_of(tell(Story()))
    crash, lost, hang = report.recoveries
    assert (crash.cause, crash.culprit, crash.rung) == ("signal 9 (SIGKILL)", "rank 1", "restart")
    assert (crash.at_step, crash.lost_steps) == (23, 3)
    assert crash.detect_s == pytest.approx(0.01)
    assert crash.decide_s == pytest.approx(0.01)
    assert crash.abort_s == pytest.approx(0.10)
    assert crash.communicator_s == pytest.approx(0.36 + 0.003, abs=1e-6)
    phases = (crash.detect_s, crash.decide_s, crash.abort_s, crash.communicator_s)
    assert sum(phases) + crash.state_s + crash.warmup_s == pytest.approx(crash.total_s)
    assert (hang.cause, hang.detect_s) == ("ComputeHang (stopped)", pytest.approx(1.2))
    assert hang.decide_s == pytest.approx(0.51)
    assert (lost.culprit, lost.rung, lost.lost_steps, lost.total_s) == ("controller", "none", 0, 0)


def test_a_node_that_lost_agent_and_keeper_together_is_a_recovery():
    """Nobody is left to tell of the keeper; the next agent comes with nothing."""
    story = Story(nproc=1, nodes=2)
    story.start()
    story.train(23)
    story.register(0, generation=0)  # An agent alone was replaced.
    story.register(1, generation=-1)
    story._take_down(None)
    story.start()
    story.train(20)
    story.finish()
    report = report_of(story)
    check_sum(report)
    (recovery,) = report.recoveries
    assert (recovery.cause, recovery.culprit) == ("keeper lost", "node 1")
    assert (recovery.rung, recovery.lost_steps) == ("restart", 3)
    assert report.ledger["reconfiguration.abort"].s > 0


@pytest.mark.parametrize(
    "name", ["GenerationStopped", "restored_s", "first_step_s", "RanksStarted", "Decision"]
)
def test_a_missing_stamp_shows_as_unattributed(name):
    resumable = name != "RanksStarted"
    story = Story(resumable=resumable)
    whole = report_of(tell(story))
    torn = report_of(tell(story.without(name)))
    check_sum(torn)
    assert torn.ledger["unattributed"].s > whole.ledger["unattributed"].s + 0.15


def test_a_rank_that_counts_too_much_shows_as_unattributed():
    story = Story()
    story.start()
    story.train(20)
    honest = report_of(story).ledger["unattributed"].s
    import msgspec

    for rank, account in story.accounts.items():
        story.accounts[rank] = msgspec.structs.replace(account, boundary_s=1.0)
    story.note()
    report = report_of(story)
    check_sum(report)
    assert report.ledger["unattributed"].s - honest == pytest.approx(2.0, abs=0.05)


def test_a_restart_from_further_back_takes_away_what_was_useful():
    story = Story()
    story.start()
    story.train(12)
    story.crash()
    story.start()
    story.train(10)
    story.crash()
    story.saved = 5  # Both newer checkpoints turned out to be damaged.
    story.start()
    story.train(1)
    story.finish()
    report = report_of(story)
    check_sum(report)
    assert report.steps_committed == 6
    assert report.ledger["useful"].s == pytest.approx(2 * 6 * 0.2, rel=0.03)
    assert report.recoveries[1].lost_steps == 15
    assert report.ledger["unattributed"].fraction <= 0.005


def test_a_job_that_gave_up_keeps_what_its_checkpoint_holds():
    story = Story()
    story.start()
    story.train(23)
    story.crash()
    story.finish("failed")
    report = report_of(story)
    check_sum(report)
    assert report.steps_committed == 20
    (recovery,) = report.recoveries
    assert (recovery.rung, recovery.warmup_s) == ("give up", 0.0)
    assert recovery.lost_steps == 3  # What the next run of this name takes again.
    assert report.ledger["unattributed"].fraction <= 0.005


def test_a_failure_before_the_first_step_is_start_up():
    story = Story()
    story.now += 1.0
    story.start()
    story.accounts = {
        r: type(a)(spawned_s=a.spawned_s, init_s=a.init_s, start_step=0)
        for r, a in story.accounts.items()
    }
    story.entries = [e for e in story.entries if type(e.body).__name__ != "ProgressNoted"]
    died = story.crash()
    story.start()
    story.train(30)
    story.finish()
    report = report_of(story)
    check_sum(report)
    assert report.ledger["startup"].s == pytest.approx(2 * (died - 1000.0))
    assert report.ledger["unattributed"].fraction <= 0.005


def left_hanging(resumable):
    story = Story(resumable=resumable)
    story.start()
    story.train(20)
    trained_s = story.now
    verdict = story.suspect(1)
    story.now += 300.0
    return story, verdict, trained_s


@pytest.mark.parametrize("resumable", [True, False])
@pytest.mark.parametrize("how", ["stopped", "lost"])
def test_a_hang_in_which_the_job_was_ended_is_an_incident_and_its_time_is_lost(resumable, how):
    story, verdict, _ = left_hanging(resumable)
    fold = LedgerFold()
    if how == "stopped":
        story.stop()
    for entry in story.entries:
        fold.add(entry)
    fold.history.lost = how == "lost"
    report = fold.report(story.now)
    check_sum(report)
    (recovery,) = report.recoveries
    assert (recovery.culprit, recovery.rung) == ("rank 1", "stop")
    assert recovery.cause == "ComputeHang (stopped)"
    assert recovery.at_s == verdict.first_seen_s
    assert recovery.total_s == pytest.approx(301.3, abs=0.5)
    assert report.ledger["useful"].s <= 2 * (20 * 0.2 + 0.11)
    assert report.ledger["reconfiguration.detect"].s == pytest.approx(2 * 1.2)
    assert report.ledger["reconfiguration.decide"].s == pytest.approx(2 * 300.0)
    assert report.ledger["unattributed"].s <= 0.1
    assert not report.lost_unknown
    assert fold.history.num_incidents == 1


@pytest.mark.parametrize("resumable", [True, False])
def test_while_a_hang_stands_its_time_is_lost_and_it_is_no_incident_yet(resumable):
    story, _, _ = left_hanging(resumable)
    report = report_of(story)
    check_sum(report)
    assert report.recoveries == ()
    assert report.state == "running"
    assert report.ledger["useful"].s <= 2 * (20 * 0.2 + 0.11)
    assert report.ledger["reconfiguration.decide"].s == pytest.approx(2 * 300.0)


@pytest.mark.parametrize("resumable", [True, False])
def test_a_hang_that_was_over_before_the_job_was_ended_is_none(resumable):
    story, verdict, _ = left_hanging(resumable)
    story.write(VerdictWithdrawn(verdict=verdict, at_s=story.now, reason="it moves"))
    story.train(5)
    story.stop()
    assert report_of(story).recoveries == ()


def test_who_was_late_on_its_way_out_was_in_no_hang():
    story, _, _ = left_hanging(True)
    story.exit(1, story.now)
    story.crash(0)
    (recovery,) = report_of(story).recoveries
    assert recovery.culprit == "rank 0"


def test_a_running_job_leaves_only_the_step_in_progress_open():
    story = Story()
    story.start()
    story.train(50)
    story.note()
    story.now += 0.1
    report = report_of(story)
    check_sum(report)
    assert report.state == "running"
    assert report.ledger["unattributed"].s == pytest.approx(0.2, abs=0.05)


def test_consequences_do_not_become_the_cause():
    story = Story()
    story.start()
    story.train(5)
    story.now += 0.1
    died = story.now
    story.exit(0, died + 0.05, code=1, error="RuntimeError: Connection closed by peer")
    story.exit(1, died, signal=11)
    story.now += 0.1
    story._take_down(0)
    (recovery,) = report_of(story).recoveries
    assert (recovery.culprit, recovery.cause) == ("rank 1", "signal 11 (SIGSEGV)")
    assert recovery.at_s == died


def test_a_rank_that_left_early_is_the_culprit_of_what_its_peers_died_of():
    story = Story(resumable=False)
    story.start()
    story.train(5)
    story.exit(1, story.now)
    story.now += 0.1
    story.exit(0, story.now, code=1, error="RuntimeError: Connection closed by peer")
    story.now += 0.1
    story._take_down(None)
    (recovery,) = report_of(story).recoveries
    assert recovery.culprit == "rank 1"
    assert recovery.cause.startswith("left early; then rank 0: exit code 1")
