"""G5: a rank's kernel fails, and so does every later call of its process (F22).

Passes where the rank is told that it has lost its device, the other one leaves that world, and a
new process on the same GPU sums to the same bits as one before. The kernel fails by an index out of
bounds, which ends a process's use of the device as an illegal access does.
"""

import contextlib
import time
from typing import Any

import torch

from perdure.model.errors import DeviceLostError
from perdure.plan.elastic.microbatches import assign
from tests.contract.communicator_ranks import Rank, raises_broken
from tests.gpu.g17_exact import COUNT, Member
from tests.gpu.kit import Trial
from tests.gpu.ranks import fork_ranks


def run(trial: Trial) -> None:
    def sum_alone(rank: Rank) -> None:
        member, members = Member(trial), (rank.number,)
        member.work.enter(assign(COUNT, members), {}, rank.number, members)
        rank.answer(member.sum(rank.group(f"alone {rank.number}", members=members)))

    def lose(rank: Rank) -> None:
        group = rank.group("lost", lambda: rank.has_ended(1))
        tensor = rank.make(1.0)
        if rank.number == 1:
            group.all_reduce(tensor)  # It is under way: the other one has not begun.
            began_s = time.monotonic()
            break_device(rank)
            rank.say("lost")
            try:
                group.wait()
            except DeviceLostError as error:
                rank.answer([error.message, time.monotonic() - began_s])
            return
        rank.hear("lost")
        with raises_broken():
            for _ in range(2):  # The first one may end: the other one has begun it.
                group.all_reduce(tensor)
            group.wait()
        group.give_up()

    before = fork_ranks(trial, sum_alone, size=1)
    trial.expect(2)
    told, seconds = fork_ranks(trial, lose)[1]
    trial.note(told=told)
    trial.took(seconds)
    trial.passed()
    assert fork_ranks(trial, sum_alone, size=1) == before, "the next process has other bits"
    trial.passed()


def break_device(rank: Rank) -> None:
    """Have every later call of this process's device fail."""
    if rank.engine == "fake":
        connect: Any = rank.connect
        connect.__self__.error = "an illegal memory access was encountered"
        return
    with contextlib.suppress(RuntimeError):
        torch.ones(4, device=rank.device)[torch.tensor([1 << 20], device=rank.device)]
        torch.cuda.synchronize()
