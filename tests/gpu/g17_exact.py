"""G17: what `exact=True` adds up, in worlds of 1 to 4, over NCCL and over gloo, and across kills.

Passes where the sum has the same bits everywhere. Only broadcasts go over the engine, and every
member adds by itself, along one tree. In each kill a member of three dies while it broadcasts one
of its buckets; the others leave that world, form the next, compute what is missing, and begin the
sum again from what they have kept. Over gloo the same tensors of the GPU are broadcast.
"""

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

from perdure.plan.elastic.commit import MemberProgress
from perdure.plan.elastic.microbatches import assign, reassign
from perdure.worker.elastic.gradients import Accumulation, Buckets
from perdure.worker.elastic.group import Broken, Group, exchange_progress
from perdure.worker.elastic.moving import hash_tensors
from tests.contract.communicator_ranks import Rank
from tests.gpu.kit import Trial
from tests.gpu.ranks import fork_ranks

COUNT = 8
WIDTH = 128
BUCKET_BYTES = WIDTH * WIDTH * 4
SIZE, VICTIM = 3, 1
WAIT_S = 30.0


def run(trial: Trial) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    buckets = trial.choose(4, 2)
    found: dict[str, str] = {}
    for engine in (trial.engine, "gloo"):
        answers = fork_ranks(
            trial, lambda rank: sum_in_all_worlds(rank, trial), size=4, engine=engine
        )
        for rank, hashes in answers.items():
            found |= {f"{engine}, world of {n}, rank {rank}": bits for n, bits in hashes.items()}
        for bucket in range(buckets):
            answers = fork_ranks(
                trial, lambda rank, at=bucket: survive(rank, trial, at),
                size=SIZE, engine=engine, killed=(VICTIM,),
            )  # fmt: skip
            assert sorted(answers) == [0, 2], "a survivor has no sum"
            for rank, bits in answers.items():
                found[f"{engine}, killed at bucket {bucket}, rank {rank}"] = bits
        trial.note(engine=engine, bits=sorted(set(found.values())))
    right = found[f"{trial.engine}, world of 1, rank 0"]
    trial.note(buckets=buckets, sums=len(found))
    trial.expect(len(found))
    wrong = [name for name, bits in found.items() if bits != right]
    for _ in range(len(found) - len(wrong)):
        trial.passed()
    assert not wrong, f"other bits than one rank's: {'; '.join(wrong)}"


class Member:
    """A rank's part of one step: its model, its micro-batches, and their gradients."""

    def __init__(self, trial: Trial) -> None:
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(5)
        self.device = trial.device
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(trial.choose(4, 2))]
        self.model = nn.Sequential(*layers, nn.GELU()).to(self.device)
        self.buckets = Buckets(list(self.model.parameters()), BUCKET_BYTES)
        self.work = Accumulation(
            self.compute, lambda loss, counts: loss.backward(), self.buckets,
            count=COUNT, seed=3, exact=True, whole=False,
        )  # fmt: skip

    def compute(self, step: int, micro_batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(micro_batch)
        inputs = torch.randn(16, WIDTH, generator=generator).to(self.device)
        return self.model(inputs).square().mean()

    def sum(self, group: Group) -> str:
        """Compute what is left to this rank, add all of it up, and return a hash of the sum."""
        self.work.reduce(0, group, lambda: None)
        return hash_tensors([flat.cpu() for flat in self.buckets.flats(0)])


def sum_in_all_worlds(rank: Rank, trial: Trial) -> None:
    member, found = Member(trial), dict[int, str]()
    for size in range(1, 5):
        members = tuple(range(size))
        if rank.number in members:
            group = rank.group(f"world of {size}", members=members)
            member.work.clear()
            member.work.enter(assign(COUNT, members), {}, rank.number, (rank.number,))
            began_s = time.monotonic()
            found[size] = member.sum(group)
            if rank.number == 0 and size > 1:
                trial.took(time.monotonic() - began_s)
            leave(rank, group, f"world of {size}", members)
    rank.answer(found)


def leave(rank: Rank, group: Group, name: str, members: tuple[int, ...]) -> None:
    """Disconnect once all have their sums: who closes early breaks others' last broadcast."""
    rank.store.set(f"has {name}/{rank.number}", "")
    rank.store.wait([f"has {name}/{member}" for member in members])
    group.give_up()


class Mortal(Group):
    """A group whose process dies amid one of its broadcasts."""

    dies_at: int | None = None

    def broadcast(self, tensor: Tensor, source: int) -> None:
        super().broadcast(tensor, source)
        if self.dies_at is not None and source == self.me:
            if not self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.dies_at -= 1


def survive(rank: Rank, trial: Trial, bucket: int) -> None:
    """Add up, with a member that dies at its broadcast of `bucket`; then without it."""
    member = Member(trial)
    group: Any = rank.group("first", lambda: rank.has_ended(VICTIM), kind=Mortal)
    group.dies_at = bucket if rank.number == VICTIM else None
    member.work.enter(assign(COUNT, rank.members), {}, rank.number, (rank.number,))
    try:
        member.sum(group)
    except Broken:
        member.work.drop_unfinished()
    group.give_up()
    until_s = time.monotonic() + WAIT_S
    while not rank.has_ended(VICTIM):
        assert time.monotonic() < until_s, "nobody has died"
        time.sleep(0.005)
    left = tuple(one for one in rank.members if one != VICTIM)
    group = rank.group("second", members=left)
    mine = MemberProgress(0, tuple(member.work.done))
    progress = exchange_progress(group.store, left, rank.number, mine, lambda: False)
    done = {one: progress[one].done for one in left}
    kept = {micro_batch: one for one, has in done.items() for micro_batch in has}
    member.work.enter(reassign(COUNT, left, done), kept, rank.number, (rank.number,))
    bits = member.sum(group)
    leave(rank, group, "second", left)
    rank.answer(bits)
