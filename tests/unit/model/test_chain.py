"""A journal's lines prove themselves: what happens to them is seen, and nothing false is read."""

from collections.abc import Iterable, Sequence

import pytest

from perdure.model.chain import FIRST, EntryReader, Link, Tally, read_link, seal
from perdure.model.codec import encode
from perdure.model.errors import ProtocolError
from perdure.model.events import Decision, JournalEntry, OperatorNoted


def write(count: int, text: str = "weights \u00e9", first: int = 1, after: str = FIRST) -> bytes:
    """Return a journal of `count` entries."""
    lines = b""
    for seq in range(first, first + count):
        body = (
            OperatorNoted(id="c", text=f"{text} {seq}", step=seq, at_s=1.0 * seq)
            if seq % 2
            else Decision(action="FormWorld", summary=f"{text} {seq}", reason='"-M*\n')
        )
        line, after = seal(encode(JournalEntry(seq, 1.5 * seq, body)), after)
        lines += line
    return lines


def read(data: bytes, *, known_seq: int = 0) -> tuple[list[JournalEntry], Tally]:
    reader = EntryReader(data.splitlines(keepends=True), known_seq=known_seq)
    return list(reader), reader.tally


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def seqs(entries: Iterable[JournalEntry]) -> list[int]:
    return [entry.seq for entry in entries]


def check_read(data: bytes, true: Sequence[JournalEntry]) -> bool:
    """Check that nothing is read that was not written; return whether something is said."""
    entries, tally = read(data, known_seq=len(true))
    assert all(entry in true for entry in entries)
    assert seqs(entries) == sorted(set(seqs(entries)))
    assert len(entries) == len(true) or not tally.whole
    assert tally.whole == (tally.describe() == "")
    return not tally.whole


def test_every_flipped_bit_is_said_and_costs_one_entry_or_two() -> None:
    data = write(5)
    true, tally = read(data)
    assert (len(true), tally.whole) == (5, True)
    for bit in range(8 * len(data)):
        entries, tally = read(flip(data, bit), known_seq=len(true))
        assert not tally.whole or len(entries) == len(true), bit  # The last newline is none's.
        assert tally.describe() or bit // 8 == len(data) - 1, bit
        assert len(entries) >= len(true) - 2, bit
        assert all(entry in true for entry in entries), bit


def test_a_lost_middle_a_cut_end_and_a_lost_beginning_are_seen() -> None:
    lines = write(8).splitlines(keepends=True)
    entries, tally = read(b"".join(lines[:2] + lines[5:]))
    assert (seqs(entries), tally.gaps) == ([1, 2, 6, 7, 8], [(3, 5)])
    assert tally.describe() == "3 entries are not there or not as written (3 to 5)"
    entries, tally = read(b"".join(lines[:6]), known_seq=8)
    assert (tally.cut, tally.describe()) == (2, "the last 2 entries are not there")
    assert read(b"".join(lines[2:]))[1].gaps == [(1, 2)]
    true, _ = read(b"".join(lines))
    for length in range(len(b"".join(lines))):
        check_read(b"".join(lines)[:length], true)


def test_two_mixed_histories_are_seen_and_one_is_read() -> None:
    one, other = write(9).splitlines(keepends=True), write(9, "other").splitlines(keepends=True)
    entries, tally = read(b"".join(one[:4] + other[4:]))
    assert seqs(entries) == [1, 2, 3, 4]
    assert (tally.foreign, tally.foreign_from) == (5, 5)
    entries, tally = read(b"".join(one[:4] + other[3:6] + one[4:]))
    assert (seqs(entries), tally.foreign) == (list(range(1, 10)), 3)
    entries, tally = read(b"".join(one[:4] + one[2:]))  # A block that is there twice.
    assert (seqs(entries), tally.foreign) == (list(range(1, 10)), 2)


def test_a_torn_last_line_is_left_out_and_is_no_damage_by_itself() -> None:
    data = write(3)
    entries, tally = read(data[:-7])
    assert (seqs(entries), tally.torn, tally.whole) == ([1, 2], True, True)
    assert read(data[:-7], known_seq=3)[1].describe() == "the last entry is not there"
    assert seqs(read(data[:-1])[0]) == [1, 2, 3]


def test_zeros_in_the_place_of_a_block_are_passed_over() -> None:
    data = write(20)
    middle = len(data) // 2
    entries, tally = read(data[:middle] + bytes(512) + data[middle + 512 :])
    assert tally.missing == 20 - len(entries) <= 5
    assert tally.describe().startswith(f"{tally.missing} entries are not there or not as written")


def test_what_follows_a_place_is_read_from_there() -> None:
    lines = write(6).splitlines(keepends=True)
    place = read_link(lines[3])
    assert place is not None
    reader = EntryReader(lines[4:], last=place)
    assert (seqs(reader), reader.tally.whole) == ([5, 6], True)
    reader = EntryReader(lines[4:], last=Link(4, FIRST, "f" * 16))
    assert (seqs(reader), reader.tally.foreign) == ([], 2)
    reader = EntryReader(lines[3:], first=0)
    assert (seqs(reader), reader.tally.whole) == ([4, 5, 6], True)


def test_a_journal_without_hashes_is_refused() -> None:
    """It is no damage: the first line is whole, and says that it has none."""
    lines = write(3).splitlines(keepends=True)
    old = [line.partition(b',"after":"')[0] + b"}\n" for line in lines]
    with pytest.raises(ProtocolError, match=r"before 0\.2"):
        read(b"".join(old))
    entries, tally = read(b"".join([lines[0], *old[1:]]))
    assert (seqs(entries), tally.broken) == ([1], 2)
    entries, tally = read(old[0][:-3])
    assert (entries, tally.torn) == ([], True)


def test_a_removed_event_is_passed_over_and_is_no_damage() -> None:
    first, after = seal(
        encode(JournalEntry(1, 1.0, OperatorNoted(id="a", text="a", step=1, at_s=1.0))), FIRST
    )
    body = b'{"type":"MessagesSetAside","at_s":2.0,"door":"rank","source":"rank 1","count":3}'
    gone, after = seal(b'{"seq":2,"at_s":2.0,"body":' + body + b"}", after)
    last, _ = seal(
        encode(JournalEntry(3, 3.0, OperatorNoted(id="b", text="b", step=3, at_s=3.0))), after
    )
    entries, tally = read(first + gone + last, known_seq=3)
    assert (seqs(entries), tally.whole) == ([1, 3], True)
