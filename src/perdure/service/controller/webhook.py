"""`POST /notify`: an outside monitor's word over HTTP, for those that speak nothing else.

    curl -H "Authorization: Bearer $(cat TOKEN)" -d '{"kind":"device-failed","device":"GPU-1"}' URL

A `Notice` as JSON in, a `CommandReply` as JSON out, one request a connection. It speaks just enough
HTTP/1.1 for that: a length is required, everything is bounded in size and in time. Who does not
know the token learns nothing but that. The answer is the controller's, so 200 means that the
notice is in the journal.
"""

import asyncio
import contextlib
import hmac
import logging
import ssl
from http import HTTPStatus

from perdure.model.bus.wire import CommandReply
from perdure.model.codec import decode, encode
from perdure.service.controller.inbox import Inbox

log = logging.getLogger("perdure.webhook")

HEAD_BYTES_MAX = 8192
BODY_BYTES_MAX = 16_384
OPEN_MAX = 32
READ_S = 5.0
ANSWER_S = 10.0
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
        self._open = 0

    async def run(self) -> None:
        """Serve until cancelled; a port in use is waited for."""
        said = False
        while True:
            try:
                server = await asyncio.start_server(
                    self._serve, self._host, self.port, limit=HEAD_BYTES_MAX, ssl=self._tls
                )
                break
            except OSError as error:
                if not said:
                    log.error("webhook on %s:%d: %s; trying again", self._host, self.port, error)
                said = True
                await asyncio.sleep(_BIND_AGAIN_S)
        self.port = server.sockets[0].getsockname()[1]
        log.info("webhook on %s:%d", self._host, self.port)
        async with server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > OPEN_MAX:
                raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
            async with asyncio.timeout(READ_S):
                body = await self._read(reader)
            status, data = await self._ask(body)
        except Refusal as refusal:
            log.warning("refused: %s", refusal.reason)
            status = refusal.status
            data = encode(CommandReply(id="", ok=False, reason=refusal.reason))
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            status, data = HTTPStatus.REQUEST_TIMEOUT, b"{}"
        finally:
            self._open -= 1
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(head.encode() + data)
            async with asyncio.timeout(READ_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """Return the body of an authorized request.

        Raises:
            Refusal: it is none.
        """
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.LimitOverrunError:
            raise Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers too large") from None
        request, *lines = head.split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, _, v in (ln.partition(":") for ln in lines)}
        wanted, given = f"Bearer {self._token}", headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), wanted.encode()):
            raise Refusal(HTTPStatus.UNAUTHORIZED, "no token, or a wrong one")
        method, _, rest = request.partition(" ")
        if rest.partition(" ")[0] != "/notify":
            raise Refusal(HTTPStatus.NOT_FOUND, "there is /notify and nothing else")
        if method != "POST":
            raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "POST it")
        length = headers.get("content-length", "")
        if not length.isascii() or not length.isdigit():
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "no Content-Length")
        if len(length) > 9 or int(length) > BODY_BYTES_MAX:
            reason = f"more than {BODY_BYTES_MAX} bytes"
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
        return await reader.readexactly(int(length))

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
