"""Files that others append to, kept to a bounded size: their beginning, and their newest part.

Whoever writes (a rank, what it has started, nats-server) has the file open for appending, goes on
writing to the same name, and is never asked. So what is old is taken out at the file's front: it is
copied to a part beside it, and the blocks it took are removed under the writers' feet
(FALLOC_FL_COLLAPSE_RANGE: ext4, XFS; no byte is lost). Where a file system cannot do that, the file
is emptied once all of it was copied; a line that is written within those microseconds is lost.

    rank-3.out.@0          the beginning, for ever
    rank-3.out.@268435456  the part before the newest one
    rank-3.out             the newest, which is appended to

The number is the place of a part's first byte in all that was ever written, so a reader goes on
where it was, and knows how many bytes are not kept.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from perdure.failpoints import failpoint
from perdure.files import read_size
from perdure.files.regular import open_file

HEAD_BYTES = 8 << 20
"""The beginning that is kept for ever."""
PART_BYTES = 32 << 20
"""A file is cut once it has so much; with the part before it and its beginning, twice as much and a
quarter is kept of each."""
_BLOCK = 1 << 16
"""A multiple of every file system's blocks, of which alone files can be cut."""
_COLLAPSE_RANGE = 8
_UNABLE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM)
_COMPARED = 1 << 16
_PART = re.compile(r"(.+)\.@(\d+)", re.DOTALL)
_libc = ctypes.CDLL(None, use_errno=True)


class Part(NamedTuple):
    """A stretch of all that was written to a file; the last one is the file itself."""

    begin: int
    end: int
    path: str


def list_parts(path: str) -> list[Part]:
    """Return what is kept of the file at `path`, oldest first; its newest part comes last."""
    return list_parts_of([path])[path]


def list_parts_of(paths: Iterable[str]) -> dict[str, list[Part]]:
    """Return path -> what is kept of the file there; each folder is listed once."""
    wanted: dict[str, dict[str, str]] = {}
    found: dict[str, list[Part]] = {}
    for path in paths:
        folder, name = os.path.split(path)
        wanted.setdefault(folder or ".", {})[name] = path
        found[path] = []
    for folder, names in wanted.items():
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                match = _PART.fullmatch(entry.name)
                if match and match[1] in names:
                    begin = int(match[2])
                    part = Part(begin, begin + read_size(entry.path), entry.path)
                    found[names[match[1]]].append(part)
    for path, parts in found.items():
        parts.sort()
        begin = parts[-1].end if parts else 0
        parts.append(Part(begin, begin + read_size(path), path))
    return found


def measure_file(path: str) -> int:
    """Return how many bytes were ever written to the file at `path`."""
    return list_parts(path)[-1].end


def read_piece(path: str, offset: int, count: int) -> tuple[int, bytes]:
    """Return at most `count` bytes of all that was written, from `offset` on, and where they begin.

    That is later than `offset` where what stood there is not kept. Nothing is returned at the end,
    or while the file is just being cut.
    """
    return read_pieces({path: offset}, count)[path]


def read_pieces(offsets: Mapping[str, int], count: int) -> dict[str, tuple[int, bytes]]:
    """Return path -> a piece of what was written there, each as `read_piece` returns it.

    Folders are listed twice, however many files of them are read.
    """
    found = {path: (offset, b"") for path, offset in offsets.items()}
    left = list(offsets)
    for _ in range(3):
        before = list_parts_of(left)
        pieces = {path: _read_parts(before[path], offsets[path], count) for path in left}
        after = list_parts_of(left)
        cut = [p for p in left if [x.begin for x in before[p]] != [x.begin for x in after[p]]]
        found |= {path: piece for path, piece in pieces.items() if path not in cut}
        left = cut
        if not left:
            break
    return found


def _read_parts(parts: Sequence[Part], offset: int, count: int) -> tuple[int, bytes]:
    begin, at, data = offset, offset, b""
    for part in parts:
        if part.end <= at or len(data) >= count:
            continue
        if part.begin > at:
            if data:
                break
            begin = at = part.begin
        try:
            with open_file(part.path) as file:
                file.seek(at - part.begin)
                data += file.read(min(count - len(data), part.end - at))
        except OSError:
            break
        at = begin + len(data)
    return begin, data


def rotate_file(path: str, head_bytes: int = HEAD_BYTES, part_bytes: int = PART_BYTES) -> bool:
    """Cut the file at `path` if it is large enough; return whether it was.

    Raises:
        OSError: the disk is full, or the file is not ours; nothing of it is lost.
    """
    new = f"{path}.@new"
    if os.path.exists(new):
        _finish(path, new)
    *older, newest = list_parts(path)
    size = newest.end - newest.begin
    if size < (part_bytes if older else head_bytes):
        return False
    length = (size - 1) // _BLOCK * _BLOCK
    try:
        _copy_front(path, new, length)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    failpoint("rotation/copied")
    _cut_front(path, new, length)
    failpoint("rotation/cut")
    os.rename(new, f"{path}.@{newest.begin}")
    for part in older[1:]:
        os.unlink(part.path)
    return True


def _copy_front(path: str, new: str, length: int) -> None:
    """Copy the first `length` bytes of a file to another one, and bring them to the disk."""
    with open_file(path) as source, open(new, "wb") as target:
        shutil.copystat(path, new)
        left = length
        while left and (data := source.read(min(left, 1 << 20))):
            target.write(data)
            left -= len(data)
        target.flush()
        os.fsync(target.fileno())


def _cut_front(path: str, new: str, length: int) -> None:
    """Take the first `length` bytes, which `new` has, out of a file; where that cannot be, all."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if length and _collapse(fd, length):
            return
        with open(fd, "rb", closefd=False) as source, open(new, "ab") as target:
            source.seek(length)
            while True:  # Until nobody has written meanwhile.
                shutil.copyfileobj(source, target)
                target.flush()
                if os.fstat(fd).st_size == target.tell():
                    os.ftruncate(fd, 0)
                    return
    finally:
        os.close(fd)


def _collapse(fd: int, length: int) -> bool:
    """Remove a file's first `length` bytes; return False where its file system cannot."""
    offset_, length_ = ctypes.c_int64(0), ctypes.c_int64(length)
    if _libc.fallocate(fd, _COLLAPSE_RANGE, offset_, length_) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number))


def _finish(path: str, new: str) -> None:
    """Do what whoever died in the middle of a cut has left: the copy counts once it was cut."""
    with open_file(path) as current, open_file(new) as copy:
        still = read_size(path) >= read_size(new)
        still = still and current.read(_COMPARED) == copy.read(_COMPARED)
    if still:
        os.unlink(new)
    else:
        os.rename(new, f"{path}.@{list_parts(path)[-1].begin}")


def list_streams_by_age(folder: Path) -> list[tuple[int, Path]]:
    """Return the folders `gN` of ranks' streams by their generations, oldest first."""
    found = [(re.fullmatch(r"g(\d+)", path.name), path) for path in folder.glob("g*")]
    return sorted((int(match[1]), path) for match, path in found if match)
