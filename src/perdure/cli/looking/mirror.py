"""The journal's mirror, followed while a controller writes it."""

import os
from collections.abc import Collection

from perdure.files.regular import LINE_BYTES_MAX, open_file
from perdure.model.chain import EntryReader, Link, Tally
from perdure.model.events import JournalEntry
from perdure.service.jobfiles import MINE

_AT_ONCE = 16 << 20
"""Bytes that are read at once of a mirror that has grown by more."""


class MirrorTail:
    """New entries of `journal.jsonl`, which a restarted controller writes anew."""

    def __init__(self, path: str, without: Collection[str] = ()) -> None:
        """Follow `path`, which need not be there yet; entries of types in `without` stay out."""
        self._path, self._without = path, without
        self._inode, self._offset = 0, 0
        self._last: Link | None = None
        self.begun = 0
        """How often it has begun with the first entry."""
        self.tally = Tally()
        """What of this file could not be read."""

    def poll(self) -> list[JournalEntry]:
        """Return the entries since the last call; all of them again for a new file."""
        found: list[JournalEntry] = []
        begun = self.begun
        while more := self.poll_piece():
            if self.begun != begun:
                begun = self.begun
                found.clear()
            found += more
        return found

    def poll_piece(self) -> list[JournalEntry]:
        """Return the next few entries; `begun` has grown where they are a new file's first.

        None are returned at the end alone: a stretch in which there is none is passed over.
        """
        while lines := self._read_lines():
            reader = EntryReader(lines, mine=MINE, last=self._last, without=self._without)
            entries = list(reader)
            self._last = reader.last
            self.tally.add(reader.tally)
            if entries:
                return entries
        return []

    def _read_lines(self) -> list[bytes]:
        """Return the next few whole lines."""
        try:
            with open_file(self._path) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._last = status.st_ino, 0, None
                    self.begun, self.tally = self.begun + 1, Tally()
                file.seek(self._offset)
                data = file.read(_AT_ONCE)
                data += file.readline(LINE_BYTES_MAX) if len(data) == _AT_ONCE else b""
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]  # The rest has yet to be written.
        self._offset += len(whole)
        return whole.splitlines(keepends=True)
