"""G13: four communicators of a process, each with something under way, are broken at once.

Both ranks break them in opposite orders, each by a thread of its own as `Group` does: passes where
nothing is under way any more within five seconds. How it ends where one thread breaks and drains
one after another (F4) is noted, last and in processes of its own, and is no failure.
"""

import threading
import time

import torch

from perdure.worker.elastic.group import Group
from tests.contract.communicator_ranks import Rank, raises_broken
from tests.gpu.kit import Trial
from tests.gpu.ranks import fork_ranks

COUNT = 4
DRAINED_S = 5.0


def run(trial: Trial) -> None:
    tries = trial.choose(20, 2)
    trial.expect(tries)

    def break_side_by_side(rank: Rank) -> None:
        for number in range(tries):
            groups = begin(rank, f"try {number}", trial)
            began_s = time.monotonic()
            for group in order(rank, groups):
                group.break_()
            for group in order(rank, groups):
                with raises_broken():
                    group.wait()  # It drains, also where this rank has begun nothing.
            drained_s = time.monotonic() - began_s
            assert drained_s < DRAINED_S, f"it took {drained_s:.1f} s"
            rank.meet(f"drained {number}")
            for group in groups:
                group.give_up()
            if rank.number == 0:
                trial.took(drained_s)
                trial.passed()

    def break_in_sequence(rank: Rank) -> None:
        groups = begin(rank, "sequence", trial)
        ended = threading.Event()

        def work() -> None:
            for group in order(rank, groups):
                group.comm.break_()
                group.comm.drained(DRAINED_S)
            ended.set()

        threading.Thread(target=work, daemon=True).start()
        rank.answer(ended.wait(DRAINED_S))
        rank.meet("sequence")

    fork_ranks(trial, break_side_by_side, limit_s=50.0)
    trial.note(sequence_ends=fork_ranks(trial, break_in_sequence, limit_s=15.0))


def begin(rank: Rank, name: str, trial: Trial) -> list[Group]:
    """Return four groups in each of which this rank or the other one waits for its peer."""
    groups = [rank.group(f"{name}, {number}") for number in range(COUNT)]
    for number, group in enumerate(groups):
        if number % 2 == rank.number:
            group.all_reduce(torch.ones(trial.choose(1 << 18, 16), device=rank.device))
    time.sleep(0.05)
    return groups


def order(rank: Rank, groups: list[Group]) -> list[Group]:
    """Return them in this rank's order, which is not the other one's."""
    return groups[::-1] if rank.number else groups
