"""A communicator that misbehaves as NCCL's does, without a GPU, for tests: a thread is its device.

What it is to be is read in NCCL and PyTorch; `docs/gpu.md` has the facts by these numbers, with
their sources. Tensors of the CPU are exchanged for real, through the members' store.

- F1: what is aborted ends, and looks as if it were complete; here it has written garbage.
- F3: `break_` only sets a flag, and what runs ends some time later.
- F5: an abort does not end while a graph lives that has captured the communicator (`capture`).
- F8: forming cannot be broken off. It ends by the clock, and what was made is then broken.
- F10: all operations of a group, messages among them, share one stream: each begins when the one
  before has ended. There are no tags, and a message has been sent once it was taken.
- F21: a member that is gone says nothing: the others' operations run until they are broken.
- F22: an error of the device is for ever, and for all of the process.

An end comes as late as the device (`FakeDevice`) is told, and a hang is an operation that does not
look at the flag. Nothing is deleted from the store but messages, so that an epoch may not be long.
"""

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perdure.model.errors import DeviceLostError
from perdure.worker.elastic.apart import Broken, breaking, make_apart
from perdure.worker.elastic.communicators import Kind, State, Ticket
from perdure.worker.elastic.moving import fill_blob, join_blob, view_bytes

_LOOK_S = 0.0002
_LOOK_S_MAX = 0.002
_GARBAGE = 77

Write = Callable[[], object]
"""Puts an operation's outcome into its tensor."""


@dataclass(slots=True)
class FakeDevice:
    """What all operations of a process run on, and how it misbehaves."""

    late_s: float = 0.0
    """An operation ends so much later than it could."""
    hangs: bool = False
    """Operations do not look at the flag that an abort sets."""
    error: str = ""
    """Once there is one, nothing works any more."""
    build_s: float = 10.0
    """How long members that are forming wait for one another."""

    def connect(
        self, store: Any, index: int, size: int, overtaken: Callable[[], bool]
    ) -> "FakeComm":
        """Return a communicator once all members are there.

        Raises:
            Broken: one did not come, or `overtaken()` became true.
            DeviceLostError: it has an error.
        """
        if self.error:
            raise DeviceLostError(self.error)

        def make() -> FakeComm:
            comm, until_s = FakeComm(self, store, index, size), time.monotonic() + self.build_s
            ticket = comm.all_reduce(torch.zeros(1))
            while comm.poll(ticket) == "running":
                if time.monotonic() > until_s:
                    comm.break_()
                    raise RuntimeError("a member did not come")
                time.sleep(_LOOK_S_MAX)
            return comm

        with breaking(RuntimeError):
            return make_apart(make, overtaken, "perdure-connect", FakeComm.break_)


class _Aborted(Exception):
    """A kernel leaves because of the flag."""


class FakeGraph:
    """What has captured a communicator."""

    def __init__(self, graphs: "set[FakeGraph]") -> None:
        """Live, among `graphs`."""
        self._graphs = graphs
        graphs.add(self)

    def replay(self) -> None:
        """Do nothing.

        Raises:
            RuntimeError: it was destroyed.
        """
        if self not in self._graphs:
            raise RuntimeError("a graph was replayed that is no more")

    def reset(self) -> None:
        """Be destroyed."""
        self._graphs.discard(self)


class FakeComm:
    """Members over a store; one thread does one operation after another."""

    heard = told = False

    def __init__(self, device: FakeDevice, store: Any, index: int, size: int) -> None:
        """Meet the other members in `store`, of which this is number `index`."""
        self._device, self._store = device, store
        self._index, self._members = index, range(size)
        self._stream: queue.SimpleQueue[tuple[Callable[[], Write], Ticket, Tensor] | None]
        self._stream = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._running: set[Ticket] = set()
        self._graphs: set[FakeGraph] = set()
        self._turns = Counter[str]()
        """What was done of each kind, and over each line."""
        threading.Thread(target=self._work, name="perdure-device", daemon=True).start()

    # --- operations ---------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Begin to sum, in the members' order."""

        def kernel() -> Write:
            first, *more = self._exchange(tensor, self._members)
            for part in more:
                first.add_(part)
            return lambda: tensor.copy_(first)

        return self._begin("collective", kernel, tensor)

    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Begin to copy; the source ends before the others."""

        def kernel() -> Write:
            (part,) = self._exchange(tensor, [source])
            return lambda: tensor.copy_(part)

        return self._begin("collective", kernel, tensor)

    def all_gather(self, output: Tensor, part: Tensor) -> Ticket:
        """Begin to gather."""

        def kernel() -> Write:
            parts = self._exchange(part, self._members)
            return lambda: output.view(-1).copy_(torch.cat([one.view(-1) for one in parts]))

        return self._begin("collective", kernel, output)

    def send(self, tensor: Tensor, to: int, tag: int) -> Ticket:
        """Begin to send."""

        def kernel() -> Write:
            key = self._name_turn(f"{self._index}-{to}")
            self._put(key, tensor)
            self._spin(lambda: not self._store.check([key]))
            return lambda: None

        return self._begin("send", kernel, torch.empty(0))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Ticket:
        """Begin to receive."""

        def kernel() -> Write:
            key = self._name_turn(f"{source}-{self._index}")
            (part,) = self._take([key], tensor)
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(key)
            return lambda: tensor.copy_(part)

        return self._begin("receive", kernel, tensor)

    def _begin(self, kind: Kind, kernel: Callable[[], Write], tensor: Tensor) -> Ticket:
        if self._device.error or self._aborted.is_set():
            raise Broken(self._device.error or "the communicator was aborted")
        ticket = Ticket(kind, threading.Event())
        self._running.add(ticket)
        self._stream.put((kernel, ticket, tensor))
        return ticket

    def capture(self) -> FakeGraph:
        """Return a graph that holds up an abort until it is destroyed."""
        return FakeGraph(self._graphs)

    # --- the device ---------------------------------------------------------------------------

    def _work(self) -> None:
        while (next_one := self._stream.get()) is not None:
            kernel, ticket, tensor = next_one
            with torch.no_grad():
                try:
                    self._carry_out(kernel)
                except _Aborted:
                    tensor.view(-1)[: -(-tensor.numel() // 2)] = _GARBAGE
            ticket.work.set()

    def _carry_out(self, kernel: Callable[[], Write]) -> None:
        write = kernel()
        until_s = time.monotonic() + self._device.late_s
        self._spin(lambda: time.monotonic() >= until_s)
        write()

    def _exchange(self, tensor: Tensor, sources: Sequence[int]) -> list[Tensor]:
        """Give what this member has, where it is a source, and return what all sources have."""
        key = self._name_turn("all")
        if self._index in sources:
            self._put(f"{key}/{self._index}", tensor)
        return self._take([f"{key}/{source}" for source in sources], tensor)

    def _name_turn(self, line: str) -> str:
        self._turns[line] += 1
        return f"{line}/{self._turns[line]}"

    def _put(self, key: str, tensor: Tensor) -> None:
        with contextlib.suppress(RuntimeError):  # Then nobody takes it.
            self._store.set(key, bytes(view_bytes(join_blob([tensor]))))

    def _take(self, keys: Sequence[str], like: Tensor) -> list[Tensor]:
        """Return what is at `keys` once it is there, as tensors like this one."""
        found: list[bytes] = []

        def look() -> bool:
            if self._store.check(list(keys)):
                found.extend(self._store.multi_get(list(keys)))
            return bool(found)

        self._spin(look)
        parts = [torch.empty_like(like) for _ in keys]
        for part, data in zip(parts, found, strict=True):
            fill_blob([part], torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return parts

    def _spin(self, ended: Callable[[], bool]) -> None:
        """Look until something has ended; a store that is gone says nothing.

        Raises:
            _Aborted: the flag was set.
        """
        pause_s = _LOOK_S
        while True:
            if (self._aborted.is_set() and not self._device.hangs) or self._device.error:
                raise _Aborted
            with contextlib.suppress(RuntimeError):
                if ended():
                    return
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LOOK_S_MAX)

    # --- what is seen of it -------------------------------------------------------------------

    def poll(self, ticket: Ticket) -> State:
        """Return how it looks: what was aborted looks complete."""
        if ticket.state == "running":
            if self._device.error:
                ticket.end(self._device.error)
            elif ticket.work.is_set():
                ticket.end()
                self._running.discard(ticket)
        return ticket.state

    def rest(self, ticket: Ticket, at_most_s: float) -> None:
        """Sleep: nothing tells of an end."""
        time.sleep(at_most_s)

    def break_(self) -> None:
        """Set the flag."""
        if not self._aborted.is_set():
            self._aborted.set()
            self._stream.put(None)

    def drained(self, timeout_s: float) -> bool:
        """Wait until all of it has ended, and no graph lives."""
        until_s = time.monotonic() + timeout_s
        for ticket in list(self._running):
            ticket.work.wait(max(0.0, until_s - time.monotonic()))
            self.poll(ticket)
        while self._graphs and time.monotonic() < until_s:
            time.sleep(_LOOK_S_MAX)
        return not (self._running or self._graphs or self._device.error)

    def close(self) -> None:
        """Abort, as NCCL's communicators end."""
        self.break_()
