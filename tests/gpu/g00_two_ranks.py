"""G0: two ranks that share the GPU form a world and sum once. All others of part 2 build on it."""

import time

from tests.contract.communicator_ranks import Rank
from tests.gpu.kit import Trial
from tests.gpu.ranks import fork_ranks


def run(trial: Trial) -> None:
    trial.expect(1)

    def sum_once(rank: Rank) -> None:
        began_s = time.monotonic()
        tensor = rank.make(1.0, 2.0)
        context_s = time.monotonic() - began_s
        group = rank.group("first")
        formed_s = time.monotonic() - began_s - context_s
        group.all_reduce(tensor)
        group.wait()
        assert tensor.tolist() == [2.0, 4.0]
        rank.meet("summed")
        group.give_up()
        if rank.number == 0:
            trial.note(context_s=round(context_s, 3), formed_s=round(formed_s, 3))
            trial.took(time.monotonic() - began_s)
            trial.passed()

    fork_ranks(trial, sum_once, limit_s=36.0)
