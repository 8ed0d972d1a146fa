"""Streams to a log: a full disk below them is no reason to end a training.

`keeper/copier.py` writes what ranks say to files of the job's folder. Where their disk is full, its
quota spent or its server away, what does not fit is dropped, counted, and said to be as soon as
there is room. A rank's own streams are alike: `print` would raise what no script expects, and at
the end the interpreter would turn success into exit code 120. Standard library only:
`worker.start.cold` uses it in scripts that want no more.
"""

import errno
import functools
import io
import os
import select
import stat
import sys
from typing import Any

DISK_ERRORS = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS,
    errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT,  # Its server is away.
})  # fmt: skip
"""Errors of a disk that is full or away, which no script expects."""


class LossyFile(io.FileIO):
    """A descriptor that takes all of what it is given, also what its disk does not.

    Bytes go to it at once, as they do where Python runs with -u, which is how torchrun and a cold
    start run it: the last words of a rank that is killed are not lost. No `BufferedWriter` stands
    between it and the text, because that lets nobody in twice: a signal's handler that prints may
    run within any line of Python, thus also within `write`.
    """

    lost = 0
    """Bytes not yet said to be."""

    def seekable(self) -> bool:
        """Return False: a rank's streams are pipes, also if the image made them on a file."""
        return False

    def write(self, data: Any, /) -> int:
        """Write all of `data`, drop what does not fit, and return the size of both in bytes.

        Raises:
            OSError: the fault is not the disk's.
        """
        size, taken = memoryview(data).nbytes, 0
        lost, self.lost = self.lost, 0  # A handler that prints meanwhile does not say it again.
        try:
            if lost:
                super().write(f"\nperdure: {lost:,} bytes did not fit on the disk\n".encode())
                lost = 0
            rest = data
            while taken < size:
                part = super().write(rest)
                if part is None:  # A child has made the pipe that they share non-blocking.
                    select.select([], [self], [])
                    continue
                taken += part
                rest = memoryview(data).cast("B")[taken:]
        except OSError as error:
            trace = error.__traceback__
            by_handler = trace is not None and trace.tb_next is not None
            if by_handler or error.errno not in DISK_ERRORS:
                raise
        self.lost += lost + size - taken
        return size


def open_streams(stdout: str, stderr: str, stdin: int = 0) -> None:
    """Have a process append both streams to their files.

    It reads what process `stdin` would read, and nothing if that is 0.
    """
    for path, number in ((stdout, 1), (stderr, 2)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, number)
        os.close(fd)
    fd = _open_input(stdin) if stdin else os.open(os.devnull, os.O_RDONLY)
    os.dup2(fd, 0)
    os.close(fd)


def _open_input(pid: int) -> int:
    """Open the standard input of a process: a pipe, or a file from where it has been read to."""
    path = f"/proc/{pid}/fd/0"
    try:
        kind = os.stat(path).st_mode
        if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)):  # Who types is not asked by a rank.
            return os.open(os.devnull, os.O_RDONLY)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # A FIFO may have no writer any more.
        os.set_blocking(fd, True)
        if stat.S_ISREG(kind):
            with open(f"/proc/{pid}/fdinfo/0") as file:
                os.lseek(fd, int(file.readline().split()[1]), os.SEEK_SET)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY)
    return fd


def reopen_input() -> None:
    """Read standard input by a new stream: the image's has noted that its `/dev/null` can seek."""
    before = sys.stdin
    raw = io.FileIO(0, "rb", closefd=False)
    raw.name = "<stdin>"
    stream = io.TextIOWrapper(
        io.BufferedReader(raw),
        encoding=before.encoding,
        errors=before.errors,
        newline="\n",
        write_through=True,  # Which has no effect; python -u sets it.
    )
    stream.__dict__["mode"] = "r"
    for name in ("stdin", "__stdin__"):
        setattr(sys, name, stream)


def survive_full_disks() -> None:
    """Put streams that survive a full disk in the place of standard output and error."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if not isinstance(before, io.TextIOWrapper) or before.fileno() != fd:
            continue
        before.flush()
        raw = LossyFile(fd, "wb", closefd=False)
        raw.name = f"<{name}>"
        os.register_at_fork(after_in_child=functools.partial(setattr, raw, "lost", 0))
        stream = io.TextIOWrapper(
            raw,
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        stream.__dict__["mode"] = "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
