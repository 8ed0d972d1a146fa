"""Files that a script or another user may have replaced: only regular files are opened.

A FIFO would make a reader wait for ever, a device would fill its memory, and a link would show
another user's file. Each kind of file has a largest size.
"""

import errno
import os
import stat
from typing import BinaryIO

from perdure.failpoints import failpoint
from perdure.model.errors import PlatformError

DOCUMENT_BYTES_MAX = 64 << 20
"""Largest document in bytes. A picture of 10,000 ranks has about 4 MB."""
LINE_BYTES_MAX = 64 << 20
"""Longest line in bytes: the largest message that a NATS server accepts."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnfitFileError(PlatformError, OSError):
    """The path has no regular file, or a file that is too large for its kind."""

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        """Name the path and the kind of file there."""
        name = os.fspath(path)
        super().__init__(f"{name} is {kind}", hint=f"move it away: mv {name} {name}.unfit")
        self.errno, self.strerror, self.filename = errno.EINVAL, f"it is {kind}", name

    def __str__(self) -> str:
        """Return the message without the number that an OSError begins with."""
        return self.message


def open_regular(path: str | os.PathLike[str], flags: int = 0, *, follow: bool = False) -> int:
    """Return a descriptor for reading the regular file at `path`; never wait.

    Links are refused unless `follow`. The function is an `opener` of `open`: `flags` are ignored.

    Raises:
        UnfitFileError: `path` is something else.
        OSError: it cannot be opened.
    """
    more = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, os.O_RDONLY | more)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO) and (kind := name_foreign(path)):
            raise UnfitFileError(path, kind) from None
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise UnfitFileError(path, _name_kind(mode))
    return fd


def open_file(
    path: str | os.PathLike[str], buffering: int = -1, *, follow: bool = False
) -> BinaryIO:
    """Open a regular file for reading, as `open_regular` does."""
    return open(open_regular(path, follow=follow), "rb", buffering)


def read_file(
    path: str | os.PathLike[str], bytes_max: int = DOCUMENT_BYTES_MAX, *, follow: bool = False
) -> bytes:
    """Return the content of a regular file of at most `bytes_max` bytes.

    Raises:
        UnfitFileError: it is larger, or no regular file.
        OSError: it cannot be read.
    """
    failpoint("file/read", os.path.basename(path))
    with open_file(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(bytes_max + 1) if size <= bytes_max else b""
    if max(size, len(data)) > bytes_max:  # It may have grown.
        raise UnfitFileError(path, f"larger than {bytes_max / (1 << 20):.0f} MiB")
    return data


def name_foreign(path: str | os.PathLike[str]) -> str:
    """Return the kind of a path that has no regular file, such as `a FIFO`; empty otherwise."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    return "" if stat.S_ISREG(mode) else _name_kind(mode)


def _name_kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no file")
