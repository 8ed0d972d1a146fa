import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.journals import Story

from perdure.telemetry.accounting.ledger import LedgerFold

FAULTS = ["train", "crash", "hang", "controller", "early"]


def tell(story, moves):
    story.now += 0.5
    story.decide("first generation")
    story.start()
    for kind, steps in moves:
        match kind:
            case "train":
                story.train(steps)
            case "crash":
                story.crash(steps % story.spec.world_size)
                story.start()
            case "hang":
                story.hang(steps % story.spec.world_size)
                story.start()
            case "controller":
                story.lose_controller()
            case "early":
                story.saved = max(0, story.saved - story.checkpoint_every)


@settings(max_examples=examples(60), deadline=None)
@given(
    nproc=st.integers(1, 4),
    spares=st.integers(0, 2),
    resumable=st.booleans(),
    moves=st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(1, 30)), max_size=8),
    drop=st.sets(st.sampled_from(["GenerationStopped", "Decision", "restored_s", "JobEnded"])),
    ended=st.booleans(),
)
def test_accounts_are_a_partition_whatever_happens(nproc, spares, resumable, moves, drop, ended):
    story = Story(nproc=nproc, spares=spares, resumable=resumable, drop=frozenset(drop))
    tell(story, moves)
    if ended:
        story.finish()
    fold = LedgerFold()
    for entry in story.entries:
        fold.add(entry)
    report = fold.report(story.now)
    assert all(a.s >= 0 for a in report.ledger.values())
    assert sum(a.s for a in report.ledger.values()) == pytest.approx(report.slot_s)
    if ended and not drop:
        assert report.ledger["unattributed"].fraction <= 0.005
    for rank in range(nproc):
        segments = [s for s in fold.segments(story.now) if s.rank == rank]
        for before, after in itertools.pairwise(segments):
            assert before.end_s <= after.begin_s
        for s in segments:
            assert sum(seconds for _, seconds in s.seconds) <= s.end_s - s.begin_s + 1e-9
