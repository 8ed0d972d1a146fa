"""G11: a peer stands still in an all-reduce, and the world is broken.

Passes where the break returns at once, the operation then looks finished (F1), `Group` says all the
same that it has not happened, and nothing is under way any more within two seconds. In every other
try the peer stops before it begins, else in the middle: its kernel runs, and nothing feeds it.
"""

import os
import signal
import time

import torch

from tests.contract.communicator_ranks import Rank, at_once, raises_broken
from tests.gpu.kit import Trial
from tests.gpu.ranks import fork_ranks

DRAINED_S = 2.0
OPERATIONS = 16


def run(trial: Trial) -> None:
    tries = trial.choose(20, 4)
    elements = trial.choose(1 << 20, 1 << 10)
    trial.expect(tries)

    def leave_who_stands_still(rank: Rank) -> None:
        rank.store.set(f"pid/{rank.number}", str(os.getpid()))
        for number in range(tries):
            group = rank.group(f"try {number}")
            tensors = [torch.ones(elements, device=rank.device) for _ in range(OPERATIONS)]
            group.all_reduce(tensors[0])
            group.wait()
            rank.meet(f"begin {number}")
            if rank.number == 1:
                for tensor in tensors if number % 2 else ():
                    group.all_reduce(tensor)
                rank.say(f"stops {number}")
                os.kill(os.getpid(), signal.SIGSTOP)
                group.break_()
            else:
                try:
                    break_world(rank, group, tensors, number)
                finally:
                    os.kill(int(rank.store.get("pid/1")), signal.SIGCONT)
                trial.passed()
            group.give_up()
            rank.meet(f"left {number}")

    def break_world(rank: Rank, group, tensors, number: int) -> None:
        rank.hear(f"stops {number}")
        for tensor in tensors:
            group.all_reduce(tensor)
        last = group._begun[-1]
        time.sleep(0.1)
        assert group.comm.poll(last) == "running", "the operation did not wait for who stands still"
        began_s = time.monotonic()
        with at_once():
            group.break_()
        with raises_broken():
            group.wait()
        drained_s = time.monotonic() - began_s
        trial.took(drained_s)
        assert last.state == "done", f"the operation looks {last.state}: {last.error}"
        assert drained_s < DRAINED_S, f"it took {drained_s:.2f} s until nothing was under way"

    fork_ranks(trial, leave_who_stands_still, limit_s=45.0)
    trial.note(operations=OPERATIONS, bytes=4 * elements)
