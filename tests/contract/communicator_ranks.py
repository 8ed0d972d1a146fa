"""What is asked of every engine, by two real ranks each: `CONTRACTS`, one after another.

usage: python -m tests.contract.communicator_ranks gloo|fake|split|nccl|split-nccl ...

Answers by one line of JSON: engine -> contract -> what its ranks have to complain of. Ranks are
forked from a process that has torch imported and has run no operator. With NCCL two processes
share a GPU, which it refuses unless they seem to be on two hosts: then all goes over sockets.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perdure.adapters.host import read_state
from perdure.model.nccl import ELASTIC
from perdure.worker.elastic.apart import Broken
from perdure.worker.elastic.communicators import Connect, gloo
from perdure.worker.elastic.communicators.split import beside, choose_engine
from perdure.worker.elastic.group import Group, PrefixStore
from tests.contract.one_gpu import NCCL_ON_ONE_GPU
from tests.fake_communicator import FakeDevice
from tests.waiting import PATIENCE_S, wait_until

BUILD_S = 2.0
NEVER_S = 3600.0
"""To build in the contracts: what waits for a time-out does not end before the test."""
LIMIT_S = 60.0
AT_ONCE_S = 2.0
"""On a busy machine; for what the GPU kit runs, and not for the contracts."""


def open_engine(name: str, rank: int, build_s: float = BUILD_S) -> tuple[Connect, str]:
    """Return what connects, and the device on which its tensors are."""
    if name == "gloo":
        gloo._BUILD_S = build_s
        return gloo.connect, "cpu"
    if name == "fake":
        return FakeDevice(late_s=0.002, build_s=build_s).connect, "cpu"
    if name == "split":
        gloo._BUILD_S = build_s
        device = FakeDevice(late_s=0.002, build_s=build_s)
        return beside(device.connect, gloo.connect, is_float32), "cpu"
    from perdure.worker.elastic.communicators.nccl import open_device

    os.environ |= ELASTIC | NCCL_ON_ONE_GPU | {"NCCL_HOSTID": f"r{rank}"}
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = f"{build_s:.0f}"
    if name == "split-nccl":  # As the training loop has it.
        gloo._BUILD_S = build_s
        return choose_engine(torch.device("cuda:0")), "cuda:0"
    return open_device("cuda:0"), "cuda:0"


def is_float32(tensor: Tensor) -> bool:
    """Return whether a tensor stands for one of the device, where two engines are together."""
    return tensor.dtype == torch.float32


class Rank:
    """One of two, or of more, and what it tells the others."""

    def __init__(
        self, number: int, engine: str, folder: str, *, size: int = 2, build_s: float = BUILD_S
    ) -> None:
        self.number, self.other, self.members = number, 1 - number, tuple(range(size))
        self.engine, self._folder = engine, folder
        self.store: Any = vars(dist)["FileStore"](f"{folder}/store", size)
        self.store.set_timeout(timedelta(seconds=PATIENCE_S))
        self.connect, self.device = open_engine(engine, number, build_s)

    def group(
        self,
        name: str,
        overtaken: Callable[[], bool] = lambda: False,
        members: tuple[int, ...] = (),
        kind: type[Group] = Group,
    ) -> Group:
        store = PrefixStore(name, self.store)
        return kind(members or self.members, self.number, store, self.connect, overtaken)

    def has_ended(self, number: int) -> bool:
        """Return whether another rank's process is gone, as its parent has seen."""
        return Path(self._folder, f"ended-{number}").exists()

    def make(self, *values: float) -> Tensor:
        return torch.tensor(values, device=self.device)

    def say(self, word: str) -> None:
        self.store.set(f"said/{self.number}/{word}", "")

    def hear(self, word: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not self.store.check([f"said/{self.other}/{word}"]):
            assert time.monotonic() < until_s, f"the other one never says {word!r}"
            time.sleep(0.002)

    def meet(self, place: str) -> None:
        self.say(place)
        self.hear(place)

    def answer(self, said: Any) -> None:
        """Leave a document for the parent."""
        Path(self._folder, f"answer-{self.number}").write_text(json.dumps(said))


@contextlib.contextmanager
def raises_broken() -> Iterator[None]:
    try:
        yield
    except Broken:
        return
    raise AssertionError("nothing is broken")


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < AT_ONCE_S, "it waits"


# --- the contracts ---------------------------------------------------------------------------


def what_is_begun_moves_tensors(rank: Rank) -> None:
    group = rank.group("moves")
    summed, copied = rank.make(1.0, 2.0 + rank.number), rank.make(float(rank.number), 5.0)
    gathered, part = torch.zeros(4, device=rank.device), rank.make(rank.number, 8.0)
    group.all_reduce(summed)
    group.broadcast(copied, 1)
    group.all_gather(gathered, part)
    group.wait()
    assert (summed.tolist(), copied.tolist()) == ([2.0, 5.0], [1.0, 5.0])
    assert gathered.tolist() == [0.0, 8.0, 1.0, 8.0]
    for tag in range(2):  # There and back; each has its own order.
        for source in range(2):
            message = rank.make(float(10 * tag + source))
            if source == rank.number:
                group.wait_for(group.send(message, rank.other, tag))
            else:
                message.zero_()
                group.wait_for(group.receive(message, source, tag))
                assert message.tolist() == [10.0 * tag + source]
    group.give_up()


def what_is_on_the_cpu_moves_beside_the_device(rank: Rank) -> None:
    if not rank.engine.startswith("split"):
        return
    group = rank.group("beside")
    device, host = rank.make(1.0 + rank.number), torch.ones(2, dtype=torch.float64)
    taken = torch.zeros(3, dtype=torch.uint8)
    # Each sends first: over one stream both would wait for ever.
    group.all_reduce(device)
    group.all_reduce(host)
    message = rank.make(7.0 + rank.number)
    came = torch.zeros_like(message)
    sent = group.send(message, rank.other, 0)
    group.wait_for(group.receive(came, rank.other, 0))
    group.wait_for(sent)
    group.send(torch.full((3,), rank.number, dtype=torch.uint8), rank.other, 1)
    group.receive(taken, rank.other, 1)
    group.meet()
    assert (device.tolist(), host.tolist()) == ([3.0], [2.0, 2.0])
    assert (came.tolist(), taken.tolist()) == ([7.0 + rank.other], [rank.other] * 3)
    group.give_up()


def looking_never_waits(rank: Rank) -> None:
    group = rank.group("looks")
    tensor = rank.make(1.0)
    if rank.number == 0:
        ticket = group.comm.all_reduce(tensor)  # The other one takes part once this one has looked.
        assert {group.comm.poll(ticket) for _ in range(200)} == {"running"}
        rank.say("looked")
    else:
        rank.hear("looked")
        ticket = group.comm.all_reduce(tensor)
    until_s = time.monotonic() + PATIENCE_S
    while group.comm.poll(ticket) == "running":
        assert time.monotonic() < until_s
        group.comm.rest(ticket, 0.001)
    assert (ticket.state, tensor.tolist()) == ("done", [2.0])
    rank.meet("seen")
    group.give_up()


def who_breaks_does_not_wait_and_leaves_nothing_under_way(rank: Rank) -> None:
    group = rank.group("breaks")
    rank.meet("formed")  # A group that is being formed is broken as well.
    if rank.number == 0:
        tensors = [torch.ones(1 << 18, device=rank.device) for _ in range(3)]
        for tensor in tensors:
            group.all_reduce(tensor)
        for _ in range(3):
            thread = threading.Thread(target=group.break_)
            thread.start()
            thread.join()
        with raises_broken():
            group.wait()
        for tensor in tensors:
            tensor.fill_(3.0)
        time.sleep(0.3)
        assert all(bool((tensor == 3.0).all()) for tensor in tensors), "something still wrote"
        with raises_broken():
            group.all_reduce(tensors[0])
    rank.meet("broken")
    group.give_up()


def who_waits_hears_of_a_break(rank: Rank) -> None:
    for number, begin in enumerate(("all_reduce", "receive", "send")):
        group = rank.group(f"hears {number}")
        rank.meet(f"formed {number}")
        tensor = torch.ones(1 << 20, device=rank.device)
        if rank.number == 0:
            threading.Timer(0.1, group.break_).start()
            with raises_broken():
                if begin == "all_reduce":
                    group.all_reduce(tensor)
                else:
                    getattr(group, begin)(tensor, rank.other, 0)
                group.wait()
        rank.meet(f"heard {number}")
        group.give_up()


def an_end_that_is_seen_after_a_break_has_not_happened(rank: Rank) -> None:
    group = rank.group("ends")
    tensor = rank.make(1.0)
    group.all_reduce(tensor)
    time.sleep(0.3)
    rank.meet("ended")
    group.break_()
    with raises_broken():
        group.wait()
    rank.meet("judged")
    group.give_up()


def a_member_that_stands_still_holds_nobody_up(rank: Rank) -> None:
    group = rank.group("still")
    rank.store.set(f"pid/{rank.number}", str(os.getpid()))
    rank.meet("still")
    if rank.number == 1:
        rank.say("stops")
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        rank.hear("stops")
        wait_until(lambda: read_state(int(rank.store.get("pid/1"))) == "T", "stop of the other")
        group.all_reduce(rank.make(1.0))
        threading.Timer(0.1, group.break_).start()
        try:
            with raises_broken():
                group.wait()
            group.give_up()
        finally:
            os.kill(int(rank.store.get("pid/1")), signal.SIGCONT)
    rank.meet("goes on")
    group.give_up()


def a_member_that_does_not_come_is_left_at_an_order(rank: Rank) -> None:
    if rank.number == 0:
        began_s = time.monotonic()
        with raises_broken():
            rank.group("nobody", lambda: time.monotonic() > began_s + 0.1)
    group = rank.group("somebody")  # While the other one is still being formed.
    group.all_reduce(rank.make(1.0))
    group.wait()
    rank.meet("somebody")
    group.give_up()


def the_thread_that_forms_for_nobody_ends(rank: Rank) -> None:
    if rank.number == 0:
        began_s = time.monotonic()
        with raises_broken():
            rank.group("nobody", lambda: time.monotonic() > began_s + 0.1)
    for thread in threading.enumerate():
        if thread.name == "perdure-connect":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def epoch_follows_epoch(rank: Rank) -> None:
    for epoch in range(6):
        group = rank.group(f"epoch {epoch}")
        tensor = rank.make(1.0)
        group.all_reduce(tensor)
        group.wait()
        assert tensor.tolist() == [2.0]
        if rank.number == epoch % 2:
            group.all_reduce(tensor)
            group.break_()
        rank.meet(f"epoch {epoch}")
        group.give_up()


CONTRACTS = (
    what_is_begun_moves_tensors,
    what_is_on_the_cpu_moves_beside_the_device,
    looking_never_waits,
    who_breaks_does_not_wait_and_leaves_nothing_under_way,
    who_waits_hears_of_a_break,
    an_end_that_is_seen_after_a_break_has_not_happened,
    a_member_that_stands_still_holds_nobody_up,
    a_member_that_does_not_come_is_left_at_an_order,
    the_thread_that_forms_for_nobody_ends,
    epoch_follows_epoch,
)


def run(
    contract: Callable[[Rank], None],
    engine: str,
    folder: str,
    *,
    size: int = 2,
    build_s: float = BUILD_S,
    limit_s: float = LIMIT_S,
    killed: Collection[int] = (),
) -> list[str]:
    """Return what forked ranks complain of; those `killed` are to end by SIGKILL."""
    pids = []
    for number in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                contract(Rank(number, engine, folder, size=size, build_s=build_s))
                code = 0
            except BaseException:
                with open(f"{folder}/{number}", "w") as file:
                    traceback.print_exc(file=file)
            finally:
                os._exit(code)
        pids.append(pid)
    until_s, ends = time.monotonic() + limit_s, dict[int, int]()
    while len(ends) < size:
        for number in set(range(size)) - set(ends):
            if (ended := os.waitpid(pids[number], os.WNOHANG))[0]:
                ends[number] = os.waitstatus_to_exitcode(ended[1])
                Path(folder, f"ended-{number}").touch()
            elif time.monotonic() > until_s:
                os.kill(pids[number], signal.SIGKILL)
        time.sleep(0.01)
    complaints = []
    for number, code in sorted(ends.items()):
        if code != (-signal.SIGKILL if number in killed else 0):
            said = Path(folder, str(number))
            text = said.read_text() if said.exists() else f"exit code {code}"
            complaints.append(f"rank {number}: {text}")
    return complaints


def read_answers(folder: str, size: int) -> dict[int, Any]:
    """Return what ranks have answered."""
    paths = {number: Path(folder, f"answer-{number}") for number in range(size)}
    return {n: json.loads(path.read_text()) for n, path in paths.items() if path.exists()}


def main() -> None:
    """Run all contracts with each engine."""
    found: dict[str, dict[str, list[str]]] = {}
    for engine in sys.argv[1:]:
        found[engine] = {}
        for contract in CONTRACTS:
            # With NCCL the contracts were never tried with other times than those of old.
            short = contract is the_thread_that_forms_for_nobody_ends or "nccl" in engine
            build_s = BUILD_S if short else NEVER_S
            with tempfile.TemporaryDirectory() as folder:
                found[engine][contract.__name__] = run(
                    contract, engine, folder, build_s=build_s, limit_s=PATIENCE_S
                )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
