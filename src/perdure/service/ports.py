"""What the event loops need of the outside, as Protocols.

Two implementations of each hold one contract suite (`tests/contract`): the real one in `adapters`,
and the one in memory (`tests/fakes.py`).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from perdure.model.events import Announced

Reply = Callable[[bytes], Awaitable[None]]
"""Sends the answer to one request; may be called later, or never."""
OnMessage = Callable[[bytes], None]
OnRequest = Callable[[bytes, Reply], None]
OnEach = Callable[[str, bytes, Reply], None]
"""What the `*` of the subject stood for, the message, and the means to answer it, if asked to."""


class Bus(Protocol):
    """Messages between the parts.

    Connections are kept up for ever; what is sent meanwhile is lost, so everything that matters
    is either a request that is repeated or a level.
    """

    @property
    def connected(self) -> bool:
        """Whether the server can be reached at this moment."""

    @property
    def refused(self) -> bool:
        """Whether the connection is lost and a server does not take this login any more."""

    @property
    def reconnects(self) -> int:
        """How many times the connection was lost and came back."""

    @property
    def payload_max(self) -> int:
        """How many bytes a message may have, by the word of the server."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Send `data` to whoever listens. Dropped without an error while not connected."""

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Return the answer of whoever serves `subject`.

        Raises:
            RequestError: no answer in `timeout_s`, or (at once) nobody serves the subject.
        """

    async def subscribe(self, subject: str, handler: OnMessage) -> None:
        """Call `handler` with each message, in the order of each sender."""

    async def serve(self, subject: str, handler: OnRequest) -> None:
        """Call `handler` with each request and the means to answer it."""

    async def serve_each(self, subject: str, handler: OnEach) -> None:
        """Call `handler` with each message whose subject fits `subject`, which ends in `.*`.

        Of several that listen to such a subject each hears everything, and any may answer.
        """

    async def close(self) -> None:
        """Disconnect; nothing is called afterwards."""


STUCK_S = 8.0
"""A server that has refused to write the journal for so long is started anew."""


class JournalStream(Protocol):
    """A durable log of byte strings, numbered from 1 without gaps, with fenced appends."""

    @property
    def bytes_max(self) -> int:
        """How many bytes a message may have now."""

    async def read_all(self, *, first: int = 1) -> list[bytes]:
        """Return every message from number `first` on, oldest first.

        In the place of one that is gone stands an empty one.
        """

    def read(self, *, first: int = 1) -> AsyncIterator[bytes]:
        """Yield the same one after another; some of them at a time are in memory."""

    async def mend(self, messages: list[bytes]) -> int:
        """Have the log hold the lines of `messages` and nothing else; return its last number.

        Where it keeps its numbers, each message has that of its place in the list. None that it
        had is given out again, for anything else.

        Raises:
            PlatformError: it does not hold all of them.
        """

    async def read_last(self) -> bytes | None:
        """Return the newest message; None where there is none."""

    async def append(self, data: bytes, *, expected_last: int, message_id: str) -> int:
        """Return the number of the message, once it is on disk.

        Repeating a call whose answer was lost is harmless: `message_id` is stored once.

        Raises:
            FencedError: the log's last number is not `expected_last`.
            PlatformError: it could not be written, or nobody answered; it may be on disk or not.
        """


class NoticeSource(Protocol):
    """Where a platform says that it takes the machine away."""

    @property
    def name(self) -> str:
        """Which one, in a word."""

    @property
    def pause_s(self) -> float:
        """How long to wait between two looks; 0 where `read` itself waits for news."""

    async def read(self) -> tuple[Announced, ...]:
        """Return all that is announced at the moment.

        Raises:
            PlatformError: it cannot be told.
        """

    async def acknowledge(self, id_: str) -> None:
        """Say that nothing runs here any more, where the platform wants to know.

        Raises:
            PlatformError: it does not take the answer.
        """
