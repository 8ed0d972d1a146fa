"""`POST /notify`: an outside monitor's word over HTTP, for those that speak nothing else.

    curl -H "Authorization: Bearer $(cat TOKEN)" -d '{"kind":"device-failed","device":"GPU-1"}' URL

A `Notice` as JSON in, a `CommandReply` as JSON out, one request a connection; everything is bounded
in size and in time. Who does not know the token learns nothing but that. The answer is the
controller's, so 200 means that the notice is in the journal.
"""

import asyncio
import contextlib
import hmac
import logging
import ssl
from http import HTTPStatus

import h11

from perdure.adapters.listener import Listener
from perdure.model.bus.wire import CommandReply
from perdure.model.codec import decode, encode
from perdure.service.controller.inbox import Inbox

log = logging.getLogger("perdure.webhook")

HEAD_BYTES_MAX = 8192
BODY_BYTES_MAX = 16_384
OPEN_MAX = 32
"""Connections that have shown the token; more get 503."""
READ_S = 5.0
ANSWER_S = 10.0
_READ_BYTES = 512
"""So much a head may be larger than HEAD_BYTES_MAX: it is measured only while it is incomplete."""
_BIND_AGAIN_S = 1.0


class Refusal(Exception):
    """An HTTP status instead of an answer."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        """Refuse with `status`, saying why."""
        super().__init__(reason)
        self.status, self.reason = status, reason


class Webhook:
    """One listening socket; what it takes goes into `inbox`."""

    def __init__(
        self, inbox: Inbox, host: str, port: int, token: str, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """Prepare; `run` serves."""
        self._inbox, self._token, self._tls = inbox, token, tls
        self._host, self.port = host, port
        self._known: set[asyncio.StreamWriter] = set()
        """Connections that have shown the token."""

    async def run(self) -> None:
        """Serve until cancelled; a port in use is waited for."""
        said = False
        while True:
            try:
                self._listener = Listener(self._host, self.port)
                break
            except OSError as error:
                if not said:
                    log.error("webhook on %s:%d: %s; trying again", self._host, self.port, error)
                said = True
                await asyncio.sleep(_BIND_AGAIN_S)
        self.port = self._listener.getsockname()[1]
        server = await asyncio.start_server(
            self._serve, sock=self._listener, backlog=self._listener.backlog,
            limit=HEAD_BYTES_MAX, ssl=self._tls,
            ssl_handshake_timeout=READ_S if self._tls else None,
        )  # fmt: skip
        log.info("webhook on %s:%d", self._host, self.port)
        async with server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        try:
            async with asyncio.timeout(READ_S):
                body = await self._read(http, reader, writer)
            status, data = await self._ask(body)
        except Refusal as refusal:
            log.warning("refused: %s", refusal.reason)
            status = refusal.status
            data = encode(CommandReply(id="", ok=False, reason=refusal.reason))
        except (TimeoutError, OSError, EOFError):
            status, data = HTTPStatus.REQUEST_TIMEOUT, b"{}"
        finally:
            self._known.discard(writer)
        with contextlib.suppress(h11.ProtocolError):  # To who has gone nothing can be said.
            writer.write(_render(http, status, data))
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(READ_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        writer.transport.abort()  # Of who does not read its answer.

    async def _read(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        """Return the body of an authorized request.

        Raises:
            Refusal: it is none.
            EOFError: the caller has gone in the middle of it.
        """
        body = b""
        while True:
            try:
                event = http.next_event()
            except h11.RemoteProtocolError as error:
                status = HTTPStatus(error.error_status_hint)
                raise Refusal(status, f"not a request: {error}") from None
            match event:
                case h11.NEED_DATA:
                    http.receive_data(await reader.read(_READ_BYTES))
                case h11.Request():
                    self._check(event)
                    self._listener.admit(writer.get_extra_info("peername")[:2])
                    if len(self._known) >= OPEN_MAX:
                        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
                    self._known.add(writer)
                case h11.Data():
                    body += event.data
                    _check_size(len(body))
                case h11.EndOfMessage():
                    return body
                case _:
                    raise EOFError

    def _check(self, request: h11.Request) -> None:
        """Refuse before anything more is read of it.

        Raises:
            Refusal: its sender may not, or it is not what is taken here.
        """
        headers = dict(request.headers)
        wanted, given = f"Bearer {self._token}".encode(), headers.get(b"authorization", b"")
        if not hmac.compare_digest(given, wanted):
            raise Refusal(HTTPStatus.UNAUTHORIZED, "no token, or a wrong one")
        if request.target != b"/notify":
            raise Refusal(HTTPStatus.NOT_FOUND, "there is /notify and nothing else")
        if request.method != b"POST":
            raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "POST it")
        _check_size(int(headers.get(b"content-length", 0)))

    async def _ask(self, body: bytes) -> tuple[HTTPStatus, bytes]:
        """Return what the controller answers."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def reply(data: bytes) -> None:
            if not answer.done():
                answer.set_result(data)

        self._inbox.take_notice(body, reply)
        try:
            async with asyncio.timeout(ANSWER_S):
                data = await answer
        except TimeoutError:
            reason = "no answer yet: the journal cannot be written now; send it again with an id"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, reason) from None
        told: CommandReply = decode(data, CommandReply)
        if told.ok:
            return HTTPStatus.OK, data
        malformed = told.reason.startswith("refused: ")
        return HTTPStatus.BAD_REQUEST if malformed else HTTPStatus.CONFLICT, data


def _check_size(size: int) -> None:
    if size > BODY_BYTES_MAX:
        reason = f"more than {BODY_BYTES_MAX} bytes"
        raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)


def _render(http: h11.Connection, status: HTTPStatus, data: bytes) -> bytes:
    """Return an answer as it is sent.

    Raises:
        h11.ProtocolError: what the caller has sent lets none be given.
    """
    headers = [
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(data))),
        ("Connection", "close"),
    ]
    head = http.send(h11.Response(status_code=status, reason=status.phrase, headers=headers))
    return (head or b"") + (http.send(h11.Data(data=data)) or b"")
