"""The journal's stream in JetStream: fenced appends, and reading it all at once.

`Nats-Expected-Last-Sequence` makes an append conditional: of two writers one is told so at once.
`Nats-Msg-Id` makes the repetition of an append whose answer was lost harmless for two minutes;
after that the newest message's id is looked at, so it is harmless for ever.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamConfig

from perdure.adapters.nats.bus import NatsBus
from perdure.failpoints import failpoint
from perdure.model.bus.wire import stream_journal, subject_journal
from perdure.model.chain import split_lines
from perdure.model.errors import FencedError, PlatformError

WRONG_LAST_SEQUENCE = (10071, 10164)
_ID = "Nats-Msg-Id"
_LAST = "Nats-Expected-Last-Sequence"
LOST = (nats.errors.Error, nats.js.errors.Error, OSError, asyncio.TimeoutError)
_BATCH = 500
_BATCH_BYTES = 8 << 20
_DIRECT_S = 0.5
"""Between two messages of one batch from one replica."""
_MISSED_MAX = 10
_PAUSE_S = 0.2
_MEND_BYTES = 500_000
"""Of a message of a journal that is made anew."""
_HEADERS = 512
"""Bytes of an append's headers, at the most: they count as payload."""


class NatsStream:
    """`JournalStream` on JetStream; made by `open`."""

    def __init__(self, bus: NatsBus, job: str) -> None:
        """Use `bus`; the stream must exist."""
        self._bus = bus
        self._name, self._subject = stream_journal(job), subject_journal(job)

    @property
    def bytes_max(self) -> int:
        """How many bytes a message may have now, beside its headers."""
        return self._bus.payload_max - _HEADERS

    @property
    def _js(self) -> JetStreamContext:
        return self._bus.client.jetstream(timeout=5)

    @classmethod
    async def open(cls, bus: NatsBus, job: str) -> "NatsStream":
        """Return the job's stream, made where it is not there yet.

        Raises:
            PlatformError: JetStream does not answer or refuses.
        """
        stream = cls(bus, job)
        try:
            await stream._bus.unless_lost(stream._js.add_stream(stream._configure()))
        except nats.js.errors.ServiceUnavailableError as error:
            raise PlatformError(
                f"no journal can be kept at {bus.url}: JetStream is not there for this account",
                hint="it has to be on, in the server and for the account (docs/nats.md)",
            ) from error
        except nats.js.errors.BadRequestError as error:
            if error.err_code != 10058:  # it is there, with other settings: somebody's choice
                raise PlatformError(f"cannot make the journal: {error}") from error
        except LOST as error:
            raise PlatformError(f"cannot open the journal: {error!r}") from error
        return stream

    def _configure(self, first: int | None = None, replicas: int = 1) -> StreamConfig:
        return StreamConfig(
            name=self._name,
            subjects=[self._subject],
            storage=StorageType.FILE,
            retention=RetentionPolicy.LIMITS,
            duplicate_window=120,
            num_replicas=replicas,
            allow_direct=True,
            first_seq=first,
        )

    async def read_last(self) -> bytes | None:
        """Return the newest message; None where there is none.

        Raises:
            PlatformError: JetStream does not answer.
        """
        try:
            last = await self._bus.unless_lost(self._js.get_last_msg(self._name, self._subject))
        except nats.js.errors.NotFoundError:
            return None
        except LOST as error:
            raise PlatformError(f"cannot read the journal: {error!r}") from error
        return last.data

    async def read_all(self, *, first: int = 1) -> list[bytes]:
        """Return every message from number `first` on, as `read` yields them.

        Raises:
            PlatformError: as there.
        """
        return [message async for message in self.read(first=first)]

    async def read(self, *, first: int = 1) -> AsyncIterator[bytes]:
        """Yield every message from number `first` on, oldest first; none before it is made.

        In the place of one that is gone stands an empty one.

        Raises:
            PlatformError: JetStream does not answer, or what it answers does not arrive.
        """
        try:
            oldest, last = await self._read_numbers()
            number = first
            while number <= last:
                found, until = await self._read_some(max(number, oldest), last)
                for each in range(number, until + 1):
                    yield found.get(each, b"")
                number = until + 1
        except LOST as error:
            raise PlatformError(f"cannot read the journal: {error!r}") from error

    async def _read_numbers(self) -> tuple[int, int]:
        """Return the oldest and the newest number; 0 where no controller has made the journal."""
        try:
            found = await self._bus.unless_lost(self._js.stream_info(self._name))
        except nats.js.errors.NotFoundError:
            return 0, 0
        return int(found.state.first_seq), int(found.state.last_seq)

    async def _read_some(self, first: int, last: int) -> tuple[dict[int, bytes], int]:
        """Return the next of messages `first` to `last`, and the number to which they go.

        Without a consumer: where the last message is gone, a consumer waits for it, and the server
        with it.
        """
        missed = 0
        while first <= last:
            answer = await self._bus.unless_lost(self._ask(first, last))
            if answer.messages:
                until = min(answer.newest, last)
                return answer.messages, until
            if answer.ended:
                break
            missed += 1
            if missed > _MISSED_MAX:
                raise PlatformError(
                    f"the journal's message {first} is not to be had",
                    hint="does its stream allow direct gets (allow_direct)?",
                )
            await asyncio.sleep(_PAUSE_S)
        return {}, last

    async def _ask(self, first: int, last: int) -> "_Answer":
        """Return what a server sends of messages `first` to `last` when asked once."""
        client, answer = self._bus.client, _Answer(last)
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox, cb=answer.take)
        question = {
            "seq": first,
            "next_by_subj": self._subject,  # Else some take one that is gone for the end.
            "batch": min(_BATCH, last - first + 1),
            "max_bytes": _BATCH_BYTES,  # nats-py drops what comes faster than it is taken.
        }
        await client.publish(
            f"$JS.API.DIRECT.GET.{self._name}", json.dumps(question).encode(), reply=inbox
        )
        with contextlib.suppress(TimeoutError):
            while not answer.over:
                await asyncio.wait_for(answer.news.wait(), _DIRECT_S)
                answer.news.clear()
        await subscription.unsubscribe()
        return answer

    async def mend(self, messages: list[bytes]) -> int:
        """Have the stream hold `messages` and nothing else; return the last number.

        It is made anew: what JetStream has behind a damaged message it drops once it is killed. The
        numbers it had are not given out again, so that nobody's late append fits.

        Raises:
            PlatformError: it does not hold all of them.
        """
        _, last = await self._read_numbers()
        try:
            replicas = (await self._js.stream_info(self._name)).config.num_replicas or 1
            await self._js.delete_stream(self._name)
            await self._make_anew(self._configure(last + 1, replicas))
        except LOST as error:
            raise PlatformError(f"cannot make the journal anew: {error!r}") from error
        size = min(_MEND_BYTES, self.bytes_max)
        for number, data in enumerate(split_lines(b"".join(messages), size), last):
            id_ = f"mended-{number}"
            last = await self.append(data, expected_last=number, message_id=id_)
        return last

    async def _make_anew(self, config: StreamConfig) -> None:
        """Make the stream that was just deleted, whose files nats-server may still remove."""
        for left in reversed(range(_MISSED_MAX)):
            try:
                await self._bus.unless_lost(self._js.add_stream(config))
            except nats.js.errors.ServerError:
                if not left:
                    raise
                await asyncio.sleep(_PAUSE_S)
            else:
                return

    async def append(self, data: bytes, *, expected_last: int, message_id: str) -> int:
        """Return the number of the message once it is on disk."""
        headers = {_LAST: str(expected_last), _ID: message_id}
        try:
            failpoint("stream/append")
            ack = await self._bus.unless_lost(
                self._js.publish(self._subject, data, stream=self._name, headers=headers)
            )
            failpoint("stream/appended")
        except nats.js.errors.APIError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                return await self._confirm_own(message_id, expected_last)
            raise PlatformError(f"cannot append to the journal: {error}") from error
        except LOST as error:
            raise PlatformError(f"cannot append to the journal: {error!r}") from error
        return int(ack.seq)

    async def _confirm_own(self, message_id: str, expected_last: int) -> int:
        """Return the newest message's number if it is ours after all."""
        try:
            last = await self._bus.unless_lost(self._js.get_last_msg(self._name, self._subject))
        except LOST as error:
            raise PlatformError(f"cannot read the journal: {error!r}") from error
        if (last.headers or {}).get(_ID) == message_id and last.seq is not None:
            return int(last.seq)
        raise FencedError(
            f"another controller writes this journal: it ends at {last.seq}, not {expected_last}",
            hint="only one controller a job; this one leaves",
        )

    async def delete(self) -> None:
        """Remove the stream and all that is in it (an earlier run's, on a user's own server)."""
        try:
            await self._js.delete_stream(self._name)
        except nats.js.errors.NotFoundError:
            return
        except LOST as error:
            raise PlatformError(f"cannot remove the old journal: {error!r}") from error


class _Answer:
    """What comes of a server's answer: messages, each with the number of the one sent before it.

    So one that was lost on the way is told from one that the server has not got, and what follows
    the former is not believed: it is asked for again. Nothing but the server's word that it has no
    more (404) is an end: 503, for example, says that nobody keeps the journal at this moment.
    """

    def __init__(self, last: int) -> None:
        """Take messages up to number `last`."""
        self._last = last
        self.messages: dict[int, bytes] = {}
        """By number."""
        self.newest = 0
        """The newest one's number."""
        self.over = self.ended = False
        """Nothing comes any more; and the server has nothing that follows."""
        self.news = asyncio.Event()

    async def take(self, message: Msg) -> None:
        """Take what has come."""
        if self.over:
            return
        headers = message.headers or {}
        number, before = int(headers.get("Nats-Sequence", 0)), headers.get("Nats-Last-Sequence")
        lost = before is not None and int(before) != self.newest
        if number and not lost:
            self.messages[number] = message.data
            self.newest = number
        alone = before is None  # Servers before 2.11 answer with one message, or it is no message.
        self.over = lost or alone or not number or number >= self._last
        self.ended = headers.get("Status") == "404"
        self.news.set()
