"""A journal's copies are compared before anything is written: the longest sound one wins.

The stream is what is written first, so the mirror has nothing that the stream did not have. What
the mirror has more was in the stream and is lost there: JetStream drops what is behind a damaged
record once it was killed, says nothing of it, and takes the next append. Where both tell different
histories, the stream's is the one that agents and ranks have lived, and goes on.

Each line proves itself (`model/chain.py`), so what is broken in one copy is taken from the other
line by line.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from perdure.model.chain import EntryReader, Link, Tally, read_link
from perdure.model.events import JournalEntry, JournalMended
from perdure.service.jobfiles import MINE


@dataclass(slots=True)
class Comparison:
    """What a journal is by both copies, and what each of them has lost."""

    data: bytes
    """All its lines."""
    entries: list[JournalEntry]
    last: Link
    first: str
    """Hash of the first entry, by which one journal is told from another; empty without one."""
    tally: Tally
    """What neither copy has."""
    groups: list[bytes]
    """The stream's messages as they should be, each in its place."""
    stream_damaged: bool = False
    """Whether one of them is not."""
    more: bytes = b""
    """Lines that the stream lacks behind its last one."""
    restored: int = 0
    """Entries that only the mirror had."""
    stream_other: int = 0
    """Entries of the stream that are of another history, or there twice."""
    mirror: Tally = field(default_factory=Tally)
    mirror_damaged: bool = False
    """Whether the mirror holds anything but the beginning of the journal."""
    mirror_other: int = 0
    """Entries of the mirror that are of another history than the stream's."""

    def find_hash(self, seq: int) -> str:
        """Return the hash of entry `seq`; empty where it is not there, or has none."""
        start = b'{"seq":%d,' % seq
        lines = (line for line in self.data.splitlines() if line.startswith(start))
        link = next(map(read_link, lines), None)
        return link.hash if link is not None else ""

    def is_told(self) -> bool:
        """Return whether the journal says already how much of it is in no copy."""
        lost = [e.body.lost for e in self.entries if isinstance(e.body, JournalMended)]
        return not self.tally.whole and sum(lost) >= self.tally.missing

    def describe(self) -> str:
        """Return in a line what was found; empty where the copies agree."""
        said = []
        if self.restored:
            said.append(
                f"{_count(self.restored)} that the stream had lost came back from journal.jsonl"
            )
        elif self.stream_damaged and not self.is_told():
            said.append("the stream was damaged")
        if self.stream_other:
            said.append(f"the stream had {_count(self.stream_other)} of another history")
        if self.mirror_other:
            said.append(f"journal.jsonl had {_count(self.mirror_other)} of another history")
        elif self.mirror_damaged:
            said.append(f"journal.jsonl was damaged: {self.mirror.describe()}")
        if not (self.tally.whole or self.is_told()):
            said.append(f"in no copy: {self.tally.describe()}")
        return "; ".join(said)


def _count(entries: int) -> str:
    return f"{entries:,} {'entries' if entries > 1 else 'entry'}"


def compare(groups: Sequence[bytes], mirror: bytes) -> Comparison:
    """Return what the stream's `groups` and the `mirror` make together.

    Raises:
        ProtocolError: an entry that is whole is of a kind that only a newer version knows.
    """
    stream = _read_groups(groups)
    data = b"".join(groups)
    sound = stream.tally.whole and not stream.tally.torn
    if sound and data.startswith(mirror):
        entries = [entry for _, entry in stream.held.values()]
        return Comparison(data, entries, stream.last, stream.first, stream.tally, list(groups))
    copy = EntryReader(mirror.splitlines(keepends=True), mine=MINE)
    restored: dict[int, bytes] = {}
    other = 0
    for line, entry in copy.pairs():
        known = stream.held.get(entry.seq)
        if known is not None:
            other += known[0] != line
        elif not other:
            restored[entry.seq] = line
    lines = sorted([(seq, line) for seq, (line, _) in stream.held.items()] + [*restored.items()])
    whole = EntryReader((line for _, line in lines), mine=MINE)
    pairs = list(whole.pairs())
    kept = {entry.seq: line for line, entry in pairs}
    end = max(stream.held, default=0)
    if any(stream.damaged[stream.owner.get(end, 0) :]):
        end = whole.last.seq  # What belongs there has a place in the stream.
    placed = _place([seq for seq in kept if seq <= end], kept, stream)
    data = b"".join(kept.values())
    first = min(stream.owner.values(), default=0)  # What was mended begins late.
    gap = not whole.tally.whole and any(stream.damaged[first:])
    return Comparison(
        data=data,
        entries=[entry for _, entry in pairs],
        last=whole.last,
        first=whole.first,
        tally=whole.tally,
        groups=placed,
        stream_damaged=gap or placed != list(groups),
        more=b"".join(line for seq, line in kept.items() if seq > end),
        restored=sum(seq in kept for seq in restored),
        stream_other=stream.tally.foreign,
        mirror=copy.tally,
        mirror_damaged=not data.startswith(mirror),
        mirror_other=other,
    )


@dataclass(slots=True)
class _Stream:
    """What is sound in the stream."""

    held: dict[int, tuple[bytes, JournalEntry]]
    owner: dict[int, int]
    """Number of an entry -> the group that has it."""
    damaged: list[bool]
    """Of each group, whether it holds anything else, or nothing."""
    tally: Tally
    last: Link
    first: str


def _read_groups(groups: Sequence[bytes]) -> _Stream:
    at = 0

    def lines() -> Iterator[bytes]:
        nonlocal at
        for number, group in enumerate(groups):
            at = number
            yield from group.splitlines(keepends=True)

    reader = EntryReader(lines(), mine=MINE)
    held: dict[int, tuple[bytes, JournalEntry]] = {}
    owner: dict[int, int] = {}
    sound = [0] * len(groups)
    for line, entry in reader.pairs():
        held[entry.seq], owner[entry.seq] = (line, entry), at
        sound[at] += len(line)
    damaged = [not group or sound[n] != len(group) for n, group in enumerate(groups)]
    return _Stream(held, owner, damaged, reader.tally, reader.last, reader.first)


def _place(seqs: Iterable[int], lines: dict[int, bytes], stream: _Stream) -> list[bytes]:
    """Return the groups with each line where it was; what is restored fills damaged ones."""
    placed: list[list[bytes]] = [[] for _ in stream.damaged]
    at = 0
    for seq in sorted(seqs):
        if seq in stream.owner:
            at = stream.owner[seq]
        else:
            at = next((n for n in range(at, len(placed)) if stream.damaged[n]), at)
        placed[at].append(lines[seq])
    return [b"".join(group) for group in placed]
