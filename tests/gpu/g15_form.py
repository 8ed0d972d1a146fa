"""G15: a member never comes while a world is formed, and a newer order calls the others away.

Passes where the order is followed at once, the next world forms while the old one is still being
formed, and the thread that was left behind ends by its own clock.
"""

import threading
import time

from tests.contract.communicator_ranks import LIMIT_S, Rank, at_once, raises_broken
from tests.gpu.kit import Trial
from tests.gpu.ranks import fork_ranks

ORDER_S = 0.5
SPARE_S = 2.0


def run(trial: Trial) -> None:
    tries = trial.choose(2, 1)
    build_s = trial.choose(10.0, 1.0)
    trial.expect(tries)

    def be_called_away(rank: Rank) -> None:
        rank.make(1.0)  # The context is there.
        for number in range(tries):
            began_s = time.monotonic()
            if rank.number == 0:
                ordered_s = began_s + ORDER_S
                with at_once(), raises_broken():
                    rank.group(f"nobody {number}", lambda at=ordered_s: time.monotonic() > at)
                trial.took(time.monotonic() - ordered_s)
            formed_s = time.monotonic()
            group = rank.group(f"next {number}")
            formed_s = time.monotonic() - formed_s
            tensor = rank.make(1.0)
            group.all_reduce(tensor)
            group.wait()
            assert tensor.tolist() == [2.0]
            rank.meet(f"summed {number}")
            group.give_up()
            for thread in threading.enumerate():
                if thread.name == "perdure-connect":
                    thread.join(LIMIT_S)
            if rank.number == 0:
                ended_s = time.monotonic() - began_s
                trial.note(formed_s=round(formed_s, 3), thread_ended_s=round(ended_s, 3))
                assert ended_s < build_s + SPARE_S, f"the thread ended after {ended_s:.1f} s"
                trial.passed()
            rank.meet(f"over {number}")

    fork_ranks(trial, be_called_away, build_s=build_s, limit_s=35.0)
