"""NCCL's communicator, for tensors of one GPU. Untested: written where there is no GPU.

`docs/gpu.md` has the facts by these numbers, with their sources.

- One communicator an epoch, PyTorch's ProcessGroupNCCL used directly; a break aborts it for good.
- F1, F2: no wait has a time-out. A wait without one only has a stream of this communicator's follow
  the operation, where an event tells of its end; that it looks complete proves nothing.
- F3, F4: it is aborted in a thread of its own, for which nobody waits but `drained`.
- F8: it is made without blocking, and ready once a first all-reduce has ended. Until then only the
  thread that makes it touches it, and ends by the clock (TORCH_NCCL_NONBLOCKING_TIMEOUT).
- F10: it is connected ahead of its first use, so that no message makes a hidden one. All messages
  share a stream, in the order in which they were begun, so that neighbours that send to each other
  would need a communicator for each direction. The training loop sends none over NCCL (`split`).

- F5: an abort waits for CUDA graphs that have captured the communicator: `Group.captures` destroys
  them, beside the abort.

An error that NCCL itself sees (a dead peer, over sockets) is not looked for: the controller's order
ends what waits for that peer.
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perdure.worker.elastic.apart import Broken, breaking, make_apart
from perdure.worker.elastic.communicators import Connect, Kind, State, Ticket
from perdure.worker.interrupt import start_abort

_BUILD_S = 10.0
"""Bound for members who were all there a moment ago."""
_WHOLE = timedelta(hours=24)
"""Who is dead or hangs is the controller's to say, and not a clock's."""
_LOOK_S = 0.001
_numbers = itertools.count(1)


def open_device(device: str) -> Connect:
    """Return what connects this process's GPU, such as `cuda:0`, to those of others."""
    return functools.partial(connect, torch.device(device))


def connect(
    device: torch.device, store: Any, index: int, size: int, overtaken: Callable[[], bool]
) -> "NcclComm":
    """Return a communicator once all members have connected.

    Raises:
        Broken: a member was lost meanwhile, or `overtaken()` became true.
    """

    def make() -> NcclComm:
        torch.cuda.set_device(device)  # A thread begins with the first one.
        backend_class: Any = vars(dist)["ProcessGroupNCCL"]
        options = backend_class.Options()
        options.config.blocking = 0
        options._timeout = _WHOLE
        options.group_name = f"perdure-{next(_numbers)}"
        backend = backend_class(store, index, size, options)
        comm = NcclComm(backend, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        try:
            backend.eager_connect_single_device(device)
            _wait_ready(comm, torch.zeros(1, device=device))
        except BaseException:
            comm.break_()
            raise
        return comm

    with breaking(RuntimeError, what="no connections: "):
        return make_apart(make, overtaken, "perdure-connect", NcclComm.break_)


def _wait_ready(comm: "NcclComm", one: Tensor) -> None:
    """Wait until a first sum has ended.

    Raises:
        RuntimeError: it has not, within the bound.
    """
    ticket, until_s = comm.all_reduce(one), time.monotonic() + _BUILD_S
    while comm.poll(ticket) == "running":
        if time.monotonic() > until_s:
            raise RuntimeError("a member did not come")
        time.sleep(_LOOK_S)
    if ticket.error:
        raise RuntimeError(ticket.error)


def follow(work: Any, stream: Any) -> Any:
    """Return an event that tells of the end of `work`, behind which `stream` goes on."""
    with torch.cuda.stream(stream):
        work.wait()
        ended: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record()
    return ended


class NcclComm:
    """Members over NCCL, each with one GPU."""

    heard = told = False

    def __init__(self, backend: Any, stream: Any) -> None:
        """Use a ProcessGroupNCCL; `stream` is for its ends alone."""
        self._backend, self._stream = backend, stream
        self._running: set[Ticket] = set()
        self._lock = threading.Lock()
        self._aborting: threading.Thread | None = None
        self._lost = False
        """A call of CUDA has failed: so will every other one of this process."""

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Begin to sum `tensor`."""
        return self._begin("collective", "allreduce", [tensor])

    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Begin to copy a member's tensor."""
        return self._begin("collective", "broadcast", tensor, source)

    def all_gather(self, output: Tensor, part: Tensor) -> Ticket:
        """Begin to gather all parts."""
        return self._begin("collective", "_allgather_base", output, part)

    def send(self, tensor: Tensor, to: int, tag: int) -> Ticket:
        """Begin to send."""
        return self._begin("send", "send", [tensor], to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Ticket:
        """Begin to receive."""
        return self._begin("receive", "recv", [tensor], source, tag)

    def _begin(self, kind: Kind, name: str, *args: Any) -> Ticket:
        if self._aborting is not None:
            raise Broken("the communicator was aborted")
        with breaking(RuntimeError):
            work = getattr(self._backend, name)(*args)
            # The tensors stay with the ticket: PyTorch lets go of them at the first wait.
            ticket = Ticket(kind, (follow(work, self._stream), args))
        self._running.add(ticket)
        return ticket

    def poll(self, ticket: Ticket) -> State:
        """Return how it looks: what was aborted looks complete."""
        if ticket.state == "running":
            try:
                if not ticket.work[0].query():
                    return "running"
                ticket.end()
            except RuntimeError as error:
                self._lost = True
                ticket.end(str(error) or "a call of CUDA has failed")
            self._running.discard(ticket)
            ticket.work = None
        return ticket.state

    def rest(self, ticket: Ticket, at_most_s: float) -> None:
        """Sleep: nothing tells of an end."""
        time.sleep(at_most_s)

    def break_(self) -> None:
        """Have a thread abort it."""
        with self._lock:
            if self._aborting is None:
                self._aborting = start_abort(self._backend)

    def drained(self, timeout_s: float) -> bool:
        """Wait until it is aborted, and all that was begun has ended."""
        until_s = time.monotonic() + timeout_s
        if self._aborting is not None:
            self._aborting.join(timeout_s)
        while any([self.poll(ticket) == "running" for ticket in list(self._running)]):
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOOK_S)
        return not self._lost and (self._aborting is None or not self._aborting.is_alive())

    def close(self) -> None:
        """Abort it: it cannot be used again, and nobody is told."""
        self.break_()
