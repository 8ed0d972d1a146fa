import random

import msgspec
import pytest

from perdure.dash.verdicts import render_verdict
from perdure.detect.detector import Detector
from perdure.model.events import (
    ControllerStarted,
    GenerationStepping,
    NodeLost,
    NodeRegistered,
    ProgressNoted,
    RankExited,
    VerdictWithdrawn,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import DetectConfig, JobSpec
from perdure.model.signals.progress import (
    BusyPhase,
    NodeBeat,
    RankAccount,
)


@pytest.mark.parametrize("resumable", [True, False])
@pytest.mark.parametrize("ends_known", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_of_two_is_named_within_the_floor_and_one_step(
    make_world, resumable, ends_known, victim
):
    world = make_world(resumable=resumable, ends_known=ends_known)
    world.run(30)
    stopped_s = world.now
    world.ranks[victim].state = "T"
    world.run(3)
    first = world.verdicts[0]
    assert (first.kind, first.culprit.rank, first.activity) == ("ComputeHang", victim, "stopped")
    assert not first.actionable
    assert first.confirmed_s - stopped_s <= 1.0 + 0.32 + 0.2
    assert first.first_seen_s <= stopped_s
    (acted,) = world.actionable
    assert acted.culprit.rank == victim
    assert 0.5 <= acted.evidence["acted_after_s"] <= 0.8
    assert acted.step == (world.ranks[victim].step if resumable else -1)


def test_a_rank_stopped_inside_the_collective_is_named_by_its_state(make_world):
    world = make_world()
    world.run(20)
    for r in world.ranks:
        r.started, r.since_s, r.heartbeat_s = r.ended + 1, world.now, world.now
    world.ranks[1].state, world.network = "T", False
    world.run(3, hold=lambda rank: True)
    assert {v.culprit.rank for v in world.verdicts} == {1}


@pytest.mark.parametrize("activity", ["busy", "quiet"])
def test_a_rank_that_did_not_arrive_is_named_and_acted_upon_as_the_job_file_says(
    make_world, activity
):
    world = make_world(config=DetectConfig(quiet_action_s=30.0, hang_action_s=300.0))
    world.run(20)
    at_s = world.now
    world.ranks[1].busy = activity == "busy"
    world.run(2, hold=lambda rank: rank == 1)
    (verdict,) = world.verdicts
    assert (verdict.kind, verdict.culprit.rank) == ("ComputeHang", 1)
    assert verdict.evidence["missing"] == [1]
    assert verdict.evidence["arrived"] == [0]
    assert verdict.confirmed_s - at_s <= 1.0 + 0.32 + 0.4
    world.run(400, hold=lambda rank: rank == 1)
    (acted,) = world.actionable
    assert acted.activity == activity
    expected = {"busy": 300.0, "quiet": 30.0}[activity]
    assert expected <= acted.evidence["acted_after_s"] <= expected + 3.0
    assert (acted.ground, acted.certain) == ("job file", False)
    told = render_verdict(acted, at_s)
    assert "not certain; " in told
    assert told.count("certain") == 1, "evidence says nothing of the verdict's certainty"
    assert "recorded_inside: True" in told


def test_a_first_evaluation_of_60_s_on_rank_0_survives(make_world):
    world = make_world()
    world.run(20)
    world.run(60, hold=lambda rank: rank == 0)
    world.run(10)
    assert not world.actionable
    assert [v.culprit.rank for v in world.verdicts] == [0]
    assert len(world.of(VerdictWithdrawn)) == 1


def test_the_next_evaluation_is_expected(make_world):
    world = make_world()

    def evaluate(rank, step):
        return 20.0 if rank == 0 and step % 50 == 0 and step else 0.3

    world.run(100, duration=evaluate)
    before = len(world.verdicts)
    assert before >= 1
    world.run(200, duration=evaluate)
    assert len(world.verdicts) == before
    world.run(20, hold=lambda rank: rank == 1)  # Anywhere else a hang is found as fast as ever.
    assert world.verdicts[-1].culprit.rank == 1


def test_a_recompile_of_30_s_and_a_blocked_read_of_20_s_survive(make_world):
    world = make_world()
    world.run(20)
    world.run(30, hold=lambda rank: True)
    world.run(10)
    world.ranks[1].busy = False
    world.run(20, hold=lambda rank: rank == 1)
    world.run(10)
    assert not world.actionable
    assert world.verdicts
    assert len(world.of(VerdictWithdrawn)) == len(world.verdicts)


def test_all_entered_and_nobody_moves_is_a_communication_hang_of_nobody(make_world):
    world = make_world(config=DetectConfig(quiet_action_s=30.0))
    world.run(20)
    for r in world.ranks:
        r.started, r.since_s, r.heartbeat_s, r.busy = r.ended + 1, world.now, world.now, False
    world.network = False
    world.run(40, hold=lambda rank: True)
    assert {(v.kind, v.culprit.rank) for v in world.verdicts} == {("CommHang", None)}
    assert world.actionable


def test_an_hour_of_noisy_healthy_steps_accuses_nobody(make_world):
    rng = random.Random(7)
    world = make_world(beat_every_s=1.0)

    def noisy(rank, step):
        return max(0.05, rng.lognormvariate(-0.7, 0.25))

    world.run(3600, duration=noisy)
    assert world.verdicts == []
    assert len(world.of(GenerationStepping)) == 1
    notes = world.of(ProgressNoted)
    assert 250 <= len(notes) <= 300  # Every five seconds at first, every 36 in the end.
    assert 60 <= sum(note.whole for note in notes) <= 85  # Every 43.


def test_collections_of_garbage_are_told_of_twice_and_a_hang_after_them_within_18_steps(make_world):
    rng = random.Random(7)
    world = make_world()

    def collect(rank, step):
        return 3.0 if rank == 0 and rng.random() < 0.02 else 0.3

    world.run(600, duration=collect)
    assert 1 <= len(world.verdicts) <= 2
    assert len(world.of(VerdictWithdrawn)) == len(world.verdicts)
    begun_s, before = world.now, len(world.verdicts)
    world.run(10, hold=lambda rank: rank == 1)
    assert [v.culprit.rank for v in world.verdicts[before:]] == [1]
    assert world.verdicts[-1].confirmed_s - begun_s <= 18 * 0.3 + 0.7


def test_steps_of_a_wide_spread_are_no_hangs(make_world):
    rng = random.Random(7)
    world = make_world()
    world.run(1200, duration=lambda rank, step: rng.lognormvariate(0.0, 0.5))
    assert world.verdicts == []


def test_who_comes_back_last_from_a_pause_of_all_is_blamed_once_others_wait_longer_than_ever(
    make_world,
):
    rng = random.Random(7)
    world = make_world(size=8)

    def compute(rank, step):
        return rng.uniform(6.0, 12.0)

    world.run(400, duration=compute)
    assert world.verdicts == []
    for r in world.ranks:
        r.busy_phase = BusyPhase("pause", world.now, world.now + 600.0)
    world.run(90, hold=lambda rank: True)
    for r in world.ranks:
        r.busy_phase, r.compute_until_s = None, world.now + 1.0 + 0.35 * r.rank
    world.run(60, duration=compute)
    assert [v.reason for v in world.verdicts if "not entered" in v.reason] == []
    world.run(60, duration=compute, hold=lambda rank: rank == 3)
    assert world.verdicts[-1].culprit.rank == 3


def test_a_long_first_step_is_allowed(make_world):
    world = make_world()
    world.run(120, duration=lambda rank, step: 55.0 if step == 0 else 0.3)
    assert world.verdicts == []


def test_cpu_counts_as_progress_only_before_the_first_collective(make_world):
    world = make_world(size=1, resumable=False)
    world.run(1000, hold=lambda rank: True)  # An hour of tokenising, say.
    assert world.verdicts == []


def test_a_script_that_shows_nothing_and_is_stopped_is_found(make_world):
    world = make_world(size=1, resumable=False)
    world.run(5, hold=lambda rank: True)
    world.ranks[0].state = "T"
    world.run(3)
    assert [v.activity for v in world.actionable] == ["stopped"]


def test_a_sleeping_script_without_collectives_is_left_alone_for_minutes(make_world):
    world = make_world(size=1, resumable=False)
    world.ranks[0].busy = False
    world.run(400, hold=lambda rank: True)
    assert not world.actionable


def exited(rank, at_s, *, code=0, comms=(), asked=False):
    record = ExitRecord(rank=rank, generation=0, pid=1, at_s=at_s, code=code, asked=asked)
    return RankExited(node=0, record=record, account=RankAccount(), detected_s=at_s, comms=comms)


def test_a_rank_that_left_while_another_waits_is_an_early_exit(make_world):
    world = make_world(resumable=False)
    world.run(20)
    left_s = world.now
    world.take(exited(1, left_s, comms=world.progress(world.ranks[1]).comms))
    world.run(4, hold=lambda rank: rank == 1)
    assert [(v.kind, v.culprit.rank) for v in world.verdicts] == [("EarlyExit", 1)]
    assert not world.actionable
    world.run(3, hold=lambda rank: rank == 1)
    (acted,) = world.actionable
    assert acted.confirmed_s - left_s < 2
    assert 5 <= acted.confirmed_s + acted.evidence["acted_after_s"] - left_s <= 5.5


def test_a_rank_that_left_is_blamed_for_the_one_whose_collective_failed_for_want_of_it(make_world):
    """T5: the other was said to hang for the second in which it came to its own end."""
    world = make_world(resumable=False)
    world.run(20)
    waiting, left = world.ranks
    left.started = left.ended
    waiting.started = waiting.ended = left.ended + 1  # Its connection was reset: it unwinds.
    world.take(exited(1, world.now, comms=world.progress(left).comms))
    world.run(30, hold=lambda rank: True)
    assert [(v.kind, v.culprit.rank, v.certain) for v in world.verdicts] == [
        ("EarlyExit", 1, False)
    ]
    assert not world.actionable  # It may be writing down what it has.


def test_the_stale_record_of_one_that_has_left_proves_nothing_about_who_waits(make_world):
    """T5: ranks 1 and 2 end by os._exit, each with a record of its own age; rank 0 saves."""
    world = make_world(size=3, resumable=False)
    world.run(20)
    waiting, behind, torn = world.ranks
    behind.started = behind.ended = waiting.started - 1  # Its last poll was skipped.
    torn.started, torn.ended = waiting.started, waiting.started - 1
    waiting.ended = waiting.started
    for rank in (behind, torn):
        world.take(exited(rank.rank, world.now, comms=world.progress(rank).comms))
    world.run(60, hold=lambda rank: True)
    assert [(v.kind, v.culprit.rank, v.certain) for v in world.verdicts] == [
        ("EarlyExit", 1, False)
    ]
    assert not world.actionable


def test_who_was_not_heard_of_since_a_collective_ended_is_not_said_to_be_inside(make_world):
    """Two nodes' heartbeats are of different moments: the older one still shows it inside."""
    world = make_world(nodes=2)
    world.run(20)
    world.run(20, hold=lambda rank: rank == 1)  # An evaluation; rank 0 waits.
    world.mute.add(0)
    world.run(0.5)
    assert world.ranks[1].ended == world.ranks[0].ended, "the collective has ended everywhere"
    world.mute.clear()
    world.run(5)
    assert {(v.kind, v.culprit.rank) for v in world.verdicts} == {("ComputeHang", 1)}


def test_a_rank_that_left_after_the_last_collective_is_none(make_world):
    world = make_world(resumable=False, ends_known=False)
    world.run(20)
    assert world.ranks[0].started == world.ranks[1].started
    world.take(exited(1, world.now, comms=world.progress(world.ranks[1]).comms))
    world.run(100, hold=lambda rank: True)  # Rank 0 saves the model.
    assert not world.actionable


@pytest.mark.parametrize("asked", [False, True])
def test_a_rank_that_comes_to_its_end_did_not_hang(make_world, asked):
    world = make_world()
    world.run(20)
    world.run(4, hold=lambda rank: rank == 1)
    (hang,) = world.verdicts
    assert (hang.kind, hang.culprit.rank) == ("ComputeHang", 1)
    world.take(exited(1, world.now, asked=asked))
    withdrawn = [event.verdict for event in world.of(VerdictWithdrawn)]
    # An order ends a hung rank as well: that it left when asked says nothing.
    assert withdrawn == ([] if asked else [hang])


def test_another_ranks_end_does_not_excuse_the_one_that_hangs(make_world):
    world = make_world(size=3)
    world.run(20)
    world.run(4, hold=lambda rank: rank == 1)
    (hang,) = world.verdicts
    assert hang.culprit.rank == 1
    world.take(exited(2, world.now))
    assert world.of(VerdictWithdrawn) == []


def test_after_a_crash_the_waiting_ranks_are_not_accused(make_world):
    world = make_world()
    world.run(20)
    world.take(exited(1, world.now, code=1))
    world.run(30, hold=lambda rank: rank == 1)
    assert world.verdicts == []


def test_the_hang_is_found_after_the_controller_was_replaced(make_world):
    world = make_world()
    world.run(30)
    fresh = Detector(world.spec)
    for at_s, event in world.events:
        assert fresh.note(at_s, event) == []
    fresh.note(world.now, ControllerStarted(incarnation="b"))
    world.detector = fresh
    world.ranks[1].state = "T"
    stopped_s = world.now
    world.run(5)
    assert world.actionable[0].culprit.rank == 1
    assert world.verdicts[0].confirmed_s - stopped_s < 2
    assert len(world.of(GenerationStepping)) == 1


def test_a_missing_rank_of_a_silent_node_is_left_to_the_node(make_world):
    world = make_world(size=2, nodes=2)
    world.run(20)
    silent = world.ranks[1]
    for _ in range(100):
        world.now += 0.2
        world.ranks[0].started = world.ranks[0].ended + 1
        progress = world.progress(world.ranks[0])
        world.seq += 1
        beat = NodeBeat(0, "a", world.seq, world.now, 0, (progress,))
        for event in [*world.detector.take_beat(world.now, beat), *world.detector.tick(world.now)]:
            world.take(event)
    assert world.verdicts == []
    (lost,) = world.of(NodeLost)
    assert lost.node == 1
    assert silent.step > 0
    assert world.detector.next_deadline() is not None


def test_a_new_controller_gives_nodes_their_time_again():
    detector = Detector(JobSpec(script="x.py"))
    for node in (0, 1):
        detector.note(0.0, hello(node))
    detector.note(100.0, ControllerStarted(incarnation="b"))
    for now in (105.0, 110.0):
        detector.note(now, hello(1))
    assert detector.tick(114.0) == []
    assert detector.next_deadline() == 115.0
    (lost,) = detector.tick(115.0)
    assert lost.node == 0
    assert detector.next_deadline() == 125.0


def hello(node):
    return NodeRegistered(node=node, incarnation="a", host="h", boot_id="b", slots=1)


def test_where_all_nodes_are_silent_the_controller_is_cut_off_and_decides_nothing():
    detector = Detector(JobSpec(script="x.py"))
    for node in (0, 1):
        detector.note(0.0, hello(node))
    for now in range(1, 600):
        assert detector.tick(float(now)) == []
    for now in (600.0, 606.0, 612.0):
        detector.note(now, hello(1))
    assert detector.tick(614.0) == []
    (lost,) = detector.tick(615.0)
    assert lost.node == 0

    detector.note(615.8, hello(1))
    detector.note(616.0, hello(0))
    lost = [event for now in range(617, 1600) for event in detector.tick(float(now))]
    assert [event.node for event in lost] == [0, 1]
    assert lost[0].at_s - 616.0 >= JobSpec(script="x.py").restart.node_wait_s


def test_a_node_cut_off_from_the_controller_alone_is_not_lost_while_its_ranks_take_part(make_world):
    world = make_world(size=2, nodes=2)
    world.run(20)
    for number in range(200):
        world.now += 0.2
        here = world.ranks[0]
        if number < 100:  # Then node 1 is really gone: rank 0 gets no further.
            here.ended = here.started
            here.started += 1
            here.since_s = world.now
        progress = world.progress(here)
        world.seq += 1
        beat = NodeBeat(0, "a", world.seq, world.now, 0, (progress,))
        for event in [*world.detector.take_beat(world.now, beat), *world.detector.tick(world.now)]:
            world.take(event)
        if number == 100:
            assert world.of(NodeLost) == []
    (lost,) = world.of(NodeLost)
    assert lost.node == 1


def test_a_script_without_collectives_is_stepping_once_it_lived_a_second(make_world):
    world = make_world(size=1, resumable=False)
    world.run(0.8, hold=lambda rank: True)
    assert world.of(GenerationStepping) == []
    world.run(0.8, hold=lambda rank: True)
    assert len(world.of(GenerationStepping)) == 1


def test_stepping_carries_the_latest_stamps(make_world):
    world = make_world()
    world.run(2)
    (stepping,) = world.of(GenerationStepping)
    assert stepping.at_s == stepping.stamps["first_step"] == world.first_step_s
    kinds = [type(event) for _, event in world.events]
    assert kinds.index(ProgressNoted) < kinds.index(GenerationStepping)


def test_a_verdict_survives_the_journal(make_world):
    world = make_world()
    world.run(20)
    world.ranks[1].state = "T"
    world.run(3)
    text = msgspec.json.encode(world.verdicts[-1])
    assert msgspec.json.decode(text, type=type(world.verdicts[-1])) == world.verdicts[-1]


def test_a_script_without_steps_is_watched_by_its_collectives(make_world):
    """It stays in phase `group` for ever, which may be long only before its collectives move."""
    world = make_world(resumable=False)
    world.run(20)
    at_s = world.now
    world.run(3, hold=lambda rank: rank == 1)
    (verdict,) = world.verdicts
    assert (verdict.kind, verdict.culprit.rank) == ("ComputeHang", 1)
    assert verdict.confirmed_s - at_s <= 1.0 + 2 * 0.32 + 0.2


def test_a_hang_that_was_acted_upon_by_nobody_and_ended_is_not_the_last_one_seen(make_world):
    world = make_world()
    world.run(20)
    world.ranks[1].state = "T"
    world.run(3)
    world.ranks[1].state = "S"
    world.run(20)
    world.ranks[0].state = "T"
    world.run(3)
    assert [v.culprit.rank for v in world.actionable] == [1, 0]


@pytest.mark.parametrize("code", [0, None])
def test_a_script_whose_other_ranks_have_ended_may_have_last_work_to_do(make_world, code):
    """Rank 0 saves the model, while rank 1's interpreter ends, or has ended."""
    world = make_world(resumable=False)
    world.run(30)
    world.finished.add(1)
    world.run(0.2, hold=lambda rank: True)
    if code == 0:
        world.mute.add(1)
        world.take(exited(world.now, 1, code=0))
    world.run(30, hold=lambda rank: True)
    assert world.verdicts == []
    world.run(60, hold=lambda rank: True)
    assert [v.kind for v in world.verdicts][:1] == ["ComputeHang"]
    assert not world.actionable
