"""A rank's line to its node's agent: one daemon thread, one unix socket, JSON lines.

Events are kept until the agent says that it has taken them over, across any number of agents.
The thread never touches training: it hands what it is told to handlers that only note it, and
the training thread acts at its next step boundary. Losing the agent costs training nothing.
"""

import contextlib
import os
import select
import socket
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from perdure.failpoints import failpoint
from perdure.model.bus.wire import (
    FromWorker,
    ToWorker,
    WorkerAck,
    WorkerEvent,
    WorkerHello,
    WorkerQuery,
    WorkerSignal,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.model.events import AnyEvent, MetricsLogged
from perdure.model.fitting import EVENT_BYTES_MAX, drop_values, fit_event
from perdure.model.orders import Order
from perdure.worker.system.forking import free_in_child
from perdure.worker.system.sockets import OwnSocket
from perdure.worker.system.stderr import say

RETRY_S = 0.2
_SEND_TIMEOUT_S = 10.0
METRICS_KEPT = 256
"""Batches of metrics that wait for an agent; of older ones only the count is kept."""
_REFUSED_S = 10.0
"""Between two complaints about what the agent says."""


class Control:
    """The rank's end of the line. Every method may be called from any thread."""

    def __init__(self, path: str, hello: WorkerHello) -> None:
        """Talk to the agent that listens at `path`, introducing itself by `hello`."""
        self._path = path
        self._hello = hello
        self._pid = os.getpid()
        self._changed = free_in_child(threading.Condition())
        self._unacked: deque[WorkerEvent] = deque()
        self._seq = 0
        self._metrics: deque[int] = deque()
        """Numbers of the metrics among them, or that were."""
        self._sent = 0
        """Newest event sent on this connection."""
        self._asides: deque[FromWorker] = deque()
        """Queries and signals: sent once, lost with the connection."""
        self._wake_read, self._wake_write = _make_pair()
        self._line: OwnSocket | None = None
        self._refused_at_s = -_REFUSED_S
        self._stop = free_in_child(threading.Event())
        self._thread: threading.Thread | None = None
        self._handlers: dict[type[Order], Callable[[Any], None]] = {}
        self.on_connect: Callable[[], None] | None = None
        _live.add(self)

    def obey(self, handler: Callable[[Any], None], *kinds: type[Order]) -> None:
        """Hand orders of these kinds to `handler`, in this thread; it may not wait.

        An order that nobody has asked for is passed over: whoever decides it repeats it.
        """
        self._handlers |= dict.fromkeys(kinds, handler)

    def start(self) -> None:
        """Connect, and go on connecting for ever."""
        self._thread = threading.Thread(target=self._run, name="perdure-control", daemon=True)
        self._thread.start()

    def emit(self, event: AnyEvent) -> int:
        """Queue `event` for the journal and return its number. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return 0
        with self._changed:
            self._seq += 1
            self._unacked.append(WorkerEvent(self._seq, event))
            if isinstance(event, MetricsLogged):
                self._metrics.append(self._seq)
                self._drop_metrics()
            seq = self._seq
        self._wake()
        return seq

    def _drop_metrics(self) -> None:
        """While no agent takes anything: keep the facts, and count what the oldest metrics held."""
        if len(self._metrics) <= METRICS_KEPT:
            return
        index = self._metrics.popleft() - self._unacked[0].seq
        if index >= 0 and isinstance(event := self._unacked[index].event, MetricsLogged):
            self._unacked[index] = WorkerEvent(self._unacked[index].seq, drop_values(event))

    def query(self, boundary_id: str) -> None:
        """Ask what became of a prepared boundary."""
        self._asides.append(WorkerQuery(boundary_id))
        self._wake()

    def signal(self, number: int) -> None:
        """Pass on a signal. Takes no lock, so a signal's handler may call it."""
        self._asides.append(WorkerSignal(number))
        self._wake()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every event was taken over; False where `timeout_s` passed first."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._unacked, timeout_s)

    def close(self, drain_s: float = 0.0) -> None:
        """Wait up to `drain_s` for acknowledgements, then end the thread."""
        if os.getpid() != self._pid or self._stop.is_set():
            return
        if drain_s:
            self.drain(drain_s)
        self._stop.set()
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)
            if self._thread.is_alive():
                return
        self._close_pair()

    def _close_pair(self) -> None:
        self._wake_read.close()
        self._wake_write.close()

    def _wake(self) -> None:
        if self._wake_write.intact:
            with contextlib.suppress(OSError):  # Full: it will wake anyway.
                self._wake_write.sock.send(b".")

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._is_intact():
                    self._close_pair()
                    self._wake_read, self._wake_write = _make_pair()
                self._line = OwnSocket(self._connect())
                self._serve(self._line)
            except OSError:
                pass  # No agent now; the next one gets everything that is not acknowledged.
            except Exception as error:  # Ours; what is not acknowledged is said again.
                say(f"the line to the agent broke: {error!r}")
            finally:
                line, self._line = self._line, None
                if line is not None:
                    line.close()
            self._stop.wait(RETRY_S)

    def _is_intact(self) -> bool:
        """Return whether a script has left the thread what it is woken by."""
        return self._wake_read.intact and self._wake_write.intact

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_SEND_TIMEOUT_S)
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        return connection

    def _serve(self, own: OwnSocket) -> None:
        connection, wake = own.sock, self._wake_read.sock
        connection.sendall(encode(self._hello) + b"\n")
        self._sent = 0
        if self.on_connect is not None:
            self.on_connect()
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(wake, select.POLLIN)
        rest = b""
        while not self._stop.is_set():
            self._send_queued(connection)
            ready = {fd for fd, _ in poll.poll()}
            if not (own.intact and self._is_intact()):
                return
            if wake.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
            if connection.fileno() in ready:
                data = connection.recv(65536)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line)
        self._send_queued(connection)

    def _send_queued(self, connection: socket.socket) -> None:
        with self._changed:
            events = [message for message in self._unacked if message.seq > self._sent]
            self._sent = self._seq
        messages: list[FromWorker] = [
            WorkerEvent(m.seq, fit_event(m.event, EVENT_BYTES_MAX) or m.event) for m in events
        ]
        while self._asides:
            messages.append(self._asides.popleft())
        if messages:
            connection.sendall(b"".join(encode(message) + b"\n" for message in messages))
            failpoint("rank/event")

    def _take(self, line: bytes) -> None:
        """Do what `line` says; one that cannot be read is left out, and the next one counts."""
        try:
            message: ToWorker = decode(line, ToWorker)
        except ProtocolError as error:
            if self._refused_at_s + _REFUSED_S <= (now := time.monotonic()):
                self._refused_at_s = now
                say(f"the agent sent what it may not: {error}")
            return
        try:
            self._handle(message)
        except Exception as error:  # What the order asks for; the line outlives it.
            why = "".join(traceback.format_exception_only(error)).strip()
            say(f"{type(message).__name__} could not be carried out: {why}")

    def _handle(self, message: ToWorker) -> None:
        if not isinstance(message, WorkerAck):
            failpoint("rank/order", type(message).__name__)
            if handler := self._handlers.get(type(message)):
                handler(message)
            return
        with self._changed:
            while self._unacked and self._unacked[0].seq <= message.seq:
                self._unacked.popleft()
            self._changed.notify_all()

    def _forget(self) -> None:
        """In a forked child: give back the parent's descriptors, so that its end is seen."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
        if not self._stop.is_set():
            self._stop.set()
            self._close_pair()


def _make_pair() -> tuple[OwnSocket, OwnSocket]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return OwnSocket(ends[0]), OwnSocket(ends[1])


_live: "weakref.WeakSet[Control]" = weakref.WeakSet()


def _forget_all() -> None:
    for control in list(_live):
        control._forget()


os.register_at_fork(after_in_child=_forget_all)
