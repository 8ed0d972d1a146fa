"""Messages over NATS: a connection that is kept up for ever.

nats-py's own reconnecting does the work. What it would keep back in its buffer during an outage
is dropped here instead: a heartbeat of ten seconds ago is worth nothing, and whoever needs an
answer repeats the request.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import nats
import nats.errors
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg

from perdure.adapters.nats.credentials import make_login
from perdure.model.bus.access import INBOX, inbox_prefix
from perdure.model.bus.endpoint import Endpoint
from perdure.model.errors import PlatformError, RequestError

log = logging.getLogger("perdure.nats")

T = TypeVar("T")
_GOODBYE_S = 1.0
_ATTEMPT_S = 5.0
_RETRY_S = 0.1
_AGAIN_S = 0.03
"""Until who has swallowed a cancellation gets the next; no multiple of nats-py's own pauses."""
_LOOK_S = 1.0
"""Between two looks at whether nats-py has given up: it does not always say so."""
_LOST = (nats.errors.Error, OSError, asyncio.TimeoutError)


class _Client(Client):
    """nats-py's, but for how it lets a connection go, and whom it shows a password."""

    owner = -1
    """User of the server if it is on loopback; -1: any."""

    async def _process_op_err(self, e: Exception) -> None:
        """Drop a connection that failed: TLS would wait 30 s for a goodbye of who is cut off."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and not (self.is_closed or self.is_reconnecting):
            writer.transport.abort()
        await super()._process_op_err(e)

    async def _connect_to_server(self, server: Srv) -> None:
        """Come back to no server once it is closed.

        A refusal that comes at the instant of the cancellation takes its place (`asyncio.wait_for`
        before Python 3.12), and nats-py would try again for ever.
        """
        if self.is_closed and asyncio.current_task() is self._reconnection_task:
            raise asyncio.CancelledError
        await super()._connect_to_server(server)
        # Before the password is sent: another user may have taken the port of a server that died.
        host, port = server.uri.hostname or "", server.uri.port or 0
        if self.owner >= 0 and _is_foreign(host, port, self.owner):
            assert self._transport is not None
            self._transport.close()  # type: ignore[no-untyped-call]
            raise ConnectionRefusedError(f"port {port} belongs to another user")

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        """Close to the end: nats-py stops half-way where what is left cannot be written.

        That is so whenever a server says goodbye behind a ping: nobody is left to read the answer.
        """
        try:
            await super()._close(status, do_cbs)
        except OSError:
            self._pending, self._pending_data_size = [], 0
            self._status = Client.DISCONNECTED
            await super()._close(status, do_cbs)


def _is_foreign(host: str, port: int, owner: int) -> bool:
    """Return whether another user than `owner` listens at a loopback port, or nobody any more."""
    with contextlib.suppress(OSError):  # No IPv4 address, or no such table.
        packed = [socket.inet_aton(address) for address in (host, "0.0.0.0")]
        wanted = [f"{int.from_bytes(one, sys.byteorder):08X}:{port:04X}" for one in packed]
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        users = [int(row[7]) for row in rows if row[3] == _LISTENS and row[1] in wanted]
        return bool(rows) and users != [owner]
    return False


_LISTENS = "0A"
_NOT_NOW = (9, 10)
"""OpenSSL's codes of a certificate that begins later or has ended: the clocks may differ."""


class UntrustedError(PlatformError):
    """Whoever answers shows a certificate of another authority, or of another address."""


class NatsBus:
    """`Bus` on a NATS server; made by `connect`."""

    def __init__(self) -> None:
        """Make one that is not connected; `connect` is the way to get one that is."""
        self.client: Client = _Client()
        """Another one after the server has sent this one away."""
        self.url = ""
        """Where the server is."""
        self._owner = -1
        self._lost = asyncio.Event()
        self._refusal = ""
        """The newest permission or login that the server refused."""
        self._error: Exception | None = None
        """The newest that nats-py has met."""
        self._turned_away = False
        """The login was refused since the connection was lost."""
        self._options: dict[str, Any] = {}
        self._subscriptions: list[tuple[str, Callable[[Msg], Awaitable[None]]]] = []
        self._reconnects = 0
        """How often the connections of earlier clients came back."""
        self._sent_away = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, endpoint: Endpoint, *, name: str = "", timeout_s: float | None = None
    ) -> "NatsBus":
        """Return a connection, waiting for the server for ever, or for `timeout_s`.

        A server that refuses the credentials is asked again like one that is not there: it may be
        about to be given them.

        Raises:
            PlatformError: not connected after `timeout_s`; or the credentials cannot be read.
        """
        bus = cls()
        bus.url, bus._owner = endpoint.url, endpoint.owner
        login = make_login(endpoint)
        if endpoint.user:
            login["inbox_prefix"] = inbox_prefix(endpoint.user)
        bus._options = {
            "servers": [endpoint.url],
            "dont_randomize": True,
            "name": name or None,
            "tls": _make_tls(endpoint),
            "allow_reconnect": True,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": 0.1,  # Its type says int; fractions work.
            "connect_timeout": 2,
            "ping_interval": 10,
            "max_outstanding_pings": 2,
            "error_cb": bus._note_error,
            "disconnected_cb": bus._lose,
            "closed_cb": bus._note_closed,
            **login,
        }
        try:
            async with asyncio.timeout(timeout_s):
                bus.client = await bus._open()
        except TimeoutError as error:
            raise bus._explain() from error
        bus._keeping = asyncio.create_task(bus._keep())
        return bus

    async def _open(self) -> Client:
        """Return a client that is connected, however long that takes.

        One that was refused is not asked a second time: nats-py may take it for closed by then.
        """
        while True:
            client = _Client()
            client.owner = self._owner
            try:
                await _give(_ATTEMPT_S, client.connect(**self._options))
            except Exception as error:  # Also of a file that is just being written.
                await self._note_error(error)
            finally:
                if not client.is_connected:
                    await _close(client)
            if client.is_connected:
                return client
            await asyncio.sleep(_RETRY_S)

    async def _note_error(self, error: Exception) -> None:
        """Errors show at the calls, but for a refusal: nobody waits for that one."""
        text = str(error).removeprefix("nats: ").strip("'")
        if text or self._error is None:
            self._error = error
        self._turned_away |= "authorization violation" in text.lower()
        if "violation" in text.lower() and text != self._refusal:
            self._refusal = text
            log.error("refused by the NATS server: %s", text)

    async def _lose(self) -> None:
        self._turned_away = False
        self._lost.set()
        self._lost = asyncio.Event()

    async def _note_closed(self) -> None:
        self._sent_away.set()

    async def _keep(self) -> None:
        """Begin anew wherever nats-py gives up: a server has sent it away.

        That happens when credentials expire or are revoked; a file of them is read anew. It is
        looked at again each time, since the next server may do the same at once.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._sent_away.wait()
            self._sent_away.clear()
            if self.client.is_closed:
                log.error("sent away by the NATS server (%s); connecting again", self._error)
                before, self.client = self.reconnects, await self._begin_anew()
                self._reconnects = before + 1

    async def _begin_anew(self) -> Client:
        """Return another client, which hears what the one before did."""
        while True:
            client = await self._open()
            try:
                for subject, receive in self._subscriptions:
                    await client.subscribe(subject, cb=receive)
                return client
            except _LOST as error:
                await self._note_error(error)
                await _close(client)
                await asyncio.sleep(_RETRY_S)
            except asyncio.CancelledError:
                await _close(client)
                raise

    def _explain(self) -> PlatformError:
        """Return why there is no connection, and what to do about it."""
        cause, url = self._error, self.url
        if self._refusal:
            return PlatformError(
                f"the NATS server at {url} refuses the credentials: {self._refusal}",
                hint="with --nats: is --nats-creds of this server's account, and not expired?",
            )
        if isinstance(cause, ssl.SSLError):
            why = getattr(cause, "verify_message", "") or cause.reason or cause
            code = getattr(cause, "verify_code", None)
            final = code is not None and code not in _NOT_NOW
            return (UntrustedError if final else PlatformError)(
                f"no safe connection to the NATS server at {url}: {why}",
                hint="--nats-tls-ca FILE: the authority that has signed its certificate",
            )
        why = str(cause or "") or "no answer"
        if isinstance(cause, OSError) and cause.errno:
            why = os.strerror(cause.errno) if cause.errno > 0 else cause.strerror
        return PlatformError(
            f"no NATS server at {url}: {why}",
            hint="is the job running? With --nats: is the URL right?",
        )

    @property
    def connected(self) -> bool:
        """Whether the server can be reached at this moment."""
        return self.client.is_connected

    @property
    def refused(self) -> bool:
        """Whether the connection is lost and a server does not take this login any more."""
        return self._turned_away and not self.connected

    @property
    def reconnects(self) -> int:
        """How many times the connection was lost and came back."""
        return self._reconnects + int(self.client.stats["reconnects"])

    @property
    def payload_max(self) -> int:
        """How many bytes a message may have, by the word of the server."""
        return int(self.client.max_payload)

    async def publish(self, subject: str, data: bytes) -> None:
        """Send `data`; dropped while not connected."""
        if self.client.is_connected:
            try:
                await self.client.publish(subject, data)
            except nats.errors.MaxPayloadError:
                log.error("%d bytes for %s are too many for the server", len(data), subject)
            except _LOST:
                return

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Return the answer."""
        try:
            message = await self.unless_lost(self.client.request(subject, data, timeout=timeout_s))
        except nats.errors.NoRespondersError:
            raise RequestError(f"nobody serves {subject}") from None
        except _LOST as error:
            raise RequestError(f"no answer on {subject} in {timeout_s:g} s") from error
        return bytes(message.data)

    async def unless_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what `call` returns; what waits for an answer need not sit out its time-out.

        Raises:
            RequestError: there is no connection, or it was lost meanwhile.
        """
        if not self.client.is_connected:
            call.close()
            raise RequestError("the NATS server cannot be reached")
        task = asyncio.ensure_future(call)
        task.add_done_callback(_take_note)
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            if not task.done():
                task.cancel()
        if task.cancelled() or not task.done():
            raise RequestError("the connection to the NATS server was lost")
        return task.result()

    async def subscribe(self, subject: str, handler: Callable[[bytes], None]) -> None:
        """Call `handler` with each message."""

        async def receive(message: Msg) -> None:
            handler(message.data)

        await self._listen(subject, receive)

    async def serve(
        self,
        subject: str,
        handler: Callable[[bytes, Callable[[bytes], Awaitable[None]]], None],
    ) -> None:
        """Call `handler` with each request and the means to answer it."""
        await self.serve_each(subject, lambda _, data, reply: handler(data, reply))

    async def serve_each(
        self,
        subject: str,
        handler: Callable[[str, bytes, Callable[[bytes], Awaitable[None]]], None],
    ) -> None:
        """Call `handler` with what the last part of each message's subject is, and the message.

        The sender names the subject of the answer. If that is no inbox, nothing is answered: this
        login may publish where the sender may not.
        """

        async def receive(message: Msg) -> None:
            async def reply(data: bytes) -> None:
                if message.reply.startswith(INBOX):
                    await self.publish(message.reply, data)

            handler(message.subject.rpartition(".")[2], message.data, reply)

        await self._listen(subject, receive)

    async def _listen(self, subject: str, receive: Callable[[Msg], Awaitable[None]]) -> None:
        """Wait until the server knows the subscription; the next client has it anyhow."""

        async def take(message: Msg) -> None:
            try:
                await receive(message)
            except Exception:  # Ours; the library would keep it to itself.
                log.exception("a message on %s could not be taken", message.subject)

        self._subscriptions.append((subject, take))
        with contextlib.suppress(*_LOST):
            await self.client.subscribe(subject, cb=take)
            for _ in range(2):  # nats-py's ping overtakes what it has yet to write: the second not.
                await self.client.flush(timeout=2)

    async def close(self) -> None:
        """Disconnect."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        transport = self.client._transport
        await _close(self.client)
        if transport is not None:  # Of TLS the goodbye is still under way.
            with contextlib.suppress(OSError, TimeoutError, ssl.SSLError):
                async with asyncio.timeout(_GOODBYE_S):
                    await transport.wait_closed()  # type: ignore[no-untyped-call]


async def _close(client: Client) -> None:
    """Close `client`, whatever state it is in."""
    with contextlib.suppress(*_LOST, ssl.SSLError):
        await _give(_GOODBYE_S, client.close())


async def _give(seconds: float, doing: Coroutine[Any, Any, None]) -> None:
    """Await what nats-py does, so long at most.

    It swallows a cancellation that comes while it says goodbye, and goes on: so that happens in a
    task of its own, which is cancelled until it has ended.

    Raises:
        TimeoutError: it has not ended by itself.
    """
    task = asyncio.create_task(doing)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_AGAIN_S)
    if task.cancelled():
        raise TimeoutError
    task.result()


def _make_tls(endpoint: Endpoint) -> ssl.SSLContext | None:
    """Return how to check the server, and what to show it; None where it speaks no TLS.

    Raises:
        PlatformError: a certificate cannot be read.
    """
    if not (endpoint.url.startswith("tls:") or endpoint.ca or endpoint.tls_cert):
        return None
    # A connection that the server closes; asyncio warns of what nats-py's reader returns then.
    logging.getLogger("asyncio").addFilter(_is_no_eof_warning)
    try:
        context = ssl.create_default_context(cadata=endpoint.ca or None)
        if endpoint.tls_cert:
            context.load_cert_chain(endpoint.tls_cert, endpoint.tls_key or None)
    except (OSError, ValueError) as error:
        name = os.path.basename(endpoint.tls_cert) or "the authority's"
        raise PlatformError(f"cannot use the certificate {name}: {error}") from error
    return context


def _is_no_eof_warning(record: logging.LogRecord) -> bool:
    return "eof_received" not in record.getMessage()


def _take_note(task: "asyncio.Future[Any]") -> None:
    """Look at how `task` ended, whether or not its caller still waits for it.

    A caller that is cancelled (at the job's end), or that has seen the connection go, leaves a
    request behind that may yet fail; asyncio would print that as never retrieved.
    """
    if not task.cancelled():
        task.exception()
