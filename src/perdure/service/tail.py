"""The ranks' output files, followed: new lines of any rank of any generation, prefixed."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FOLDER = re.compile(r"g(\d+)")
_FILE = re.compile(r"rank-(\d+)\.(out|err)")
_CHUNK = 1 << 20
"""Read of one file at a time, so that memory stays bounded."""
_KEPT_GENERATIONS = 2
"""Files of generations older than the newest two say nothing new."""


@dataclass(slots=True)
class _File:
    path: str
    rank: int
    offset: int = 0
    rest: bytes = b""


class RankTails:
    """Follows the streams of a job."""

    def __init__(self, folder: str) -> None:
        """Follow what is appended below `folder` from now on (`gN/rank-R.out` and `.err`)."""
        self._folder = Path(folder)
        self._files: dict[str, _File] = {}
        self._closed: set[int] = set()
        for _, path, rank in self._find():
            self._files[path] = _File(path, rank, os.stat(path).st_size)

    def _find(self) -> Iterator[tuple[int, str, int]]:
        """Yield (generation, path, rank) of the files that may still say something."""
        try:
            names = [(int(m[1]), p) for p in self._folder.iterdir() if (m := _named(_FOLDER, p))]
        except (FileNotFoundError, NotADirectoryError):
            return
        for generation, folder in sorted(names):
            if generation not in self._closed:
                for path in sorted(folder.iterdir()):
                    match = _named(_FILE, path)
                    if match:
                        yield generation, str(path), int(match[1])

    def poll(self, *, last: bool = False) -> Iterator[str]:
        """Yield the lines that are new; with `last` also a line without an end."""
        seen: set[int] = set()
        for generation, path, rank in self._find():
            seen.add(generation)
            file = self._files.setdefault(path, _File(path, rank))
            while True:
                data = self._read(file)
                lines = (file.rest + data).split(b"\n")
                file.rest = lines.pop()
                if last and len(data) < _CHUNK and file.rest:
                    lines.append(file.rest)
                    file.rest = b""
                for line in lines:
                    yield f"[rank {rank}] {line.decode(errors='replace')}"
                if len(data) < _CHUNK:
                    break
        self._closed.update(sorted(seen)[:-_KEPT_GENERATIONS])

    def _read(self, file: _File) -> bytes:
        try:
            with open(file.path, "rb") as source:
                source.seek(file.offset)
                data = source.read(_CHUNK)
        except OSError:
            return b""
        file.offset += len(data)
        return data


def _named(pattern: re.Pattern[str], path: Path) -> re.Match[str] | None:
    return pattern.fullmatch(path.name)
