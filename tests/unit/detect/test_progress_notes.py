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
    assert newest.step == min(newest.accounts[r].step for r in (0, 1))


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
    assert newest.step == min(newest.accounts[r].step for r in (0, 2)) > 10
    assert newest.collectives > 10
    world.run(30.0)
    assert world.of(GenerationStepping)[0].step > 10
