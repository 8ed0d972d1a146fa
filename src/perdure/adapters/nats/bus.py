"""Messages over NATS: a connection that is kept up for ever.

nats-py's own reconnecting does the work. What it would keep back in its buffer during an outage
is dropped here instead: a heartbeat of ten seconds ago is worth nothing, and whoever needs an
answer repeats the request.
"""

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from perdure.adapters.nats.credentials import find_login
from perdure.model.access import inbox_prefix
from perdure.model.errors import PlatformError, RequestError
from perdure.model.wire import Endpoint

log = logging.getLogger("perdure.nats")

T = TypeVar("T")
_GOODBYE_S = 1.0
_LOST = (nats.errors.Error, OSError, asyncio.TimeoutError)


class NatsBus:
    """`Bus` on a NATS server; made by `connect`."""

    def __init__(self) -> None:
        """Make one that is not connected; `connect` is the way to get one that is."""
        self.client = Client()
        self._lost = asyncio.Event()
        self._refusal = ""
        """The newest permission or login that the server refused."""

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
        client = bus.client
        login = find_login(endpoint)
        if endpoint.user:
            login["inbox_prefix"] = inbox_prefix(endpoint.user)

        async def note(error: Exception) -> None:
            """Errors show at the calls, but for a refusal: nobody waits for that one."""
            text = str(error)
            if "violation" in text.lower() and text != bus._refusal:
                bus._refusal = text
                log.error("refused by the NATS server: %s", text)

        async def lose() -> None:
            bus._lost.set()
            bus._lost = asyncio.Event()

        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    [endpoint.url],
                    name=name or None,
                    tls=_make_tls(endpoint),
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.1,  # type: ignore[arg-type]  # seconds, floats work
                    connect_timeout=2,
                    ping_interval=10,
                    max_outstanding_pings=2,
                    error_cb=note,
                    disconnected_cb=lose,
                    **login,
                )
        except _LOST as error:
            await client.close()
            why = bus._refusal or error or type(error).__name__
            raise PlatformError(
                f"no NATS server at {endpoint.url}: {why}",
                hint="is the job running? With --nats: are the URL and --nats-creds right?",
            ) from error
        return bus

    @property
    def connected(self) -> bool:
        """Whether the server can be reached at this moment."""
        return self.client.is_connected

    @property
    def reconnects(self) -> int:
        """How many times the connection was lost and came back."""
        return int(self.client.stats["reconnects"])

    async def publish(self, subject: str, data: bytes) -> None:
        """Send `data`; dropped while not connected."""
        if self.client.is_connected:
            try:
                await self.client.publish(subject, data)
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

        await self.client.subscribe(subject, cb=receive)
        await self._settle()

    async def serve(
        self,
        subject: str,
        handler: Callable[[bytes, Callable[[bytes], Awaitable[None]]], None],
    ) -> None:
        """Call `handler` with each request and the means to answer it."""

        async def receive(message: Msg) -> None:
            async def reply(data: bytes) -> None:
                if message.reply:
                    await self.publish(message.reply, data)

            handler(message.data, reply)

        await self.client.subscribe(subject, cb=receive)
        await self._settle()

    async def _settle(self) -> None:
        """Wait until the server knows the subscription (a reconnect repeats it anyhow)."""
        try:
            await self.client.flush(timeout=2)
        except _LOST:
            return

    async def close(self) -> None:
        """Disconnect."""
        transport = self.client._transport
        await self.client.close()
        if transport is not None:  # Of TLS the goodbye is still under way.
            with contextlib.suppress(OSError, TimeoutError, ssl.SSLError):
                async with asyncio.timeout(_GOODBYE_S):
                    await transport.wait_closed()  # type: ignore[no-untyped-call]


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
