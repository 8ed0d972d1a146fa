"""The journal's stream in JetStream: fenced appends, and reading it all at once.

`Nats-Expected-Last-Sequence` makes an append conditional: of two writers one is told so at once.
`Nats-Msg-Id` makes the repetition of an append whose answer was lost harmless for two minutes;
after that the newest message's id is looked at, so it is harmless for ever.
"""

import asyncio
import contextlib
import json

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from perdure.adapters.nats.bus import NatsBus
from perdure.failpoints import failpoint
from perdure.model.bus.wire import stream_journal, subject_journal
from perdure.model.errors import FencedError, PlatformError

WRONG_LAST_SEQUENCE = (10071, 10164)
_ID = "Nats-Msg-Id"
_LAST = "Nats-Expected-Last-Sequence"
LOST = (nats.errors.Error, nats.js.errors.Error, OSError, asyncio.TimeoutError)
_BATCH = 500
_DIRECT_S = 0.5
"""For one batch from one replica."""
_MISSED_MAX = 10
_HEADERS = 512
"""Bytes of an append's headers, at the most: they count as payload."""


class NatsStream:
    """`JournalStream` on JetStream; made by `open`."""

    def __init__(self, bus: NatsBus, job: str, *, direct: bool = False) -> None:
        """Use `bus`; the stream must exist.

        With `direct` it is read without a consumer: to make one, a cluster needs more of itself
        than to append does, and just after the loss of a server it has not got that.
        """
        self._bus, self._direct = bus, direct
        self._name, self._subject = stream_journal(job), subject_journal(job)

    @property
    def bytes_max(self) -> int:
        """How many bytes a message may have now, beside its headers."""
        return self._bus.payload_max - _HEADERS

    @property
    def _js(self) -> JetStreamContext:
        return self._bus.client.jetstream(timeout=1 if self._direct else 5)

    @classmethod
    async def open(cls, bus: NatsBus, job: str, *, replicas: int = 1) -> "NatsStream":
        """Return the job's stream, made with so many `replicas` where it is not there yet.

        Raises:
            PlatformError: JetStream does not answer or refuses.
        """
        stream = cls(bus, job, direct=replicas > 1)
        config = StreamConfig(
            name=stream._name,
            subjects=[stream._subject],
            storage=StorageType.FILE,
            retention=RetentionPolicy.LIMITS,
            duplicate_window=120,
            num_replicas=replicas,
            allow_direct=True,
        )
        try:
            await stream._bus.unless_lost(stream._js.add_stream(config))
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

    async def read_leader(self) -> str:
        """Return the name of the server that writes the journal; empty where nobody says so."""
        try:
            info = await self._bus.unless_lost(self._js.stream_info(self._name))
        except LOST:
            return ""
        return (info.cluster.leader if info.cluster is not None else None) or ""

    async def read_all(self, *, first: int = 1) -> list[bytes]:
        """Return every message from number `first` on, oldest first; none before it is made.

        Raises:
            PlatformError: JetStream does not answer.
        """
        try:
            last = await self._read_newest_number()
            if last < first:
                return []
            if self._direct:
                return await self._read_direct(first, last)
            pull = await self._js.pull_subscribe(
                self._subject,
                stream=self._name,
                config=ConsumerConfig(
                    ack_policy=AckPolicy.NONE,
                    deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                    opt_start_seq=first,
                    mem_storage=True,
                    inactive_threshold=10,
                ),
            )
            messages: list[bytes] = []
            number = first - 1
            while number < last:
                for message in await pull.fetch(min(_BATCH, last - number), timeout=5):
                    number = message.metadata.sequence.stream
                    messages.append(message.data)
            await pull.unsubscribe()
        except LOST as error:
            raise PlatformError(f"cannot read the journal: {error!r}") from error
        return messages

    async def _read_newest_number(self) -> int:
        """Return the newest message's number; 0 too where no controller has made the journal."""
        try:
            found = await self._bus.unless_lost(self._js.stream_info(self._name))
        except nats.js.errors.NotFoundError:
            return 0
        return int(found.state.last_seq)

    async def _read_direct(self, first: int, last: int) -> list[bytes]:
        """Return messages `first` to `last`, from whichever replica answers."""
        messages: list[bytes] = []
        missed = 0
        while len(messages) <= last - first:
            batch = await self._bus.unless_lost(self._fetch_direct(first + len(messages), last))
            messages += batch
            missed = 0 if batch else missed + 1
            if missed > _MISSED_MAX:
                raise PlatformError(f"the journal's entry {first + len(messages)} is not to be had")
        return messages

    async def _fetch_direct(self, first: int, last: int) -> list[bytes]:
        client = self._bus.client
        messages: list[bytes] = []
        done = asyncio.Event()

        async def take(message: Msg) -> None:
            number = int((message.headers or {}).get("Nats-Sequence", 0))
            if number == first + len(messages) <= last:
                messages.append(message.data)
            if not number or number >= last:  # A status: the batch is over, or there is none.
                done.set()

        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox, cb=take)
        question = {"seq": first, "batch": min(_BATCH, last - first + 1)}
        await client.publish(
            f"$JS.API.DIRECT.GET.{self._name}", json.dumps(question).encode(), reply=inbox
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), _DIRECT_S)
        await subscription.unsubscribe()
        return messages

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
