"""Following: streams of ranks, and the journal's mirror."""

import tracemalloc
from pathlib import Path

import pytest
from tests.journals import render_journal

from perdure.cli.looking import mirror
from perdure.cli.looking.mirror import MirrorTail
from perdure.cli.looking.output import (
    Stream,
    describe_entry,
    list_streams,
    render_entry,
)
from perdure.model.events import (
    CommandReceived,
    ControllerLost,
    Decision,
    JournalEntry,
    NodeLost,
    TimerFired,
)


def entry(seq: int) -> bytes:
    lines = (JournalEntry(seq=n, at_s=1.0, body=TimerFired()) for n in range(1, seq + 1))
    return render_journal(lines).splitlines(keepends=True)[-1]


def test_streams_are_found_in_order(tmp_path: Path) -> None:
    for name in ("g1/rank-0.err", "g0/rank-10.out", "g0/rank-2.out", "g0/rank-2.err", "g0/x", "y"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    found = [(s.generation, s.rank, s.name) for s in list_streams(str(tmp_path))]
    assert found == [(0, 2, "out"), (0, 2, "err"), (0, 10, "out"), (1, 0, "err")]


def test_a_line_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.out"
    stream = Stream(0, 0, "out", str(path))
    assert list(stream.read(last=False)) == []
    path.write_bytes(b"one\ntw")
    assert list(stream.read(last=False)) == ["one"]
    path.write_bytes(b"one\ntwo\r50%\n\nend \xff")
    assert list(stream.read(last=False)) == ["two\r50%", ""]
    assert list(stream.read(last=True)) == ["end \ufffd"]
    assert list(stream.read(last=True)) == []


def test_a_long_log_is_read_in_pieces(tmp_path: Path) -> None:
    """Neither a long file nor a long line is held whole; a character is not cut in two."""
    path = tmp_path / "rank-0.out"
    lines, long = "".join(f"{n}{'-' * 50_000}\n" for n in range(200)), "ab" + "\u20ac" * (1 << 20)
    path.write_text(lines + long)
    stream = Stream(0, 0, "out", str(path))
    numbers, rest = [], []
    tracemalloc.start()
    for line in stream.read(last=True):
        if "-" in line:
            numbers.append(int(line.strip("-")))
        else:
            rest.append((len(line), line.removeprefix("ab").strip("\u20ac")))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert numbers == list(range(200))
    assert (sum(size for size, _ in rest), {odd for _, odd in rest}) == (len(long), {""})
    assert peak < 8 << 20
    assert list(stream.read(last=True)) == []


def test_a_rank_that_prints_faster_than_is_read_is_read_to_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.out"
    path.write_bytes(b"1\n2\n")
    stream, seen = Stream(0, 0, "out", str(path)), []
    for line in stream.read(last=False):
        seen.append(line)
        with open(path, "ab") as file:
            file.write(b"more\n" * 1000)
        if len(seen) > 2:
            break
    assert seen == ["1", "2"]


def test_the_mirror_is_followed_through_a_rewrite(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    tail = MirrorTail(str(path))
    assert tail.poll() == []
    path.write_bytes(entry(1) + entry(2)[:9])
    assert [e.seq for e in tail.poll()] == [1]
    path.write_bytes(entry(1) + entry(2))
    assert [e.seq for e in tail.poll()] == [2]
    fresh = tmp_path / "new"
    fresh.write_bytes(entry(1) + entry(2) + entry(3))
    fresh.replace(path)
    assert [e.seq for e in tail.poll()] == [1, 2, 3]
    path.write_bytes(entry(1) + b"no entry\n")
    assert [e.seq for e in tail.poll()] == [1], "it was cut in place"
    with path.open("ab") as file:
        file.write(entry(4))
    assert [e.seq for e in tail.poll()] == [4]
    assert (tail.tally.entries, tail.tally.whole) == (2, False)
    assert tail.tally.gaps == [(2, 3)]


def test_a_damaged_stretch_of_the_mirror_is_not_taken_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a job that has ended showed nothing of what followed, whatever was pressed."""
    monkeypatch.setattr(mirror, "_AT_ONCE", 200)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(entry(1) + b"\0" * 50 + b"\n" + b"no entry\n" * 100 + entry(7))
    tail = MirrorTail(str(path))
    assert [e.seq for e in tail.poll()] == [1, 7]
    assert tail.poll() == []
    assert (tail.tally.broken, tail.tally.gaps) == (101, [(2, 6)])


def test_an_entry_keeps_its_kind_first() -> None:
    body = CommandReceived(id="1", kind="stop", who="eve")
    shown = describe_entry(JournalEntry(seq=4, at_s=2.0, body=body))
    assert list(shown) == ["seq", "t", "kind", "id", "what", "who"]
    assert (shown["kind"], shown["what"]) == ("CommandReceived", "stop")


def test_an_entry_as_a_line() -> None:
    lost = JournalEntry(seq=7, at_s=12.5, body=NodeLost(node=1, at_s=12.0, reason="a\nb"))
    assert render_entry(lost, 10.0) == "     7     2.500 s  NodeLost node=1 reason=a\\nb"
    decided = JournalEntry(seq=8, at_s=12.5, body=Decision(action="A", summary="s", reason="r"))
    assert render_entry(decided, 10.0) == "     8     2.500 s  -> A: s (r)"


def test_moments_of_an_entry_count_from_the_same_start_as_its_line() -> None:
    ended = ControllerLost(part="agent", pid=1, cause="c", at_s=1012.0, restarted_s=1012.25)
    line = render_entry(JournalEntry(seq=9, at_s=1012.5, body=ended), 1010.0)
    assert "2.500 s  ControllerLost" in line
    assert "restarted_s=2.25" in line
