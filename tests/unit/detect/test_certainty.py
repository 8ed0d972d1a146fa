"""T5: what is silent or busy for long is reported at once, and left alone until it is certain."""

import msgspec
import pytest
from tests.simulator.collectives import Layout
from tests.unit.detect.drive import inject

from perdure.detect.cadence import Habits
from perdure.detect.certainty import AGAIN, SOONEST_S, TIMEOUT_S, decide_grounds, measure_stillness
from perdure.detect.detector import Detector
from perdure.model.events import (
    ControllerStarted,
    StacksTaken,
    VerdictReached,
    VerdictWithdrawn,
    WorldReformed,
)
from perdure.model.fitting import CUT
from perdure.model.job import DetectConfig
from perdure.model.signals.progress import CommProgress
from perdure.model.verdicts import Culprit, Verdict

STACK = """Process 7: python train.py
Python v3.12 (/usr/bin/python)

Thread 7 (idle): "MainThread"
    read (data.py:{line})
    train (train.py:3)
{beside}"""
OWN_THREAD = """Thread 8 (idle): "perdure-recorder"
    poll (recorder.py:{line})"""
THREAD = """Thread 9 (idle): "writer"
    write (save.py:{line})"""
TICKING = """Thread 9 (idle): "Thread-4"
    refresh (tqdm/std.py:{line})
    run (tqdm/_monitor.py:84)"""


def hold_one(rank: int) -> bool:
    return rank == 1


@pytest.mark.parametrize("resumable", [True, False])
@pytest.mark.parametrize(("state", "busy"), [("S", True), ("S", False), ("D", False)])
@pytest.mark.parametrize("silent_s", [31, 301])
def test_a_rank_that_waits_or_computes_alone_is_named_and_left_alone(
    make_world, resumable, state, busy, silent_s
):
    world = make_world(resumable=resumable, beat_every_s=0.5)
    world.run(20)
    world.ranks[1].busy, world.ranks[1].state = busy, state
    world.run(silent_s, hold=hold_one)
    (verdict,) = world.verdicts
    assert (verdict.culprit.rank, verdict.certain) == (1, False)
    assert verdict.ground in ("timeout", "habit")
    assert verdict.acts_s >= verdict.confirmed_s + SOONEST_S - 5
    world.ranks[1].busy, world.ranks[1].state = True, "S"
    world.run(10)
    assert world.actionable == []
    assert len(world.of(VerdictWithdrawn)) == 1


def test_state_d_is_an_activity_of_its_own(make_world):
    world = make_world()
    world.run(20)
    world.ranks[1].busy, world.ranks[1].state = False, "D"
    world.run(10, hold=hold_one)
    (verdict,) = world.verdicts
    assert verdict.activity == "blocked"
    assert "state D" in verdict.acts_why


def test_silence_beyond_the_groups_own_time_out_is_acted_upon(make_world):
    world = make_world(resumable=False, timeout_s=60.0)
    world.run(20)
    world.ranks[1].busy = False
    began_s = world.now
    world.run(55, hold=hold_one)
    assert world.actionable == []
    world.run(20, hold=hold_one)
    (acted,) = world.actionable
    assert (acted.culprit.rank, acted.ground, acted.certain) == (1, "timeout", False)
    assert "60 s" in acted.acts_why
    assert "default" not in acted.acts_why
    assert 60 <= acted.confirmed_s + acted.evidence["acted_after_s"] - began_s <= 70


@pytest.mark.parametrize(("state", "busy"), [("S", True), ("D", False)])
def test_while_cpu_moves_or_the_kernel_is_waited_for_time_alone_never_acts(make_world, state, busy):
    world = make_world(timeout_s=30.0, beat_every_s=0.5)
    world.run(20)
    world.ranks[1].busy, world.ranks[1].state = busy, state
    world.run(200, hold=hold_one)
    assert world.actionable == []


def test_who_spins_in_an_elastic_world_is_ended_when_torch_would_end_the_wait(make_world):
    """Its own collectives have none: a rank that computes for ever would be waited for for ever."""
    world = make_world(timeout_s=30.0, beat_every_s=0.5)
    for rank in (0, 1):
        times = dict.fromkeys(("began_s", "ordered_s", "formed_s"), world.now)
        world.take(WorldReformed(generation=0, rank=rank, epoch=1, step=0, **times))
    world.run(20)
    world.ranks[1].busy = True
    world.run(29, hold=hold_one)
    assert world.actionable == []
    world.run(8, hold=hold_one)
    (acted,) = world.actionable
    assert (acted.culprit.rank, acted.ground) == (1, "timeout")


def test_without_a_time_out_that_could_be_read_torchs_longest_counts(make_world):
    world = make_world(resumable=False)
    world.run(20)
    world.ranks[1].busy = False
    world.run(3, hold=hold_one)
    (verdict,) = world.verdicts
    assert verdict.ground == "timeout"
    assert verdict.acts_s - verdict.confirmed_s > TIMEOUT_S - 5
    assert "torch's default" in verdict.acts_why


def test_ten_times_the_jobs_own_longest_silence_is_enough_where_steps_are_known(make_world):
    world = make_world(beat_every_s=1.0)
    world.run(100, duration=lambda rank, step: 2.0)
    world.run(70, duration=lambda rank, step: 70.0)
    world.run(40, duration=lambda rank, step: 2.0)
    world.ranks[1].busy = False
    began_s = world.now
    world.run(SOONEST_S + 60, hold=hold_one)
    assert world.actionable == []
    world.run(80, hold=hold_one)
    (acted,) = world.actionable
    assert acted.ground == "habit"
    longest_s = 70.0
    after_s = acted.confirmed_s + acted.evidence["acted_after_s"] - began_s
    assert 10 * longest_s <= after_s <= 10 * longest_s + 30


@pytest.mark.parametrize(
    ("line", "beside", "changed"),
    [(1, "", False), (2, "", True), (1, OWN_THREAD, False), (1, TICKING, False), (1, THREAD, True)],
)
def test_a_stack_that_has_changed_is_alive(make_world, line, beside, changed):
    """The script's threads count; perdure's own and a progress bar's do not: they tick (T5)."""
    world = make_world(resumable=False, timeout_s=60.0)
    world.run(20)
    world.ranks[1].busy = False
    world.run(30, hold=hold_one)

    def take(line, beside_line):
        stacks = {1: STACK.format(line=line, beside=beside.format(line=beside_line))}
        world.take(StacksTaken(generation=0, at_s=world.now, stacks=stacks))

    take(1, 1)
    world.run(28.6, hold=hold_one)
    before = len(world.verdicts)
    while len(world.verdicts) == before:  # The second look is asked for by saying it again.
        world.run(0.2, hold=hold_one)
    assert world.actionable == []
    take(line, 2)
    world.run(20, hold=hold_one)
    assert [v.ground for v in world.actionable] == ([] if changed else ["timeout"])


def test_a_verdict_of_little_confidence_is_not_acted_upon_by_what_was_learned(make_world):
    world = make_world()
    world.run(30)
    (watch, _) = world.detector._watches.values()
    habits = Habits()
    habits.end_silence("step", 0.5)

    def grounds(confidence):
        verdict = Verdict(
            kind="ComputeHang", culprit=Culprit(rank=0), generation=0, first_seen_s=world.now,
            confirmed_s=world.now, confidence=confidence, reason="",
        )  # fmt: skip
        still = measure_stillness([watch], "", 0.0)
        return decide_grounds(
            verdict, [watch], "quiet", still, DetectConfig(), habits, fact="", again=False
        )

    assert grounds(0.9).ground == "habit"
    assert grounds(0.3).ground == "timeout"


def test_a_verdict_that_comes_back_at_its_place_is_not_answered_the_same_way_again(make_world):
    config = DetectConfig(quiet_action_s=10.0)
    world = make_world(config=config, timeout_s=100.0)

    def hang():
        world.ranks[1].busy = world.ranks[1].step != 40

    def run(seconds):
        for _ in range(int(seconds / 0.4)):
            hang()
            world.run(0.4, hold=lambda rank: rank == 1 and world.ranks[1].step == 40)

    run(40)
    assert [v.ground for v in world.actionable] == ["job file"]
    world.restart(step=30)
    run(60)
    (first, again) = [v for v in world.verdicts if not v.actionable]
    assert (first.step, again.step) == (40, 40)
    assert AGAIN in again.reason
    assert AGAIN not in first.reason
    assert len(world.actionable) == 1, "the second time it waits for the group's own time-out"
    run(80)
    assert [v.ground for v in world.actionable] == ["job file", "timeout"]

    # A controller that was replaced meanwhile knows of it as well.
    world.restart(step=38)
    fresh = Detector(world.spec)
    for at_s, event in world.events:
        fresh.note(at_s, event)
    fresh.note(world.now, ControllerStarted(incarnation="b"))
    world.detector = fresh
    run(30)
    assert AGAIN in world.verdicts[-1].reason


def test_a_stopped_rank_is_acted_upon_at_once_however_often(make_world):
    world = make_world()
    for _ in range(3):
        world.run(30)
        world.ranks[1].state = "T"
        world.run(3)
        world.restart(step=10)
    assert [(v.ground, v.certain) for v in world.actionable] == [("stopped", True)] * 3


def test_habits_outlive_generations_and_controllers(make_world):
    world = make_world()

    def evaluate(rank, step):
        return 20.0 if rank == 0 and step in (37, 100) else 0.3

    world.run(110, duration=evaluate)
    assert [v.step for v in world.verdicts] == [37, 100]
    assert world.ranks[0].step > 100
    world.restart(step=90)
    world.run(40, duration=evaluate)
    assert world.ranks[0].step > 100
    assert len(world.verdicts) == 2, "step 100 was seen to be silent before"
    fresh = Detector(world.spec)
    for at_s, event in world.events:
        fresh.note(at_s, event)
    fresh.note(world.now, ControllerStarted(incarnation="b"))
    world.detector = fresh
    world.restart(step=95)
    world.run(40, duration=evaluate)
    assert world.ranks[0].step > 100
    assert len(world.verdicts) == 2


@pytest.mark.parametrize(
    ("kind", "ground", "within_s"),
    [("stop", "stopped", 3.0), ("other-op", "desync", 8.0), ("drop-link", "link", 13.0)],
)
@pytest.mark.parametrize("lay", [Layout(4), Layout(8, nproc=2)])
def test_facts_are_acted_upon_as_fast_as_ever(kind, ground, within_s, lay):
    run = inject(lay, kind, 1, within_s, peer=2)
    acted = [e.verdict for _, e in run.said if isinstance(e, VerdictReached)][-1]
    assert (acted.actionable, acted.ground, acted.certain) == (True, ground, True)
    assert acted.acts_why


OWN = """
Thread 8 (idle): "perdure-control"
    Control._serve (perdure/worker/control.py:184)
    Thread._bootstrap (threading.py:1002)
Thread 9 (idle): "Thread-1 (_pin_memory_loop)"
    select (selectors.py:415)
    Queue.get (multiprocessing/queues.py:103)
    do_one_step (torch/utils/data/_utils/pin_memory.py:30)
    _pin_memory_loop (torch/utils/data/_utils/pin_memory.py:51)
    run (threading.py:982)
Thread 10 (idle): "ThreadPoolExecutor-1_0"
    _worker (concurrent/futures/thread.py:90)
    run (threading.py:982)
Thread 11 (idle): "Thread-4"
    wait (threading.py:327)
    wait (threading.py:629)
    TMonitor.run (tqdm/_monitor.py:60)
Thread 12 (idle): "QueueFeederThread"
    wait (threading.py:327)
    _feed (multiprocessing/queues.py:231)
    run (threading.py:982)"""
TIMER = """
Thread 8 (idle): "Thread-1"
    wait (threading.py:655)
    run (threading.py:1431)
    _bootstrap (threading.py:1002)"""
LOOP = """
Thread 8 (idle): "Thread-1 (run_forever)"
    select (selectors.py:468)
    _run_once (asyncio/base_events.py:1949)
    run_forever (asyncio/base_events.py:641)
    run (threading.py:982)"""
SHADOW = """
Thread 8 (active): "Thread-1 (profile)"
    step (profile.py:12)
    run (threading.py:982)"""
POOLED = """
Thread 8 (active): "ThreadPoolExecutor-1_0"
    get (queue.py:12)
    run (concurrent/futures/thread.py:58)
    _worker (concurrent/futures/thread.py:92)
    run (threading.py:982)"""
LONG = f"""
Thread 8 (idle): "perdure-control"
    serve (perdure/worker/control.py:184) … [30,000 {CUT}
    run (threading.py:982)"""
WRITER = """
Thread 8 (idle): "Thread-1 (save)"
    save (train.py:12)
    Thread.run (threading.py:982)"""
ASYNC_SAVE = """
Thread 8 (idle): "ThreadPoolExecutor-0_0"
    barrier (torch/distributed/distributed_c10d.py:5356)
    Thread.run (threading.py:982)"""


@pytest.mark.parametrize(
    ("blocked", "beside"),
    [
        (True, ""),
        (True, OWN),
        (False, ""),
        *((True, s) for s in (WRITER, ASYNC_SAVE, TIMER, LOOP, SHADOW, POOLED, LONG)),
    ],
)
def test_a_circle_of_waiting_is_proven_by_the_stacks_of_all_that_are_in_it(
    make_world, blocked, beside
):
    """Whoever has a collective under way may still be computing, or another thread may enter it.

    Its stacks tell, where they are whole: no thread but a known one waits for nothing (T5).
    """
    world = make_world()
    world.run(20)
    plain = world.progress

    def crossed(r):
        shown = plain(r)
        entered = [r.ended + (r.rank == at) for at in (0, 1)]
        comms = tuple(
            CommProgress(name, 2, entered[at], r.ended, "allreduce", world.now, (0, 1))
            for at, name in enumerate(("first", "second"))
        )
        return msgspec.structs.replace(shown, comms=comms)

    world.progress = crossed
    for r in world.ranks:
        r.busy = False
    world.run(3, hold=lambda rank: True)
    verdict = world.verdicts[-1]
    assert (verdict.kind, verdict.evidence["circle"]) == ("CommHang", [0, 1])
    frames = ("all_reduce (torch/distributed/distributed_c10d.py:2970)", "read (data.py:1)")
    stacks = {
        rank: 'Thread 7 (idle): "MainThread"\n    '
        + frames[0 if blocked or rank == 0 else 1]
        + "\n    train (train.py:3)"
        + (beside if rank == 0 else "")
        for rank in (0, 1)
    }
    world.take(StacksTaken(generation=0, at_s=world.now, stacks=stacks))
    world.run(15, hold=lambda rank: True)
    proven = blocked and beside in ("", OWN)
    expected = [("circle", True)] if proven else []
    assert [(v.ground, v.certain) for v in world.actionable] == expected


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_rank_that_lies_about_its_time_out_puts_no_endless_time_into_the_journal(
    make_world, timeout_s
):
    world = make_world(resumable=False, timeout_s=timeout_s)
    world.run(20)
    world.ranks[1].busy = False
    world.run(5, hold=hold_one)
    (verdict,) = world.verdicts
    assert world.now + 500 < verdict.acts_s < 1e9


def test_silences_without_end_are_not_learned():
    habits = Habits()
    for duration_s in (float("nan"), float("inf")):
        habits.end_gap(5, duration_s)
        habits.end_phase("step", duration_s)
        habits.end_silence("step", duration_s)
    assert habits.note() == Habits().note()
