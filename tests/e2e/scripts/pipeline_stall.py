"""Two stages of a pipeline, two replicas of each; once one rank computes for ever.

Ranks 0 and 1 are the first stage, 2 and 3 the second. What a rank sends is awaited at the end of
the step only, as in the schedules of torch.distributed.pipelining, so that a send that has long
since arrived is still under way when its rank stands still.
"""

import sys
import time

import torch
import torch.distributed as dist

STEP = 60
stalls, after_send = int(sys.argv[1]), sys.argv[2] == "after-send"
dist.init_process_group("gloo")
rank = dist.get_rank()
stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
stage, peer = rank // 2, (rank + 2) % 4


def stall(step: int, *, sent: bool) -> None:
    """Compute for ever, if it is this rank's turn."""
    if (step, rank, sent) == (STEP, stalls, after_send):
        print("stalls at", time.monotonic(), flush=True)
    while step == STEP and rank == stalls and sent == after_send:
        torch.randn(64, 64) @ torch.randn(64, 64)


for step in range(1_000_000):
    activation, gradient = torch.ones(8), torch.ones(8)
    if stage == 0:
        time.sleep(0.02)
        stall(step, sent=False)
        sent = dist.isend(activation, peer)
        stall(step, sent=True)
        dist.recv(gradient, peer)
    else:
        time.sleep(0.02)
        dist.recv(activation, peer)
        stall(step, sent=False)
        sent = dist.isend(gradient, peer)
        stall(step, sent=True)
    for _ in range(1 + stage):  # A stage has more of them than the other.
        dist.all_reduce(gradient, group=stages[stage])
    sent.wait()
