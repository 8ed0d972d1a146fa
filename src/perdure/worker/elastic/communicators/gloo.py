"""gloo's communicator, for tensors of the CPU: broken by shutting its connections.

gloo wakes whoever waits for an operation, so `rest` waits in gloo, which is faster than any looking
and sleeping. How it may wait depends on the operation:

- A collective is waited for in slices: a wait that ends by the clock leaves it as it is.
- A receive is waited for to its end, because a wait for a transfer that ends by the clock closes
  all connections. Shut connections end it: a receive stands in a queue of its pair, and gloo tells
  a pair's failure to whatever stands there.
- A send is waited for in another thread: gloo does not tell a pair's failure to the transfer that
  it was just beginning to write, which then waits for ever. It tells the end of a transfer only to
  who waits for it.

What does not learn that its connections were shut is given a moment, and then left behind for good.
Nothing moves on closed connections, so that its tensors are as safe as after an error.
"""

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from perdure.worker.elastic.apart import breaking, make_apart, start
from perdure.worker.elastic.communicators import Kind, State, Ticket
from perdure.worker.interrupt import forget_device, make_own_device, shut_down_devices

_BUILD_S = 10.0
"""Bound for the connections of a group whose members were all there a moment ago."""
_WHOLE = timedelta(hours=24)
"""Who is dead or hangs is the controller's to say, and not a clock's."""
_SLICE = timedelta(seconds=0.05)
"""How long a break may go unnoticed by who waits for a collective or a send."""
_MOMENT_S = 0.25
"""For an operation to learn that its connections are shut: one that was about to write, writes."""


def make_device() -> Any:
    """Return gloo's listener."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if name:
        return dist.ProcessGroupGloo.create_device(interface=name)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if host in ("127.0.0.1", "localhost"):
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    return dist.ProcessGroupGloo.create_default_device()


def connect(store: Any, index: int, size: int, overtaken: Callable[[], bool]) -> "GlooComm":
    """Return a communicator once all members have connected, over a device of its own.

    Raises:
        Broken: a member was lost meanwhile, or `overtaken()` became true.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=_BUILD_S)
    options._threads = 2

    def make() -> Any:
        return dist.ProcessGroupGloo(store, index, size, options)

    with breaking(RuntimeError, what="no connections: "):
        device, listener = make_own_device(make_device)
        options._devices = [device]
        try:
            group = make_apart(make, overtaken, "perdure-connect")
        except BaseException:
            GlooComm(None, listener).close()
            raise
    group._set_default_timeout(_WHOLE)
    return GlooComm(group, listener)


class GlooComm:
    """Members over gloo."""

    heard = told = True

    def __init__(self, group: Any, listener: str) -> None:
        """Use a process group of gloo that is connected, over the device with this listener."""
        self.group, self._listener = group, listener
        self._running: set[Ticket] = set()
        self._broken = False

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Begin to sum `tensor`."""
        return self._begin("collective", self.group.allreduce, [tensor])

    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Begin to copy a member's tensor."""
        return self._begin("collective", self.group.broadcast, tensor, source)

    def all_gather(self, output: Tensor, part: Tensor) -> Ticket:
        """Begin to gather all parts."""
        return self._begin("collective", self.group._allgather_base, output, part)

    def send(self, tensor: Tensor, to: int, tag: int) -> Ticket:
        """Begin to send."""
        return self._begin("send", self.group.send, [tensor], to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Ticket:
        """Begin to receive."""
        return self._begin("receive", self.group.recv, [tensor], source, tag)

    def _begin(self, kind: Kind, call: Callable[..., Any], *args: Any) -> Ticket:
        with breaking(RuntimeError):
            ticket = Ticket(kind, call(*args))
        self._running.add(ticket)
        return ticket

    def poll(self, ticket: Ticket) -> State:
        """Return how it looks; the end of a transfer is learnt by resting alone."""
        if ticket.state == "running":
            if ticket.kind == "collective" and ticket.work.is_completed():
                self._end(ticket, ticket.work.wait)
            elif ticket.waiter is not None and ticket.waiter.done():
                self._end(ticket, ticket.waiter.result)
        return ticket.state

    def rest(self, ticket: Ticket, at_most_s: float) -> None:
        """Wait for an end, or for a break."""
        match ticket.kind:
            case "collective":
                with contextlib.suppress(RuntimeError):  # What it is, the next look tells.
                    ticket.work.wait(_SLICE)
            case "send":
                ticket.waiter = ticket.waiter or start(
                    functools.partial(ticket.work.wait, _WHOLE), "perdure-send"
                )
                wait([ticket.waiter], _SLICE.total_seconds())
            case "receive":
                limit = _SLICE if self._broken else _WHOLE
                self._end(ticket, functools.partial(ticket.work.wait, limit))

    def _end(self, ticket: Ticket, ask: Callable[[], bool]) -> None:
        try:
            ticket.end("" if ask() else "a transfer was aborted")
        except RuntimeError as error:
            ticket.end(str(error) or "a transfer has failed")
        self._running.discard(ticket)

    def break_(self) -> None:
        """Shut the group's connections: our peers wait for us as we have waited for a lost one."""
        if not self._broken:
            self._broken = True
            with contextlib.suppress(OSError):
                shut_down_devices({self._listener})

    def drained(self, timeout_s: float) -> bool:
        """Give each operation a moment to learn of the break; true in the end."""
        moment_s = min(timeout_s, _MOMENT_S)
        for ticket in list(self._running):
            until_s = time.monotonic() + moment_s
            while self.poll(ticket) == "running" and time.monotonic() < until_s:
                self.rest(ticket, moment_s)
            if ticket.state == "running":
                ticket.end("an operation was left behind")
                self._leave_behind()
        self._running.clear()
        return True

    def _leave_behind(self) -> None:
        """See that the group's destructor, which would wait for what never ends, never runs."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))

    def close(self) -> None:
        """Close the connections: whoever waits for us learns of it.

        Modules, meshes, and forked processes may still hold the group, or its descriptors. gloo
        takes 10 ms to end a device, for which nobody waits.
        """
        self.break_()
        forget_device(self._listener)
        held, self.group = [self.group], None
        start(held.clear, "perdure-close", daemon=False)
