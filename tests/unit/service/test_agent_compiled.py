"""Two agents on one bus: who asks whom for what is compiled, who is refused, how long it takes."""

import asyncio
import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from tests.fakes import FakeBus, FakeServer
from tests.waiting import PATIENCE_S

from perdure.adapters.links import LinkReader
from perdure.adapters.transfer import Listener, Wire, open_wire
from perdure.model.codec import decode, encode
from perdure.model.job import JobSpec
from perdure.model.signals.compiled import CompiledAsk, CompiledDoor, subject_compiled
from perdure.service.agent import compiled
from perdure.service.agent.compiled import CompiledSharing
from perdure.service.agent.shell import AgentService
from perdure.service.ports import Reply

SPEC = JobSpec(name="job", script="train.py", nodes=1, spares=1, remote=1)
FINGERPRINT = {"processor": "p", "torch": "2.13.0", "gpus": ""}


class Node:
    def __init__(
        self,
        server: FakeServer,
        number: int,
        root: Path,
        *,
        spec: JobSpec = SPEC,
        fingerprint: dict[str, str] = FINGERPRINT,
        alone: bool = False,
    ) -> None:
        self.asides: list[tuple[str, str, str]] = []
        self.folders = {name: root / name for name in ("inductor", "triton")}
        for folder in self.folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        self.sharing = CompiledSharing(
            FakeBus(server),
            spec,
            number,
            folders=self.folders,
            fingerprint=lambda: fingerprint,
            address=lambda: "127.0.0.1",
            alone=alone,
            aside=lambda door, source, why: self.asides.append((door, source, str(why))),
        )

    def compile(self, name: str = "kernel", *, folder: str = "inductor") -> None:
        path = self.folders[folder] / "ab" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
        os.utime(path, (time.time() - 60,) * 2)

    def list_files(self) -> list[str]:
        return sorted(p.name for f in self.folders.values() for p in f.rglob("*") if p.is_file())


WAIT_S, REACH_S, SILENT_S = compiled.WAIT_S, compiled._REACH_S, compiled._SILENT_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody give up, and let no wait be long enough to be told of."""
    for name in ("WAIT_S", "TAKE_S", "_SILENT_S", "_REACH_S", "_SAID_S"):
        monkeypatch.setattr(compiled, name, 3600.0)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


async def take(giver: Node, taker: Node) -> str:
    await giver.sharing.start()
    await taker.sharing.start()
    try:
        assert taker.sharing.due
        said = await asyncio.wait_for(taker.sharing.wait(), PATIENCE_S)
        assert not taker.sharing.due, "it is asked for once"
        return said
    finally:
        await giver.sharing.close()
        await taker.sharing.close()


async def test_a_node_takes_what_another_has_compiled_before_its_first_ranks(
    server: FakeServer, tmp_path: Path
) -> None:
    giver, taker = Node(server, 0, tmp_path / "0"), Node(server, 1, tmp_path / "1")
    giver.compile()
    giver.compile("cubin", folder="triton")
    assert await take(giver, taker) == ""
    assert taker.list_files() == ["kernel"], "Triton's name each other by a path that is not here"
    assert taker.asides == []


async def test_at_the_same_path_tritons_own_entries_are_taken_as_well(
    server: FakeServer, tmp_path: Path
) -> None:
    giver, taker = Node(server, 0, tmp_path / "0"), Node(server, 1, tmp_path / "1")
    giver.compile("cubin", folder="triton")
    giver.sharing._describe_place = lambda: ("/cache", "0")  # type: ignore[method-assign]
    taker.sharing._describe_place = lambda: ("/cache", "1")  # type: ignore[method-assign]
    await take(giver, taker)
    assert taker.list_files() == ["cubin"]


@pytest.mark.parametrize(
    ("name", "value"), [("processor", "q"), ("torch", "2.12.0"), ("gpus", "H100")]
)
async def test_what_was_made_for_another_kind_of_machine_is_not_taken(
    server: FakeServer,
    tmp_path: Path,
    name: str,
    value: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    giver = Node(server, 0, tmp_path / "0", fingerprint=FINGERPRINT | {name: value})
    taker = Node(server, 1, tmp_path / "1")
    giver.compile()
    with caplog.at_level("INFO", logger="perdure.agent"):
        await take(giver, taker)
    assert taker.list_files() == []
    assert "what it was made for is another: " + name in caplog.text


async def test_a_giver_that_hides_what_it_was_made_for_is_not_believed(
    server: FakeServer, tmp_path: Path
) -> None:
    taker = Node(server, 1, tmp_path / "1")
    answers = [
        encode(CompiledDoor(FINGERPRINT | {"processor": "q"}, "127.0.0.1", 1, "t" * 16, "00")),
        encode(CompiledDoor(FINGERPRINT, "127.0.0.1", 1, "t" * 16, "no key")),
        b"\xff{",
    ]
    tasks: list[asyncio.Future[None]] = []
    for answer in answers:
        taker.sharing._began = False

        def lie(data: bytes, reply: Reply, answer: bytes = answer) -> None:
            tasks.append(asyncio.ensure_future(reply(answer)))

        await FakeBus(server).serve(subject_compiled("job", 0, 1), lie)
        assert await asyncio.wait_for(taker.sharing.wait(), PATIENCE_S) == ""
    assert [(door, source) for door, source, _ in taker.asides] == [("compiled", "node 0")] * 3
    assert "processor is q there" in taker.asides[0][2]
    assert "a key that is none" in taker.asides[1][2]
    await taker.sharing.close()


async def test_a_start_waits_for_a_bounded_time_and_what_comes_later_is_taken(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node's door is there, and nobody behind it says anything; or it does later."""
    monkeypatch.setattr(compiled, "WAIT_S", 0.2)
    monkeypatch.setattr(compiled, "_SAID_S", 0.1)
    giver, taker = Node(server, 0, tmp_path / "0"), Node(server, 1, tmp_path / "1")
    giver.compile()
    late, send = asyncio.Event(), compiled.send_compiled
    loop = asyncio.get_running_loop()

    def send_late(*args: object, **kwargs: object) -> None:
        asyncio.run_coroutine_threadsafe(late.wait(), loop).result(PATIENCE_S)
        send(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(compiled, "send_compiled", send_late)
    await giver.sharing.start()
    said = await asyncio.wait_for(taker.sharing.wait(), PATIENCE_S)
    assert re.fullmatch(r"waited \d+\.\d\d s for what another node has compiled", said)
    assert taker.list_files() == []
    late.set()
    async with asyncio.timeout(PATIENCE_S):
        while not taker.list_files():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await taker.sharing.close()
    await giver.sharing.close()


async def test_names_that_cannot_be_written_are_told_of(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    giver, taker = Node(server, 0, tmp_path / "0"), Node(server, 1, tmp_path / "1")
    giver.compile()
    (taker.folders["inductor"] / "ab").touch()  # In the place of a folder.
    with caplog.at_level("INFO", logger="perdure.agent"):
        assert await take(giver, taker) == ""
    assert "0 of 1 files are taken" in caplog.text
    assert "; the names of 1 cannot be written here" in caplog.text


@pytest.mark.parametrize(
    ("own", "chosen"), [("10.0.0.7", "10.0.0.1"), ("node7", "10.0.0.1"), ("127.0.0.1", "127.0.0.1")]
)
def test_a_door_is_where_another_machine_reaches_it(own: str, chosen: str) -> None:
    """Most connections of its ranks are among themselves."""
    reader = LinkReader(lambda rank: {})
    links, machine = SimpleNamespace(reader=reader), SimpleNamespace(identity=SimpleNamespace())
    machine.identity.host = own
    agent: Any = SimpleNamespace(_links=links, machine=machine)
    assert AgentService._choose_address(agent) == own
    reader.hosts |= {"127.0.0.1": 56, "10.0.0.1": 8}
    assert AgentService._choose_address(agent) == chosen


async def test_nobody_waits_for_who_is_not_there(server: FakeServer, tmp_path: Path) -> None:
    taker = Node(server, 1, tmp_path / "1")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert await asyncio.wait_for(taker.sharing.wait(), PATIENCE_S) == ""  # Nobody serves.

    def point_nowhere(data: bytes, reply: Reply) -> None:
        door = CompiledDoor(FINGERPRINT, "127.0.0.1", port, "t" * 16, "00")
        tasks.append(asyncio.ensure_future(reply(encode(door))))

    tasks: list[asyncio.Future[None]] = []
    await FakeBus(server).serve(subject_compiled("job", 0, 1), point_nowhere)
    assert await asyncio.wait_for(taker.sharing.wait(), PATIENCE_S) == ""
    assert taker.asides == []
    await taker.sharing.close()


async def test_a_folder_that_both_have_is_not_sent(server: FakeServer, tmp_path: Path) -> None:
    spec = structs.replace(SPEC, remote=0)
    giver = Node(server, 0, tmp_path / "0", spec=spec)
    taker = Node(server, 1, tmp_path / "0", spec=spec)
    giver.compile()
    opened: list[object] = []
    giver.sharing._send = lambda *args, **kwargs: opened.append(args)  # type: ignore[method-assign]
    await take(giver, taker)
    assert opened == []


async def ask_as(server: FakeServer, asker: int) -> CompiledDoor:
    """Return what node 0 answers to a question of `asker`."""
    subject, ask = subject_compiled("job", 0, asker), encode(CompiledAsk(FINGERPRINT))
    door: CompiledDoor = decode(
        await FakeBus(server).request(subject, ask, timeout_s=PATIENCE_S), CompiledDoor
    )
    return door


async def test_only_so_many_are_given_to_at_a_time_and_the_next_asks_again(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, serve = threading.Event(), compiled.Listener.serve

    def serve_until_late(door: Listener, answer: Callable[[Wire], None], deadline_s: float) -> None:
        """Keep a door open for who never comes, until it is late."""
        if late.is_set():
            serve(door, answer, deadline_s)
        else:
            late.wait(PATIENCE_S)
            serve(door, answer, 0.01)

    monkeypatch.setattr(compiled.Listener, "serve", serve_until_late)
    giver, taker = Node(server, 0, tmp_path / "0"), Node(server, 1, tmp_path / "1")
    giver.compile()
    await giver.sharing.start()
    doors = [await ask_as(server, asker) for asker in (5, 6, 7, 8, 9)]
    assert [door.busy for door in doors] == [False] * 4 + [True]
    ask, answers = taker.sharing._ask, list[CompiledDoor]()

    async def note(source: int) -> CompiledDoor:
        answers.append(await ask(source))
        late.set()
        return answers[-1]

    taker.sharing._ask = note  # type: ignore[method-assign]
    await asyncio.wait_for(taker.sharing.wait(), PATIENCE_S)
    assert (answers[0].busy, answers[-1].busy) == (True, False)
    assert taker.list_files() == ["kernel"]
    await giver.sharing.close()
    await taker.sharing.close()


async def test_one_machine_has_one_door_however_often_it_asks(
    server: FakeServer, tmp_path: Path
) -> None:
    giver, taker = Node(server, 0, tmp_path / "0"), Node(server, 1, tmp_path / "1")
    giver.compile()
    await giver.sharing.start()
    first = await ask_as(server, 7)
    for _ in range(10):
        await ask_as(server, 7)
    await asyncio.wait_for(taker.sharing.wait(), PATIENCE_S)
    assert taker.list_files() == ["kernel"], "the others' doors are not its own to hold"
    async with asyncio.timeout(PATIENCE_S):
        door = await ask_as(server, 7)
        while door.busy:  # The old one is about to close.
            await asyncio.sleep(0.01)
            door = await ask_as(server, 7)
    assert door.key
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((first.host, first.port), timeout=PATIENCE_S)
    await giver.sharing.close()
    await taker.sharing.close()


async def test_where_nothing_is_compiled_a_whole_fleet_starts_at_once(
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = structs.replace(SPEC, nodes=17, spares=0, remote=16)
    giver = Node(server, 0, tmp_path / "0", spec=spec)
    (giver.folders["inductor"] / "locks").mkdir()
    (giver.folders["inductor"] / "locks" / "kernel.lock").touch()
    await giver.sharing.start()
    opened: list[str] = []
    monkeypatch.setattr(compiled, "Listener", opened.append)
    takers = [Node(server, number, tmp_path / str(number), spec=spec) for number in range(1, 17)]
    with caplog.at_level("INFO", logger="perdure.agent"):
        said = await asyncio.wait_for(
            asyncio.gather(*(t.sharing.wait() for t in takers)), PATIENCE_S
        )
    assert opened == []
    assert set(said) == {""}
    assert caplog.text.count("; nothing is compiled there") == 16
    for node in (giver, *takers):
        await node.sharing.close()


THREE = structs.replace(SPEC, nodes=3, spares=1)
"""Two nodes of the job's own, and one to join, which asks node 0 before node 1."""


async def test_the_next_is_asked_at_once_where_one_is_busy(
    server: FakeServer, tmp_path: Path
) -> None:
    busy, asked = encode(CompiledDoor(error="it sends to others", busy=True)), list[bytes]()
    giver = Node(server, 1, tmp_path / "1", spec=THREE)
    taker = Node(server, 2, tmp_path / "2", spec=THREE)
    giver.compile()
    await giver.sharing.start()
    tasks: list[asyncio.Future[None]] = []

    def serve(data: bytes, reply: Reply) -> None:
        asked.append(data)
        tasks.append(asyncio.ensure_future(reply(busy)))

    await FakeBus(server).serve(subject_compiled("job", 0, 2), serve)
    assert await asyncio.wait_for(taker.sharing.wait(), PATIENCE_S) == ""
    assert taker.list_files() == ["kernel"]
    assert len(asked) == 1
    await giver.sharing.close()
    await taker.sharing.close()


@pytest.mark.parametrize("backlog", [0, 8], ids=["dropped", "silent"])
async def test_the_next_is_asked_where_a_door_cannot_be_reached(
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backlog: int,
) -> None:
    """A firewall drops packets (here, the kernel does: its queue is full), or says nothing."""
    giver = Node(server, 1, tmp_path / "1", spec=THREE)
    taker = Node(server, 2, tmp_path / "2", spec=THREE)
    giver.compile()
    await giver.sharing.start()
    tasks: list[asyncio.Future[None]] = []
    with (
        socket.create_server(("127.0.0.1", 0), backlog=backlog) as full,
        contextlib.ExitStack() as held,
    ):
        for _ in range(3):
            client = held.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        door = CompiledDoor(FINGERPRINT, "127.0.0.1", full.getsockname()[1], "t" * 16, "00")

        def serve(data: bytes, reply: Reply) -> None:
            tasks.append(asyncio.ensure_future(reply(encode(door))))

        ask = taker.sharing._ask

        async def give_up_the_first(source: int) -> CompiledDoor:
            monkeypatch.setattr(compiled, "_REACH_S", 3600.0 if source else 0.2)
            return await ask(source)

        taker.sharing._ask = give_up_the_first  # type: ignore[method-assign]
        await FakeBus(server).serve(subject_compiled("job", 0, 2), serve)
        with caplog.at_level("INFO", logger="perdure.agent"):
            said = await asyncio.wait_for(taker.sharing.wait(), PATIENCE_S)
    assert said == ""
    assert taker.list_files() == ["kernel"]
    assert REACH_S + SILENT_S < WAIT_S, "within the time that a start waits"
    assert "node 0 has compiled: 0 of 0 files are taken" in caplog.text
    await giver.sharing.close()
    await taker.sharing.close()


async def test_nodes_that_are_silent_cost_half_a_second_all_together(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_SILENT_S", SILENT_S)
    spec = structs.replace(SPEC, nodes=9)
    taker = Node(server, 8, tmp_path / "8", spec=spec)
    for source in taker.sharing._sources:
        silent = subject_compiled("job", source, 8)
        await FakeBus(server).serve(silent, lambda data, reply: None)
    waits_s: list[float] = []
    request = taker.sharing._bus.request

    async def note(subject: str, data: bytes, *, timeout_s: float) -> bytes:
        waits_s.append(timeout_s)
        return await request(subject, data, timeout_s=timeout_s)

    monkeypatch.setattr(taker.sharing._bus, "request", note)
    await asyncio.wait_for(taker.sharing.wait(), PATIENCE_S)
    assert len(waits_s) == 3
    assert sum(waits_s) <= SILENT_S
    await taker.sharing.close()


async def test_a_door_without_its_token_leads_nowhere(server: FakeServer, tmp_path: Path) -> None:
    giver = Node(server, 0, tmp_path / "0")
    giver.compile()
    await giver.sharing.start()
    door = await ask_as(server, 1)

    def try_in() -> None:
        with open_wire(door.host, door.port, "x" * 16, source="", deadline_s=PATIENCE_S) as wire:
            wire.receive(1)

    with pytest.raises(ConnectionError):
        await asyncio.to_thread(try_in)
    await giver.sharing.close()


@pytest.mark.parametrize(
    ("spec", "node", "alone", "asked"),
    [
        (SPEC, 1, True, [0]),
        (SPEC, 0, True, []),
        (JobSpec(name="job", script="t", nodes=4), 2, True, []),
        (JobSpec(name="job", script="t", nodes=5), 2, False, [3, 4, 0]),
        (JobSpec(name="job", script="t", nodes=9, remote=7), 8, False, [0, 1]),
        (JobSpec(name="job", script="t", nodes=2, remote=2), 1, False, []),
    ],
    ids=["joined", "first", "emulated", "slurm", "boxes", "all from elsewhere"],
)
def test_only_agents_of_the_jobs_own_are_asked(
    tmp_path: Path, spec: JobSpec, node: int, alone: bool, asked: list[int]
) -> None:
    """What it executes then comes from where the script and its environment come from."""
    made = Node(FakeServer(), node, tmp_path, spec=spec, alone=alone)
    assert made.sharing._sources == asked
    assert made.sharing.due == bool(asked)


async def test_a_machine_from_elsewhere_gives_nothing(server: FakeServer, tmp_path: Path) -> None:
    node = Node(server, 1, tmp_path)
    await node.sharing.start()
    assert server.patterns == {}
    await node.sharing.close()
