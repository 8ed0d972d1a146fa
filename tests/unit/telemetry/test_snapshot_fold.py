import msgspec
from tests.journals import Story, make_series, tell

from perdure.model import codec
from perdure.model.events import (
    AnyEvent,
    BoundaryReached,
    CommandReceived,
    KeysDeclared,
    OperatorNoted,
    RankExited,
    SettingsChanged,
    WorldReformed,
)
from perdure.model.failures import ExitRecord
from perdure.model.report import Snapshot
from perdure.model.signals.progress import (
    CommProgress,
    NodeBeat,
    ProcSample,
    RankAccount,
    RankProgress,
)
from perdure.model.steering import Change, KeySpec
from perdure.telemetry.accounting.ledger import make_report
from perdure.telemetry.live.snapshot import CONDENSE_EVERY, SnapshotFold
from perdure.telemetry.series import SeriesFold


def fold_of(story):
    fold = SnapshotFold(story.spec)
    for entry in story.entries:
        fold.add(entry)
    return fold


def beat(seq, now, step, generation=0):
    account = RankAccount(step=step, init_s=1.0, first_step_s=1.0, last_step_s=now)
    comms = (CommProgress("pg", 2, 7, 6, "allreduce", now - 2.0),)
    ranks = tuple(
        RankProgress(r, 100 + r, "step", 0.0, now, account, comms, ProcSample("S", 3.0, 0, 9))
        for r in range(2)
    )
    return NodeBeat(0, "a", seq, now, generation, ranks)


def test_states_follow_the_job():
    story = Story()
    fold = SnapshotFold(story.spec)
    states = []
    tell(story)
    for entry in story.entries:
        fold.add(entry)
        picture = fold.snapshot(entry.at_s)
        state = picture.state
        assert (picture.fixed is None) == (picture.depth == "supervised" and state != "running")
        if not states or states[-1] != state:
            states.append(state)
    cycle = ["running", "recovering"]
    assert states == ["pending", "forming", *cycle, *cycle, "running", "done"]


def test_heartbeats_give_steps_speed_and_waiting():
    story = Story()
    story.start()
    fold = fold_of(story)
    for i in range(11):
        fold.take_beat(story.now + i, beat(i, story.now + i, i * 2))
    snapshot = fold.snapshot(story.now + 10)
    assert (snapshot.step, snapshot.steps_per_s, snapshot.depth) == (20, 2.0, "resumable")
    assert snapshot.fixed == "resumable: its world has the ranks that it began with"
    row = snapshot.ranks[1]
    assert (row.state, row.pid, row.cpu_s, row.rss_bytes) == ("waiting", 101, 3.0, 9)
    assert row.collective == "allreduce #7 (waiting 2.0 s)"
    assert codec.decode(codec.encode(snapshot), Snapshot) == snapshot


def follow(fold, story, seconds, declare, steps):
    """Let two ranks train, of which `steps` and `declare` say how far and what for, and look."""
    for i in range(seconds):
        made, said = steps(i), declare(i)
        ranks = tuple(
            msgspec.structs.replace(
                rank,
                account=msgspec.structs.replace(rank.account, step=made[rank.rank]),
                num_steps=said[rank.rank],
            )
            for rank in beat(i, story.now + i, 0).ranks
        )
        fold.take_beat(story.now + i, NodeBeat(0, "a", i, story.now + i, 0, ranks))
    story.now += seconds
    return fold.snapshot(story.now - 1)


def declare(fold, story, num_steps):
    story.write(KeysDeclared(generation=0, keys=(), num_steps=num_steps))
    fold.add(story.entries[-1])


def test_a_job_takes_as_long_as_its_slowest_rank():
    story = Story()
    story.start()
    fold = fold_of(story)
    declare(fold, story, 1000)
    seen = follow(fold, story, 120, lambda i: (1000, 1000), lambda i: (8 * i + 1, i + 1))
    assert seen.num_steps == 1000
    assert seen.left_s[0] <= 1000 - 120 <= seen.left_s[1]
    assert seen.left_s[0] > 800


def test_ranks_that_say_different_numbers_of_steps_leave_it_unknown():
    story = Story()
    story.start()
    fold = fold_of(story)
    declare(fold, story, 1000)
    differ = follow(fold, story, 60, lambda i: (1000, 2000), lambda i: (i + 1, i + 1))
    assert (differ.num_steps, differ.left_s) == (0, None)
    declare(fold, story, 2000)
    agree = follow(fold, story, 60, lambda i: (2000, 2000), lambda i: (i + 61, i + 61))
    assert agree.num_steps == 2000
    assert agree.left_s is not None


def test_of_who_says_nothing_or_was_passed_nothing_is_said():
    story = Story()
    story.start()
    fold = fold_of(story)
    declare(fold, story, 1000)
    older = follow(fold, story, 60, lambda i: (0, 0), lambda i: (i + 1, i + 1))
    assert older.num_steps == 1000, "a rank of an older perdure does not say"
    assert older.left_s is not None
    declare(fold, story, 40)
    passed = follow(fold, story, 60, lambda i: (40, 40), lambda i: (i + 61, i + 61))
    assert (passed.num_steps, passed.left_s) == (0, None)


def test_a_rank_that_cannot_be_seen_leaves_the_step_to_the_others():
    story = Story()
    story.start()
    fold = fold_of(story)
    seen = beat(1, story.now, 20)
    blank = RankProgress(1, 101, "spawned", 0.0, 0.0, RankAccount())
    for unseen, step in ((False, 0), (True, 20)):  # The former may still be at its start.
        other = msgspec.structs.replace(blank, unseen=unseen)
        fold.take_beat(story.now, msgspec.structs.replace(seen, ranks=(seen.ranks[0], other)))
        assert fold.snapshot(story.now).step == step


def test_a_change_that_was_taken_back_is_shown_so_before_the_next_heartbeat():
    story = Story()
    story.start()
    key = KeySpec(name="lr", type="float", default=0.1)
    story.write(KeysDeclared(generation=0, keys=(key,)))
    shown = []
    for epoch, (step, lr) in enumerate(((20, 0.2), (22, 0.1)), 1):
        story.write(SettingsChanged(change=Change(epoch=epoch, step=step, values={"lr": lr})))
        for refused in ("no", ""):
            reached = BoundaryReached(
                id=f"b{epoch}", rank=0, step=step, at_s=story.now, error=refused
            )
            story.write(reached)
            fold = fold_of(story)
            fold.take_beat(story.now, beat(1, story.now, 19))
            snapshot = fold.snapshot(story.now)
            shown.append((snapshot.settings["lr"], snapshot.epoch, len(snapshot.coming)))
    assert shown == [(0.1, 0, 1), (0.2, 1, 0), (0.2, 1, 1), (0.1, 2, 0)]


def test_a_late_heartbeat_of_an_older_generation_is_ignored():
    story = Story()
    story.start()
    story.train(6)
    story.crash()
    story.start()
    fold = fold_of(story)
    fold.take_beat(story.now, beat(1, story.now, 99, generation=0))
    assert fold.snapshot(story.now).step == 5
    assert fold.snapshot(story.now).restarts == 1


def test_stop_shows_until_the_end():
    story = Story()
    story.start()
    story.write(CommandReceived(id="1", kind="stop"))
    assert fold_of(story).snapshot(story.now).state == "stopping"


def test_a_step_logged_again_counts_once():
    story = tell(Story())
    series = make_series(story.entries, story.now, story.curves)
    steps = [step for step, _ in series.metrics["loss"]]
    assert steps == list(range(1, 106))
    assert len(series.checkpoints) == 21
    assert {s.rank for s in series.segments} == {0, 1}


def test_a_picture_beside_a_report_is_the_same_and_takes_nothing_from_it():
    story = Story(nproc=4, nodes=2)
    for _ in range(30):  # More entries than a picture of its own keeps.
        story.start()
        story.train(20)
        story.crash(3)
        story.lose_controller()
        story.write(OperatorNoted(id="n", text="seen", step=3, at_s=story.now, who="me"))
    story.hang(1)
    series, alone = SeriesFold(), SnapshotFold(story.spec)
    beside = SnapshotFold(story.spec, beside=series)
    for count, entry in enumerate(story.entries):
        alone.add(entry)
        series.add(entry)
        beside.add(entry)
        if count % 100 == 0 or count == len(story.entries) - 1:
            assert beside.snapshot(entry.at_s) == alone.snapshot(entry.at_s)
    assert len(story.entries) > CONDENSE_EVERY
    assert series.ledger.report(story.now) == make_report(story.entries, story.now)
    told = series.series(series.ledger.segments(story.now))
    assert told == make_series(story.entries, story.now)


def test_time_left_is_by_the_pace_of_the_world_that_there_is():
    """A world that is formed again in place begins a pace; who is lost holds up nobody's."""
    story = Story(nproc=3)
    story.start()
    story.write(KeysDeclared(generation=0, keys=(), num_steps=10_000))
    fold, now = fold_of(story), story.now

    def beat_of(at_s: float, steps: dict[int, int]) -> NodeBeat:
        ranks = tuple(
            RankProgress(
                rank, 100 + rank, "step", 0.0, at_s,
                RankAccount(step=step, init_s=1.0, first_step_s=1.0, last_step_s=at_s), (),
                ProcSample("S", 3.0, 0, 9),
            )
            for rank, step in steps.items()
        )  # fmt: skip
        return NodeBeat(0, "a", int(at_s * 10), at_s, 0, ranks)

    def write(body: AnyEvent) -> None:
        known = len(story.entries)
        story.write(body, now)
        for entry in story.entries[known:]:
            fold.add(entry)

    def train(seconds: int, pace: float, step: float, ranks: tuple[int, ...]) -> float:
        nonlocal now
        for _ in range(seconds):
            now, step = now + 1.0, step + pace
            fold.take_beat(now, beat_of(now, dict.fromkeys(ranks, int(step))))
        return step

    step = train(60, 10.0, 0.0, (0, 1, 2))
    told = fold.snapshot(now).left_s
    assert told is not None
    assert told[0] <= (10_000 - step) / 10.0 <= told[1]
    record = ExitRecord(2, 0, 102, now, signal=9)
    write(RankExited(node=0, record=record, account=RankAccount(step=600), detected_s=now))
    now += 3.0
    for epoch, pace, ranks in ((1, 6.0, (0, 1)), (2, 10.0, (0, 1, 3))):
        for rank in ranks:
            write(
                WorldReformed(
                    generation=0, epoch=epoch, rank=rank, step=int(step), began_s=now - 1,
                    ordered_s=now - 1, formed_s=now,
                )
            )  # fmt: skip
        step = train(25, pace, step, ranks)
        assert fold.snapshot(now).left_s is None, "nobody knows yet what this world's pace is"
        step = train(15, pace, step, ranks)
        told = fold.snapshot(now).left_s
        assert told is not None
        assert told[0] <= (10_000 - step) / pace <= told[1] < 1.2 * told[0]
