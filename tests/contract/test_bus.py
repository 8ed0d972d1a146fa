# ruff: noqa: ASYNC110
"""One suite for every `Bus`: the one in memory, and the one over a real nats-server."""

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client, Srv

from perdure.adapters.nats import NatsBus, NatsServer
from perdure.adapters.nats.server import server_config
from perdure.model.bus.endpoint import Endpoint
from perdure.model.errors import PlatformError, RequestError
from perdure.service.ports import Bus, Reply
from tests.fakes import FakeBus, FakeServer
from tests.waiting import PATIENCE_S

Connect = Callable[[], Awaitable[Bus]]


class Server:
    """A real server that can be killed and started again on its port."""

    def __init__(self, folder: Path) -> None:
        self.files = NatsServer(folder=str(folder / "nats"), token="s3cr3t")
        self.log = folder / "nats.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._held: socket.socket | None = None
        """Keeps the port for the next start."""

    def start(self, payload_max: int = 8 << 20) -> Endpoint:
        command = self.files.command()
        path = Path(server_config(self.files.folder))
        path.write_text(path.read_text().replace(str(8 << 20), str(payload_max)))
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.files.wait_ready(timeout_s=PATIENCE_S)
        self._let_go()
        return Endpoint(url=self.files.url, token="s3cr3t", clock_offset_s=0.0)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._hold()

    def stop(self) -> None:
        """End it as it likes to be ended: it then writes down what it has."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self._hold()

    def close(self) -> None:
        """End it for good."""
        self.kill()
        self._let_go()

    def _hold(self) -> None:
        """Bind the port without listening, so that only the server can use it again."""
        self._let_go()
        if self.files.port <= 0:
            return  # It has never been ready.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", self.files.port))

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


async def hear_refusal(endpoint: Endpoint) -> str:
    """Return why a server takes no login; a busy machine hears of it later."""
    timeout_s = 0.5
    while True:
        with pytest.raises(PlatformError) as caught:
            await NatsBus.connect(endpoint, timeout_s=timeout_s)
        if not caught.value.message.startswith("no NATS server") or timeout_s > PATIENCE_S:
            return caught.value.message
        timeout_s *= 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


@pytest.fixture(params=["fake", "nats"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    buses: list[Bus] = []
    fake = FakeServer()
    endpoint = request.getfixturevalue("server").start() if request.param == "nats" else None

    async def connect() -> Bus:
        bus: Bus = (
            await NatsBus.connect(endpoint, timeout_s=PATIENCE_S) if endpoint else FakeBus(fake)
        )
        buses.append(bus)
        return bus

    yield connect
    for bus in buses:
        await bus.close()


async def receive(bus: Bus, subject: str) -> "asyncio.Queue[bytes]":
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    await bus.subscribe(subject, queue.put_nowait)
    return queue


async def test_publish_reaches_each_listener_in_order(connect: Connect) -> None:
    one, two = await connect(), await connect()
    queues = [await receive(one, "a.b"), await receive(two, "a.b"), await receive(two, "a.c")]
    for number in range(100):
        await one.publish("a.b", b"%d" % number)
    for queue in queues[:2]:
        got = [await asyncio.wait_for(queue.get(), PATIENCE_S) for _ in range(100)]
        assert got == [b"%d" % number for number in range(100)]
    assert queues[2].empty()


async def test_request_is_answered_also_later(connect: Connect) -> None:
    one, two = await connect(), await connect()
    held: list[Reply] = []
    await one.serve("ask", lambda data, reply: held.append(reply))
    pending = asyncio.create_task(two.request("ask", b"?", timeout_s=PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        while not held:
            await asyncio.sleep(0)
    assert not pending.done()
    await held[0](b"!")
    assert await pending == b"!"


async def test_request_to_nobody_fails_at_once(connect: Connect) -> None:
    bus = await connect()
    with pytest.raises(RequestError, match="nobody serves"):
        await bus.request("nobody", b"?", timeout_s=3600)


async def test_request_without_answer_times_out(connect: Connect) -> None:
    bus = await connect()
    await bus.serve("mute", lambda data, reply: None)
    with pytest.raises(RequestError, match=r"no answer on mute in 0\.05 s"):
        await bus.request("mute", b"?", timeout_s=0.05)


async def test_closed_bus_hears_nothing(connect: Connect) -> None:
    one, two, three = await connect(), await connect(), await connect()
    queue, heard = await receive(two, "a.b"), await receive(three, "a.b")
    await two.close()
    await one.publish("a.b", b"x")
    assert await asyncio.wait_for(heard.get(), PATIENCE_S) == b"x"
    assert queue.empty()
    assert not two.connected


async def test_nats_reconnects_to_a_killed_server(server: Server) -> None:
    endpoint = server.start()
    bus = await NatsBus.connect(endpoint, timeout_s=PATIENCE_S)
    queue = await receive(bus, "a.b")
    server.kill()
    async with asyncio.timeout(PATIENCE_S):
        while bus.connected:
            await asyncio.sleep(0.01)
    await bus.publish("a.b", b"lost")
    with pytest.raises(RequestError):
        await bus.request("a.b", b"x", timeout_s=PATIENCE_S)
    assert server.start().url == endpoint.url
    async with asyncio.timeout(PATIENCE_S):
        while not bus.connected:
            await asyncio.sleep(0.01)
    await bus.publish("a.b", b"back")
    assert await asyncio.wait_for(queue.get(), PATIENCE_S) == b"back"
    assert bus.reconnects == 1
    await bus.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # nats-py's writers
async def test_nats_tells_a_server_with_other_logins_from_none(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, connect = 0, Client._connect_to_server

    async def count_and_connect(client: Client, place: Srv) -> None:
        nonlocal tries
        tries += 1
        await connect(client, place)

    monkeypatch.setattr(Client, "_connect_to_server", count_and_connect)
    bus = await NatsBus.connect(server.start(), timeout_s=PATIENCE_S)
    for token, refused in (("another", True), ("s3cr3t", False)):
        server.kill()
        server.files.token = token
        server.start()
        async with asyncio.timeout(PATIENCE_S):
            while (bus.refused, bus.connected) != (refused, not refused):
                await asyncio.sleep(0.01)
    await bus.serve("a.b", lambda data, reply: None)
    with pytest.raises(RequestError, match="no answer"):  # It is connected to the end.
        await bus.request("a.b", b"?", timeout_s=0.2)
    server.kill()
    async with asyncio.timeout(PATIENCE_S):
        while bus.connected:
            await asyncio.sleep(0.01)
        enough = tries + 4
        while tries < enough:
            await asyncio.sleep(0.01)
    assert not bus.refused, "nobody is there"
    await bus.close()


async def test_a_closed_bus_tries_no_server_any_more(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus is closed although a refusal takes the place of the cancellation."""
    bus = await NatsBus.connect(server.start(), timeout_s=PATIENCE_S)
    trying = asyncio.Event()

    async def lose_the_cancellation(client: Client, place: object) -> None:
        trying.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        raise ConnectionRefusedError

    monkeypatch.setattr(Client, "_connect_to_server", lose_the_cancellation)
    server.kill()
    async with asyncio.timeout(PATIENCE_S):
        await trying.wait()
        await bus.close()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)


async def test_nats_wants_the_token(server: Server) -> None:
    url = server.start().url
    refusal = await hear_refusal(Endpoint(url=url, token="wrong", clock_offset_s=0))
    assert "refuses the credentials: Authorization Violation" in refusal


async def test_a_wait_ends_though_nats_py_swallows_that_it_is_over(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    swallowed = 0

    async def connect(*_: object, **__: object) -> None:
        nonlocal swallowed
        while swallowed < 3:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                swallowed += 1
        await asyncio.sleep(3600)

    monkeypatch.setattr(Client, "_connect_to_server", connect)
    endpoint = Endpoint(url=server.start().url, token="", clock_offset_s=0)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(PlatformError):
            await NatsBus.connect(endpoint, timeout_s=0.2)
    assert swallowed == 3
    assert len(asyncio.all_tasks()) == 1


def test_the_secret_is_its_owners(server: Server) -> None:
    command = server.files.command()
    assert "s3cr3t" not in " ".join(command)
    assert Path(command[-1]).stat().st_mode & 0o777 == 0o600


class Moody:
    """A server that sends clients away, `times` times, behind a ping; then it stays."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.listening = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"M","version":"2.10.0","max_payload":1024}\r\n')
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            if line.startswith(b"PING") and self.left:
                self.left -= 1
                writer.write(b"PING\r\n-ERR 'User Authentication Expired'\r\n")
                writer.transport.abort()
                return
            if line.startswith(b"SUB"):
                self.listening.set()
        writer.close()


async def test_who_is_sent_away_again_and_again_comes_back() -> None:
    """nats-py cannot answer the ping any more, and stops half-way through its own goodbye."""
    moody = Moody(2)
    server = await asyncio.start_server(moody.serve, "127.0.0.1", 0)
    url = "nats://127.0.0.1:{1}".format(*server.sockets[0].getsockname())
    bus = await NatsBus.connect(Endpoint(url, "s3cr3t", 0.0), timeout_s=PATIENCE_S)
    await bus.subscribe("a", lambda data: None)
    async with asyncio.timeout(PATIENCE_S):
        await moody.listening.wait()
        while not bus.connected:
            await asyncio.sleep(0.01)
    await bus.close()
    server.close()
    await server.wait_closed()


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a \"b\" \\ 'é' $x {y}"
    folder.mkdir()
    server = Server(folder)
    try:
        server.start()
    finally:
        server.close()
    assert (folder / "nats" / "jetstream").is_dir()
