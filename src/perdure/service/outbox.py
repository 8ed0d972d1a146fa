"""Events on their way from a part to the controller: kept until they are in the journal.

They travel in order, one batch at a time. A batch that is not acknowledged is sent again, with
the same numbers, so that the controller takes each event once.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from perdure.model.codec import decode, encode
from perdure.model.errors import PerdureError
from perdure.model.events import AnyEvent
from perdure.model.wire import EventAck, EventMessage
from perdure.service.ports import Bus

_BATCH_MAX = 200
_TIMEOUT_S = 0.5
_PAUSE_S = 0.1


class Outbox:
    """A queue with a sender of its own."""

    def __init__(self, bus: Bus, subject: str, source: str, node: int) -> None:
        """Send as `source`; nothing moves before `run` does."""
        self._bus, self._subject = bus, subject
        self._source, self._node = source, node
        self._queue: deque[tuple[AnyEvent, Callable[[], None] | None]] = deque()
        self._first_seq = 1
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, event: AnyEvent, acknowledged: Callable[[], None] | None = None) -> None:
        """Queue `event`; `acknowledged` is called once the journal has it."""
        self._queue.append((event, acknowledged))
        self._empty.clear()
        self._filled.set()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until everything is in the journal; False after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        return self._empty.is_set()

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._filled.wait()
            batch = [self._queue[i] for i in range(min(len(self._queue), _BATCH_MAX))]
            message = EventMessage(
                self._source, self._node, self._first_seq, tuple(event for event, _ in batch)
            )
            try:
                answer = await self._bus.request(
                    self._subject, encode(message), timeout_s=_TIMEOUT_S
                )
                acked: EventAck = decode(answer, EventAck)
            except PerdureError:
                await asyncio.sleep(_PAUSE_S)
                continue
            while self._queue and self._first_seq <= acked.seq:
                _, acknowledged = self._queue.popleft()
                self._first_seq += 1
                if acknowledged is not None:
                    acknowledged()
            if not self._queue:
                self._filled.clear()
                self._empty.set()
