"""Two agents on one bus: who asks whom for what is compiled, who is refused, how long it takes."""

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest
from msgspec import structs
from tests.fakes import FakeBus, FakeServer

from perdure.adapters.transfer import open_wire
from perdure.model.codec import decode, encode
from perdure.model.job import JobSpec
from perdure.model.signals.compiled import CompiledAsk, CompiledDoor, subject_compiled
from perdure.service.agent import compiled
from perdure.service.agent.compiled import CompiledSharing
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


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


async def take(giver: Node, taker: Node) -> str:
    await giver.sharing.start()
    await taker.sharing.start()
    try:
        assert taker.sharing.due
        said = await asyncio.wait_for(taker.sharing.wait(), 20)
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

        await FakeBus(server).serve(subject_compiled("job", 0), lie)
        assert await asyncio.wait_for(taker.sharing.wait(), 20) == ""
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
    late, send = asyncio.Event(), giver.sharing._send
    loop = asyncio.get_running_loop()

    def send_late(*args: object, **kwargs: object) -> None:
        asyncio.run_coroutine_threadsafe(late.wait(), loop).result(20)
        send(*args, **kwargs)  # type: ignore[arg-type]

    giver.sharing._send = send_late  # type: ignore[method-assign]
    await giver.sharing.start()
    began = time.monotonic()
    said = await asyncio.wait_for(taker.sharing.wait(), 20)
    assert said.startswith("waited 0.")
    assert said.endswith("s for what another node has compiled")
    assert time.monotonic() - began < 10
    assert taker.list_files() == []
    late.set()
    while not taker.list_files():
        assert time.monotonic() - began < 20
        await asyncio.sleep(0.01)
    await taker.sharing.close()
    await giver.sharing.close()


async def test_nobody_waits_for_who_is_not_there(server: FakeServer, tmp_path: Path) -> None:
    taker = Node(server, 1, tmp_path / "1")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert await asyncio.wait_for(taker.sharing.wait(), 20) == ""  # Nobody serves.

    def point_nowhere(data: bytes, reply: Reply) -> None:
        door = CompiledDoor(FINGERPRINT, "127.0.0.1", port, "t" * 16, "00")
        tasks.append(asyncio.ensure_future(reply(encode(door))))

    tasks: list[asyncio.Future[None]] = []
    await FakeBus(server).serve(subject_compiled("job", 0), point_nowhere)
    assert await asyncio.wait_for(taker.sharing.wait(), 20) == ""
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


async def test_only_so_many_are_given_to_at_a_time_and_the_next_asks_again(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "TAKE_S", 1.0)  # For so long a door is open for who never comes.
    giver, taker = Node(server, 0, tmp_path / "0"), Node(server, 1, tmp_path / "1")
    giver.compile()
    await giver.sharing.start()
    bus, ask = FakeBus(server), encode(CompiledAsk(7, FINGERPRINT))
    doors: list[CompiledDoor] = []
    for _ in range(5):
        answer = await bus.request(subject_compiled("job", 0), ask, timeout_s=5)
        doors.append(decode(answer, CompiledDoor))
    assert [door.busy for door in doors] == [False] * 4 + [True]
    monkeypatch.setattr(compiled, "TAKE_S", 10.0)
    await asyncio.wait_for(taker.sharing.wait(), 20)
    assert taker.list_files() == ["kernel"]
    await giver.sharing.close()
    await taker.sharing.close()


async def test_a_door_without_its_token_leads_nowhere(server: FakeServer, tmp_path: Path) -> None:
    giver = Node(server, 0, tmp_path / "0")
    giver.compile()
    await giver.sharing.start()
    ask = encode(CompiledAsk(1, FINGERPRINT))
    answer = await FakeBus(server).request(subject_compiled("job", 0), ask, timeout_s=5)
    door: CompiledDoor = decode(answer, CompiledDoor)

    def try_in() -> None:
        with open_wire(door.host, door.port, "x" * 16, source="", deadline_s=10) as wire:
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
    assert subject_compiled("job", 1) not in server.servers
    await node.sharing.close()
