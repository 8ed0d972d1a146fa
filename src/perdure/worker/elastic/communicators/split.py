"""Two engines beside each other: one for the tensors of a device, and gloo for all else.

An engine for a device takes no tensor of the CPU, and a world has both: gradients are on the
device, and counts, votes, snapshots and a pipeline's packed messages are on the CPU. Each tensor's
collectives go by where it is.

Messages go over gloo wherever their tensors are, by way of the CPU. All messages of a group of NCCL
share a stream, so that two members that send to each other first wait for ever; on the device only
states and sums are sent so, once a world, to who lacks them.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perdure.worker.elastic.communicators import Communicator, Connect, State, Ticket, gloo
from perdure.worker.elastic.communicators.nccl import open_device

PrefixStore: Any = vars(dist)["PrefixStore"]


def choose_engine(device: torch.device) -> Connect:
    """Return what connects the members of a world whose parameters are on `device`."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return gloo.connect
    return beside(open_device(str(device)), gloo.connect, lambda tensor: tensor.device == device)


def beside(device: Connect, host: Connect, on_device: Callable[[Tensor], bool]) -> Connect:
    """Return what connects over both; what is `on_device` is moved by the first."""

    def connect(store: Any, index: int, size: int, overtaken: Callable[[], bool]) -> Communicator:
        below = host(PrefixStore("host", store), index, size, overtaken)
        try:
            above = device(PrefixStore("device", store), index, size, overtaken)
        except BaseException:
            below.close()
            raise
        return SplitComm(above, below, on_device)

    return connect


class SplitComm:
    """Members over two engines."""

    heard = told = False

    def __init__(
        self, device: Communicator, host: Communicator, on_device: Callable[[Tensor], bool]
    ) -> None:
        """Use these two, which have the same members."""
        self._device, self._host, self._on_device = device, host, on_device
        self._running: set[Ticket] = set()

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Begin to sum `tensor`."""
        engine = self._choose(tensor)
        return self._keep(engine, engine.all_reduce(tensor))

    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Begin to copy a member's tensor."""
        engine = self._choose(tensor)
        return self._keep(engine, engine.broadcast(tensor, source))

    def all_gather(self, output: Tensor, part: Tensor) -> Ticket:
        """Begin to gather all parts."""
        engine = self._choose(output)
        return self._keep(engine, engine.all_gather(output, part))

    def send(self, tensor: Tensor, to: int, tag: int) -> Ticket:
        """Begin to send, by way of the CPU."""
        return self._keep(self._host, self._host.send(tensor.detach().cpu(), to, tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Ticket:
        """Begin to receive; what is on the device is filled once the message is there."""
        if tensor.device.type == "cpu":
            return self._keep(self._host, self._host.receive(tensor, source, tag))
        came = torch.empty_like(tensor, device="cpu")
        fill = functools.partial(tensor.detach().copy_, came)
        return self._keep(self._host, self._host.receive(came, source, tag), fill)

    def _choose(self, tensor: Tensor) -> Communicator:
        return self._device if self._on_device(tensor) else self._host

    def _keep(
        self, engine: Communicator, inner: Ticket, fill: Callable[[], object] | None = None
    ) -> Ticket:
        ticket = Ticket(inner.kind, (engine, inner, fill))
        self._running.add(ticket)
        return ticket

    def poll(self, ticket: Ticket) -> State:
        """Return how it looks to its engine."""
        if ticket.state == "running":
            engine, inner, fill = ticket.work
            if engine.poll(inner) == "running":
                return "running"
            if fill is not None and not inner.error:
                fill()
            self._end(ticket, inner.error)
        return ticket.state

    def rest(self, ticket: Ticket, at_most_s: float) -> None:
        """Let its engine let time pass."""
        engine, inner, _ = ticket.work
        engine.rest(inner, at_most_s)

    def _end(self, ticket: Ticket, error: str) -> None:
        ticket.end(error)
        ticket.work = None
        self._running.discard(ticket)

    def break_(self) -> None:
        """Break both."""
        self._device.break_()
        self._host.break_()

    def drained(self, timeout_s: float) -> bool:
        """Wait for both; what was received meanwhile is put nowhere any more."""
        until_s = time.monotonic() + timeout_s
        idle = self._host.drained(timeout_s)
        idle = self._device.drained(max(0.0, until_s - time.monotonic())) and idle
        for ticket in list(self._running):
            self._end(ticket, ticket.work[1].error or "the world was broken")
        return idle

    def close(self) -> None:
        """Close both."""
        self._device.close()
        self._host.close()
