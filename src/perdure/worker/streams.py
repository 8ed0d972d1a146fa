"""Standard streams of a rank: a full disk below them is no reason to end a training.

A script's output lies in files of the job's folder. Where their disk is full, its quota spent or
its server away, `print` would raise what no script expects, and at the end the interpreter would
turn success into exit code 120. What does not fit is dropped instead, counted, and said to be as
soon as there is room. Standard library only: `worker.cold` uses it in scripts that want no more.
"""

import contextlib
import errno
import functools
import io
import os
import sys
import threading
from collections import deque
from typing import Any

_DISK = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS,
    errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT,  # Its server is away.
})  # fmt: skip


class LossyFile(io.FileIO):
    """A descriptor that takes all of what it is given, also what its disk does not."""

    lost = 0
    """Bytes not yet said to be."""

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
            while taken < size and (part := super().write(rest)):
                taken += part
                rest = memoryview(data).cast("B")[taken:]
        except OSError as error:
            trace = error.__traceback__
            by_handler = trace is not None and trace.tb_next is not None
            if by_handler or error.errno not in _DISK:
                raise
        self.lost += lost + size - taken
        return size


class ReentrantWriter(io.BufferedWriter):
    """Buffers as `BufferedWriter` does, and lets a thread in again that is within it.

    A signal's handler that prints may run within any line of Python, thus also within the
    descriptor's `write`; Python's own buffer refuses it there.
    """

    def __init__(self, raw: LossyFile) -> None:
        """Write to `raw`."""
        super().__init__(raw)
        self._held: deque[bytes] = deque()
        self._size = 0
        self.renew_lock()

    def renew_lock(self) -> None:
        """Be free, as in the child of a fork in which another thread was within."""
        self._lock = threading.RLock()

    def write(self, data: Any, /) -> int:
        """Take all of `data`, and return its size in bytes.

        Raises:
            OSError: it is written, and the fault is not the disk's.
            ValueError: the stream is closed.
        """
        view = memoryview(data)
        if self.closed:
            raise ValueError("write to closed file")
        with self._lock:
            if self._size + view.nbytes > io.DEFAULT_BUFFER_SIZE:
                self.flush()
            if view.nbytes > io.DEFAULT_BUFFER_SIZE:
                self.raw.write(view)
            else:
                self._held.append(view.tobytes())
                self._size += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Write what is held.

        Raises:
            OSError: the fault is not the disk's.
            ValueError: the stream is closed.
        """
        if self.closed:
            raise ValueError("flush of closed file")
        with self._lock:
            parts: list[bytes] = []
            with contextlib.suppress(IndexError):  # A handler may take some meanwhile.
                while True:
                    parts.append(self._held.popleft())
            self._size = 0
            if data := b"".join(parts):
                self.raw.write(data)

    def tell(self) -> int:
        """Return where the next byte will be."""
        self.flush()
        return super().tell()

    def seek(self, target: int, whence: int = 0, /) -> int:
        """Go to another place, and return it."""
        self.flush()
        return super().seek(target, whence)

    def truncate(self, pos: int | None = None, /) -> int:
        """Cut the file, and return its size."""
        self.flush()
        return super().truncate(pos)


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
        buffer: io.FileIO | io.BufferedWriter = raw
        if isinstance(before.buffer, io.BufferedWriter):  # It is not where -u says so.
            buffer = ReentrantWriter(raw)
            os.register_at_fork(after_in_child=buffer.renew_lock)
        stream = io.TextIOWrapper(
            buffer,
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        stream.__dict__["mode"] = "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
