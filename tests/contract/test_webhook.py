# ruff: noqa: ASYNC110
"""`POST /notify`, by a real socket: who may, what is taken, and what is refused."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure.adapters.listener import STRANGERS_MAX
from perdure.adapters.nats import make_certificate
from perdure.model.bus.wire import Command, CommandReply
from perdure.model.codec import encode
from perdure.model.job import JobSpec
from perdure.service.controller.inbox import Inbox
from perdure.service.controller.webhook import BODY_BYTES_MAX, Webhook
from perdure.service.ports import Reply
from tests.waiting import PATIENCE_S

TOKEN = "t0ken-of-the-test"
NOTICE = {"kind": "device-failed", "device": "GPU-1", "id": "42"}


class Hook:
    """A webhook whose controller refuses devices other than GPU-1."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.inbox = Inbox(JobSpec(script="x"), asyncio.Event())
        self.webhook = Webhook(self.inbox, "127.0.0.1", 0, TOKEN, tls=tls)
        self.taken: list[Command] = []

    async def control(self) -> None:
        while True:
            for command, reply in self.inbox.empty().commands:
                self.taken.append(command)
                await self.answer(command, reply)
            await asyncio.sleep(0.005)

    async def answer(self, command: Command, reply: Reply) -> None:
        ok = command.args.get("device") == "GPU-1"
        reason = "" if ok else "there is no such device"
        await reply(encode(CommandReply(id=command.id, ok=ok, reason=reason)))

    async def post(self, body: bytes, head: str = "", token: str = TOKEN) -> tuple[int, Any]:
        head = head or f"POST /notify HTTP/1.1\r\nContent-Length: {len(body)}"
        lines = f"{head}\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
        return await self.send(lines.encode() + body)

    async def send(self, data: bytes) -> tuple[int, Any]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.webhook.port)
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body or b"{}")


@pytest.fixture
async def hook() -> AsyncIterator[Hook]:
    async with serve(Hook()) as hook:
        yield hook


@contextlib.asynccontextmanager
async def serve(hook: Hook) -> AsyncIterator[Hook]:
    tasks = [asyncio.create_task(hook.webhook.run()), asyncio.create_task(hook.control())]
    while not hook.webhook.port:
        await asyncio.sleep(0.005)
    yield hook
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_notice_is_taken_and_answered(hook: Hook) -> None:
    status, answer = await hook.post(json.dumps(NOTICE).encode())
    assert (status, answer["ok"], answer["id"]) == (200, True, "notice-42")
    assert hook.taken[0].kind == "notify"
    assert hook.taken[0].args == NOTICE
    status, answer = await hook.post(b'{"kind":"device-failed","device":"GPU-7"}')
    assert (status, answer["reason"]) == (409, "there is no such device")
    in_parts = (
        f"{len(body := json.dumps(NOTICE).encode()):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    )
    status, answer = await hook.post(
        in_parts, "POST /notify HTTP/1.1\r\nTransfer-Encoding: chunked"
    )
    assert (status, answer["ok"]) == (200, True), "a sender that does not know how much it sends"


@pytest.mark.parametrize("addresses", [1, 9])
async def test_idle_connections_without_a_token_keep_no_notice_out(
    hook: Hook, addresses: int
) -> None:
    """Of eight notices with the right token, eight got 503 while 64 connections were idle."""
    idle = []
    async with asyncio.timeout(PATIENCE_S):
        for number in range(STRANGERS_MAX + 64):
            local = (f"127.0.0.{1 + number % addresses}", 0)
            connection = await asyncio.open_connection(
                "127.0.0.1", hook.webhook.port, local_addr=local
            )
            connection[1].write(b"P")
            idle.append(connection)
        body = json.dumps(NOTICE).encode()
        assert [(await hook.post(body))[0] for _ in range(4)] == [200] * 4
        answers = await asyncio.gather(*(hook.post(body) for _ in range(8)))
        assert [status for status, _ in answers] == [200] * 8
        reader, _ = idle[0]
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""  # The oldest lost its place.
    for _, writer in idle:
        writer.close()


async def test_handshakes_of_tls_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were only timed: each took a file of the controller for five seconds."""
    monkeypatch.setattr("perdure.service.controller.webhook.READ_S", PATIENCE_S)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    cert, key = make_certificate(str(tmp_path), "127.0.0.1")
    tls.load_cert_chain(cert, key)
    idle = []
    async with serve(Hook(tls)) as hook, asyncio.timeout(PATIENCE_S):
        for _ in range(STRANGERS_MAX + 64):
            idle.append(await asyncio.open_connection("127.0.0.1", hook.webhook.port))
        with contextlib.suppress(ConnectionError):
            assert await idle[0][0].read() == b""  # The oldest lost its place.
        context = ssl.create_default_context(cafile=cert)
        port = hook.webhook.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        body = json.dumps(NOTICE).encode()
        head = f"POST /notify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        for _, other in [*idle, (reader, writer)]:
            other.close()


async def test_bad_requests_are_refused(hook: Hook) -> None:
    body = json.dumps(NOTICE).encode()
    length = f"Content-Length: {len(body)}"
    assert (await hook.post(body, token="wrong"))[0] == 401
    unsigned = f"POST /notify HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n"
    assert (await hook.send(unsigned.encode() + body))[0] == 401
    assert (await hook.send(b"GET / HTTP/1.1\r\n\r\n"))[0] == 400, "no host"
    assert (await hook.send(b"\x16\x03\x01\x02\x00\x01\r\n\r\n"))[0] == 400, "TLS, perhaps"
    assert (await hook.post(body, f"GET /notify HTTP/1.1\r\n{length}"))[0] == 405
    assert (await hook.post(body, f"POST /status HTTP/1.1\r\n{length}"))[0] == 404
    assert (await hook.post(body, "POST /notify HTTP/1.1"))[0] == 400, "of no length"
    assert (await hook.post(body, "POST /notify HTTP/1.1\r\nContent-Length: -1"))[0] == 400
    endless = "POST /notify HTTP/1.1\r\nTransfer-Encoding: chunked"
    chunk = b"ff\r\n" + b" " * 255 + b"\r\n"
    assert (await hook.post(chunk * (BODY_BYTES_MAX // 255 + 1), endless))[0] == 413
    large = f"POST /notify HTTP/1.1\r\nContent-Length: {BODY_BYTES_MAX + 1}"
    assert (await hook.post(b"", large))[0] == 413
    assert (await hook.post(body, f"POST /notify HTTP/1.1\r\n{length}\r\nX: {'x' * 9000}"))[
        0
    ] == 431
    assert (await hook.post(b"{}"))[0] == 400
    assert (await hook.post(b'{"kind":"reboot"}'))[0] == 400
    assert (await hook.post(b"\xff\xfe\x00"))[0] == 400
    reader, writer = await asyncio.open_connection("127.0.0.1", hook.webhook.port)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b"", "who leaves without a word is let go"
    writer.close()
    assert hook.taken == []
    assert (await hook.post(body))[0] == 200


async def test_a_caller_who_says_nothing_is_let_go(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.service.controller.webhook.READ_S", 0.1)
    assert (await hook.send(b"POST /notify HTTP/1.1\r\n"))[0] == 408
    monkeypatch.setattr("perdure.service.controller.webhook.READ_S", PATIENCE_S)
    assert (await hook.post(json.dumps(NOTICE).encode()))[0] == 200
