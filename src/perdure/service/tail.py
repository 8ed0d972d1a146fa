"""The ranks' output files, followed: new lines of any rank of any generation, prefixed.

What one look takes is bounded, since a rank may write faster than anybody reads, and may never
write a newline. What is passed over for that is said in its place; the files have all of it.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perdure.files.rotation import measure_file, read_piece
from perdure.model.input.plain import show_overwritten

_FOLDER = re.compile(r"g(\d+)")
_FILE = re.compile(r"rank-(\d+)\.(out|err)")
_POLL_BYTES = 1 << 19
"""Taken at one look, from all files that have news together."""
_BEHIND_MAX = 4 << 20
"""Bytes that a file may be ahead of what was taken; beyond that, what is near its end is worth
more than what came before."""
_LINE_MAX = 1 << 16
"""Bytes of a line that are shown."""
_KEPT_GENERATIONS = 2
"""Files of generations older than the newest two say nothing new."""


@dataclass(slots=True)
class _File:
    path: str
    rank: int
    offset: int = 0
    rest: bytes = b""
    """The beginning of a line whose end is not there yet."""
    cut: bool = False
    """What follows, up to the next newline, belongs to a line that is not shown any further."""

    def count_unread_bytes(self) -> int:
        """Return how many bytes are new."""
        size = measure_file(self.path)
        self.offset = min(self.offset, size)  # It was emptied.
        return size - self.offset

    def skip(self, count: int) -> str:
        """Pass over `count` bytes, and the rest of the line there; return what is said of it."""
        self.offset += count
        self.rest, self.cut = b"", True
        return f"… {count:,} bytes are not shown: see {self.path}"

    def read(self, count: int, *, last: bool) -> Iterator[str]:
        """Yield the lines in the next `count` bytes; with `last` also one without an end."""
        data = self._read(count)
        if self.cut:
            _, newline, data = data.partition(b"\n")
            self.cut = not newline
        *lines, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (last or len(self.rest) > _LINE_MAX):
            lines.append(self.rest)
            self.rest, self.cut = b"", not last
        for line in lines:
            text = line[:_LINE_MAX].decode(errors="replace")
            yield text if len(line) <= _LINE_MAX else f"{text} … (a long line: see {self.path})"

    def _read(self, count: int) -> bytes:
        begin, data = read_piece(self.path, self.offset, count)
        if begin > self.offset:
            self.rest, self.cut = b"", True  # It was cut away before anybody has read it.
        self.offset = begin + len(data)
        return data


class RankTails:
    """Follows the streams of a job."""

    def __init__(self, folder: str) -> None:
        """Follow what is appended below `folder` from now on (`gN/rank-R.out` and `.err`)."""
        self._folder = Path(folder)
        self._files: dict[str, _File] = {}
        self._closed: set[int] = set()
        for _, file in self._list_unread():
            file.offset = file.count_unread_bytes()

    def poll(self, *, last: bool = False) -> Iterator[str]:
        """Yield the lines that are new; with `last` also a line without an end.

        Such a line comes as well once its rank has begun again: who wrote it is gone.
        """
        found = [
            (generation, file, file.count_unread_bytes())
            for generation, file in self._list_unread()
        ]
        newest = {file.rank: generation for generation, file, _ in found}
        news = [
            (file, behind, last or generation < newest[file.rank])
            for generation, file, behind in found
        ]
        news = [
            (file, behind, over) for file, behind, over in news if behind or (over and file.rest)
        ]
        share = _POLL_BYTES // max(len(news), 1)
        for file, behind, over in news:
            if behind > (share if last else _BEHIND_MAX):
                yield f"[rank {file.rank}] {file.skip(behind - share)}"
            for line in file.read(share, last=last or (over and behind <= share)):
                yield f"[rank {file.rank}] {show_overwritten(line)}"
        old = sorted({generation for generation, _, _ in found})[:-_KEPT_GENERATIONS]
        self._closed |= set(old) - {number for number, _, behind in found if behind > share}

    def _list_unread(self) -> Iterator[tuple[int, _File]]:
        """Yield generation and file of all that may still say something, in order."""
        for number, folder in _list(self._folder, _FOLDER):
            if number not in self._closed:
                for rank, path in _list(folder, _FILE):
                    yield number, self._files.setdefault(str(path), _File(str(path), rank))


def _list(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return what lies in `folder` and is called so, by its number; nothing where it is gone."""
    with contextlib.suppress(OSError):
        found = [(pattern.fullmatch(path.name), path) for path in folder.iterdir()]
        return sorted((int(match[1]), path) for match, path in found if match)
    return []
