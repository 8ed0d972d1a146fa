"""Events on their way to the journal: kept, in order, until the controller has them on disk.

One message is under way at a time, and each costs the controller one sync of its disk. So a
message takes along what all sources have to tell, and what ranks say to an agreement waits a
moment for the others of the node, who are asked, and come to the step, at the same time.

What a rank says keeps the rank's own numbers (source `gG-rR-pPID`), so that an agent that dies
between passing an event on and telling the rank so loses nothing and doubles nothing: the rank
repeats it to the next agent, and the controller knows the number.

A message is as large as the server takes it (`max_payload`). What waits is bounded in bytes too:
of metrics that cannot be sent only the count is kept in the end. Facts are never dropped; one that
is larger than any message is cut in its free texts.

Nothing stays at the head for ever. A message that the controller refuses is dropped. Numbers that
never came (of what was dropped here, or by an earlier controller) are declared skipped once the
controller says that it waits for them.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from perdure.failpoints import failpoint
from perdure.model.bus.wire import EventAck, EventBatch, EventMessage
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError, RequestError
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    MetricsLogged,
)
from perdure.model.fitting import EVENT_BYTES_MAX, drop_values, fit_event
from perdure.service.part import wait_event
from perdure.service.ports import Bus

log = logging.getLogger("perdure.agent")

ACK_TIMEOUT_S = 0.5
_RETRY_S = 0.05
_EVENTS_MAX = 32
"""In a message."""
QUEUE_BYTES_MAX = 32 << 20
"""Above it the oldest metrics are dropped, and counted; facts never are."""
SOURCES_KEPT = 1024
"""Sources whose numbers are remembered; of more, those that have nothing queued are forgotten, the
oldest first. The controller knows their numbers, too."""
_ENVELOPE = 1024
"""Bytes of a message beside its batches."""
_BATCH = 512
"""Bytes of a batch beside its events, with the name of its source."""
_COMPANY_S = 0.001
"""How long an answer waits for those of the node's other ranks."""


@dataclass(slots=True)
class _Queued:
    source: str
    seq: int
    event: AnyEvent
    done: Callable[[], None] | None
    size: int = 0
    """Bytes of the event."""
    skipped: int = 0
    """So many numbers before `seq` nobody will ever fill."""

    def replace(self, event: AnyEvent) -> int:
        """Have `event` stand here; return by how many bytes it is larger."""
        before, self.event, self.size = self.size, event, len(encode(event))
        return self.size - before


class Outbox:
    """One queue for all sources, so that the order in which things happened is kept."""

    def __init__(self, bus: Bus | None, subject: str, *, node: int, source: str) -> None:
        """Send to `subject`; the agent's own events carry `source`.

        Events may be put before there is a bus, and `run` needs one.
        """
        self.bus, self._subject, self._node, self._source = bus, subject, node, source
        self._queue: deque[_Queued] = deque()
        self._queued: dict[str, int] = {}
        """Source -> number of its newest event; who was heard last comes last."""
        self._taken: dict[str, int] = {}
        self._bytes = 0
        """The bytes of everything that is queued."""
        self._metrics: deque[_Queued] = deque()
        """What may be dropped, oldest first, or has been sent already."""
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self.company = 1
        """Ranks that answer together."""
        self.on_term: Callable[[int], None] = lambda term: None
        """Hears the term of each controller that has acknowledged something."""

    def put(self, event: AnyEvent, done: Callable[[], None] | None = None) -> None:
        """Queue an event of the agent's own; `done` is called once it is in the journal."""
        self._append(_Queued(self._source, self._queued.get(self._source, 0) + 1, event, done))

    def put_from(self, source: str, seq: int, event: AnyEvent, done: Callable[[], None]) -> None:
        """Queue event `seq` of a rank; one that was queued before is left where it is.

        `done` is called at once where the journal has it already.
        """
        if seq <= self._taken.get(source, 0):
            done()
        elif seq > self._queued.get(source, 0):
            self._append(_Queued(source, seq, event, done))

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything is in the journal; False where it is not after `timeout_s`."""
        return await wait_event(self._empty, timeout_s)

    async def run(self) -> None:
        """Send, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._await_company()
                if not await self._send():
                    await asyncio.sleep(_RETRY_S)
            self._empty.set()

    def _append(self, queued: _Queued) -> None:
        self._queued.pop(queued.source, None)
        self._queued[queued.source] = queued.seq
        self._bytes += queued.replace(queued.event)
        if queued.size > EVENT_BYTES_MAX:
            cut = fit_event(queued.event, EVENT_BYTES_MAX)
            self._bytes += queued.replace(cut or queued.event)
        self._queue.append(queued)
        if isinstance(queued.event, MetricsLogged):
            self._metrics.append(queued)
        while self._bytes > QUEUE_BYTES_MAX and self._metrics:
            self._drop(self._metrics.popleft())
        self._empty.clear()
        self._wake.set()

    def _drop(self, queued: _Queued) -> None:
        """Count the values of metrics that wait, in their place."""
        waits = queued.seq > self._taken.get(queued.source, 0)
        if waits and isinstance(queued.event, MetricsLogged):
            self._bytes += queued.replace(drop_values(queued.event))

    async def _await_company(self) -> None:
        """Give the node's other ranks the time to answer as well, if nothing else is to be told."""
        events = [queued.event for queued in self._queue]
        if not all(isinstance(event, BoundaryAnswered | BoundaryReached) for event in events):
            return
        if len({queued.source for queued in self._queue}) < self.company:
            await asyncio.sleep(_COMPANY_S)

    async def _send(self) -> bool:
        assert self.bus is not None
        batches: list[EventBatch] = []
        sent = self._select(self.bus.payload_max)
        if not sent:
            return True  # Its last event was too large.
        for source, seq, event, skipped in ((q.source, q.seq, q.event, q.skipped) for q in sent):
            last = batches[-1] if batches else None
            follows = last and last.source == source and last.first_seq + len(last.events) == seq
            if last and follows and not skipped:
                events = (*last.events, event)
                batches[-1] = EventBatch(source, last.first_seq, events, last.skipped)
            else:
                batches.append(EventBatch(source, seq, (event,), skipped))
        message = EventMessage(node=self._node, batches=tuple(batches))
        failpoint("outbox/send", self._source)
        try:
            answer = await self.bus.request(self._subject, encode(message), timeout_s=ACK_TIMEOUT_S)
            ack: EventAck = decode(answer, EventAck)
        except RequestError:
            return False  # Nobody there now; the same again.
        except ProtocolError as error:
            log.error("acknowledgement refused: %s", error)
            return False
        failpoint("outbox/sent", self._source)
        if ack.term:
            self.on_term(ack.term)
        if ack.refused:
            log.error("%d events dropped, which the controller refuses: %s", len(sent), ack.refused)
            return self._settle({queued.source: queued.seq for queued in sent})
        return self._settle(ack.seqs)

    def _select(self, bytes_max: int) -> list[_Queued]:
        """Return the next events that fit into a message, the first one cut if it must be.

        If that is not enough, the first one is dropped, and none is returned.
        """
        room = bytes_max - _ENVELOPE
        head = self._queue[0]
        if head.size + _BATCH > room:
            log.error("event %d of %s: %d bytes are cut", head.seq, head.source, head.size)
            cut = fit_event(head.event, room - _BATCH)
            if cut is None:
                log.error("event %d of %s dropped: it is too large", head.seq, head.source)
                self._settle({head.source: head.seq})
                return []
            self._bytes += head.replace(cut)
        sent: list[_Queued] = []
        for queued in itertools.islice(self._queue, _EVENTS_MAX):
            room -= queued.size + _BATCH
            if sent and room < 0:
                break
            sent.append(queued)
        return sent

    def _settle(self, seqs: dict[str, int]) -> bool:
        """Drop what the journal has; False where that is nothing new."""
        for source in self._queued.keys() & seqs.keys():
            self._taken[source] = max(seqs[source], self._taken.get(source, 0))
        progress = False
        while self._queue and self._queue[0].seq <= self._taken.get(self._queue[0].source, 0):
            settled = self._queue.popleft()
            self._bytes -= settled.size
            progress = True
            if settled.done is not None:
                settled.done()
        while self._metrics and self._metrics[0].seq <= self._taken.get(self._metrics[0].source, 0):
            self._metrics.popleft()
        if len(self._queued) > SOURCES_KEPT + len(self._queue):
            self._forget()
        return self._skip_missing(seqs) or progress

    def _forget(self) -> None:
        """Forget sources that have nothing queued, until half as many are left as may be."""
        kept = {queued.source for queued in self._queue} | {self._source}
        idle = [source for source in self._queued if source not in kept]
        for source in idle[: len(self._queued) - SOURCES_KEPT // 2]:
            del self._queued[source]
            self._taken.pop(source, None)

    def _skip_missing(self, seqs: dict[str, int]) -> bool:
        """Declare skipped what the controller waits for before the head; False where it does not.

        Whoever numbers events sends them in order and again from the first that was not taken, so
        what is missing before the head does not come any more: nobody could read it, or an earlier
        controller took it, and it was no fact.
        """
        if not self._queue:
            return False
        head = self._queue[0]
        missing = head.seq - head.skipped - seqs.get(head.source, head.seq) - 1
        if missing <= 0:
            return False
        log.warning("%d events before number %d of %s do not come", missing, head.seq, head.source)
        head.skipped += missing
        return True
