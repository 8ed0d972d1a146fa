# ruff: noqa: ASYNC240
"""Before a controller writes, stream, mirror and snapshots are compared: the sound one wins."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes import FakeStream, number_entries
from tests.journals import reseal
from tests.unit.model.test_chain import flip

from perdure.model.chain import EntryReader
from perdure.model.events import Decision, JournalEntry, JournalMended
from perdure.service.controller.comparison import compare
from perdure.service.controller.journal import Journal, Mirror


async def write(stream: FakeStream, mirror: Path | None, *words: str, writer: str = "one") -> None:
    """Append an entry for each word, the first two in one group."""
    journal = Journal(stream, writer=writer, mirror=Mirror(str(mirror)) if mirror else None)
    await journal.open()
    groups = [words[:2], *([word] for word in words[2:])] if len(words) > 1 else [words]
    for group in groups:
        bodies = [Decision(action="A", summary=word, reason="why") for word in group]
        await journal.append(number_entries(journal, bodies, at_s=1.5))


@pytest.fixture
async def stream(tmp_path: Path) -> FakeStream:
    """Give a stream of six entries, whose mirror is `journal.jsonl`."""
    stream = FakeStream()
    await write(stream, tmp_path / "journal.jsonl", "a", "b", "c", "d", "e", "f")
    return stream


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


class Opened:
    """What the next controller finds."""

    def __init__(self, journal: Journal, entries: list[JournalEntry], mirror: Path) -> None:
        self.seqs = [entry.seq for entry in entries]
        self.last_seq = journal.last_seq
        told = [each for each in journal.take_damage() if isinstance(each, JournalMended)]
        self.mended = told[0] if told else None
        self.aside = sorted(path.name for path in mirror.parent.glob("*.damaged-*"))


async def open_next(stream: FakeStream, mirror: Path) -> Opened:
    """Open it as the next controller, which then writes; both copies have to be whole after."""
    journal = Journal(stream, writer="two", mirror=Mirror(str(mirror)))
    opened = Opened(journal, await journal.open(), mirror)
    body = Decision(action="A", summary="next", reason="why")
    await journal.append(number_entries(journal, [body], at_s=2.0))
    data = b"".join(stream.messages)
    assert mirror.read_bytes() == data
    reader = EntryReader(data.splitlines(keepends=True))
    assert [entry.seq for entry in reader][-1] == opened.last_seq + 1
    return opened


async def test_copies_that_agree_are_left_alone(stream: FakeStream, mirror: Path) -> None:
    mirror.write_bytes(b"".join(stream.messages)[:-30])  # It lags: that is no damage.
    opened = await open_next(stream, mirror)
    assert (opened.seqs, opened.mended, opened.aside) == ([1, 2, 3, 4, 5, 6], None, [])


@pytest.mark.parametrize("step", [101])
async def test_a_flipped_bit_of_either_copy_costs_nothing_and_is_said(
    stream: FakeStream, mirror: Path, step: int
) -> None:
    messages, data = list(stream.messages), mirror.read_bytes()
    for bit in range(0, 8 * len(data) - 8, step):  # Without the last newline, which is no entry's.
        stream.messages[:] = messages
        stream.ids.clear()
        mirror.write_bytes(flip(data, bit))
        opened = await open_next(stream, mirror)
        assert opened.seqs == [1, 2, 3, 4, 5, 6], bit
        assert opened.mended is not None
        assert opened.mended.lost == 0
        aside = Path(opened.mended.aside)
        assert aside.read_bytes() == flip(data, bit)
        aside.unlink()
    for number, message in enumerate(messages):
        for bit in range(0, 8 * len(message), step):
            stream.messages[:] = messages
            stream.ids.clear()
            stream.messages[number] = flip(message, bit)
            mirror.write_bytes(data)
            opened = await open_next(stream, mirror)
            assert opened.seqs == [1, 2, 3, 4, 5, 6], bit
            assert opened.mended is not None
            assert opened.mended.lost == 0
            assert stream.messages[: len(messages)] == messages
            (aside,) = mirror.parent.glob("*.damaged-*")
            assert flip(message, bit) in aside.read_bytes()
            aside.unlink()


@pytest.mark.parametrize(
    ("damage", "restored"),
    [
        (lambda m: m[:2], 3),
        (lambda m: m[:1] + m[3:], 2),
        (lambda m: [*m[:2], b"", *m[3:]], 1),
        (lambda m: [b"", b"", *m[2:]], 3),
        (lambda m: [], 6),
    ],
)
async def test_what_the_stream_has_lost_comes_back_from_the_mirror(
    stream: FakeStream,
    mirror: Path,
    damage: Callable[[list[bytes]], list[bytes]],
    restored: int,
) -> None:
    whole = b"".join(stream.messages)
    stream.messages[:] = damage(list(stream.messages))
    opened = await open_next(stream, mirror)
    assert opened.seqs == [1, 2, 3, 4, 5, 6]
    assert opened.mended is not None
    assert (opened.mended.restored, opened.mended.lost, opened.aside) == (restored, 0, [])
    assert b"".join(stream.messages).startswith(whole)


async def test_each_copy_mends_the_other(stream: FakeStream, mirror: Path) -> None:
    whole = mirror.read_bytes()
    mirror.write_bytes(flip(whole, 100))
    stream.messages[3] = flip(stream.messages[3], 300)
    opened = await open_next(stream, mirror)
    names = ["journal.jsonl.damaged-1", "journal.jsonl.damaged-2"]
    assert (opened.seqs, opened.aside) == ([1, 2, 3, 4, 5, 6], names)
    assert mirror.read_bytes().startswith(whole)


async def test_what_no_copy_has_is_said_and_the_rest_goes_on(
    stream: FakeStream, mirror: Path
) -> None:
    lines = mirror.read_bytes().splitlines(keepends=True)
    mirror.write_bytes(b"".join(lines[:2] + lines[3:]))
    stream.messages[1] = flip(stream.messages[1], 300)
    opened = await open_next(stream, mirror)
    assert opened.seqs == [1, 2, 4, 5, 6]
    assert opened.mended is not None
    assert (opened.mended.restored, opened.mended.lost) == (0, 1)
    assert "in no copy: 1 entry is not there or not as written (3)" in opened.mended.reason


async def test_of_two_histories_the_streams_goes_on_and_the_other_is_kept(
    stream: FakeStream, mirror: Path
) -> None:
    other = b"".join(reseal(stream.messages, b'"c"', b'"x"'))
    mirror.write_bytes(other)
    opened = await open_next(stream, mirror)
    assert (opened.seqs, opened.aside) == ([1, 2, 3, 4, 5, 6], ["journal.jsonl.damaged-1"])
    assert (mirror.parent / opened.aside[0]).read_bytes() == other
    assert opened.mended is not None
    assert "journal.jsonl had 4 entries of another history" in opened.mended.reason


async def test_a_mirror_that_cannot_be_written_is_not_cut(
    stream: FakeStream, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    spoilt = flip(mirror.read_bytes(), 999)
    mirror.write_bytes(spoilt)
    monkeypatch.setattr("perdure.service.controller.journal._MIRROR_RETRY_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("perdure.service.controller.journal.replace_file", refuse)
        journal = Journal(stream, writer="two", mirror=Mirror(str(mirror)))
        await journal.open()
        await append(journal, "g")
        assert mirror.read_bytes() == spoilt
    await append(journal, "h")
    assert mirror.read_bytes() == b"".join(stream.messages)


async def append(journal: Journal, word: str) -> None:
    body = Decision(action="A", summary=word, reason="why")
    await journal.append(number_entries(journal, [body], at_s=2.0))


async def test_damaged_mirrors_that_are_kept_are_bounded(stream: FakeStream, mirror: Path) -> None:
    for bit in range(100, 1000, 100):
        mirror.write_bytes(flip(mirror.read_bytes(), bit))
        opened = await open_next(stream, mirror)
    assert opened.aside == [f"journal.jsonl.damaged-{n}" for n in (1, 2, 3)]


def test_a_stream_that_begins_late_is_whole() -> None:
    stream = FakeStream()
    asyncio.run(write(stream, None, "a", "b", "c"))
    found = compare([b"", b"", *stream.messages], b"".join(stream.messages))
    assert found.describe() == ""


async def test_what_is_lost_for_good_is_said_once(stream: FakeStream, mirror: Path) -> None:
    lines = mirror.read_bytes().splitlines(keepends=True)
    mirror.write_bytes(b"".join(lines[:2] + lines[3:]))
    stream.messages[1] = flip(stream.messages[1], 300)
    journal = Journal(stream, writer="two", mirror=Mirror(str(mirror)))
    await journal.open()
    (mended,) = journal.take_damage()
    await journal.append(number_entries(journal, [mended], at_s=2.0))
    held = list(stream.messages)
    opened = await open_next(stream, mirror)
    assert (opened.seqs, opened.mended) == ([1, 2, 4, 5, 6, 7], None)
    assert stream.messages[: len(held)] == held


async def test_a_second_history_in_the_stream_is_kept_beside_it(
    stream: FakeStream, mirror: Path
) -> None:
    [other] = reseal([stream.messages[-1]], b'"f"', b'"x"')
    stream.messages.append(other)
    opened = await open_next(stream, mirror)
    assert opened.seqs == [1, 2, 3, 4, 5, 6]
    assert opened.mended is not None
    assert "the stream had 1 entry of another history" in opened.mended.reason
    assert other in Path(opened.mended.aside).read_bytes()
