"""A controller that starts from a snapshot of its predecessor's memory, and what spoils one."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fakes import FakeBus, FakeStream
from tests.journals import reseal
from tests.unit.service.test_controller import SPEC, Rig, encode
from tests.waiting import PATIENCE_S

from perdure.control.memory import Memory
from perdure.model.bus.wire import Command, subject_commands
from perdure.model.chain import read_link
from perdure.model.codec import decode
from perdure.model.errors import PlatformError
from perdure.model.events import (
    CheckpointSaved,
    CommandReceived,
    JobSubmitted,
    JournalMended,
    RoomNoted,
)
from perdure.model.records import decode_record, encode_record
from perdure.service.controller.journal import Journal, Mirror
from perdure.service.controller.loop import ControllerService
from perdure.service.controller.snapshots import SnapshotFiles
from perdure.service.jobfiles import parse_journal

NOTE = RoomNoted(grade="low", reason="no room", place="/x", at_s=1000.0, node=0)
SAVED = CheckpointSaved(
    generation=0, step=10, path="p", bytes=1, stall_s=0.0, save_s=0.1, at_s=1000.0
)


class CountingStream(FakeStream):
    """Remembers from which message on it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []

    def read(self, *, first: int = 1) -> AsyncIterator[bytes]:
        self.reads.append(first)
        return super().read(first=first)


class SnapshotRig(Rig):
    """A rig whose controllers write down what they know every 20 entries."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.home = home
        self.stream: CountingStream = CountingStream()
        self.service: ControllerService | None = None

    @property
    def files(self) -> list[Path]:
        return sorted((self.home / "snapshots").glob("*.json"))

    async def start_controller(self) -> None:
        self.controllers += 1
        name = f"c{self.controllers}"
        self.service = ControllerService(
            SPEC,
            FakeBus(self.server),
            Journal(self.stream, writer=name, mirror=Mirror(str(self.home / "journal.jsonl"))),
            clock=lambda: self.time_s,
            incarnation=name,
            submitted_s=990.0,
            show=self.snapshots.append,
            snapshots=SnapshotFiles(str(self.home / "snapshots")),
            snapshot_every=20,
        )
        self.task = asyncio.create_task(self.service.run())
        await self.until(lambda: any(order.controller == name for order in self.orders))

    async def fill(self, entries: int) -> None:
        """Let the agent send until the journal has so many entries more."""
        for _ in range(entries):
            await self.send(NOTE)

    async def restart(self) -> Memory:
        """End the controller, start another; return what that one knows at its start."""
        await self.end_controller()
        await self.start_controller()
        assert self.service is not None
        return self.service._memory

    def whole(self) -> Memory:
        """Return what the journal says from its first entry on."""
        memory = Memory(SPEC)
        for entry in parse_journal(b"".join(self.stream.messages).splitlines(keepends=True)):
            memory.replay(entry)
        return memory


@pytest.fixture
async def rig(tmp_path: Path):  # type: ignore[no-untyped-def]
    rig = SnapshotRig(tmp_path)
    await rig.start()
    await rig.form()
    yield rig
    await rig.end_controller()


async def test_the_next_controller_reads_only_the_tail(rig: SnapshotRig) -> None:
    await rig.fill(50)
    await rig.until(lambda: len(rig.files) == 2)
    memory = await rig.restart()
    assert rig.stream.reads[0] == 1
    assert rig.stream.reads[-1] > 30
    assert memory.machine.state == rig.whole().machine.state
    assert memory.taken == rig.whole().taken
    assert await rig.send(NOTE) == rig.seq
    await rig.fill(60)
    await rig.until(lambda: len(rig.files) == 2 and rig.files[0].name > "000000000060")


async def test_a_message_from_before_the_snapshot_is_taken_once(rig: SnapshotRig) -> None:
    await rig.fill(30)
    await rig.until(lambda: rig.files)
    await rig.restart()
    length = len(rig.stream.messages)
    assert await rig.send(NOTE, SAVED, first_seq=3) == rig.seq
    assert len(rig.stream.messages) == length


async def test_a_command_from_before_the_snapshot_keeps_its_answer(rig: SnapshotRig) -> None:
    command = encode(Command(id="k1", kind="inject", args={"rank": 9}))
    first = await rig.agent.request(subject_commands("job"), command, timeout_s=PATIENCE_S)
    await rig.fill(30)
    await rig.until(lambda: rig.files)
    await rig.restart()
    assert await rig.agent.request(subject_commands("job"), command, timeout_s=PATIENCE_S) == first
    asked = [b for b in rig.bodies() if isinstance(b, CommandReceived)]
    assert len(asked) == 1


async def test_the_mirror_is_continued(rig: SnapshotRig) -> None:
    await rig.fill(30)
    await rig.until(lambda: rig.files)
    memory = await rig.restart()
    await rig.fill(5)
    assert memory is not None
    mirror = rig.home / "journal.jsonl"
    await rig.until(lambda: mirror.read_bytes() == b"".join(rig.stream.messages))
    assert len([first for first in rig.stream.reads if first == 1]) == 1


@pytest.mark.parametrize("harm", ["torn", "gone", "changed"])
async def test_a_spoilt_mirror_is_written_again(rig: SnapshotRig, harm: str) -> None:
    await rig.fill(30)
    await rig.until(lambda: rig.files)
    await rig.end_controller()
    mirror = rig.home / "journal.jsonl"
    data = mirror.read_bytes()
    if harm == "gone":
        mirror.unlink()
    else:
        mirror.write_bytes(data[:200] if harm == "torn" else b"x" + data[1:])
    await rig.start_controller()
    await rig.fill(5)
    with contextlib.suppress(FileNotFoundError):
        await rig.until(lambda: mirror.exists())
    await rig.until(lambda: mirror.read_bytes() == b"".join(rig.stream.messages))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ("flip", "hash"),
        ("cut", "malformed|hash"),
        ("code", "other code"),
        ("header", "not what was written"),
        ("empty", "malformed"),
    ],
)
async def test_a_bad_snapshot_falls_back_to_the_one_before(
    rig: SnapshotRig, harm: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.fill(50)
    await rig.until(lambda: len(rig.files) == 2)
    older, newer = rig.files
    data = newer.read_bytes()
    header, _, body = data.partition(b"\n")
    other = decode_record(header, dict) | {"code": "0"}
    spoilt = {
        "flip": data.replace(b'"running"', b'"pending"'),
        "cut": data[: len(data) // 2],
        "code": encode_record(other) + b"\n" + body,
        "header": data.replace(b'"code":"', b'"code":"0', 1),
        "empty": b"",
    }[harm]
    assert spoilt != data
    newer.write_bytes(spoilt)
    with caplog.at_level(logging.INFO, "perdure.controller"):
        memory = await rig.restart()
    assert memory.machine.state == rig.whole().machine.state
    assert rig.stream.reads[-1] > 10
    assert f"snapshot {newer.name} is not used" in caplog.text
    assert any(word in caplog.text for word in why.split("|"))
    assert f"after the snapshot at entry {int(older.stem)}" in caplog.text


async def test_without_any_good_snapshot_everything_is_replayed(
    rig: SnapshotRig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.fill(50)
    await rig.until(lambda: len(rig.files) == 2)
    for path in rig.files:
        path.write_bytes(b"{}\n{}")
    with caplog.at_level(logging.INFO, "perdure.controller"):
        memory = await rig.restart()
    assert rig.stream.reads[-1] == 1
    assert memory.machine.state == rig.whole().machine.state
    assert "from the first on" in caplog.text


async def test_a_snapshot_of_another_journal_is_passed_over(
    rig: SnapshotRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.fill(50)
    await rig.until(lambda: len(rig.files) == 2)
    await rig.end_controller()
    rig.stream.messages[:] = reseal(rig.stream.messages, b"no room", b"no disk")
    with caplog.at_level(logging.INFO, "perdure.controller"):
        await rig.start_controller()
    assert "does not fit the journal" in caplog.text
    assert rig.service is not None
    assert rig.service._memory.machine.state == rig.whole().machine.state


@pytest.mark.parametrize("mirror", [True, False])
async def test_an_emptied_stream_comes_back_from_the_mirror_or_goes_on_from_a_snapshot(
    rig: SnapshotRig, mirror: bool
) -> None:
    await rig.fill(30)
    await rig.until(lambda: rig.files)
    await rig.end_controller()
    before, known = rig.bodies(), int(rig.files[-1].stem)
    rig.stream.messages.clear()
    rig.stream.ids.clear()
    if not mirror:
        (rig.home / "journal.jsonl").unlink()
    await rig.start_controller()
    (mended,) = [body for body in rig.bodies() if isinstance(body, JournalMended)]
    if mirror:
        assert rig.bodies()[: len(before)] == before
        assert (mended.restored, mended.lost) == (len(before), 0)
        return
    first = read_link(rig.stream.messages[0].splitlines()[0])
    assert first is not None
    assert (first.seq, mended.lost) == (known + 1, known)
    assert rig.service is not None
    assert rig.service._memory.machine.state.spec is not None
    assert not any(isinstance(body, JobSubmitted) for body in rig.bodies())


async def test_a_full_disk_stops_no_controller(
    rig: SnapshotRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str, data: bytes) -> None:
        raise PlatformError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("perdure.service.controller.snapshots.write_atomic", refuse)
    await rig.fill(30)
    await rig.until(lambda: "No space left" in caplog.text)
    assert await rig.send(NOTE) == rig.seq
    assert rig.files == []
    assert decode(rig.stream.messages[0].splitlines()[0], dict)["seq"] == 1
