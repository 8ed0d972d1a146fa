# ruff: noqa: ASYNC110, ASYNC230, ASYNC240
"""One suite for every `JournalStream`, and the journal on top of it."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from nats.js.api import StreamConfig

from perdure.adapters.nats import NatsBus, NatsStream
from perdure.model.bus.endpoint import Endpoint
from perdure.model.bus.wire import stream_journal, subject_journal
from perdure.model.errors import FencedError, PlatformError
from perdure.model.events import (
    ControllerStarted,
    Decision,
    JobEnded,
    JournalEntry,
    JournalMended,
)
from perdure.model.job import JobSpec
from perdure.service.controller.journal import (
    Journal,
    Mirror,
    clear_stream,
    read_end,
    read_journal,
)
from perdure.service.jobfiles import make_folders, read_last_entries, read_mirror, write_document
from perdure.service.jobfolders import paths_of
from perdure.service.ports import JournalStream
from tests.contract.test_bus import Server
from tests.fakes import FakeStream, number_entries
from tests.journals import render_journal
from tests.waiting import PATIENCE_S


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


@pytest.fixture(params=["fake", "nats"])
async def stream(request: pytest.FixtureRequest) -> AsyncIterator[JournalStream]:
    if request.param == "fake":
        yield FakeStream()
        return
    endpoint = request.getfixturevalue("server").start()
    bus = await NatsBus.connect(endpoint, timeout_s=PATIENCE_S)
    yield await NatsStream.open(bus, "a.job")
    await bus.close()


def entries(journal: Journal, *words: str) -> list[JournalEntry]:
    return number_entries(
        journal, [Decision(action="A", summary=w, reason="r") for w in words], at_s=1.0
    )


async def test_messages_are_numbered_and_read_in_order(stream: JournalStream) -> None:
    assert await stream.read_all() == []
    for index in range(1200):
        number = await stream.append(b"%d" % index, expected_last=index, message_id=f"m{index}")
        assert number == index + 1
        if index == 3:
            assert len(await stream.read_all()) == 4
    assert await stream.read_all() == [b"%d" % index for index in range(1200)]


async def test_before_a_controller_has_made_it_there_is_nothing_to_read(server: Server) -> None:
    bus = await NatsBus.connect(server.start(), timeout_s=PATIENCE_S)
    assert await NatsStream(bus, "a.job").read_all() == []
    await bus.close()


async def test_what_a_slow_reader_drops_is_read_again(server: Server) -> None:
    """nats-py drops what comes faster than it is taken: of 270 MB once 96,016 entries."""
    bus = await NatsBus.connect(server.start(), timeout_s=PATIENCE_S)
    stream = await NatsStream.open(bus, "a.job")
    messages = [b"%d" % index * 30 for index in range(600)]
    for index, data in enumerate(messages):
        await stream.append(data, expected_last=index, message_id=f"m{index}")
    bus.client.subscribe = partial(bus.client.subscribe, pending_bytes_limit=2_000)  # type: ignore[method-assign]
    assert await stream.read_all() == messages
    await bus.close()


async def test_a_stream_that_nobody_answers_for_is_not_an_empty_one(server: Server) -> None:
    """An operator has made it without direct gets: 503 is no word on what it holds."""
    bus = await NatsBus.connect(server.start(), timeout_s=PATIENCE_S)
    name, subject = stream_journal("a.job"), subject_journal("a.job")
    js = bus.client.jetstream()
    await js.add_stream(StreamConfig(name=name, subjects=[subject], allow_direct=False))
    stream = await NatsStream.open(bus, "a.job")
    await stream.append(b"x", expected_last=0, message_id="m1")
    with pytest.raises(PlatformError, match="not to be had") as refused:
        await stream.read_all()
    assert "allow_direct" in refused.value.hint
    await bus.close()


async def test_messages_that_are_gone_leave_empty_ones_and_hide_none(server: Server) -> None:
    """Also the first one of what is asked for at once, which some servers take for the end."""
    bus = await NatsBus.connect(server.start(), timeout_s=PATIENCE_S)
    stream = await NatsStream.open(bus, "a.job")
    for index in range(1200):
        await stream.append(b"%d" % index, expected_last=index, message_id=f"m{index}")
    gone = {0, 500, 700, 1000}
    for index in gone:
        await bus.client.jetstream().delete_msg(stream_journal("a.job"), index + 1)
    found = await stream.read_all()
    assert found == [b"" if index in gone else b"%d" % index for index in range(1200)]
    await bus.close()


async def test_a_repeated_append_is_stored_once(stream: JournalStream) -> None:
    assert await stream.append(b"x", expected_last=0, message_id="a") == 1
    assert await stream.append(b"x", expected_last=0, message_id="a") == 1
    assert await stream.read_all() == [b"x"]


async def test_the_second_writer_is_fenced(stream: JournalStream) -> None:
    await stream.append(b"x", expected_last=0, message_id="a")
    with pytest.raises(FencedError, match="another controller"):
        await stream.append(b"y", expected_last=0, message_id="b")
    assert await stream.read_all() == [b"x"]


async def test_journal_survives_a_change_of_writer(stream: JournalStream) -> None:
    first = Journal(stream, writer="one")
    assert await first.open() == []
    await first.append(entries(first, "a", "b"))
    second = Journal(stream, writer="two")
    assert [e.seq for e in await second.open()] == [1, 2]
    await second.append(entries(second, "c"))
    with pytest.raises(FencedError):
        await first.append(entries(first, "late"))
    third = Journal(stream, writer="three")
    found = await third.open()
    assert [(e.seq, e.body.summary) for e in found if isinstance(e.body, Decision)] == [
        (1, "a"), (2, "b"), (3, "c"),
    ]  # fmt: skip


async def test_large_groups_are_split(stream: JournalStream) -> None:
    journal = Journal(stream, writer="one")
    await journal.open()
    await journal.append(entries(journal, *("x" * 300_000 for _ in range(5))))
    assert journal.last_seq == 5
    assert len(await stream.read_all()) == 5
    await journal.append(entries(journal, "a", "b"))
    assert len(await Journal(stream, writer="two").open()) == 7


@pytest.mark.parametrize("stored", [False, True])
async def test_journal_tries_again_until_it_can_be_written(stored: bool) -> None:
    stream = FakeStream()
    stream.failures = [(PlatformError("no answer"), stored), (PlatformError("full"), False)]
    journal = Journal(stream, writer="one")
    await journal.open()
    await journal.append(entries(journal, "a"))
    await journal.append(entries(journal, "b"))
    assert len(stream.messages) == 2


async def test_mirror_follows_and_heals(tmp_path: Path) -> None:
    stream = FakeStream()
    path = tmp_path / "journal.jsonl"
    journal = Journal(stream, writer="one", mirror=Mirror(str(path)))
    await journal.open()
    await journal.append(entries(journal, "a"))
    path.rename(tmp_path / "aside")
    path.mkdir()  # cannot be written
    await journal.append(entries(journal, "b"))
    path.rmdir()
    (tmp_path / "aside").rename(path)
    with open(path, "ab") as file:
        file.write(b'{"seq": 2, "half')
    await journal.append(entries(journal, "c"))
    assert path.read_bytes() == b"".join(stream.messages)
    path.write_bytes(b"")
    await Journal(stream, writer="two", mirror=Mirror(str(path))).open()
    assert path.read_bytes() == b"".join(stream.messages)


@pytest.mark.parametrize(
    ("left", "agreed"),
    [("none", True), ("nothing", True), ("a part", True), ("all", True), ("more", False),
     ("another", False), ("a folder", False)],
)  # fmt: skip
async def test_entries_are_read_as_long_as_stream_and_mirror_agree(
    tmp_path: Path, left: str, agreed: bool
) -> None:
    stream, path = FakeStream(), tmp_path / "journal.jsonl"
    journal = Journal(stream, writer="one", mirror=Mirror(str(path)))
    await journal.open()
    for word in "abcd":
        await journal.append(entries(journal, word))
    whole = path.read_bytes()
    lost = stream.messages.pop() if left == "more" else b""
    texts = {"nothing": b"", "a part": whole[:-300], "another": whole.replace(b'"c"', b'"x"')}
    path.unlink()
    if left == "a folder":
        path.mkdir()
    elif left != "none":
        path.write_bytes(texts.get(left, whole))
    following = Journal(stream, writer="two", mirror=Mirror(str(path)))
    found = [entry.seq async for entry in following.read()]
    assert following.agreed == agreed
    if not agreed and left != "a folder":
        assert path.read_bytes() == texts.get(left, whole)
    if not agreed:
        found = [entry.seq for entry in await following.open()]
    assert found == [1, 2, 3, 4]
    await following.append(entries(following, "e"))
    assert following.last_seq == 5
    if left != "a folder":
        assert b"".join(stream.messages) == path.read_bytes()
        size, digest = following.position().mirror_size, following.position().mirror_digest
        assert Mirror(str(path)).resume(size, digest)
        assert path.read_bytes().startswith(whole)
    assert lost in b"".join(stream.messages)


async def test_a_stream_that_is_damaged_behind_a_mirror_that_lags(tmp_path: Path) -> None:
    stream, path = FakeStream(), tmp_path / "journal.jsonl"
    journal = Journal(stream, writer="one", mirror=Mirror(str(path)))
    await journal.open()
    for word in "abcd":
        await journal.append(entries(journal, word))
    path.write_bytes(stream.messages[0])
    stream.messages[2] = stream.messages[2].replace(b'"c"', b'"x"')
    following = Journal(stream, writer="two", mirror=Mirror(str(path)))
    assert [entry.seq async for entry in following.read()] == [1, 2]
    assert [entry.seq for entry in await following.open()] == [1, 2, 4]
    assert "in no copy: 1 entry is not there or not as written (3)" in str(following.take_damage())
    assert path.read_bytes() == b"".join(stream.messages)


async def test_what_is_read_is_not_held(tmp_path: Path) -> None:
    """2.3 GB for a month of a thousand ranks, where a machine without its snapshots takes over."""
    stream, path = FakeStream(), tmp_path / "journal.jsonl"
    journal = Journal(stream, writer="one", mirror=Mirror(str(path)))
    await journal.open()
    for _ in range(20):
        await journal.append(entries(journal, *("x" * 1000 for _ in range(100))))
    path.write_bytes(path.read_bytes()[:1_000_000])
    tracemalloc.start()
    try:
        following = Journal(stream, writer="two", mirror=Mirror(str(path)))
        assert sum([1 async for _ in following.read()]) == 2000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert following.agreed
    assert len(path.read_bytes()) > 2_000_000 > 2 * peak


async def test_a_torn_last_line_of_the_mirror_is_left_out(tmp_path: Path) -> None:
    paths = paths_of(str(tmp_path), "job")
    assert read_mirror(paths) is None
    first = JournalEntry(seq=1, at_s=0.5, body=ControllerStarted(incarnation="c"))
    whole = render_journal([first])
    Path(paths.root).mkdir(parents=True)
    Path(paths.journal).write_bytes(whole + whole[:-7])
    assert list(read_journal(paths)) == [first]


async def test_acknowledged_entries_survive_kill_9_of_the_server(server: Server) -> None:
    endpoint = server.start()
    bus = await NatsBus.connect(endpoint, timeout_s=PATIENCE_S)
    journal = Journal(await NatsStream.open(bus, "job"), writer="one")
    await journal.open()
    for index in range(20):
        await journal.append(entries(journal, str(index)))
        if index % 5 == 4:
            server.kill()
            server.start()
    async with asyncio.timeout(PATIENCE_S):
        while bus.reconnects < 4:
            await asyncio.sleep(0.01)
    again = Journal(await NatsStream.open(bus, "job"), writer="two")
    assert [entry.seq for entry in await again.open()] == list(range(1, 21))
    await bus.close()


def test_journal_is_read_from_the_store_when_there_is_no_mirror(tmp_path: Path) -> None:
    paths = paths_of(str(tmp_path), "job")
    make_folders(paths)
    server = Server(Path(paths.root))
    endpoint = server.start()

    async def write() -> None:
        bus = await NatsBus.connect(endpoint, timeout_s=PATIENCE_S)
        journal = Journal(await NatsStream.open(bus, "job"), writer="one")
        await journal.open()
        await journal.append(entries(journal, "a", "b"))
        await bus.close()

    try:
        asyncio.run(write())
        write_document(paths.endpoint, Endpoint(url=endpoint.url, token="s3cr3t", clock_offset_s=0))
        assert len(list(read_journal(paths))) == 2  # the server runs
    finally:
        server.close()
    assert len(list(read_journal(paths))) == 2  # it does not


def test_the_last_entry_is_found_without_reading_the_rest(tmp_path: Path) -> None:
    paths = paths_of(str(tmp_path), "job")
    assert read_last_entries(paths) == []
    mirror = Path(paths.journal)
    mirror.parent.mkdir(parents=True)
    mirror.write_bytes(b"")
    assert read_last_entries(paths) == []
    lines = render_journal(
        JournalEntry(seq, 1.0, Decision(action="A", summary="x" * size, reason="r"))
        for seq, size in ((1, 10), (2, 300_000), (3, 200_000), (4, 5))
    ).splitlines(keepends=True)
    for count in (1, 2, 3, 4):
        mirror.write_bytes(b"".join(lines[:count]))
        assert read_last_entries(paths)[-1].seq == count
    mirror.write_bytes(b"".join(lines) + b'{"seq":5,"at')  # torn
    assert read_last_entries(paths)[-1].seq == 4


async def test_an_end_that_is_not_the_last_entry_is_the_end(server: Server, tmp_path: Path) -> None:
    """What the turn that ended a job brought about besides follows in the same group."""
    endpoint = server.start()
    bus = await NatsBus.connect(endpoint, timeout_s=PATIENCE_S)
    stream = await NatsStream.open(bus, "a.job")
    journal = Journal(stream, writer="one")
    await journal.open()
    end = JobEnded(status="done", exit_code=0, reason="", at_s=1.0)
    bodies = [end, Decision(action="A", summary="s", reason="r")]
    await journal.append(number_entries(journal, bodies, at_s=1.0))
    paths = paths_of(str(tmp_path / "home"), "a.job")
    make_folders(paths)  # No mirror: its disk is full.
    assert await read_end(paths, bus, JobSpec(name="a.job", script="x.py")) == end
    write_document(paths.credential("controller"), endpoint)
    await clear_stream(paths, "a.job", ours=False)
    assert await stream.read_all() == []
    await bus.close()


@pytest.mark.parametrize("place", [0.5, 0.99], ids=["middle", "last"])
@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
async def test_what_jetstream_loses_behind_a_flipped_bit_is_restored(
    server: Server, tmp_path: Path, stopped: bool, place: float
) -> None:
    """A server that was killed drops all behind it, one that was stopped the record itself."""
    mirror = tmp_path / "journal.jsonl"

    async def next_controller(words: Sequence[str]) -> tuple[int, str]:
        endpoint = server.start()
        bus = await NatsBus.connect(endpoint, timeout_s=PATIENCE_S)
        stream = await NatsStream.open(bus, "a.job")
        journal = Journal(stream, writer=f"c-{words}", mirror=Mirror(str(mirror)))
        found = await journal.open()
        for word in words:
            await journal.append(entries(journal, word))
        assert b"".join(await stream.read_all()) == mirror.read_bytes()
        await bus.close()
        mended = [each.reason for each in journal.take_damage() if isinstance(each, JournalMended)]
        return len(found), "".join(mended)

    assert await next_controller([f"word {n}" for n in range(30)]) == (0, "")
    server.stop() if stopped else server.kill()
    [block] = tmp_path.rglob("*.blk")
    data = bytearray(block.read_bytes())
    data[int(len(data) * place)] ^= 4
    block.write_bytes(data)
    count, reason = await next_controller(["after"])
    assert count == 30
    assert "came back from journal.jsonl" in reason
    server.kill()
    assert await next_controller([]) == (31, "")
