"""The journal's lines prove themselves: each carries a hash of its bytes and of the line before.

A line ends in `"after":"..."`, the hash of the entry that it follows, and `"hash":"..."`, that of
all its bytes before this word, `after` among them. So each is known to be whole by itself, also
inside a text, and that it follows its neighbour: a lost middle and two mixed histories are seen.
What an end lacks no chain can tell; who knows how far the journal went (`known_seq`) sees it.

It is against decay and not against malice: xxh3_64. A journal whose first line has no hash is of a
perdure before 0.2, and is refused.
"""

from collections.abc import Collection, Iterable, Iterator

import msgspec
import xxhash

from perdure.model.bus.version import Spoken
from perdure.model.codec import decode_stored
from perdure.model.errors import ProtocolError
from perdure.model.events import ControllerStarted, JournalEntry

FIRST = "0" * 16
"""What the first entry of a journal follows."""
_AFTER, _HASH, _END = b',"after":"', b'","hash":"', b'"}'
_DIGITS = len(FIRST)
_HASH_AT = -(len(_HASH) + _DIGITS + len(_END))
_AFTER_AT = _HASH_AT - _DIGITS - len(_AFTER)
_SEQ = b'{"seq":'
_BODY, _BODY_WITHIN = b',"body":{"type":"', 96
_REMOVED = frozenset({b"MessagesSetAside"})
"""Types of events that journals of 0.2 may have, and that nothing reads or writes any more."""
_RANGES_MAX = 20
"""Gaps that are named; of more, only how many entries they are."""


def seal(entry: bytes, after: str) -> tuple[bytes, str]:
    """Return the line of an encoded `entry` that follows the one with hash `after`, and its hash.

    >>> line, hash = seal(b'{"seq":1,"at_s":2.0}', FIRST)
    >>> line.decode().rstrip()
    '{"seq":1,"at_s":2.0,"after":"0000000000000000","hash":"4e6c46ba29a31a07"}'
    """
    body = entry[:-1] + _AFTER + after.encode()
    hash_ = xxhash.xxh3_64_hexdigest(body)
    return body + _HASH + hash_.encode() + _END + b"\n", hash_


class Link(msgspec.Struct, frozen=True):
    """What a line with a hash says of its place."""

    seq: int
    after: str
    hash: str


def read_link(line: bytes) -> Link | None:
    """Return the place of a `line` that is what was written; None for one with another hash."""
    text = line.removesuffix(b"\n")
    body, tail = text[:_HASH_AT], text[_HASH_AT:]
    hash_ = xxhash.xxh3_64_hexdigest(body)
    if tail != _HASH + hash_.encode() + _END or not body.startswith(_SEQ):
        return None
    after = body[-_DIGITS:].decode()
    return Link(int(body[len(_SEQ) : body.index(b",")]), after, hash_)


def _read_type(line: bytes) -> bytes:
    """Return the type of a line's body; empty where it does not stand where it is written."""
    begin = line.find(_BODY, 0, _BODY_WITHIN)
    return line[begin + len(_BODY) : line.find(b'"', begin + len(_BODY))] if begin >= 0 else b""


def _is_sealed(line: bytes) -> bool:
    """Return whether `line` was written with a hash, whatever of its bytes has changed since."""
    text = line.removesuffix(b"\n")
    return text[_HASH_AT:].startswith(_HASH) or text[_AFTER_AT:].startswith(_AFTER)


def split_lines(data: bytes, size: int) -> Iterator[bytes]:
    """Yield the lines of `data` in pieces of at most `size` bytes, or of one line."""
    piece: list[bytes] = []
    taken = 0
    for line in data.splitlines(keepends=True):
        if piece and taken + len(line) > size:
            yield b"".join(piece)
            piece, taken = [], 0
        piece.append(line)
        taken += len(line)
    if piece:
        yield b"".join(piece)


def _is_older(line: bytes) -> bool:
    """Return whether a line is an entry that was written without a hash."""
    whole = line.startswith(_SEQ) and line.endswith(b"}\n")
    return whole and not _is_sealed(line)


class Tally(msgspec.Struct):
    """What of a journal could not be read, and where."""

    entries: int = 0
    """So many could."""
    missing: int = 0
    """Numbers between the first and the last that nothing sound was found for."""
    gaps: list[tuple[int, int]] = []
    """First and last number of the first of these."""
    broken: int = 0
    """Lines that are no entry, or not as they were written."""
    foreign: int = 0
    """Sound entries of another history, or there twice; none is shown."""
    foreign_from: int = 0
    """The first of their numbers."""
    torn: bool = False
    """The last line has no end: its writer was killed, or the file was cut."""
    cut: int = 0
    """Entries that are known to have followed the last one."""

    @property
    def whole(self) -> bool:
        """Whether all that was ever written is there."""
        return not (self.missing or self.broken or self.foreign or self.cut)

    def add(self, other: "Tally") -> None:
        """Add what could not be read of what follows."""
        self.entries += other.entries
        self.missing += other.missing
        self.gaps += other.gaps[: _RANGES_MAX - len(self.gaps)]
        self.broken += other.broken
        self.foreign += other.foreign
        self.foreign_from = self.foreign_from or other.foreign_from
        self.torn, self.cut = other.torn, other.cut

    def note_gap(self, first: int, last: int) -> None:
        """Note that the entries `first` to `last` are not there."""
        self.missing += last - first + 1
        if len(self.gaps) < _RANGES_MAX:
            self.gaps.append((first, last))

    def describe(self) -> str:
        """Return in a line what is wrong; empty where nothing is.

        >>> Tally(entries=7, missing=3, gaps=[(4, 4), (8, 9)], broken=2).describe()
        '3 entries are not there or not as written (4, 8 to 9)'
        >>> Tally(entries=7, cut=2).describe()
        'the last 2 entries are not there'
        """
        said = []
        if self.missing:
            named = [str(a) if a == b else f"{a} to {b}" for a, b in self.gaps]
            if sum(b - a + 1 for a, b in self.gaps) < self.missing:
                named.append("...")
            verb = "entries are" if self.missing > 1 else "entry is"
            said.append(f"{self.missing:,} {verb} not there or not as written ({', '.join(named)})")
        if self.cut:
            many = f"{self.cut:,} entries are" if self.cut > 1 else "entry is"
            said.append(f"the last {many} not there")
        if self.foreign:
            verb = "entries are" if self.foreign > 1 else "entry is"
            said.append(
                f"{self.foreign:,} {verb} of another history or there twice, "
                f"from number {self.foreign_from} on"
            )
        if self.broken and not (self.missing or self.cut):
            verb = "lines are" if self.broken > 1 else "line is"
            said.append(f"{self.broken:,} {verb} no entry")
        return "; ".join(said)


class EntryReader:
    """The sound entries of a journal, one after another, and a tally of what was not.

    Iterate once; `tally` is whole after the last entry. Nothing is held but the line at hand.
    """

    def __init__(
        self,
        lines: Iterable[bytes],
        *,
        mine: Spoken | None = None,
        last: Link | None = None,
        first: int = 1,
        known_seq: int = 0,
        without: Collection[str] = (),
    ) -> None:
        """Read `lines`, each with its end, as a version that speaks `mine`.

        They follow the entry of `last`, or begin with number `first` (0: with any), and once went
        to `known_seq` at least. Sound entries of a type in `without` are counted and not yielded,
        which takes a tenth of the time.
        """
        self._lines, self._mine = lines, mine
        self._without = _REMOVED.union(name.encode() for name in without)
        self._first, self._known_seq = first, known_seq
        self.last = last or Link(first - 1 if first else 0, "", FIRST)
        """The newest sound entry."""
        self.first = ""
        """Hash of the first one."""
        self._began = last is not None or first > 0
        self._foreign = False
        self._speaks: Spoken | None = None
        self.tally = Tally()

    def __iter__(self) -> Iterator[JournalEntry]:
        """Yield each sound entry.

        Raises:
            ProtocolError: one that is whole is of a kind that only a newer version knows.
        """
        for _, entry in self.pairs():
            yield entry

    def pairs(self) -> Iterator[tuple[bytes, JournalEntry]]:
        """Yield each sound entry with its line, which ends in a newline.

        Raises:
            ProtocolError: as above.
        """
        for line in self._lines:
            entry = self.take(line)
            if entry is not None:
                yield line if line.endswith(b"\n") else line + b"\n", entry
        self.tally.cut = max(0, self._known_seq - self.last.seq)

    def take(self, line: bytes) -> JournalEntry | None:
        """Return the entry of the next line; None where it is none that counts.

        Raises:
            ProtocolError: as above.
        """
        entry = self._take(line) if line.strip() else None
        if entry is not None:
            self.tally.entries += 1
            if isinstance(entry.body, ControllerStarted):
                self._speaks = entry.body.speaks
        return entry

    def _take(self, line: bytes) -> JournalEntry | None:
        link = read_link(line)
        if link is None:
            if not (self.first or self.last.seq) and _is_older(line):
                raise ProtocolError(
                    "a perdure before 0.2 wrote this journal, and this one does not read it",
                    hint="run the job under another name; checkpoint.from takes its checkpoints",
                )
            if line.endswith(b"\n"):
                self.tally.broken += 1
            else:
                self.tally.torn = True
            return None
        if not self._follows(link):
            return None
        if _read_type(line) in self._without:
            self._go_on(link)
            self.tally.entries += 1
            return None
        entry = self._decode(line)
        self._go_on(link)
        return entry

    def _follows(self, link: Link) -> bool:
        """Return whether `link` is of this history, behind all that was taken."""
        last = self.last
        chained = bool(link.after and last.after)
        if not self._began:
            return True
        if chained and link.after == last.hash and link.seq == last.seq + 1:
            self._foreign = False
            return True
        other = chained and link.seq == last.seq + 1
        if self._foreign or other or link.seq <= last.seq:
            self._foreign = self._foreign or other
            self.tally.foreign_from = self.tally.foreign_from or link.seq
            self.tally.foreign += 1
            return False
        return True

    def _go_on(self, link: Link) -> None:
        if self._began and link.seq > self.last.seq + 1:
            self.tally.note_gap(self.last.seq + 1, link.seq - 1)
        self._began, self.last, self.first = True, link, self.first or link.hash

    def _decode(self, line: bytes) -> JournalEntry:
        try:
            return decode_stored(line, JournalEntry)
        except ProtocolError as error:
            by, mine = self._speaks, self._mine
            newer = by is not None and mine is not None and by.protocol >= mine.protocol
            strange = by is not None and by != mine and newer
            number = self.last.seq + 1
            why = f" (entry {number} was written by {by}, and this is {mine})" if strange else ""
            raise ProtocolError(f"{error}{why}") from error
