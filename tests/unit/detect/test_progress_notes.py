"""What the journal says of the whole world's progress, as its members come and go."""

import msgspec

from perdure.model.events import GenerationStepping, ProgressNoted, RankExited, WorldReformed
from perdure.model.failures import ExitRecord
from perdure.model.signals.progress import ProcSample, RankAccount, RankProgress


def leave(world, rank: int, *, asked: bool = False) -> None:
    record = ExitRecord(rank, 0, 100 + rank, world.now, code=0, asked=asked)
    account = world.progress(world.ranks[rank]).account
    world.take(RankExited(node=0, record=record, account=account, detected_s=world.now))


def form(world, epoch: int, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        world.take(
            WorldReformed(
                generation=0, epoch=epoch, rank=rank, step=world.ranks[rank].step,
                began_s=world.now, ordered_s=world.now, formed_s=world.now,
            )
        )  # fmt: skip


def test_who_has_left_before_the_others_formed_their_world_holds_no_step_back(make_world):
    world = make_world(size=3)
    world.run(10.0)
    leave(world, 2)
    left_at = world.ranks[2].step
    form(world, 1, (0, 1))
    world.run(10.0)
    newest = world.of(ProgressNoted)[-1]
    assert newest.step > left_at
    assert set(newest.accounts) <= {0, 1}
    whole = world.detector.sum_up(world.now)
    assert whole.step == min(whole.accounts[r].step for r in (0, 1)) >= newest.step


def test_who_leaves_after_the_others_formed_theirs_holds_no_step_back_either(make_world):
    world = make_world(size=3)
    world.run(10.0)
    form(world, 1, (0, 1))
    leave(world, 2)
    left_at = world.ranks[2].step
    world.run(10.0)
    assert world.of(ProgressNoted)[-1].step > left_at


def test_who_has_finished_in_the_newest_world_counts(make_world):
    world = make_world(size=3)
    world.run(10.0)
    form(world, 1, (0, 1, 2))
    leave(world, 2)
    left_at = world.ranks[2].step
    world.run(10.0)
    assert world.of(ProgressNoted)[-1].step == left_at


def test_who_cannot_be_seen_holds_no_step_back(make_world):
    """T1: a FIFO in the place of one rank's ring; the job's step was unknown from then on."""
    world = make_world(size=3)
    see = world.progress

    def look(rank):
        if rank.rank != 1:
            return see(rank)
        proc = ProcSample(state="S", cpu_s=rank.cpu_s)
        blank = RankProgress(rank.rank, 101, "spawned", 0.0, 0.0, RankAccount(), proc=proc)
        return msgspec.structs.replace(blank, unseen=True)

    world.progress = look
    world.run(10.0)
    newest = world.of(ProgressNoted)[-1]
    whole = world.detector.sum_up(world.now)
    assert whole.step == min(whole.accounts[r].step for r in (0, 2)) >= newest.step > 10
    assert newest.collectives > 10
    world.run(30.0)
    assert world.of(GenerationStepping)[0].step > 10


def test_all_ranks_are_noted_seldom_and_when_one_fails(make_world):
    """A journal of a month has to be read in seconds: what 1,000 ranks have done is 430 KB."""
    world = make_world(size=2)
    world.run(300.0)
    notes = world.of(ProgressNoted)
    assert [set(note.accounts) for note in notes if note.whole] == [{0, 1}] * 7
    assert all(len(note.accounts) == 1 for note in notes if not note.whole)
    exited = ExitRecord(rank=1, generation=0, pid=101, at_s=world.now, code=1)
    end = RankExited(node=0, record=exited, account=RankAccount(step=3), detected_s=world.now)
    (last,) = [e for e in world.detector.note(world.now, end) if isinstance(e, ProgressNoted)]
    assert last.whole
    assert last.accounts[0].step >= notes[-1].step
    again = msgspec.structs.replace(end, record=msgspec.structs.replace(exited, rank=0))
    assert not world.detector.note(world.now, again)
