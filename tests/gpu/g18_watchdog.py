"""G18: what PyTorch's watchdog does once NCCL has an error, and what a wait with a time-out does.

A peer is killed amid a sum: over sockets that is an error (F21), upon which the watchdog may hold
the lock of every new operation (F6). Passes where, with an elastic world's variables, the process
lives on and nothing that it begins takes more than a second, in that world or another one; and
where a wait of 50 ms that runs out leaves a communicator that is good for nothing (F2). How a
supervised job's rank ends by its variables is noted.
"""

import contextlib
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from perdure.model.nccl import SUPERVISED
from perdure.worker.elastic.apart import Broken
from perdure.worker.elastic.communicators import Communicator, Ticket
from perdure.worker.elastic.group import PrefixStore
from tests.contract.communicator_ranks import Rank
from tests.fake_communicator import FakeComm
from tests.gpu.kit import Trial
from tests.gpu.ranks import fork_ranks

BEGIN_MAX_S = 1.0
EXPIRE_S = 0.05
VICTIM = 1


def run(trial: Trial) -> None:
    watch_s = trial.choose(8.0, 1.0)

    def outlive(rank: Rank) -> None:
        group = rank.group("dies")
        own = PrefixStore(f"own {rank.number}", rank.store)
        other = rank.connect(own, 0, 1, lambda: False)  # A world that nobody has left.
        die_amid(rank, group.comm)
        began, raised = begin_for(rank, [group.comm, other], watch_s)
        rank.answer({"began": len(began), "longest_s": max(began), "raised": raised})
        group.break_()
        group.give_up()
        other.break_()

    def end_supervised(rank: Rank) -> None:
        os.environ.update(SUPERVISED)
        group = rank.group("supervised")
        die_amid(rank, group.comm)
        began, raised = begin_for(rank, [group.comm], watch_s)
        rank.answer({"began": len(began), "longest_s": max(began), "raised": raised})

    def expire(rank: Rank) -> None:
        group = rank.group("expires")
        tensor = rank.make(1.0)
        if rank.number == 0:
            ticket, said = wait_out(group.comm, tensor)
            until_s = time.monotonic() + 5.0
            while group.comm.poll(ticket) == "running" and time.monotonic() < until_s:
                time.sleep(0.001)
            looks = group.comm.poll(ticket)
            rank.say("waited")
            rank.answer({"said": said, "looks": looks, "again": try_again(rank, group.comm)})
        else:
            rank.hear("waited")
            with contextlib.suppress(Broken):  # Both sums: were it good, they would be whole.
                for _ in range(2):
                    group.comm.all_reduce(tensor)
        rank.meet("expired")
        group.break_()
        group.give_up()

    found = fork_ranks(trial, outlive, killed=(VICTIM,), limit_s=trial.choose(25.0, 60.0))
    trial.check(sorted(found) == [0], f"the survivors are {sorted(found)}")
    trial.note(elastic=found[0])
    trial.took(found[0]["longest_s"])
    trial.check(found[0]["began"] >= 2, "nothing was begun after the error")
    longest_s = found[0]["longest_s"]
    trial.check(longest_s <= BEGIN_MAX_S, f"to begin an operation took {longest_s:.1f} s")
    expired = fork_ranks(trial, expire, limit_s=trial.choose(20.0, 60.0))[0]
    trial.note(expired=expired)
    trial.check(expired["looks"] != "running", "what nobody else has begun is still under way")
    trial.check(expired["again"] != "summed", "the communicator is still good")
    trial.note(supervised=note_end(trial, end_supervised))


def die_amid(rank: Rank, comm: Communicator) -> None:
    """Have the victim die while it sums; the other one has begun, and knows that it is gone."""
    tensor = torch.ones(1 << 18, device=rank.device)
    if rank.number == VICTIM:
        rank.hear("begun")
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(tensor)
    rank.say("begun")
    while not rank.has_ended(VICTIM):
        time.sleep(0.005)


def begin_for(rank: Rank, comms: list[Communicator], seconds: float) -> tuple[list[float], str]:
    """Return how long it took to begin each of many sums, and what one said that could not."""
    taken, raised, until_s = [], "", time.monotonic() + seconds
    tensors = [rank.make(1.0) for _ in comms]
    while time.monotonic() < until_s:
        for comm, tensor in zip(comms, tensors, strict=True):
            began_s = time.monotonic()
            try:
                comm.all_reduce(tensor)
            except Broken as error:
                raised = str(error)[:200]
            taken.append(time.monotonic() - began_s)
        time.sleep(0.05)
    return taken, raised


def wait_out(comm: Any, tensor: Tensor) -> tuple[Ticket, str]:
    """Begin what the other one has not begun, wait 50 ms for it, and return what that said."""
    if isinstance(comm, FakeComm):
        ticket = comm.all_reduce(tensor)
        time.sleep(EXPIRE_S)
        comm.break_()  # It has no wait: what F2 says of one is done in its place.
        return ticket, "nothing: it is a fake one"
    from perdure.worker.elastic.communicators.nccl import follow

    work = comm._backend.allreduce([tensor])
    ticket = Ticket("collective", (follow(work, comm._stream), tensor))
    try:
        work.wait(timedelta(seconds=EXPIRE_S))
    except RuntimeError as error:
        return ticket, str(error)[:200]
    return ticket, "nothing"


def try_again(rank: Rank, comm: Communicator) -> str:
    """Return what another sum over it says; `summed` if it is as it should be with both."""
    try:
        ticket = comm.all_reduce(tensor := rank.make(1.0))
    except Broken as error:
        return f"refused: {error}"[:200]
    until_s = time.monotonic() + 2.0
    while comm.poll(ticket) == "running" and time.monotonic() < until_s:
        time.sleep(0.001)
    if comm.poll(ticket) == "running":
        return "never ends"
    return "summed" if tensor.tolist() == [2.0] else f"looks {comm.poll(ticket)}"


def note_end(trial: Trial, body: Any) -> Any:
    """Return how the survivor of a supervised world ended: torch ends it, or it says something."""
    try:
        return fork_ranks(trial, body, killed=(VICTIM,), limit_s=trial.choose(15.0, 60.0)).get(0)
    except AssertionError as error:
        return f"it ended: {error}"[:200]
