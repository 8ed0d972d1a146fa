"""The little HTTP that metadata services speak: one request a connection, without proxy.

They are reached over a link-local address of the machine itself, without TLS; Kubernetes' server,
which is another machine, with it. Every answer is bounded in size
and in time, and a request can be cancelled, which a blocking library's cannot.
"""

import asyncio
import contextlib
import io
import ssl
from collections.abc import Mapping
from http.client import HTTPMessage, parse_headers
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from perdure.model.errors import ConfigError, PlatformError
from perdure.model.events import Announced

T = TypeVar("T")

_BYTES_MAX = 1 << 22
"""Of an answer: some hundred pods."""
TIMEOUT_S = 2.0


class Answer(msgspec.Struct, frozen=True):
    """The answer of a metadata service."""

    status: int
    headers: HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        """Return the body in words."""
        return self.body.decode(errors="replace").strip()


class Source:
    """A place that announces. Most take no answer, and nothing is done to acknowledge."""

    name = ""
    pause_s = 5.0
    """Between two looks."""

    async def read(self) -> tuple[Announced, ...]:
        """Return all that is announced at the moment.

        Raises:
            PlatformError: it cannot be reached, or answers what makes no sense.
        """
        return ()

    async def acknowledge(self, id_: str) -> None:
        """Tell it, where it wants to know, that what it has announced may begin.

        Raises:
            PlatformError: it does not take the answer.
        """


class MetadataService:
    """One of them, by its base URL."""

    def __init__(self, url: str, context: ssl.SSLContext | None = None) -> None:
        """Ask at `url`; over TLS where there is a `context`.

        Raises:
            ConfigError: it is no URL of a host.
        """
        parts = urlsplit(url)
        if parts.scheme != ("https" if context else "http") or not parts.hostname:
            raise ConfigError(
                f"preemption: `{url}` is no URL of a metadata service",
                hint="such as http://169.254.169.254",
            )
        self.url, self._host, self._port = url, parts.hostname, parts.port or 80
        self._context = context
        self._host_header, self._prefix = parts.netloc, parts.path.rstrip("/")

    def parse(self, path: str, answer: Answer, type_: type[T]) -> T:
        """Return the JSON that was found at `path`.

        Raises:
            PlatformError: it makes no sense.
        """
        try:
            return msgspec.json.decode(answer.body, type=type_)
        except msgspec.MsgspecError as error:
            raise PlatformError(f"{self.url}{path}: {error}") from None

    async def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        body: bytes = b"",
        timeout_s: float = TIMEOUT_S,
        expected: tuple[int, ...] = (200,),
        hint: str = "",
    ) -> Answer:
        """Return what the service answers, with a status that was `expected`.

        Raises:
            PlatformError: it cannot be reached, takes longer than `timeout_s`, speaks no HTTP, or
                answers with another status, of which the `hint` says more.
        """
        lines = [
            f"{method} {self._prefix}{path} HTTP/1.1",
            f"Host: {self._host_header}",
            *(f"{name}: {value}" for name, value in headers.items()),
            *(f"Content-Length: {len(body)}", "Connection: close", "", ""),
        ]
        request = "\r\n".join(lines).encode() + body
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(request)
        except TimeoutError:
            raise PlatformError(f"{self.url} does not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise PlatformError(
                f"{self.url} cannot be reached: {error.strerror or error}"
            ) from None
        except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise PlatformError(f"{self.url} speaks no HTTP: {error}") from None
        if answer.status not in expected:
            raise PlatformError(f"{self.url}{path} answers {answer.status}", hint=hint)
        return answer

    async def _exchange(self, request: bytes) -> Answer:
        reader, writer = await asyncio.open_connection(
            self._host, self._port, limit=_BYTES_MAX, ssl=self._context
        )
        try:
            writer.write(request)
            await writer.drain()
            first, _, rest = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
            version, status, *_ = first.split()
            if not version.startswith(b"HTTP/1."):
                raise ValueError(first[:40])
            headers = parse_headers(io.BytesIO(rest))
            return Answer(int(status), headers, await _read_body(reader, headers))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _read_body(reader: asyncio.StreamReader, headers: HTTPMessage) -> bytes:
    """Return the body, in whichever of the three ways its length is said."""
    body = b""
    if headers.get("Transfer-Encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            _check_size(len(body) + size)
            body += (await reader.readexactly(size + 2))[:-2]
        return body
    length = headers.get("Content-Length")
    if length is not None:
        _check_size(int(length))
        return await reader.readexactly(int(length))
    while more := await reader.read(_BYTES_MAX):
        _check_size(len(body) + len(more))
        body += more
    return body


def _check_size(size: int) -> None:
    if not 0 <= size <= _BYTES_MAX:
        raise ValueError(f"an answer of {size} bytes")
