"""G14: a world is broken whose communicator a CUDA graph has captured (F5).

Passes where a graph that the group is told of goes with the world, and nothing is under way after
two seconds. Whether the abort waits for one that nobody destroys is noted.
"""

import time
from typing import Any

import torch

from perdure.worker.elastic.group import Group
from tests.contract.communicator_ranks import Rank, raises_broken
from tests.gpu.kit import Trial
from tests.gpu.ranks import fork_ranks

DRAINED_S = 2.0


def run(trial: Trial) -> None:
    def break_told(rank: Rank) -> None:
        group = rank.group("told")
        group.captures.add(capture(rank, group).reset)
        rank.meet("captured")
        began_s = time.monotonic()
        group.break_()
        with raises_broken():
            group.wait()
        rank.answer(time.monotonic() - began_s)
        rank.meet("drained")
        group.give_up()

    def break_untold(rank: Rank) -> None:
        group = rank.group("untold")
        graph = capture(rank, group)
        rank.meet("captured")
        group.comm.break_()
        rank.answer(not group.comm.drained(trial.choose(DRAINED_S, 0.3)))
        rank.meet("waited")
        graph.reset()

    for _ in trial.tries(trial.choose(2, 1)):
        for seconds in fork_ranks(trial, break_told, limit_s=12.0).values():
            trial.took(seconds)
            assert seconds < DRAINED_S, f"it took {seconds:.1f} s"
    trial.note(waits_for_a_living_graph=fork_ranks(trial, break_untold, limit_s=12.0))


def capture(rank: Rank, group: Group) -> Any:
    """Return a graph that has captured a sum, which was made once before."""
    comm: Any = group.comm
    tensor = rank.make(1.0)
    group.all_reduce(tensor)
    group.wait()
    if rank.engine == "fake":
        return comm.capture()
    # The backend itself: the communicator's own events may not lie within a graph.
    graph: Any = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        comm._backend.allreduce([tensor]).wait()
    return graph
