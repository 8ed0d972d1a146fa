"""What a drill makes of a journal: when a fault was found, who was blamed, whether it is over."""

import msgspec
import pytest
from tests.journals import Story

from perdure.drill.card import FaultRow
from perdure.drill.grading import (
    Outcome,
    Strike,
    Window,
    compare_lines,
    compare_losses,
    judge_row,
    list_unmade,
    read_outcome,
)
from perdure.model.events import (
    CheckpointFailed,
    CheckpointRestored,
    FailureDecided,
    JournalEntry,
    VerdictReached,
    VerdictWithdrawn,
)
from perdure.model.verdicts import Culprit, Verdict


def make_strike(story: Story, fault: str, **fields: object) -> Strike:
    known = {"step": story.step, "rank": 1, "node": 0, "what": "harm", "saved": story.saved}
    return Strike(fault, story.now, generation=story.generation, **known | fields)  # type: ignore[arg-type]


def begin() -> Story:
    """A job that has made 23 steps, and has a checkpoint of step 20."""
    story = Story()
    story.now += 1.0
    story.start()
    story.train(23)
    return story


def fail(story: Story, culprit: str = "rank 1", cause: str = "signal 9 (SIGKILL)") -> None:
    """The world goes down for somebody, who was seen 0.25 s after the harm."""
    failure_s = story.now
    story.now += 0.25
    story.write(
        FailureDecided(
            id=f"failure-{len(story.entries)}", world=story.generation, cause=cause,
            culprit=culprit, at_step=story.step, failure_s=failure_s, detected_s=story.now,
            at_s=story.now + 0.01, rung="restart", reason="restart the world",
        )
    )  # fmt: skip
    story._take_down(None)


def come_back(story: Story, step: int, skipped: tuple[str, ...] = ()) -> None:
    """The next generation trains from the checkpoint of a step."""
    begun = len(story.entries)
    story.start()
    for index in range(begun, len(story.entries)):
        entry = story.entries[index]
        if isinstance(entry.body, CheckpointRestored):
            body = msgspec.structs.replace(entry.body, step=step, path="p", skipped=skipped)
            story.entries[index] = JournalEntry(entry.seq, entry.at_s, body)
    story.step = step


def judge(story: Story, strike: Strike) -> tuple[Outcome, FaultRow]:
    outcome = read_outcome(strike, story.entries)
    return outcome, judge_row(strike, outcome, waited_s=60.0)


def test_a_crash_that_is_found_and_over() -> None:
    story = begin()
    strike = make_strike(story, "crash")
    assert not read_outcome(strike, story.entries).over
    fail(story)
    found = read_outcome(strike, story.entries)
    assert (found.found_s, found.right, found.back_s, found.over) == (
        pytest.approx(0.25), True, None, False,
    )  # fmt: skip
    come_back(story, 20)
    outcome, row = judge(story, strike)
    assert (row.verdict, row.culprit_right, row.found_as) == (
        "passed", True, "signal 9 (SIGKILL) of rank 1",
    )  # fmt: skip
    assert outcome.over
    assert outcome.resumed == 20
    assert row.back_s == pytest.approx(story.now - strike.at_s, abs=0.01)


def test_who_was_not_harmed_is_blamed() -> None:
    story = begin()
    strike = make_strike(story, "stop")
    fail(story, "rank 0", "ComputeHang")
    come_back(story, 20)
    _, row = judge(story, strike)
    assert (row.verdict, row.culprit_right) == ("failed", False)
    assert "rank 1 was harmed, and blamed was: ComputeHang of rank 0" in row.why


def test_a_job_that_is_not_restarted_has_failed() -> None:
    story = begin()
    strike = make_strike(story, "crash")
    fail(story)
    story.finish("failed")
    outcome, row = judge(story, strike)
    assert outcome.over
    assert (row.verdict, row.back_s, row.why) == ("failed", None, "the job ended, failed: failed")


def test_what_was_never_found_has_failed() -> None:
    story = begin()
    strike = make_strike(story, "hang")
    story.train(5)
    outcome, row = judge(story, strike)
    assert not outcome.over
    assert (row.verdict, row.found_s, row.culprit_right) == ("failed", None, None)
    assert row.why == "it was not found within 60 s"


def test_what_is_told_and_not_acted_upon_has_failed() -> None:
    story = begin()
    strike = make_strike(story, "hang")
    story.now += 2.0
    verdict = Verdict(
        kind="ComputeHang", culprit=Culprit(rank=1), generation=0, first_seen_s=strike.at_s,
        confirmed_s=story.now, confidence=0.9, reason="rank 1 spins",
    )  # fmt: skip
    busy = msgspec.structs.replace(verdict, kind="HostBusy", culprit=Culprit(node=0))
    story.write(VerdictReached(verdict=busy))
    assert read_outcome(strike, story.entries).found_s is None
    story.write(VerdictReached(verdict=verdict))
    outcome, row = judge(story, strike)
    assert not outcome.over
    assert (row.verdict, row.culprit_right, row.found_s) == ("failed", True, pytest.approx(2.0))
    assert row.why == ("it was not back within 60 s: it was told, and nothing was done about it")


def test_a_world_that_forgets_its_checkpoint_has_failed() -> None:
    story = begin()
    strike = make_strike(story, "crash")
    fail(story)
    come_back(story, 0)
    _, row = judge(story, strike)
    assert row.verdict == "failed"
    assert row.why == "it went on from step 0, and not from the checkpoint of 20"


def test_a_lost_node_is_blamed_by_its_number() -> None:
    for culprit, verdict in (("node 1", "passed"), ("rank 1", "failed")):
        story = begin()
        strike = make_strike(story, "node", node=1)
        fail(story, culprit, "NodeLost")
        come_back(story, 20)
        assert judge(story, strike)[1].verdict == verdict


@pytest.mark.parametrize("told", [True, False])
def test_a_torn_checkpoint_has_to_be_told(told: bool) -> None:
    story = begin()
    strike = make_strike(story, "torn", torn="/home/checkpoints/step-00000020", saved=15)
    fail(story)
    why = "/home/checkpoints/step-00000020: rank 0's file has 512 bytes, and not 1024"
    come_back(story, 15, (why,) if told else ())
    _, row = judge(story, strike)
    assert (row.verdict, row.culprit_right) == (("passed", True) if told else ("failed", False))
    assert ("512 bytes" in row.found_as) is told


def test_a_part_that_died_is_no_stop() -> None:
    story = begin()
    strike = make_strike(story, "controller")
    story.now += 0.1
    story.lose_controller()
    _, row = judge(story, strike)
    assert (row.verdict, row.steps_redone) == ("passed", 0)
    assert (row.found_s, row.back_s) == (pytest.approx(0.1), pytest.approx(0.4))
    assert make_strike(story, "bus").fault not in row.found_as
    fail(story, "rank 0", "CommHang")
    _, row = judge(story, strike)
    assert row.verdict == "failed"
    assert "the world was restarted meanwhile: CommHang of rank 0" in row.why


def test_a_slow_rank_is_told_and_withdrawn() -> None:
    story = begin()
    strike = make_strike(story, "slow")
    story.now += 2.0
    verdict = Verdict(
        kind="Straggler", culprit=Culprit(rank=1), generation=0, first_seen_s=strike.at_s,
        confirmed_s=story.now, confidence=0.9, reason="rank 1 is slow",
    )  # fmt: skip
    wrong = msgspec.structs.replace(verdict, culprit=Culprit(rank=0))
    story.write(VerdictReached(verdict=wrong))
    outcome, row = judge(story, strike)
    assert (outcome.over, row.verdict, row.culprit_right) == (False, "failed", False)
    story.write(VerdictReached(verdict=verdict))
    assert not read_outcome(strike, story.entries).over
    healed = strike._replace(healed_s=story.now)
    story.now += 5.0
    story.write(VerdictWithdrawn(verdict=verdict, at_s=story.now, reason="as before"))
    outcome, row = judge(story, healed)
    assert (outcome.over, row.verdict, row.found_as) == (True, "passed", "Straggler of rank 1")
    assert "withdrawn 5.0 s after it was over" in row.why


def test_other_work_on_the_machine_hides_a_slow_rank() -> None:
    story = begin()
    strike = make_strike(story, "slow")
    verdict = Verdict(
        kind="HostBusy", culprit=Culprit(node=0), generation=0, first_seen_s=strike.at_s,
        confirmed_s=story.now, confidence=0.9, reason="others take its CPUs",
    )  # fmt: skip
    story.write(VerdictReached(verdict=verdict))
    _, row = judge(story, strike)
    assert (row.verdict, row.culprit_right) == ("not tried", None)
    assert "others take its CPUs" in row.why


def test_a_full_disk_stops_nothing() -> None:
    story = begin()
    strike = make_strike(story, "disk")
    story.now += 0.5
    error = "rank 0: [Errno 28] No space left on device"
    story.write(CheckpointFailed(generation=0, step=24, error=error, at_s=story.now))
    assert read_outcome(strike, story.entries).right
    healed = strike._replace(healed_s=story.now)
    assert not read_outcome(healed, story.entries).over
    story.train(5)
    outcome, row = judge(story, healed)
    assert (outcome.over, row.verdict, row.steps_redone) == (True, "passed", 0)
    assert row.back_s is not None


def test_failures_that_nobody_made_are_named() -> None:
    story = begin()
    strike = make_strike(story, "crash")
    fail(story)
    come_back(story, 20)
    spans = [(strike.at_s, story.now)]
    assert list_unmade(spans, story.entries) == []
    story.train(20)
    fail(story, "rank 0", "ComputeHang")
    (told,) = list_unmade(spans, story.entries)
    assert told.startswith("nobody made this one: ComputeHang of rank 0 at step 40")


THEIRS = {step: (1.0 / (step + 1)).hex() for step in range(60)}
WINDOWS = [Window(10, 30), Window(30, 50)]


def test_equal_losses_of_each_fault() -> None:
    found = compare_losses(WINDOWS, THEIRS, THEIRS, {})
    assert found == [("equal", "20 steps"), ("equal", "20 steps")]


def test_one_bit_is_that_faults_doing_and_no_later_ones() -> None:
    off = (float.fromhex(THEIRS[20]) * (1 + 2**-52)).hex()
    mine = THEIRS | {20: off, 40: "0x1p0"}
    (first, why), (second, later) = compare_losses(WINDOWS, mine, THEIRS, {})
    assert (first, second) == ("differ", "not compared")
    assert "from step 20 on" in why
    redone = compare_losses(WINDOWS, THEIRS | {10: off}, THEIRS, {})  # Before the fault itself.
    assert redone[0][0] == "differ"
    assert later == "they differ since an earlier fault"


def test_a_script_that_does_not_repeat_itself_is_not_compared() -> None:
    (losses, why), _ = compare_losses(WINDOWS, THEIRS | {3: "0x1p0"}, THEIRS, {})
    assert losses == "not compared"
    assert "already at step 3, before the first fault" in why


def test_a_script_that_logs_nothing_before_its_checkpoint_is_known_by_what_it_logged_later() -> (
    None
):
    """As a Trainer that logs every fifth step, and goes on from the first of them."""
    logged = {step: "0x1p0" for step in range(10, 60, 5)}
    first_life = {step: "0x1p1" for step in (10, 15)}
    found = compare_losses(WINDOWS, logged, THEIRS, first_life)
    assert [losses for losses, _ in found] == ["not compared"] * 2
    assert "already at step 10, before the first fault; is everything seeded?" in found[0][1]
    seeded = compare_losses(WINDOWS, logged, THEIRS, {step: THEIRS[step] for step in first_life})
    assert seeded[0][0] == "differ"


def test_steps_that_only_one_has_are_not_compared() -> None:
    short = {step: loss for step, loss in THEIRS.items() if step < 25}
    (first, _), (second, why) = compare_losses(WINDOWS, THEIRS, short, {})
    assert (first, second) == ("equal", "not compared")
    assert "no loss" in why


def test_printed_losses() -> None:
    assert compare_lines({"step 1 loss ": "2"}, {"step 1 loss ": "2"})[0] == "equal"
    assert compare_lines({"step 1 loss ": "2"}, {"step 1 loss ": "3"})[0] == "not compared"
    assert compare_lines({"step 1 loss ": "2"}, {})[0] == "not compared"
