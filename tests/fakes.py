"""The ports of the event loops (`perdure.service.ports`) in memory.

Each holds the contract suite that the real one holds (`tests/contract`).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from perdure.model.errors import FencedError, PlatformError, RequestError
from perdure.model.events import Announced, AnyEvent, Decision, JournalEntry
from perdure.service.controller.journal import Journal
from perdure.service.ports import OnEach, OnMessage, OnRequest


@dataclass(slots=True)
class FakeServer:
    """What several `FakeBus` are connected to; `down` plays an outage."""

    down: bool = False
    refuses: bool = False
    """While it is down another one is there, which takes nobody's login."""
    payload_max: int = 8 << 20
    listeners: dict[str, list[tuple["FakeBus", OnMessage]]] = field(default_factory=dict)
    servers: dict[str, tuple["FakeBus", OnRequest]] = field(default_factory=dict)
    patterns: dict[str, list[tuple["FakeBus", OnEach]]] = field(default_factory=dict)
    """By what comes before the `*`."""


class FakeBus:
    """`Bus` in memory."""

    def __init__(self, server: FakeServer | None = None) -> None:
        """Connect to `server`, or to one of its own."""
        self.server = server or FakeServer()
        self.reconnects = 0
        self.published: list[tuple[str, bytes]] = []
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether the server is up."""
        return not (self.server.down or self._closed)

    @property
    def refused(self) -> bool:
        """Whether another server is there."""
        return self.server.down and self.server.refuses

    @property
    def payload_max(self) -> int:
        """What the server says."""
        return self.server.payload_max

    async def publish(self, subject: str, data: bytes) -> None:
        """Send to every listener on the next turn of the loop."""
        if not self.connected or len(data) > self.payload_max:
            return
        self.published.append((subject, data))
        loop = asyncio.get_running_loop()
        for bus, handler in self.server.listeners.get(subject, ()):
            loop.call_soon(bus._deliver, handler, data)
        for bus, each in self._find_patterns(subject):

            def take(data: bytes, each: OnEach = each) -> None:
                each(subject.rpartition(".")[2], data, _say_nothing)

            loop.call_soon(bus._deliver, take, data)

    def _deliver(self, handler: OnMessage, data: bytes) -> None:
        if not self._closed:
            handler(data)

    def _find_patterns(self, subject: str) -> list[tuple["FakeBus", OnEach]]:
        found = self.server.patterns.get(subject.rpartition(".")[0], [])
        return [(bus, each) for bus, each in found if not bus._closed]

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Hand it to the one that serves the subject, and wait."""
        entry, patterns = self.server.servers.get(subject), self._find_patterns(subject)
        if not self.connected or not (patterns or (entry and not entry[0]._closed)):
            raise RequestError(f"nobody serves {subject}")
        if len(data) > self.payload_max:
            raise RequestError("nats: maximum payload exceeded")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def reply(data: bytes) -> None:
            if not answer.done():
                answer.set_result(data)

        if entry is not None:
            entry[1](data, reply)
        for _, each in patterns:
            each(subject.rpartition(".")[2], data, reply)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise RequestError(f"no answer on {subject} in {timeout_s:g} s") from None

    async def subscribe(self, subject: str, handler: OnMessage) -> None:
        """Listen."""
        self.server.listeners.setdefault(subject, []).append((self, handler))

    async def serve(self, subject: str, handler: OnRequest) -> None:
        """Serve; the last one to call it wins."""
        self.server.servers[subject] = (self, handler)

    async def serve_each(self, subject: str, handler: OnEach) -> None:
        """Listen to all that the pattern fits."""
        self.server.patterns.setdefault(subject.removesuffix(".*"), []).append((self, handler))

    async def close(self) -> None:
        """Disconnect."""
        self._closed = True
        for listeners in self.server.listeners.values():
            listeners[:] = [pair for pair in listeners if pair[0] is not self]
        for subject in [s for s, (bus, _) in self.server.servers.items() if bus is self]:
            del self.server.servers[subject]


async def _say_nothing(_: bytes) -> None:
    """Nobody awaits an answer."""


class FakeStream:
    """`JournalStream` in memory. `failures` plays errors: each is raised once, in order."""

    def __init__(self, messages: Sequence[bytes] = ()) -> None:
        """Start with `messages`."""
        self.messages = list(messages)
        self.bytes_max = 8 << 20
        self.ids: dict[str, int] = {}
        self.failures: list[tuple[PlatformError, bool]] = []
        """(error, whether the message is stored all the same: the answer was lost)."""

    async def read_all(self, *, first: int = 1) -> list[bytes]:
        """Return a copy."""
        return [message async for message in self.read(first=first)]

    async def read(self, *, first: int = 1) -> AsyncIterator[bytes]:
        """Yield each message."""
        for message in self.messages[first - 1 :]:
            yield message

    async def mend(self, messages: list[bytes]) -> int:
        """Hold `messages` instead."""
        self.messages[:] = messages
        return len(messages)

    async def read_last(self) -> bytes | None:
        """Return the newest one."""
        return self.messages[-1] if self.messages else None

    async def append(self, data: bytes, *, expected_last: int, message_id: str) -> int:
        """Append, or fail as told."""
        await asyncio.sleep(0)
        if len(data) > self.bytes_max:
            raise PlatformError("cannot append to the journal: maximum payload exceeded")
        failure, stored = self.failures.pop(0) if self.failures else (None, True)
        number = self.ids.get(message_id, 0)
        if stored and not number:
            if expected_last != len(self.messages):
                raise FencedError(
                    f"another controller writes this journal: it ends at {len(self.messages)}, "
                    f"not {expected_last}"
                )
            self.messages.append(data)
            number = self.ids[message_id] = len(self.messages)
        if failure is not None:
            raise failure
        return number


class FakeNotices:
    """`NoticeSource` in memory: `levels` are returned one after another, the last one for ever."""

    name, pause_s = "fake", 0.0

    def __init__(self, *levels: tuple[Announced, ...] | PlatformError) -> None:
        """Begin with the first level."""
        self.levels = list(levels)
        self.acknowledged: list[str] = []

    async def read(self) -> tuple[Announced, ...]:
        """Return the next level, or raise it."""
        await asyncio.sleep(0)
        level = self.levels.pop(0) if len(self.levels) > 1 else self.levels[0]
        if isinstance(level, PlatformError):
            raise level
        return level

    async def acknowledge(self, id_: str) -> None:
        """Note it."""
        self.acknowledged.append(id_)


def number_entries(
    journal: Journal, bodies: Sequence[AnyEvent | Decision], *, at_s: float
) -> list[JournalEntry]:
    """Return `bodies` as the next entries of `journal`; they count once they were appended."""
    first = journal.last_seq + 1
    return [JournalEntry(seq=n, at_s=at_s, body=body) for n, body in enumerate(bodies, first)]
